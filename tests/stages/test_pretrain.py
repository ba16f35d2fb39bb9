"""Pre-training (METHODS 18.9): its schedule, what moves, and the prototypes that judge it."""

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import npbml.data.augment as augmentation
from npbml.data.augment import augmented
from npbml.data.settings import AugmentSettings
from npbml.data.tasks import ClassSet
from npbml.errors import RunError
from npbml.lab.protocols import preset
from npbml.lab.schema import Config, override
from npbml.lab.stages import scorer_config
from npbml.learner.learner import Learner
from npbml.learner.settings import ImageSpec
from npbml.nets.layers import Norm
from npbml.randomness import draw_numbers, generator, keys
from npbml.stages.loop import run_stage
from npbml.stages.observer import Observer
from npbml.stages.pretrain import Pretrainer, learning_rate, pretrain_network, prototype_logits, rotated, use_norms
from npbml.stages.scorer import EncoderTrainer, teacher
from npbml.stages.settings import PretrainSettings
from npbml.stages.setup import Setup
from npbml.stages.stage import Stage

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "ways": 3,
    "queries": 4,
    "net": {"filters": 4, "widths": [2, 2, 2, 3]},
    "pretrain": {"steps": 10, "batch_size": 12, "validation_tasks": 6, "lr": 0.05},
}


def easy(count: int, name: str, channels: int = 1) -> ClassSet:
    """Classes of six pictures, each a template with little noise."""
    random = generator(0, name)
    templates = torch.randint(0, 200, (count, 1, channels, 16, 16), generator=random)
    images = templates + torch.randint(0, 55, (count, 6, channels, 16, 16), generator=random)
    counts = torch.full((count,), 6)
    names = tuple(f"{name} {number}" for number in range(count))
    half = torch.full((channels,), 0.5)
    return ClassSet(images.flatten(0, 1).to(torch.uint8), counts.cumsum(0) - counts, counts, names, half, half / 2)


def config_of(**changes: Any) -> Config:
    return override(override(preset("quick"), SMALL), changes)


def setup_of(config: Config) -> Setup:
    batch_size = config.test.batch_size
    return Setup(config.learner, config.shots, config.queries, config.seed, config.engine, CPU, batch_size)


def pretrainer(seed: int = 0, channels: int = 1, **changes: Any) -> Pretrainer:
    config = config_of(seed=seed, **changes)
    return Pretrainer(setup_of(config), config.pretrain, easy(5, "train", channels), easy(4, "val", channels))


