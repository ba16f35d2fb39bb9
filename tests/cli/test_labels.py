"""Pictures are labelled by command."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

Npbml = Callable[..., Any]


@pytest.mark.parametrize("missing", ["run", "support", "query"])
def test_classify_says_what_is_missing(npbml_command: Npbml, shared: Path, tmp_path: Path, missing: str) -> None:
    for kind in ("cat", "dog", "owl"):
        (tmp_path / "support" / kind).mkdir(parents=True)
        Image.new("L", (16, 16), 9).save(tmp_path / "support" / kind / "1.png")
    places = {"run": shared / "done", "support": "support", "query": "support/cat", missing: "nowhere"}
    said = npbml_command("classify", *(word for key, value in places.items() for word in (f"--{key}", value)))
    assert said.code == 1 and "nowhere" in said.error


def test_classify_labels_every_picture(npbml_command: Npbml, shared: Path, tmp_path: Path) -> None:
    for shade, kind in enumerate(("cat", "dog", "owl")):
        (tmp_path / "support" / kind).mkdir(parents=True)
        Image.new("L", (16, 16), 90 * shade).save(tmp_path / "support" / kind / f"{kind}.png")
    said = npbml_command(
        "classify", "--run", shared / "done", "--support", "support", "--query", "support/dog", "--device", "cpu"
    )
    assert said.code == 0, said.error
    rows = [line.split() for line in said.out.splitlines() if "dog.png" in line]
    assert len(rows) == 1 and rows[0][1] in ("cat", "dog", "owl") and 0.333 <= float(rows[0][2]) <= 1
