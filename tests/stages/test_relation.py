"""The relation network's training (METHODS 18.6): squared error of its scores to the one-hot labels."""

from typing import Any

import pytest
import torch
from torch import Tensor

from npbml.config import override, preset
from npbml.data.tasks import ClassSet, Task
from npbml.errors import RunError
from npbml.learner import ImageSpec, Learner
from npbml.randomness import draw_numbers, generator
from npbml.stages.pretrain import Pretrainer, augmented
from npbml.stages.relation import RelationTrainer, relation_trainer

SMALL: dict[str, Any] = {
    "ways": 3,
    "shots": 2,
    "queries": 3,
    "net": {"filters": 3},
    "relation": {"widths": [4, 6], "pools": 1, "lr": 0.01, "validation_tasks": 6},
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


def trainer_of(seed: int = 0, **changes: Any) -> RelationTrainer:
    relation = {**SMALL["relation"], **changes}
    config = override(override(preset("quick"), SMALL), {"seed": seed, "relation": relation})
    return RelationTrainer(config, easy(5, "train"), easy(4, "val"), torch.device("cpu"))


def state(trainer: RelationTrainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.module.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("augment", [False, True])
def test_the_loss_is_the_squared_error_of_the_scores_of_one_episode(augment: bool) -> None:
    trainer = trainer_of(augment=augment)
    config, random = trainer.config, generator(0, "relation", 4)
    indices = trainer.train.draw(1, 3, 2, 3, random)
    number = draw_numbers(generator(0, "relation", 4), 3)[2]
    look = augmented(trainer.train, config.pretrain.augment, number) if augment else None
    task = Task(*(part[0] for part in trainer.train.task(indices, 2, look)))
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


def test_the_gradient_is_clipped_to_the_norm_asked_for() -> None:
    lengths = []
    for clip in (0.0, 1e-4, 1e9):
        trainer = trainer_of(clip_norm=clip)
        trainer.step(0)
        lengths.append(torch.cat([p.grad.flatten() for p in trainer.module.parameters()]).norm().item())
    assert lengths[0] > 1e-3 and lengths[1] == pytest.approx(1e-4, rel=0.02) and lengths[2] == lengths[0]


def test_a_loss_that_is_not_finite_is_refused_before_it_does_harm() -> None:
    trainer = trainer_of()
    with torch.no_grad():
        trainer.module.score.bias.fill_(float("nan"))
    before = trainer.module.score.weight.clone()
    with pytest.raises(RunError, match=r"relation network's loss is nan at step 6: lower relation\.lr"):
        trainer.step(5)
    assert torch.equal(trainer.module.score.weight, before)


def test_a_learner_takes_the_network_and_gives_its_scores() -> None:
    trainer = trainer_of()
    trainer.step(0)
    learner = Learner(trainer.config, ImageSpec(1, 16, (0.5,), (0.25,)), seed=9)
    assert learner.relation is not None
    learner.relation.load_state_dict(trainer.result())
    task = Task(*(part[0] for part in trainer.val.sample(1, 3, 2, 3, generator(0, "task"))))
    with torch.no_grad():
        scores = trainer.module(task.support_images, task.support_labels, task.query_images, 3)
    assert torch.equal(learner.prepare(3, task).scores, scores)
    assert not list(learner.relation.parameters())


def test_an_encoder_that_only_scores_is_pretrained_and_taken() -> None:
    """It is a ResNet of relation.widths for relation.steps, with weights and batches of its own."""
    config = override(override(preset("quick"), SMALL), {"relation": {"kind": "encoder", "steps": 7}})
    sets = easy(5, "train"), easy(4, "val"), torch.device("cpu")
    trainer = relation_trainer(config, *sets)
    assert isinstance(trainer, Pretrainer)
    other = Pretrainer(trainer.config, *sets)
    assert trainer.config.pretrain.steps == 7 and trainer.config.backbone == "resnet12"
    assert trainer.step(0)["loss"] != other.step(0)["loss"]
    learner = Learner(config, ImageSpec(1, 16, (0.5,), (0.25,)), seed=9)
    learner.take_relation(trainer.result())
    found = learner.relation.encoder.state_dict()  # type: ignore[union-attr]
    kept = trainer.result()
    assert {name for name in kept if not name.startswith("network.")} == {"head.weight", "head.bias"}
    assert all(torch.equal(tensor, kept[f"network.{name}"]) for name, tensor in found.items())
