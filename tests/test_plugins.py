"""Parts of a user's own, each in a file of at most twenty lines, used by name in every command."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from npbml import registry
from npbml.errors import SettingError

PLUGINS = Path(__file__).parent / "plugins"
SETTINGS = """
ways = 3
queries = 3
image_size = 16
[net]
filters = 4
[pretrain]
steps = 4
batch_size = 8
validate_every = 2
validation_tasks = 4
[scorer]
widths = [2, 3]
pools = 1
[scorer_training]
steps = 2
validate_every = 2
validation_tasks = 4
[train]
steps = 2
validate_every = 2
validation_tasks = 4
[test]
tasks = 6
"""
Npbml = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def npbml(tmp_path: Path) -> Npbml:
    """Run a command in a process of its own, in an empty folder."""
    (tmp_path / "settings.toml").write_text(SETTINGS)

    def run(*words: str, ok: bool = True) -> "subprocess.CompletedProcess[str]":
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "NPBML_DATA": str(tmp_path / "data"),
            "COLUMNS": "120",
        }
        command = [sys.executable, "-m", "npbml", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert (done.returncode == 0) is ok, done.stdout + done.stderr
        return done

    return run


def plugin(name: str) -> tuple[str, str]:
    return "--plugin", str(PLUGINS / f"{name}.py")


@pytest.mark.parametrize("name", ["sign", "tiny_backbone", "blobs"])
def test_examples_are_short(name: str) -> None:
    lines = [line for line in (PLUGINS / f"{name}.py").read_text().splitlines() if line.strip()]
    assert len(lines) <= 20


def test_a_preconditioner_and_a_loss_term(npbml: Npbml, tmp_path: Path) -> None:
    common = ("--dataset", "blobs", "--config", "settings.toml", "--run", "mine")
    done = npbml("compare", "--methods", "maml,sign-maml,confident", *plugin("sign"), *plugin("blobs"), *common)
    rows = {row["method"]: row for row in json.loads((tmp_path / "mine" / "comparison.json").read_text())}
    assert {"maml", "sign-maml", "confident", "prototypes"} == set(rows)
    assert "sign-maml" in done.stdout
    assert rows["sign-maml"]["accuracy"] != rows["maml"]["accuracy"] or rows["confident"] != rows["maml"]
    assert "sign" in npbml("parts", *plugin("sign")).stdout
    assert "maml by signs" in npbml("methods", "sign-maml", *plugin("sign")).stdout
    chains = npbml("run", "--help", *plugin("sign")).stdout
    assert "sign" in chains.partition("--precondition.chain")[2][:400]
    words = npbml("settings", *plugin("sign"), "--method", "sign-maml").stdout
    assert "confidence" in words


def test_a_backbone(npbml: Npbml, tmp_path: Path) -> None:
    parts = (*plugin("tiny_backbone"), *plugin("blobs"))
    common = ("--dataset", "blobs", "--backbone", "tiny", "--config", "settings.toml", "--run", "mine")
    done = npbml("run", *parts, *common)
    assert "tiny" in done.stdout and "npbml" in done.stdout and "prototypes" in done.stdout
    again = npbml("test", "--run", "mine", "--method", "maml", *parts)
    assert "tiny" in again.stdout
    assert "tiny" in npbml("run", "--help", *plugin("tiny_backbone")).stdout
    refused = npbml("test", "--run", "mine", ok=False)
    assert refused.returncode == 1 and "There is no backbone 'tiny'" in refused.stderr
    assert "--plugin" in refused.stderr and "tiny_backbone.py" in refused.stderr


def test_a_data_set(npbml: Npbml, tmp_path: Path) -> None:
    common = ("--config", "settings.toml", "--run", "mine", "--method", "maml", "--baselines", "prototypes")
    npbml("run", "--dataset", "blobs", *plugin("blobs"), *common)
    records = json.loads((tmp_path / "mine" / "results.json").read_text())
    assert {record["dataset"] for record in records} == {"blobs"}
    assert "noisy squares" in npbml("parts", *plugin("blobs")).stdout
    refused = npbml("run", "--dataset", "blobs", *common, ok=False)
    assert "blobs" in refused.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import npbml\nnpbml.PRECONDITIONERS('svd')(object)", "is taken"),
        ("1 / 0", "ZeroDivisionError"),
        ("import npbml\nnpbml.HEADS('mine', colour=1)(object)", "no property 'colour'"),
    ],
)
def test_a_plugin_that_fails_is_told(npbml: Npbml, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "bad.py").write_text(text)
    done = npbml("parts", "--plugin", "bad.py", ok=False)
    assert said in done.stderr and "Traceback" not in done.stderr
    assert "There is no plugin" in npbml("parts", "--plugin", "none.py", ok=False).stderr


def test_an_installed_package_is_a_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    class Point:
        name, value = "mine", "my_package.parts"

        def load(self) -> None:
            loaded.append(self.name)

    monkeypatch.setattr(registry, "entry_points", lambda group: [Point()] if group == "npbml.plugins" else [])
    registry.load_entry_points()
    assert loaded == ["mine"]
    monkeypatch.setattr(Point, "load", lambda self: 1 / 0)
    with pytest.raises(SettingError, match=r"my_package.parts.*ZeroDivisionError"):
        registry.load_entry_points()
