"""The training of what scores (METHODS 18.6): squared error of a relation network's scores to one-hot labels."""

from typing import Any

import pytest
import torch
from torch import Tensor

from npbml.data.augment import augmented
from npbml.data.tasks import ClassSet
from npbml.errors import RunError
from npbml.lab.protocols import preset
from npbml.lab.schema import Config, override
from npbml.lab.stages import scorer_config
from npbml.learner.learner import Learner
from npbml.learner.prepare import normalised
from npbml.learner.settings import ImageSpec
from npbml.randomness import draw_numbers, generator
from npbml.stages.pretrain import Pretrainer
from npbml.stages.scorer import EncoderTrainer, EpisodicTrainer
from npbml.stages.setup import Setup

SMALL: dict[str, Any] = {
    "ways": 3,
    "shots": 2,
    "queries": 3,
    "net": {"filters": 3},
    "scorer": {"widths": [4, 6], "pools": 1},
    "scorer_training": {"lr": 0.01, "validation_tasks": 6},
}


def easy(count: int, name: str) -> ClassSet:
    """Classes of six pictures, each a template with little noise."""
    random = generator(0, name)
    templates = torch.randint(0, 200, (count, 1, 1, 16, 16), generator=random)
    images = templates + torch.randint(0, 55, (count, 6, 1, 16, 16), generator=random)
    counts = torch.full((count,), 6)
    names = tuple(f"{name} {number}" for number in range(count))
    half = torch.tensor([0.5])
    return ClassSet(images.flatten(0, 1).to(torch.uint8), counts.cumsum(0) - counts, counts, names, half, half / 2)


def setup_of(config: Config) -> Setup:
    cpu, batch_size = torch.device("cpu"), config.test.batch_size
    return Setup(config.learner, config.shots, config.queries, config.seed, config.engine, cpu, batch_size)


def trainer_of(seed: int = 0, **changes: Any) -> EpisodicTrainer:
    config = override(override(preset("quick"), SMALL), {"seed": seed, "scorer_training": changes})
    sets, augment = (easy(5, "train"), easy(4, "val")), config.pretrain.augment
    return EpisodicTrainer(setup_of(config), config.scorer_training, augment, *sets)


def state(trainer: EpisodicTrainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.module.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("augment", [False, True])
def test_the_loss_is_the_squared_error_of_the_scores_of_one_episode(augment: bool) -> None:
    trainer = trainer_of(augment=augment)
    classes = trainer.train
    indices = classes.draw(1, 3, 2, 3, generator(0, "relation", 4))
    number = draw_numbers(generator(0, "relation", 4), 3)[2]
    varied = augmented(classes, trainer.augment, number)
    look = (lambda indices: classes.normalise(varied(indices))) if augment else classes.batch
    task = classes.task(indices, 2, look).map(lambda part: part[0])
    with torch.no_grad():
        scores = trainer.module(task.support_images, task.support_labels, task.query_images, 3)
    expected = (scores - torch.eye(3)[task.query_labels]).square().mean().item()
    assert trainer.step(4) == {"loss": pytest.approx(expected, abs=1e-7)}


def test_augmented_episodes_are_other_episodes() -> None:
    plain, varied = trainer_of(augment=False), trainer_of(augment=True)
    assert same(state(plain), state(varied))
    plain.step(0), varied.step(0)
    assert not same(state(plain), state(varied))


def test_training_beats_the_scores_of_chance_and_finds_the_class() -> None:
    """Without looking, a third for every class is best: a squared error of 2/9."""
    trainer = trainer_of()
    losses = [trainer.step(index)["loss"] for index in range(60)]
    assert losses[0] == pytest.approx(0.25, abs=0.01)
    assert sum(losses[-10:]) / 10 < 0.8 * 2 / 9
    assert trainer.validate() > 60


def test_validation_changes_nothing_and_asks_the_same_tasks() -> None:
    trainer = trainer_of()
    trainer.step(0)
    before = state(trainer)
    assert trainer.validate() == trainer.validate() and same(before, state(trainer))


def test_the_seed_fixes_every_step() -> None:
    first, again, other = trainer_of(3), trainer_of(3), trainer_of(4)
    told = [[trainer.step(index) for index in range(3)] for trainer in (first, again, other)]
    assert told[0] == told[1] != told[2]
    assert same(state(first), state(again)) and not same(state(first), state(other))


def test_a_loss_that_is_not_finite_is_refused_before_it_does_harm() -> None:
    trainer = trainer_of()
    with torch.no_grad():
        trainer.module.score.bias.fill_(float("nan"))
    before = trainer.module.score.weight.clone()
    with pytest.raises(RunError, match=r"scorer's loss is nan at step 6: lower scorer_training\.lr"):
        trainer.step(5)
    assert torch.equal(trainer.module.score.weight, before)


def test_a_learner_takes_the_network_and_gives_its_scores() -> None:
    trainer = trainer_of()
    trainer.step(0)
    learner = Learner(trainer.setup.learner, ImageSpec(1, 16, (0.5,), (0.25,)), seed=9)
    assert learner.scorer is not None
    learner.take_scorer(trainer.result())
    batch = trainer.val.sample(1, 3, 2, 3, generator(0, "task"))
    task = batch.map(lambda part: part[0])
    support, query = (normalised(learner, images) for images in (task.support_images, task.query_images))
    with torch.no_grad():
        scores = trainer.module(support, task.support_labels, query, 3)
    assert torch.equal(learner.prepare(task).scores, scores)
    assert not list(learner.scorer.parameters())


def test_an_encoder_that_only_scores_is_pretrained_and_taken() -> None:
    """It is a ResNet of scorer.widths for scorer_training.steps, with weights and batches of its own."""
    changes = {"scorer": {"kind": "encoder"}, "scorer_training": {"steps": 7}}
    config = override(override(preset("quick"), SMALL), changes)
    sets, scoring = (easy(5, "train"), easy(4, "val")), scorer_config(config)
    trainer = EncoderTrainer(setup_of(scoring), scoring.pretrain, *sets, "relation")
    assert isinstance(trainer, Pretrainer)
    other = Pretrainer(setup_of(scoring), scoring.pretrain, *sets)
    assert trainer.settings.steps == 7 and trainer.setup.learner.backbone == "resnet12"
    assert trainer.setup.learner.net.widths == (4, 6)
    assert trainer.step(0)["loss"] != other.step(0)["loss"]
    learner = Learner(config.learner, ImageSpec(1, 16, (0.5,), (0.25,)), seed=9)
    learner.take_scorer(trainer.result())
    found = learner.scorer.encoder.state_dict()  # type: ignore[union-attr]
    kept = trainer.result()
    assert {name for name in kept if not name.startswith("network.")} == {"head.weight", "head.bias"}
    assert all(torch.equal(tensor, kept[f"network.{name}"]) for name, tensor in found.items())