def seen_by(trainer: Pretrainer, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The images of a batch that is drawn from two numbers, as the network sees them; and which they are."""
    settings = trainer.settings
    chosen = keys(numbers[0], 12) % len(trainer.train.images)
    images = augmented(trainer.train, settings.augment, numbers[1], size=settings.crop_size)(chosen)
    return trainer.train.normalise(images), chosen


def state(trainer: Pretrainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.module.state_dict().items()}


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_multistep_is_the_papers_schedule() -> None:
    """A tenth at 100,000, 150,000, 175,000 and 190,000 of 200,000 steps."""
    settings = PretrainSettings()
    assert (settings.steps, settings.lr, settings.schedule) == (200_000, 0.01, "multistep")
    edges = (0, 100_000, 150_000, 175_000, 190_000, 200_000)
    for power, (first, after) in enumerate(pairwise(edges)):
        for index in (first, (first + after) // 2, after - 1):
            assert learning_rate(settings, index) == pytest.approx(0.01 * 0.1**power, rel=1e-12)


@pytest.mark.parametrize("steps", [20, 600, 10_000])
def test_onecycle_rises_to_the_peak_and_falls_to_nothing(steps: int) -> None:
    settings = PretrainSettings(steps=steps, lr=0.3, schedule="onecycle")
    rates = [learning_rate(settings, index) for index in range(steps)]
    peak = rates.index(max(rates))
    assert rates[:peak] == sorted(rates[:peak]) and rates[peak:] == sorted(rates[peak:], reverse=True)
    assert max(rates) == pytest.approx(0.3, rel=2 / steps) and 0.1 < peak / steps < 0.2
    assert 0 < rates[0] <= 0.3 / (0.15 * steps) and 0 < rates[-1] <= 0.3 * 1.2 / steps


def test_the_rate_is_the_one_that_the_step_takes() -> None:
    trainer = pretrainer()
    for index in (0, 4, 9):
        told = trainer.step(index)
        rates = {part["lr"] for part in trainer.optimizer.param_groups}
        assert rates == {told["lr"]} == {learning_rate(trainer.settings, index)}


def test_a_step_is_nesterov_sgd_on_the_cross_entropy_of_the_batch() -> None:
    """One step written out: decay, momentum (a buffer that is the gradient), look-ahead."""
    trainer = pretrainer(pretrain={"weight_decay": 0.1})
    before = state(trainer)
    images, chosen = seen_by(trainer, draw_numbers(generator(0, "pretrain", 0), 2))
    logits = trainer.module.head(trainer.network(images))
    loss = -logits.log_softmax(1)[torch.arange(12), trainer.train.labels[chosen]].mean()
    names, parameters = zip(*trainer.module.named_parameters(), strict=True)
    learned = [p for p in parameters if p.requires_grad]
    gradients = dict(zip(learned, torch.autograd.grad(loss, learned), strict=True))
    trainer.module.load_state_dict(before)
    told = trainer.step(0)
    assert told["loss"] == pytest.approx(loss.item(), abs=1e-6)
    for name, parameter in zip(names, parameters, strict=True):
        direction = 0 if parameter not in gradients else gradients[parameter] + 0.1 * before[name]
        expected = before[name] - told["lr"] * (1 + 0.9) * direction
        torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backbone", ["conv4", "resnet12"])
@pytest.mark.parametrize("affine", ["pretrained", "identity"])
def test_what_moves_in_pretraining(backbone: str, affine: str) -> None:
    """Convolutions, head and running statistics do; the warp's projection does not; the affine part may."""
    trainer = pretrainer(backbone=backbone, net={**SMALL["net"], "affine": affine})
    before = state(trainer)
    for index in range(2):
        trainer.step(index)
    changed = moved(before, state(trainer))
    norms = {name for name, part in trainer.module.named_modules() if isinstance(part, Norm)}
    scales = {f"{name}.{key}" for name in norms for key in ("weight", "bias")}
    running = {f"{name}.{key}" for name in norms for key in ("running_mean", "running_var")}
    omega = {name for name in before if name.endswith("omega")}
    assert len(omega) == 1 and len(norms) > 4
    rest = set(before) - scales - running - omega
    assert not changed & omega and running <= changed and rest <= changed
    assert changed & scales == (scales if affine == "pretrained" else set())


def test_running_statistics_are_the_moving_average_of_the_batches() -> None:
    trainer = pretrainer()
    seen: list[Tensor] = []
    unit = trainer.network.stem.blocks[0].unit
    hook = unit.conv.register_forward_hook(lambda _module, _given, output: seen.append(output.detach()))
    trainer.step(0)
    trainer.step(1)
    hook.remove()
    mean, variance = torch.zeros(4), torch.ones(4)
    for output in seen:
        mean = 0.9 * mean + 0.1 * output.mean((0, 2, 3))
        variance = 0.9 * variance + 0.1 * output.var((0, 2, 3))
    torch.testing.assert_close(unit.norm.running_mean, mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(unit.norm.running_var, variance, rtol=0, atol=1e-6)


def test_validation_changes_nothing_and_asks_the_same_tasks() -> None:
    trainer = pretrainer()
    trainer.step(0)
    before = state(trainer)
    assert trainer.validate() == trainer.validate()
    assert moved(before, state(trainer)) == set()
    assert {part.mode for part in trainer.module.modules() if isinstance(part, Norm)} == {"track"}


def test_pretraining_learns_classes_that_are_easy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(augmentation, "_JITTER", 0.1)
    gently = {"crop_scale_low": 0.9}
    trainer = pretrainer(pretrain={**SMALL["pretrain"], "steps": 80, "lr": 0.1, "augment": gently})
    losses = [trainer.step(index)["loss"] for index in range(80)]
    assert losses[0] == pytest.approx(torch.tensor(5.0).log().item(), abs=0.02)
    assert sum(losses[-5:]) / 5 < 0.5 * losses[0] and trainer.validate() > 60


def test_the_seed_fixes_every_step() -> None:
    first, again, other = pretrainer(3), pretrainer(3), pretrainer(4)
    told = [[trainer.step(index) for index in range(2)] for trainer in (first, again, other)]
    assert told[0] == told[1] != told[2]
    assert moved(state(first), state(again)) == set()
    assert any(name.endswith("conv.weight") for name in moved(state(first), state(other)))


def test_a_step_depends_on_the_state_and_its_index_alone() -> None:
    trainer, resumed = pretrainer(), pretrainer()
    trainer.step(0)
    resumed.module.load_state_dict(trainer.module.state_dict())
    resumed.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    torch.rand(7)
    assert trainer.step(1) == resumed.step(1)
    assert moved(state(trainer), state(resumed)) == set()


def test_a_loss_that_is_not_finite_is_refused_before_it_does_harm() -> None:
    trainer = pretrainer()
    with torch.no_grad():
        trainer.module.head.weight[0, 0] = float("nan")
    before = {name: parameter.clone() for name, parameter in trainer.network.named_parameters()}
    with pytest.raises(RunError, match=r"pre-training loss is nan at step 3: lower pretrain\.lr"):
        trainer.step(2)
    assert all(torch.equal(before[name], p) for name, p in trainer.network.named_parameters())


def nearest_mean(support: Tensor, labels: Tensor, query: Tensor, ways: int) -> Tensor:
    """-|q - mean of class|^2, in loops."""
    rows = []
    for item in query:
        means = [sum(s for s, y in zip(support, labels, strict=True) if y == way) for way in range(ways)]
        counts = [int((labels == way).sum()) for way in range(ways)]
        rows.append(
            torch.stack([-((item - m / c) ** 2).sum() for m, c in zip(means, counts, strict=True)])  # type: ignore[operator]
        )
    return torch.stack(rows)


@pytest.mark.parametrize("norm", ["batch", "running"])
def test_prototypes_are_the_class_means_of_one_batch_or_of_two(norm: str) -> None:
    trainer = pretrainer(net={**SMALL["net"], "stem_norm": norm, "tail_norm": norm})
    trainer.step(0)
    network = trainer.network.double()
    use_norms(network, trainer.setup.learner)
    batch = trainer.val.sample(1, 3, 2, 3, generator(0, "task"), trainer.val.batch)
    task = batch.map(lambda part: part[0].double() if part.is_floating_point() else part[0])
    with torch.no_grad():
        together = network(torch.cat([task.support_images, task.query_images]))
        apart = torch.cat([network(task.support_images), network(task.query_images)])
        for kind, embedded in (("joint", together), ("separate", apart)):
            expected = nearest_mean(embedded[:6], task.support_labels, embedded[6:], 3)
            found = prototype_logits(network, task, 3, kind)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)
    assert torch.allclose(together, apart, rtol=0, atol=1e-12) is (norm == "running")


def test_shuffled_support_has_the_same_prototypes() -> None:
    trainer = pretrainer(net={**SMALL["net"], "stem_norm": "running", "tail_norm": "running"})
    use_norms(trainer.network, trainer.setup.learner)
    batch = trainer.val.sample(1, 3, 2, 3, generator(0, "task"), trainer.val.batch)
    task = batch.map(lambda part: part[0])
    order = torch.tensor([5, 0, 3, 1, 4, 2])
    mixed = task._replace(support_images=task.support_images[order], support_labels=task.support_labels[order])
    with torch.no_grad():
        found = [prototype_logits(trainer.network, t, 3, "separate") for t in (task, mixed)]
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backbone", ["conv4", "resnet12"])
@pytest.mark.parametrize("affine", ["pretrained", "identity"])
@pytest.mark.parametrize("norm", ["batch", "running"])
def test_a_learner_that_takes_the_encoder_embeds_as_it_does(backbone: str, affine: str, norm: str) -> None:
    """Without modulation and with the warp at its start, meta-learning begins where pre-training ended."""
    net = {**SMALL["net"], "affine": affine, "stem_norm": norm, "tail_norm": norm}
    trainer = pretrainer(backbone=backbone, net=net, film={"enabled": False}, warp={"kind": "fixed"})
    for index in range(2):
        trainer.step(index)
    learner = Learner(trainer.setup.learner, ImageSpec(1, 16, (0.5,), (0.25,)), seed=9)
    learner.take_pretrained(trainer.result())
    use_norms(trainer.network, trainer.setup.learner)
    images = trainer.val.batch(torch.arange(10))
    with torch.no_grad():
        assert torch.equal(learner.network(images), trainer.network(images))


def test_an_encoder_of_another_size_is_refused() -> None:
    trainer = pretrainer()
    config = config_of(net={"filters": 5})
    with pytest.raises(RunError, match="does not fit this network"):
        Learner(config.learner, ImageSpec(1, 16, (0.5,), (0.25,))).take_pretrained(trainer.result())


def test_pretraining_without_the_warp_unit_has_none() -> None:
    def names(config: Config) -> set[str]:
        images = ImageSpec(1, 16, (0.5,), (0.25,))
        return set(pretrain_network(config.learner, config.pretrain, images).state_dict())

    config = config_of()
    without = names(override(config, {"pretrain": {"warp": False}}))
    assert not any(".warp." in name for name in without)
    assert {name for name in names(config) if ".warp." not in name} == without
    assert not any("film" in name for name in names(config))


def test_augmentation_is_of_the_training_classes_and_by_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    classes, settings = easy(3, "train", channels=3), PretrainSettings().augment
    indices = torch.tensor([[0, 7], [11, 7]])
    numbers = [draw_numbers(generator(seed, "look"))[0] for seed in (0, 0, 1)]
    again = augmented(classes, settings, numbers[0])
    look = [augmented(classes, settings, number)(indices) for number in numbers]
    assert look[0].shape == (2, 2, 3, 16, 16) and look[0].dtype == torch.float32
    assert torch.equal(look[0], look[1]) and not torch.equal(look[0], look[2])
    assert torch.equal(again(indices), look[0]) and not torch.equal(
        again(indices), look[0]
    )  # each call draws anew
    monkeypatch.setattr(augmentation, "_JITTER", 0.0)
    still = augmented(classes, AugmentSettings(crop_scale_low=1.0, flip=False), numbers[0])(indices)
    torch.testing.assert_close(classes.normalise(still), classes.batch(indices), rtol=0, atol=1e-4)


def test_the_encoder_learns_from_crops_of_the_size_that_is_asked_for() -> None:
    trainer = pretrainer(pretrain={"crop_size": 24})
    numbers = draw_numbers(generator(0), 2)
    seen, chosen = seen_by(trainer, numbers)
    assert seen.shape == (12, 1, 24, 24)
    expected = torch.nn.functional.cross_entropy(trainer.module(seen), trainer.labels[chosen])
    torch.testing.assert_close(trainer._gradient(numbers)[0], expected)


def test_what_scores_has_crops_of_its_own_size() -> None:
    config = config_of(pretrain={"crop_size": 20}, scorer_training={"crop_size": 24})
    assert scorer_config(config).pretrain.crop_size == 24 and config.pretrain.crop_size == 20


def test_colour_and_grey_pictures_are_both_taken() -> None:
    for channels in (1, 3):
        trainer = pretrainer(channels=channels)
        trainer.step(0)
        assert trainer.network.stem.blocks[0].unit.conv.weight.shape == (4, channels, 3, 3)
        assert 0 <= trainer.validate() <= 100


def test_a_step_in_colour_asks_the_host_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor made of numbers comes from the host, and a CUDA graph cannot record that."""
    trainer = pretrainer(channels=3, pretrain={"rotations": True})
    numbers = draw_numbers(generator(0), 2)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("from the host")

    monkeypatch.setattr(torch.Tensor, "new_tensor", refuse)
    monkeypatch.setattr(torch, "tensor", refuse)
    monkeypatch.setattr(torch, "as_tensor", refuse)
    assert trainer._gradient(numbers)[0].isfinite()


def test_images_are_rotated_by_quarters() -> None:
    image = torch.tensor([[1, 2], [3, 4]]).expand(5, 1, 2, 2)
    found = rotated(image, torch.tensor([0, 1, 2, 3, 1]))
    assert found[:, 0].tolist() == [
        [[1, 2], [3, 4]],
        [[2, 4], [1, 3]],
        [[4, 3], [2, 1]],
        [[3, 1], [4, 2]],
        [[2, 4], [1, 3]],
    ]


def test_each_rotation_of_a_class_is_a_class() -> None:
    """The loss is that of telling class and rotation at once; without rotations, of the classes alone."""
    trainer, plain = pretrainer(pretrain={"rotations": True}), pretrainer()
    assert trainer.module.head.out_features == 4 * plain.module.head.out_features
    numbers = draw_numbers(generator(0), 2)
    seen, chosen = seen_by(trainer, numbers)
    turns = [place % 4 for place in range(12)]
    seen = torch.stack([image.rot90(turn, (1, 2)) for image, turn in zip(seen, turns, strict=True)])
    logits = trainer.module.head(trainer.network(seen))
    labels = [4 * int(trainer.labels[image]) + turn for image, turn in zip(chosen, turns, strict=True)]
    expected = torch.stack([-row.log_softmax(0)[label] for row, label in zip(logits, labels, strict=True)]).mean()
    torch.testing.assert_close(trainer._gradient(numbers)[0], expected)


def distilled() -> Pretrainer:
    """A pre-trainer whose teacher is a network of another kind, with weights of its own."""
    config = config_of(scorer={"kind": "encoder", "widths": [3, 4]})
    sets, scoring = (easy(5, "train"), easy(4, "val")), scorer_config(config)
    known = teacher(setup_of(scoring), scoring.pretrain, sets[0])
    known.load_state_dict(EncoderTrainer(setup_of(scoring), scoring.pretrain, *sets, "relation").result())
    return Pretrainer(setup_of(config), config.pretrain, *sets, teacher=known)


def test_a_distilled_encoder_learns_from_predictions_and_labels_alike() -> None:
    trainer = distilled()
    assert trainer.teacher is not None and not list(trainer.teacher.parameters())
    numbers = draw_numbers(generator(0), 2)
    seen, chosen = seen_by(trainer, numbers)
    mine, known = trainer.module(seen), trainer.teacher(seen)
    assert mine.shape == known.shape
    soft, wanted = (mine / 4).log_softmax(1), (known / 4).softmax(1)
    apart = 16 * (wanted * (wanted.log() - soft)).sum(1).mean()
    plain = torch.nn.functional.cross_entropy(mine, trainer.labels[chosen])
    torch.testing.assert_close(trainer._gradient(numbers)[0], (plain + apart) / 2)
    before = {name: tensor.clone() for name, tensor in trainer.teacher.state_dict().items()}
    assert "head.weight" in moved(state(trainer), (trainer.step(0), state(trainer))[1])
    assert not moved(before, trainer.teacher.state_dict())


def test_a_distilled_encoder_goes_on_after_a_stop_to_the_same_bits(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    class Killer(Observer):
        def stepped(self, step: int, metrics: Any) -> None:
            if step == 2:
                raise Killed

    def train(folder: Path, observer: Observer) -> dict[str, Tensor]:
        trainer = distilled()
        stage = Stage("pretrain", "network", "same", (), "pretrain", 4, 2, lambda: trainer)
        run_stage(stage, folder, observer, {}, 0.0)
        return state(trainer)

    whole = train(tmp_path / "whole", Observer())
    with pytest.raises(Killed):
        train(tmp_path / "stopped", Killer())
    assert not moved(whole, train(tmp_path / "stopped", Observer()))
