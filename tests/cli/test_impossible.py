"""Settings that nothing can be made of: refused in a sentence that names them, and no run folder is left."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HUGE, LARGE = 10**12, 10**6
# Beyond every range.
OUT_OF_RANGE = (
    *("net.filters", "net.widths", "scorer.widths", "scorer.pools", "scorer.rounds", "scorer.enlarge"),
    *("loss.hidden", "loss.critic_steps", "inner.steps", "inner.test_steps", "outer.epochs", "ways", "shots"),
    *("queries", "image_size", "pretrain.batch_size", "pretrain.steps", "pretrain.crop_size"),
    *("pretrain.validate_every", "pretrain.validation_tasks", "pretrain.validation_shots"),
    *("scorer_training.steps", "scorer_training.crop_size", "scorer_training.validation_tasks"),
    *("train.steps", "train.meta_batch", "train.max_skipped", "train.ensemble", "train.validate_every"),
    *("train.validation_tasks", "test.tasks", "test.batch_size", "test.shape_tasks"),
)
# Within its range, and too much for any machine of today; or, for the last ones, more than the data set has.
TOO_MUCH = {
    "net.filters": 100_000,
    "pretrain.batch_size": LARGE,
    "loss.hidden": LARGE,
    "scorer.widths": LARGE,
    "train.meta_batch": LARGE,
    "inner.steps": LARGE,
    "ways": 9_999,
    "shots": 9_999,
    "queries": 9_999,
}
ODD = {"seed": 2**70, "net.filters": 0, "pretrain.batch_size": "1e12", "loss.hidden": -1, "image_size": 15}


@pytest.mark.parametrize(
    ("name", "value"),
    [*((name, HUGE) for name in OUT_OF_RANGE), *TOO_MUCH.items(), *ODD.items()],
    ids=lambda part: str(part),
)
def test_an_impossible_setting_is_refused_by_its_name(
    npbml_command: Callable[..., Any], given: tuple[object, ...], name: str, value: object
) -> None:
    # A million of the smallest images, or steps on them, may fit into a large machine.
    size = ("--image-size", 2_000) if value == LARGE and name != "loss.hidden" else ()
    said = npbml_command("run", *given, *size, f"--{name.replace('_', '-')}", value)
    text = said.error + said.out
    assert said.code in (1, 2) and "Traceback" not in text
    assert name in text or name.replace("_", "-") in text
    assert not Path("run").exists() and not Path("runs").exists()
