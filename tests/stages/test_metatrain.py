"""Meta-training (Algorithm 1): a rate for each group, schedules, clipping, and steps that the seed fixes."""

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from npbml.data.tasks import ClassSet
from npbml.engine.execute import Executor
from npbml.engine.source import TaskSource
from npbml.errors import RunError, SettingError
from npbml.lab.protocols import preset
from npbml.lab.schema import method_config, override
from npbml.learner.learner import GROUPS, Learner
from npbml.learner.settings import ImageSpec
from npbml.randomness import generator
from npbml.rule.objective import Outer
from npbml.shapes import benchmark_shape, read_shape
from npbml.stages.loop import run_stage
from npbml.stages.metatrain import MetaTrainer
from npbml.stages.observer import Observer
from npbml.stages.setup import Setup
from npbml.stages.stage import Stage
from npbml.tensor_files import load_tensors

RATES = {"theta": 1e-3, "omega": 2e-3, "phi": 3e-3, "psi": 4e-3}
SMALL: dict[str, Any] = {
    "ways": 3,
    "queries": 2,
    "net": {"filters": 3},
    "loss": {"hidden": 4},
    "inner": {"steps": 2},
    "scorer": {"widths": [2], "pools": 1},
    "init": {"std": 0.1},
    "engine": {"tasks": "vmap"},  # the bits of two trainers are compared: neither may decide by measuring
}
TRAIN: dict[str, Any] = {
    "lr": RATES,
    "steps": 8,
    "meta_batch": 2,
    "validation_tasks": 4,
    "schedule": "constant",
    "clip": "none",
    "prefetch": False,
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


def trainer_of(method: str = "npbml", seed: int = 0, **train: Any) -> MetaTrainer:
    """A trainer of `method`; changes below other names than train's are given as `also`, an observer as `say`."""
    also, say = train.pop("also", {}), train.pop("say", lambda words: None)
    changes = {"method": method, "seed": seed, "train": {**TRAIN, **train}}
    config = method_config(override(override(override(preset("quick"), SMALL), changes), also), method)
    learner = Learner(config.learner, ImageSpec(1, 16, (0.5,), (0.25,)), config.seed)
    shape = benchmark_shape(learner.settings.ways, config.shots, config.queries)
    sources = [[TaskSource(learner, easy(*of), shape)] for of in ((5, "train"), (4, "val"))]
    tasks, engine, batch_size = (config.shots, config.queries), config.engine, config.test.batch_size
    setup = Setup(config.learner, *tasks, config.seed, engine, torch.device("cpu"), batch_size, say)
    return MetaTrainer(setup, config.train, method, learner, *sources, config.pretrain.augment)


def state(trainer: MetaTrainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.module.state_dict().items()}


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def moved_groups(trainer: MetaTrainer, steps: int = 1) -> set[str]:
    before = state(trainer)
    for index in range(steps):
        trainer.step(index)
    changed = moved(before, state(trainer))
    groups = trainer.module.groups()
    assert changed <= {name for part in groups.values() for name in part}
    return {letter for letter, part in groups.items() if changed & set(part)}


def gradient(trainer: MetaTrainer, index: int) -> dict[str, Tensor]:
    """The meta-gradient that step `index` sees, by name."""
    names, parameters = zip(*trainer.module.named_parameters(), strict=True)
    indices = trainer.train[0].draw(trainer.tasks, generator(trainer.setup.seed, "train", index))
    work = trainer.train[0].prepare(indices)
    _, found = Executor(trainer.module).gradient(list(parameters), *work, trainer.module.outer(0.0))
    return dict(zip(names, found, strict=True))


def test_the_first_step_of_adam_is_each_groups_own_rate() -> None:
    """m / sqrt(v) is the gradient's sign at first: every entry with a gradient moves by its group's rate."""
    trainer = trainer_of()
    before, found = state(trainer), gradient(trainer, 0)
    trainer.step(0)
    for letter, part in trainer.module.groups().items():
        assert part
        for name, parameter in part.items():
            step = RATES[letter] * found[name] / (found[name].abs() + 1e-8)
            torch.testing.assert_close(parameter.detach() - before[name], -step, rtol=0, atol=1e-6)


@pytest.mark.parametrize("still", GROUPS)
def test_a_rate_of_zero_keeps_its_group_bit_for_bit(still: str) -> None:
    trainer = trainer_of(lr={**RATES, still: 0.0}, weight_decay=0.1)
    assert moved_groups(trainer, 2) == set(GROUPS) - {still}


def test_maml_has_theta_alone() -> None:
    assert moved_groups(trainer_of("maml")) == {"theta"}
    with pytest.raises(SettingError, match=r"train\.lr leaves nothing to meta-learn in maml"):
        trainer_of("maml", lr={**RATES, "theta": 0.0})


def test_first_order_teaches_phi_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the gradient stopped at every inner step, the query loss does not depend on the learned loss."""
    first = trainer_of()
    monkeypatch.setattr(first.module, "outer", lambda progress: Outer(1, {-1: 1.0}))
    assert moved_groups(first, 2) == {"theta", "omega", "psi"}
    assert moved_groups(trainer_of(), 2) == set(GROUPS)


def test_a_constant_schedule_keeps_every_rate() -> None:
    trainer = trainer_of()
    for index in (0, 7):
        trainer.step(index)
        assert {part["name"]: part["lr"] for part in trainer.optimizer.param_groups} == RATES


def test_a_cosine_ends_at_a_tenth() -> None:
    steps = 1000
    trainer = trainer_of("maml", schedule="cosine", steps=steps)
    found = []
    for index in (0, steps // 2, steps - 1):
        trainer.step(index)
        found.append(trainer.optimizer.param_groups[0]["lr"] / RATES["theta"])
    assert found == pytest.approx([1.0, 0.55, 0.1], abs=1e-5)
    shares = [trainer._schedule(index) for index in range(steps)]
    assert shares == sorted(shares, reverse=True)
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * index / steps)) / 2 for index in range(steps)]
    assert shares == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("clip", ["value", "norm"])
def test_the_meta_gradient_is_clipped_where_it_was_asked_for(clip: str) -> None:
    trainer = trainer_of(clip=clip, clip_at=0.003)
    found = gradient(trainer, 0)
    length = torch.cat([g.flatten() for g in found.values()]).norm()
    assert length > 0.003 and max(g.abs().max() for g in found.values()) > 0.003
    trainer.step(0)
    for name, parameter in trainer.module.named_parameters():
        expected = found[name].clamp(-0.003, 0.003) if clip == "value" else found[name] * 0.003 / length
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-3, atol=1e-8)


def test_adamw_decays_apart_from_the_gradient() -> None:
    """Two steps of Adam and AdamW differ by the decay alone: lr * decay * weight in the first."""
    plain, decayed = trainer_of("maml"), trainer_of("maml", optimizer="adamw", weight_decay=0.5)
    before = state(plain)
    plain.step(0), decayed.step(0)
    others = dict(decayed.module.named_parameters())
    for name, parameter in plain.module.named_parameters():
        difference = (parameter - others[name]).detach()
        torch.testing.assert_close(difference, RATES["theta"] * 0.5 * before[name], rtol=0, atol=1e-7)
    assert isinstance(decayed.optimizer, torch.optim.AdamW) and type(plain.optimizer) is torch.optim.Adam


@pytest.mark.parametrize(("shots", "tasks"), [(1, 4), (5, 2)])
def test_a_step_is_on_four_tasks_of_one_shot_or_two_of_five(
    monkeypatch: pytest.MonkeyPatch, shots: int, tasks: int
) -> None:
    trainer = trainer_of("maml", meta_batch=None, also={"shots": shots, "queries": 1})
    seen, draw = [], trainer.train[0].draw_from

    def watched(numbers: Tensor, count: int) -> Tensor:
        seen.append(draw(numbers, count))
        return seen[-1]

    monkeypatch.setattr(trainer.train[0], "draw_from", watched)
    trainer.step(0)
    assert [part.shape for part in seen] == [(tasks, 3, shots + 1)]


def test_the_seed_fixes_every_step() -> None:
    first, again, other = trainer_of(seed=3), trainer_of(seed=3), trainer_of(seed=4)
    told = [[trainer.step(index) for index in range(3)] for trainer in (first, again, other)]
    assert told[0] == told[1] != told[2]
    assert moved(state(first), state(again)) == set() and moved(state(first), state(other))


@pytest.mark.parametrize("augment", [False, True])
def test_prefetched_tasks_are_the_same_tasks(augment: bool) -> None:
    plain, ahead = trainer_of(augment=augment), trainer_of(augment=augment, prefetch=True)
    assert plain.prefetch is None and ahead.prefetch is not None
    order = (0, 1, 2, 5, 6)  # also after a jump, as when a run is resumed
    assert [plain.step(index) for index in order] == [ahead.step(index) for index in order]
    assert moved(state(plain), state(ahead)) == set()


def test_a_step_depends_on_the_state_and_its_index_alone() -> None:
    trainer, resumed = trainer_of(), trainer_of()
    trainer.step(0)
    resumed.module.load_state_dict(trainer.module.state_dict())
    resumed.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    torch.rand(7)
    assert trainer.step(1) == resumed.step(1)
    assert moved(state(trainer), state(resumed)) == set()


def test_augmented_tasks_are_other_tasks() -> None:
    """They are varied as in pre-training, where that is asked for alone."""

    def loss(augment: bool, crop_scale_low: float) -> float:
        also = {"pretrain": {"augment": {"crop_scale_low": crop_scale_low}}}
        return trainer_of("maml", augment=augment, also=also).step(0)["loss"]

    usual = preset("quick").pretrain.augment.crop_scale_low
    plain, varied, cropped = loss(False, usual), loss(True, usual), loss(True, 0.05)
    assert len({plain, varied, cropped}) == 3
    assert loss(False, 0.05) == plain and trainer_of("maml", augment=True).step(0)["loss"] == varied


def test_validation_asks_the_same_tasks_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, seen = trainer_of(), []
    prepare = trainer.val[0].prepare

    def watched(indices: Tensor) -> Any:
        seen.append(indices)
        return prepare(indices)

    monkeypatch.setattr(trainer.val[0], "prepare", watched)
    before, first = state(trainer), trainer.validate()
    assert moved(before, state(trainer)) == set() and trainer.validate() == first
    trainer.step(0)
    trainer.validate()
    asked = torch.cat(seen).view(3, 4, 3, 3)
    assert torch.equal(asked[0], asked[1]) and torch.equal(asked[0], asked[2])


def test_meta_steps_lower_the_loss_of_tasks_that_are_easy() -> None:
    trainer = trainer_of("maml", lr={**RATES, "theta": 0.03}, also={"inner": {"lr": 0.1}})
    losses = [trainer.step(index)["loss"] for index in range(30)]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_the_training_curve_in_bfloat16_is_that_in_float32_within_noise() -> None:
    """The same steps and tasks: what rounding changes of the losses is less than what another seed changes."""

    def losses(precision: str, seed: int = 0) -> Tensor:
        also = {"inner": {"lr": 0.1}, "engine": {"precision": precision}}
        trainer = trainer_of("npbml", seed, lr={**RATES, "theta": 0.03}, also=also)
        return torch.tensor([trainer.step(index)["loss"] for index in range(40)])

    full, rough, other = losses("float32"), losses("bfloat16"), losses("float32", seed=1)
    assert full[-10:].mean() < 0.9 * full[:10].mean() and rough[-10:].mean() < 0.9 * rough[:10].mean()
    assert 0 < (rough - full).abs().mean() < 0.5 * (other - full).abs().mean()


def run(folder: Path, trainer: MetaTrainer) -> None:
    """Train the stage in a run folder; a checkpoint is written where a step fails."""
    stage = Stage("npbml", "learner.safetensors", "settings", (), "train", 6, 3, lambda: trainer)
    run_stage(stage, folder, Observer(), {}, 1e9)


PLANTED = {
    "theta": ("head.weight", "the adapted tensor head.weight after 0 inner steps"),
    "omega": ("network.tail.blocks.0.warp.omega", "the base term of the inner loss at inner step 0"),
    "phi": ("loss.transductive.layers.1.weight", "the transductive term of the inner loss at inner step 0"),
    "psi": ("loss.regulariser.films.0.generator.bias", "the regulariser term of the inner loss at inner step 0"),
}


@pytest.mark.parametrize("letter", GROUPS)
def test_a_nan_in_a_group_stops_the_step_and_says_where(letter: str) -> None:
    trainer = trainer_of()
    name, words = PLANTED[letter]
    parameter = trainer.module.groups()[letter][name]
    with torch.no_grad():
        parameter.fill_(float("nan"))
    before = state(trainer)
    with pytest.raises(RunError) as error:
        trainer.step(4)
    for part in ("Meta-step 5 of npbml is not finite", words, "The state before it is saved", "train.lr"):
        assert part in str(error.value)
    for key, tensor in trainer.module.state_dict().items():
        torch.testing.assert_close(tensor, before[key], rtol=0, atol=0, equal_nan=True)


def test_a_step_that_fails_keeps_the_state_before_it_and_the_run_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Poisoned tasks at step 4: what is kept is the state after 3, and without the poison the end is the same."""
    whole = trainer_of()
    run(tmp_path / "whole", whole)
    poisoned, good = trainer_of(), trainer_of()
    prepare, calls = poisoned.train[0].prepare, [0]

    def poison(*given: Any) -> Any:
        prepared, labels = prepare(*given)
        calls[0] += 1
        if calls[0] == 4:
            prepared = prepared._replace(inner=prepared.inner * float("inf"))
        return prepared, labels

    monkeypatch.setattr(poisoned.train[0], "prepare", poison)
    with pytest.raises(RunError, match=r"Meta-step 4 of npbml is not finite.*the stem's features, in task 0"):
        run(tmp_path / "part", poisoned)
    for index in range(3):
        good.step(index)
    tensors, about = load_tensors(tmp_path / "part" / "npbml" / "checkpoint.safetensors")
    assert about["step"] == 3
    for name, tensor in good.module.state_dict().items():
        assert torch.equal(tensors[f"module.{name}"], tensor)
    run(tmp_path / "part", trainer_of())
    for name in ("learner.safetensors", "metrics.jsonl"):
        part, expected = (tmp_path / folder / "npbml" / name for folder in ("part", "whole"))
        assert part.read_bytes() == expected.read_bytes()


def test_steps_that_are_not_finite_may_be_left_out_but_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    trainer = trainer_of(say=said.append, max_skipped=2)
    prepare, poisoned = trainer.train[0].prepare, [True]

    def poison(*given: Any) -> Any:
        prepared, labels = prepare(*given)
        return prepared._replace(inner=prepared.inner * (float("inf") if poisoned[0] else 1)), labels

    monkeypatch.setattr(trainer.train[0], "prepare", poison)
    before, moments = state(trainer), copy.deepcopy(trainer.optimizer.state_dict())
    assert trainer.step(0) == {"skipped": 1} and trainer.step(1) == {"skipped": 2}
    assert moved(before, state(trainer)) == set() and trainer.optimizer.state_dict() == moments
    assert len(said) == 2 and "Meta-step 2 of npbml is left out: NaN or infinity" in said[1]
    resumed = trainer_of(max_skipped=2)
    resumed.notes.update(trainer.notes)  # as a checkpoint keeps them
    monkeypatch.setattr(resumed.train[0], "prepare", poison)
    for late in (trainer, resumed):
        with pytest.raises(RunError, match="Meta-step 3 of npbml is not finite"):
            late.step(2)
    poisoned[0] = False
    assert set(trainer.step(3)) == {"loss"}


def test_a_rate_that_is_far_too_high_is_told_and_the_best_state_is_kept(tmp_path: Path) -> None:
    trainer = trainer_of(lr={**RATES, "theta": 1e30})
    start = state(trainer)
    with pytest.raises(RunError, match=r"Meta-step [2-6] of npbml is not finite: .*in task \d of the batch"):
        run(tmp_path, trainer)
    tensors, about = load_tensors(tmp_path / "npbml" / "checkpoint.safetensors")
    ((best, step),) = about["kept"]
    assert step == 0 and best >= 0
    assert all(torch.equal(tensors[f"best.0.{name}"], tensor) for name, tensor in start.items())


def any_trainer(shapes: tuple[str, ...], also: dict[str, Any] | None = None, **train: Any) -> MetaTrainer:
    """A trainer of npbml-any, with a source for each shape."""
    changes = {**SMALL, "shapes": list(shapes), "train": {**TRAIN, **train}, **(also or {})}
    config = method_config(override(preset("quick"), SMALL), "npbml-any")
    config = override(config, changes)
    learner = Learner(config.learner, ImageSpec(1, 16, (0.5,), (0.25,)), config.seed)
    classes = [easy(*of) for of in ((8, "train"), (6, "val"))]
    sources = [[TaskSource(learner, split, read_shape(shape)) for shape in shapes] for split in classes]
    setup = Setup(config.learner, 1, 2, config.seed, config.engine, torch.device("cpu"), 3)
    return MetaTrainer(setup, config.train, "npbml-any", learner, *sources, config.pretrain.augment)


SHAPES = ("2x1/1", "3x~2+~4/0", "4x1+4/1", "3x1+3/1", "2x2+~3/1")


def test_the_shape_of_a_step_depends_on_its_number_alone() -> None:
    trainer, other = any_trainer(SHAPES), any_trainer(SHAPES)
    drawn = [trainer.train.index(trainer._source(index)) for index in range(60)]
    assert [other.train.index(other._source(index)) for index in reversed(range(60))] == drawn[::-1]
    assert set(drawn) == set(range(len(SHAPES)))


@pytest.mark.parametrize("train", [{}, {"mix": True}], ids=str)
def test_a_run_over_shapes_is_resumed_bit_for_bit(train: dict[str, Any]) -> None:
    trainer, resumed = any_trainer(SHAPES, **train), any_trainer(SHAPES, **train)
    for index in range(3):
        assert math.isfinite(trainer.step(index)["loss"])
    resumed.module.load_state_dict(trainer.module.state_dict())
    resumed.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    for index in range(3, 6):
        assert trainer.step(index) == resumed.step(index)
    assert moved(state(trainer), state(resumed)) == set()
    assert trainer.validate() == resumed.validate()


def test_mixed_classes_give_other_steps() -> None:
    assert any_trainer(SHAPES).step(0) != any_trainer(SHAPES, mix=True).step(0)


def test_every_group_learns_over_shapes() -> None:
    trainer = any_trainer(SHAPES)
    before = {name: parameter.detach().clone() for name, parameter in trainer.module.named_parameters()}
    for index in range(6):
        trainer.step(index)
    changed = moved(before, dict(trainer.module.named_parameters()))
    assert all(changed & set(part) for part in trainer.module.groups().values())
    assert {"scorer.numbers", "scorer.mixture", "loss.score_weight", "loss.symmetric_query.gate"} <= changed


def test_the_temperature_follows_the_shape_where_there_are_enough_of_them() -> None:
    many, few = any_trainer(SHAPES, temperature="validation"), any_trainer(SHAPES[:2], temperature="validation")
    chosen = many.conclude([many.result()])
    assert chosen["head.temperature"] > 0 and len(chosen["head.temperature_by_shape"]) == 3
    assert few.conclude([few.result()])["head.temperature_by_shape"] == []


def test_many_shapes_are_not_compiled() -> None:
    assert any_trainer(SHAPES, steps=5000).meta_step.settings.compile == "off"
    with pytest.raises(SettingError, match="for each of 5 shapes"):
        any_trainer(SHAPES, also={"engine": {"compile": "on"}})


def test_how_tasks_run_is_on_disk_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of()
    trainer.meta_step.settings = replace(trainer.meta_step.settings, tasks="auto")

    def killed(index: int) -> dict[str, float]:
        raise MemoryError

    monkeypatch.setattr(trainer, "step", killed)
    with pytest.raises(MemoryError):
        run(tmp_path, trainer)
    _, about = load_tensors(tmp_path / "npbml" / "checkpoint.safetensors")
    assert about["step"] == 0 and about["notes"] == trainer.notes and "together" in about["notes"]
