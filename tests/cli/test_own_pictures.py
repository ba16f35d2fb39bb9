"""A run of one's own pictures, from a folder to labels."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

Npbml = Callable[..., Any]
SMALL = """
device = "cpu"
image_size = 16
[net]
filters = 4
[pretrain]
steps = 2
batch_size = 4
validate_every = 2
validation_tasks = 2
[train]
steps = 1
validate_every = 1
validation_tasks = 4
[test]
tasks = 4
"""


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Ten classes of eight pictures."""
    random = np.random.default_rng(0)
    for label in range(10):
        for number in range(8):
            path = tmp_path / "pictures" / f"class {label}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(path)
    (tmp_path / "small.toml").write_text(SMALL)
    return tmp_path / "pictures"


def test_ten_classes_of_eight_pictures_are_enough(npbml_command: Npbml, pictures: Path) -> None:
    said = npbml_command("run", "--dataset", "pictures", "--config", "small.toml")
    assert said.code == 0, said.error
    assert "pictures: 10 classes, split at random" in said.out and "2 (class" in said.out
    assert "Tasks have 2 classes and not 5: val has no more (--ways)." in said.out
    assert "Tasks have 7 query pictures of each class and not 15" in said.out
    folder = Path("runs/pictures-conv4-2way-1shot-quick-seed0")
    kept = json.loads((folder / "recommended.json").read_text())
    assert set(kept["validation"]) == {"npbml-any", "maml-any", "prototypes"}
    best = max(kept["validation"], key=lambda name: kept["validation"][name]["accuracy"])
    assert kept["validation"][kept["method"]] == kept["validation"][best]
    assert f"recommended: {kept['method']}, the best on validation tasks" in said.out
    assert f"npbml classify FEW MANY --learner {folder}" in said.out
    before = (folder / "results.json").read_text()
    said = npbml_command("run", "--dataset", "pictures", "--config", "small.toml")
    assert said.code == 0 and "npbml-any: done before" in said.out and f"run folder: {folder}" in said.out
    assert len(json.loads((folder / "results.json").read_text())) == len(json.loads(before))
    for method in ("prototypes", "npbml-any"):
        (folder / "recommended.json").write_text(json.dumps({"method": method}))
        said = npbml_command("classify", "pictures", "pictures", "--learner", folder, "--out", f"{method}.csv")
        assert said.code == 0 and f"recommends {method}: --method chooses another" in said.error
        assert len(Path(f"{method}.csv").read_text().splitlines()) == 81
    said = npbml_command(
        "classify", "pictures", "pictures", "--learner", folder, "--method", "prototypes", "--save", "a.npbml"
    )
    assert said.code == 2 and "cannot be saved" in said.error


def test_five_classes_are_too_few_and_that_is_told_first(npbml_command: Npbml, pictures: Path) -> None:
    for label in range(5):
        (pictures / f"class {label}").rename(pictures.parent / f"away {label}")
    said = npbml_command("run", "--dataset", "pictures", "--config", "small.toml", "--run", "run")
    assert said.code == 1 and "pictures has 5 classes, 1 for val" in said.error and "6 in all" in said.error
    assert not Path("run").exists()
