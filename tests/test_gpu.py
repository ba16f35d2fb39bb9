"""What only a GPU does: recorded steps, their layouts, and going on after a stop to the same bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from npbml.config import Config, method_config, override, preset
from npbml.data.tasks import ClassSet
from npbml.engine.device import make_reproducible
from npbml.engine.settings import resolved
from npbml.engine.source import TaskSource
from npbml.learner import Learner
from npbml.learner.settings import image_spec
from npbml.randomness import generator
from npbml.stages.loop import Loop, Observer, Trainer, run_loop
from npbml.stages.metatrain import MetaTrainer
from npbml.stages.pretrain import Pretrainer
from npbml.stages.relation import relation_trainer, teacher

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

Make = Callable[[Config, str, Callable[[str], None]], Trainer]

SMALL: dict[str, Any] = {
    "ways": 3,
    "queries": 2,
    "net": {"filters": 8},
    "loss": {"hidden": 4},
    "inner": {"steps": 2},
    "relation": {"widths": [4], "pools": 1, "steps": 6, "validation_tasks": 4},
    "init": {"std": 0.1},
    "pretrain": {"steps": 6, "batch": 12, "validation_tasks": 4, "turns": True},
    "train": {"steps": 6, "meta_batch": 2, "validation_tasks": 4},
    "engine": {"tasks": "together", "compile": "off"},
}


def colours(count: int, name: str, device: str) -> ClassSet:
    """Classes of six pictures in colour."""
    images = torch.randint(0, 255, (6 * count, 3, 16, 16), generator=generator(0, name)).to(torch.uint8)
    counts, half = torch.full((count,), 6), torch.full((3,), 0.5)
    return ClassSet(images, 6 * torch.arange(count), counts, tuple(map(str, range(count))), half, half / 2).to(
        device
    )


def pretrainer(config: Config, device: str, say: Callable[[str], None]) -> Pretrainer:
    sets, place = (colours(5, "train", device), colours(4, "val", device)), torch.device(device)
    known = None
    if config.pretrain.taught:
        known = teacher(config, sets[0])
        known.load_state_dict(relation_trainer(config, *sets, place).result())
    return Pretrainer(config, *sets, place, say, teacher=known)


def scorer(config: Config, device: str, say: Callable[[str], None]) -> Trainer:
    sets = colours(5, "train", device), colours(4, "val", device)
    return relation_trainer(config, *sets, torch.device(device), say)


def meta_trainer(config: Config, device: str, say: Callable[[str], None]) -> MetaTrainer:
    train, val = colours(5, "train", device), colours(4, "val", device)
    learner = Learner(config, image_spec(train), config.seed).to(device)
    precision = resolved(config.engine, torch.device(device)).precision
    sources = [TaskSource(learner, classes, config.shots, config.queries, precision) for classes in (train, val)]
    return MetaTrainer(config, learner, *sources, say)


STAGES: dict[str, tuple[Make, dict[str, Any]]] = {
    "pre-training": (pretrainer, {}),
    "pre-training, taught": (pretrainer, {"relation": {"kind": "encoder"}, "pretrain": {"taught": True}}),
    "pre-training, crops of another size": (pretrainer, {"pretrain": {"crop_size": 20}}),
    "relation network": (scorer, {}),
    "an encoder that only scores": (scorer, {"relation": {"kind": "encoder"}}),
    "meta-training, scored by an encoder": (
        meta_trainer,
        {"relation": {"kind": "encoder"}, "net": {"stem_norm": "running"}},
    ),
    "meta-training, scores by all that a task's embeddings tell": (
        meta_trainer,
        {
            "relation": {
                "kind": "both",
                "enlarged": 1.2,
                "mirrored": True,
                "turns": True,
                "centred": True,
                "evened": True,
                "rounds": 2,
            },
            "loss": {"trust": 0.5},
            "net": {"stem_norm": "running"},
        },
    ),
    "meta-training, kept features": (meta_trainer, {"net": {"stem_norm": "running"}}),
    "meta-training, a stem of batch statistics": (meta_trainer, {"net": {"stem_norm": "batch"}}),
    "meta-training, each task by itself": (meta_trainer, {"engine": {"tasks": "loop"}}),
    "meta-training of a whole network": (meta_trainer, {"engine": {"tasks": "loop"}, "net": {"frozen_blocks": 0}}),
}


def configured(changes: dict[str, Any]) -> Config:
    return method_config(override(override(preset("quick"), SMALL), changes), "npbml")


class Killed(Exception):
    pass


class Killer(Observer):
    """Ends a stage in the middle of it, after a checkpoint."""

    def stepped(self, step: int, metrics: Any) -> None:
        if step == 4:
            raise Killed


def train(
    stage: str, device: str, folder: Path, precision: str = "float32", observer: Observer | None = None
) -> torch.Tensor:
    """All weights at the end of a stage, in one vector; nothing may be said of it."""
    make, changes = STAGES[stage]
    config = override(configured(changes), {"engine": {"precision": precision}})
    said: list[str] = []
    trainer = make(config, device, said.append)
    run_loop(Loop("stage", folder, "weights", 6, 3, 0.0, "the same"), trainer, observer or Observer(), {})
    assert not said
    return weights(trainer)


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten().double().cpu() for p in trainer.module.parameters()])


@pytest.mark.parametrize("stage", STAGES)
def test_a_recorded_stage_does_what_a_cpu_does(stage: str, tmp_path: Path) -> None:
    """Adam divides by the gradient's size, so that rounding shows where that is next to nothing."""
    found, expected = (train(stage, device, tmp_path / device) for device in ("cuda", "cpu"))
    make, changes = STAGES[stage]
    start = weights(make(configured(changes), "cpu", print))
    assert (found - expected).norm() < 1e-2 * (expected - start).norm()


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_was_killed_ends_with_the_same_bits(stage: str, precision: str, tmp_path: Path) -> None:
    make_reproducible(torch.device("cuda"))
    whole = train(stage, "cuda", tmp_path / "whole", precision)
    with pytest.raises(Killed):
        train(stage, "cuda", tmp_path / "parts", precision, Killer())
    assert torch.equal(train(stage, "cuda", tmp_path / "parts", precision), whole)
