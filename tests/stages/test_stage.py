"""A stage as a value: where it is kept in a run folder, whether it has ended there, and what it has left."""

import re
from pathlib import Path
from typing import Any

import pytest

from npbml.errors import RunError
from npbml.json_files import write_json
from npbml.stages.stage import Stage


def never() -> Any:
    raise AssertionError("no trainer is made of a stage that is only looked at")


STAGE = Stage("lines", "weights.safetensors", "settings", (), "draw", 12, 2, never)


def left_by(stage: Stage, folder: Path, files: tuple[str, ...] = ("weights.safetensors", "done.json")) -> Path:
    """A run folder in which a stage has left these files."""
    for name in files:
        write_json(folder / stage.name / name, {"fingerprint": stage.fingerprint, "steps": stage.steps})
    return folder


def test_files_have_the_rank_of_their_state_in_their_names(tmp_path: Path) -> None:
    names = [STAGE.file(tmp_path, rank).relative_to(tmp_path).as_posix() for rank in range(3)]
    assert names == ["lines/weights.safetensors", "lines/weights-2.safetensors", "lines/weights-3.safetensors"]


def test_a_stage_has_ended_where_its_weights_and_its_summary_are(tmp_path: Path) -> None:
    assert STAGE.done(left_by(STAGE, tmp_path / "whole"))
    assert STAGE.summary(tmp_path / "whole") == {"fingerprint": "settings", "steps": 12}
    for name in ("weights.safetensors", "done.json"):
        assert not STAGE.done(left_by(STAGE, tmp_path / name, (name,)))


def test_a_summary_of_other_settings_is_refused(tmp_path: Path) -> None:
    left_by(Stage("lines", "weights.safetensors", "other settings", (), "draw", 12, 2, never), tmp_path)
    assert STAGE.done(tmp_path)
    with pytest.raises(RunError, match="lines was made with other settings than this run's"):
        STAGE.summary(tmp_path)


def test_a_stage_that_has_not_ended_is_told_with_the_command_that_runs_it(tmp_path: Path) -> None:
    left_by(STAGE, tmp_path / "part", ("checkpoint.safetensors",))
    for folder in (tmp_path / "part", tmp_path / "none"):
        words = f"{folder / 'lines'} is not finished: run `npbml draw --run {folder}` first"
        with pytest.raises(RunError, match=re.escape(words)):
            STAGE.summary(folder)
