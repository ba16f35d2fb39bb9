"""Classifiers in folders and on the Hugging Face Hub: the file, and its card as README.md."""

import tempfile
from os import PathLike
from pathlib import Path
from typing import Any

from npbml.errors import RunError
from npbml.json_files import write_whole

FILE = "classifier.npbml"
HEADER = """---
library_name: npbml
pipeline_tag: image-classification
tags:
- npbml
- few-shot
- image-classification
---

"""


def write_card(folder: Path, card: str) -> None:
    """Write a card as the README.md of a folder, with the header that the Hub reads."""
    write_whole(folder / "README.md", (HEADER + card).encode())


def find_file(source: str | PathLike[str], **options: Any) -> Path:
    """Return the file of a classifier in a local folder or, downloaded, in a repository of the Hub.

    Args:
        source: A folder, a file, or the name of a repository, such as `someone/flowers`.
        options: Of `huggingface_hub.hf_hub_download`.

    Raises:
        RunError: There is none, or it cannot be downloaded, or the extra is missing.
    """
    path = Path(source)
    if path.is_dir():
        if not (path / FILE).exists():
            raise RunError(f"{path} has no {FILE} in it: save_pretrained makes such folders.")
        return path / FILE
    if path.is_file():
        return path
    hub = _hub(f"There is no folder {path}, and to download a classifier")
    try:
        return Path(hub.hf_hub_download(str(source), FILE, **options))
    except Exception as error:  # its own errors, those of its HTTP library, and of the network
        raise RunError(f"{source} could not be downloaded from the Hub: {_first_line(error)}") from error


def upload(
    folder: Path, repo_id: str, message: str, private: bool | None, token: str | None, **options: Any
) -> str:
    """Upload a folder to a repository of the Hub, which is made if it is not there; return its address.

    Raises:
        RunError: It cannot be uploaded, or the extra is missing.
    """
    hub = _hub("To upload a classifier")
    try:
        api = hub.HfApi(token=token)
        made = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(repo_id=made.repo_id, folder_path=str(folder), commit_message=message, **options)
        return str(made)
    except Exception as error:  # as above
        raise RunError(f"{repo_id} could not be uploaded to the Hub: {_first_line(error)}") from error


def new_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for the time of an upload."""
    return tempfile.TemporaryDirectory(prefix="npbml-")


def _hub(what: str) -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise RunError(f"{what} takes an extra that is not installed: pip install 'npbml[hub]'.") from None
    return huggingface_hub


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
