"""What only a GPU does: recorded steps, their layouts, and going on after a stop to the same bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from npbml.data.tasks import ClassSet
from npbml.engine.device import computing
from npbml.engine.source import TaskSource
from npbml.lab.protocols import preset
from npbml.lab.schema import Config, method_config, override
from npbml.lab.stages import scorer_config
from npbml.learner.learner import Learner
from npbml.randomness import generator
from npbml.shapes import benchmark_shape
from npbml.stages.loop import Trainer, run_stage
from npbml.stages.metatrain import MetaTrainer
from npbml.stages.observer import Observer
from npbml.stages.pretrain import Pretrainer
from npbml.stages.scorer import EncoderTrainer, EpisodicTrainer, teacher
from npbml.stages.setup import Setup
from npbml.stages.stage import Stage

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

Make = Callable[[Config, str, Callable[[str], None]], Trainer]

SMALL: dict[str, Any] = {
    "ways": 3,
    "queries": 2,
    "net": {"filters": 8},
    "loss": {"hidden": 4},
    "inner": {"steps": 2},
    "scorer": {"widths": [4], "pools": 1},
    "scorer_training": {"steps": 6, "validation_tasks": 4},
    "init": {"std": 0.1},
    "pretrain": {"steps": 6, "batch_size": 12, "validation_tasks": 4, "rotations": True},
    "train": {"steps": 6, "meta_batch": 2, "validation_tasks": 4},
    "engine": {"tasks": "vmap", "compile": "off"},
}


def colours(count: int, name: str, device: str) -> ClassSet:
    """Classes of six pictures in colour."""
    images = torch.randint(0, 255, (6 * count, 3, 16, 16), generator=generator(0, name)).to(torch.uint8)
    counts, half = torch.full((count,), 6), torch.full((3,), 0.5)
    return ClassSet(images, 6 * torch.arange(count), counts, tuple(map(str, range(count))), half, half / 2).to(
        device
    )


def splits(device: str) -> tuple[ClassSet, ClassSet]:
    return colours(5, "train", device), colours(4, "val", device)


def setup_of(config: Config, device: str, say: Callable[[str], None]) -> Setup:
    """What the trainers of a configuration are given."""
    tasks, batch_size = (config.shots, config.queries), config.test.batch_size
    return Setup(config.learner, *tasks, config.seed, config.engine, torch.device(device), batch_size, say)


def pretrainer(config: Config, device: str, say: Callable[[str], None]) -> Pretrainer:
    sets, known = splits(device), None
    if config.pretrain.distill:
        scoring = scorer_config(config)
        known = teacher(setup_of(scoring, device, say), scoring.pretrain, sets[0])
        known.load_state_dict(encoder_trainer(config, device, say).result())
    return Pretrainer(setup_of(config, device, say), config.pretrain, *sets, teacher=known)


def encoder_trainer(config: Config, device: str, say: Callable[[str], None]) -> EncoderTrainer:
    scoring = scorer_config(config)
    return EncoderTrainer(setup_of(scoring, device, say), scoring.pretrain, *splits(device), "relation")


def episodic_trainer(config: Config, device: str, say: Callable[[str], None]) -> EpisodicTrainer:
    setup, augment = setup_of(config, device, say), config.pretrain.augment
    return EpisodicTrainer(setup, config.scorer_training, augment, *splits(device))


def meta_trainer(config: Config, device: str, say: Callable[[str], None]) -> MetaTrainer:
    setup, (train, val) = setup_of(config, device, say), splits(device)
    learner, precision = (
        Learner(config.learner, train.spec, config.seed).to(device),
        setup.resolved_engine.precision,
    )
    shape = benchmark_shape(learner.settings.ways, config.shots, config.queries)
    sources = [[TaskSource(learner, classes, shape, precision)] for classes in (train, val)]
    return MetaTrainer(setup, config.train, "npbml", learner, *sources, config.pretrain.augment)


STAGES: dict[str, tuple[Make, dict[str, Any]]] = {
    "pre-training": (pretrainer, {}),
    "pre-training, distilled": (pretrainer, {"scorer": {"kind": "encoder"}, "pretrain": {"distill": True}}),
    "pre-training, crops of another size": (pretrainer, {"pretrain": {"crop_size": 20}}),
    "relation network": (episodic_trainer, {}),
    "an encoder that only scores": (encoder_trainer, {"scorer": {"kind": "encoder"}}),
    "meta-training, scored by an encoder": (
        meta_trainer,
        {"scorer": {"kind": "encoder"}, "net": {"stem_norm": "running"}},
    ),
    "meta-training, scores by all that a task's embeddings tell": (
        meta_trainer,
        {
            "scorer": {
                "kind": "both",
                "enlarge": 1.2,
                "flip": True,
                "rotations": True,
                "centre": True,
                "whiten": True,
                "rounds": 2,
            },
            "loss": {"score_weight": 0.5},
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
    with computing(torch.device(device), precision):
        trainer = make(config, device, said.append)
        made = Stage("stage", "weights", "the same", (), "none", 6, 3, lambda: trainer)
        run_stage(made, folder, observer or Observer(), {}, 0.0)
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
    whole = train(stage, "cuda", tmp_path / "whole", precision)
    with pytest.raises(Killed):
        train(stage, "cuda", tmp_path / "parts", precision, Killer())
    assert torch.equal(train(stage, "cuda", tmp_path / "parts", precision), whole)
