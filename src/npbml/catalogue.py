"""Learners by name: those that come with the package, files, and the methods of run folders."""

from pathlib import Path
from typing import Any

from npbml.errors import RunError, SettingError
from npbml.json_files import read_json
from npbml.learner.file import load_learner
from npbml.learner.learner import Learner
from npbml.learner.settings import LearnerSettings
from npbml.methods import REMOVED, find_recipe, trains, with_rule
from npbml.settings import from_dict, from_old_names, leaves
from npbml.tensor_files import load_tensors

LEARNERS = Path(__file__).parent / "learners"


def shipped() -> list[str]:
    """The names of the learners that come with the package."""
    return sorted(file.stem for file in LEARNERS.glob("*.safetensors"))


def card(name: str) -> str:
    """What a learner that comes with the package was made from, what it is good for and what not, as Markdown.

    Example:
        >>> print(npbml.card("photos"))
    """
    if name not in shipped():
        raise RunError(f"No learner {name!r} comes with the package: {', '.join(shipped())}.")
    return (LEARNERS / f"{name}.md").read_text(encoding="utf-8")


def load(source: str | Path, method: str | None = None, device: str = "auto") -> Learner:
    """Load a meta-trained learner.

    Args:
        source: The name of a learner that comes with the package (`npbml.shipped()`), the file of a learner, or a
            run folder.
        method: Of a run folder, which of its methods; its own if not given.
        device: auto (a GPU where there is one), cpu, cuda, or cuda:N.

    Example:
        >>> learner = npbml.load("cifar-fs-conv4", device="cpu")
    """
    path = Path(source)
    # A folder of pictures may well have the name of a learner, such as photos.
    if str(source) in shipped() and not path.is_file() and not (path / "config.json").exists():
        path = LEARNERS / f"{source}.safetensors"
    if path.is_dir():
        return _load_from_run(path, method, device)
    if not path.exists():
        raise RunError(
            f"There is no learner file or run folder {source}, and no such learner comes with the package: "
            f"{', '.join(shipped())}."
        )
    return load_learner(path, device)


def _load_from_run(folder: Path, method: str | None, device: str) -> Learner:
    """The learner of a run folder, whose configuration is asked where the learner's file has no settings in it."""
    if not (folder / "config.json").exists():
        raise RunError(f"{folder} is not a run folder: it has no config.json.")
    config = read_json(folder / "config.json")
    if not isinstance(config, dict) or "method" not in config:
        raise RunError(f"{folder / 'config.json'} is damaged: it does not hold the settings of a run.")
    method = method or str(config["method"])
    path = folder / method / "learner.safetensors"
    if not path.exists():
        # `trains` lists the methods where there is none of that name.
        if not (path.parent / "recipe.json").exists() and not trains(method):
            raise RunError(f"{method} trains nothing, so that there is no learner of it to load.")
        raise RunError(f"{path} is not there: train it with `npbml train --run {folder} --method {method}`.")
    settings = None
    if "settings" not in load_tensors(path)[1]:
        settings = _settings_of_old_run(folder, config, method)
    return load_learner(path, device, settings)


def _settings_of_old_run(folder: Path, config: dict[str, Any], method: str) -> LearnerSettings:
    """The settings of a learner of version 0.1, from the configuration of its run and the recipe of its method."""
    groups = {leaf.old_name.partition(".")[0] for leaf in leaves(LearnerSettings())}
    own = {name: value for name, value in config.items() if name in groups}
    stage = ("steps", "lr", "clip_norm", "validate_every", "validation_tasks", "augment", "crop_size")
    own["relation"] = {name: value for name, value in own.get("relation", {}).items() if name not in stage}
    try:
        tables = from_old_names(LearnerSettings, own, REMOVED, lambda note: None)
        run = from_dict(LearnerSettings, tables, LearnerSettings())
        known = folder / method / "recipe.json"
        rule = read_json(known)["rule"] if known.exists() else find_recipe(method).rule
        rule = from_old_names(LearnerSettings, rule, REMOVED, lambda note: None)
        return with_rule(run, rule, bool(config.get("pretrain", {}).get("warp", True)))
    except (AttributeError, KeyError, TypeError, SettingError) as error:
        raise RunError(f"{folder / 'config.json'} is damaged or of another version of npbml: {error}") from None
