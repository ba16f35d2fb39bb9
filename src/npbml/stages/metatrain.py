"""Meta-training, the outer loop (Algorithm 1)."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from npbml.data.augment import augmented
from npbml.data.settings import AugmentSettings
from npbml.engine.calibration import best_temperature, temperature_by_shape
from npbml.engine.capture import Replay
from npbml.engine.distributed import check_share, rank_slice
from npbml.engine.evaluate import all_answers, evaluate, learner_answers, over_tasks
from npbml.engine.metastep import MetaStep, Ready, Tasks
from npbml.engine.prefetch import Prefetch
from npbml.engine.source import Partners, Source, TaskSource
from npbml.errors import NotFiniteError, RunError, SettingError
from npbml.learner.learner import GROUPS, Learner
from npbml.measures import MEASURES
from npbml.randomness import draw_numbers, generator, uniform
from npbml.rule.settings import shape_sizes
from npbml.shapes import Shape
from npbml.stages.settings import TrainSettings
from npbml.stages.setup import Setup
from npbml.threads import one_core

WORTH_COMPILING = 3000  # meta-steps: compiling takes one to two minutes, and saves some 20 ms a step
MOST_COMPILED = 3  # shapes
SHAPES_FOR_SLOPES = 5  # by which the temperature depends on the shape: three slopes need more shapes than that
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
}


def shape_counts(shape: Shape) -> tuple[int, int, int]:
    """Its classes, labelled and unlabelled items."""
    return shape.ways, shape.support, shape.pool


def as_given(ready: Ready) -> Ready:
    """Tasks that are ready already."""
    return ready


class MetaTrainer:
    """Meta-steps on batches of training tasks, judged on meta-validation tasks.

    Of several ranks each takes a slice of the tasks, which all of them draw alike.
    """

    def __init__(
        self,
        setup: Setup,
        settings: TrainSettings,
        method: str,
        learner: Learner,
        train: Sequence[Source],
        val: Sequence[Source],
        augment: AugmentSettings | None = None,
    ) -> None:
        """`train` and `val` have a source for each shape of tasks, one of which is drawn at every meta-step.

        `augment` is how tasks are varied, where the settings ask for it.
        """
        self.tasks = settings.tasks_at(setup.shots)
        check_share("train.meta_batch", self.tasks)
        self.setup, self.settings, self.method = setup, settings, method
        self.module, self.train, self.val, self.say = learner, train, val, setup.say
        self.augment = augment if settings.augment else None
        groups = learner.groups()
        self.rates = {letter: getattr(settings.lr, letter) for letter in GROUPS}
        parts = [
            {"params": list(groups[letter].values()), "lr": rate, "name": letter}
            for letter, rate in self.rates.items()
            if rate > 0 and groups[letter]
        ]
        if not parts:
            raise SettingError(f"train.lr leaves nothing to meta-learn in {method}: set a rate above 0.")
        self.optimizer = OPTIMIZERS[settings.optimizer](parts, weight_decay=settings.weight_decay)
        engine = setup.engine
        if engine.compile == "on" and len(train) > MOST_COMPILED:
            raise SettingError(
                f"engine.compile=on compiles an inner step for each of {len(train)} shapes, a minute or two each: "
                f"leave it at auto, which records them in CUDA graphs instead, or give {MOST_COMPILED} shapes."
            )
        if engine.compile == "auto" and (settings.steps < WORTH_COMPILING or len(train) > 1):
            engine = replace(engine, compile="off")
        self.meta_step = MetaStep(learner, self.optimizer, engine, settings.clip, settings.clip_at, self.say)
        self.notes = self.meta_step.notes
        recorded = self.meta_step.settings.cuda_graph == "on"
        replay = Replay("validation", recorded and all(source.on_device for source in val), self.say)
        self.answers = [learner_answers(learner, source, replay, tasks=engine.tasks) for source in val]
        on_cpu = next(learner.parameters()).device.type == "cpu"
        self.prefetch = Prefetch(self._prepare) if settings.prefetch and on_cpu else None

    def decide(self, index: int) -> None:
        """Measure how the tasks of a meta-step are best computed; where that fails, the step itself says why."""
        if self.meta_step.undecided:
            with suppress(NotFiniteError), nullcontext() if self.prefetch is None else one_core():
                self.meta_step.choose(self._tasks(index), self.module.outer(index / self.settings.steps))

    def step(self, index: int) -> dict[str, float]:
        outer = self.module.outer(index / self.settings.steps)
        self.meta_step.step.set_rate(lambda part: self.rates[part["name"]] * self._schedule(index))
        try:
            with nullcontext() if self.prefetch is None else one_core():
                loss = self.meta_step(self._tasks(index), outer)
        except NotFiniteError as error:
            skipped = self.notes.get("skipped", 0)
            if skipped < self.settings.max_skipped:
                self.notes["skipped"] = skipped + 1
                self.say(f"Meta-step {index + 1} of {self.method} is left out: {error}.")
                return {"skipped": skipped + 1}
            raise RunError(
                f"Meta-step {index + 1} of {self.method} is not finite: {error}. The state before it is "
                "saved. Go on with train.max_skipped, which leaves such steps out; or, in a new run, lower the "
                "rate of that part in train.lr or set train.clip=norm."
            ) from None
        return {"loss": loss}

    def validate(self) -> float:
        setup, measure = self.setup, MEASURES[self.setup.learner.target]
        tasks = max(2, self.settings.validation_tasks // len(self.val))  # of each shape
        found = [
            evaluate(answer, source.draw, tasks, setup.batch_size, setup.seed, "validation", measure)
            for answer, source in zip(self.answers, self.val, strict=True)
        ]
        means = [over_tasks(measure, shape.per_task).mean for shape in found]
        return sum(means) / len(means)

    def result(self) -> Mapping[str, Tensor]:
        return self.module.state_dict()

    def conclude(self, best: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
        """The temperature that fits the validation tasks best; of an ensemble, that of the mean of its logits."""
        if self.settings.temperature == "one":
            return {}
        now = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}
        members = []
        for state in best:
            self.module.load_state_dict(state)
            members.append(self._validation_answers())
        self.module.load_state_dict(now)
        shapes = [source.shape for source in self.val if isinstance(source, TaskSource)]
        now_by = [self.module.temperature(*shape_counts(shape)) for shape in shapes]  # divided by these already
        logits = [
            divided * torch.stack([one for one, _ in shape]).mean(0)
            for divided, shape in zip(now_by, zip(*members, strict=True), strict=True)
        ]
        labels = [labels for _, labels in members[0]]
        temperature = best_temperature(logits, labels)
        slopes: tuple[float, ...] = ()
        if len(shapes) >= SHAPES_FOR_SLOPES:
            each = [best_temperature(*one) for one in zip(logits, labels, strict=True)]
            sizes = [shape_sizes(*shape_counts(shape)) for shape in shapes]
            temperature, slopes = temperature_by_shape(each, sizes)
        self.say(f"{self.method}: temperature {temperature:g}, chosen on meta-validation tasks")
        return {"head.temperature": temperature, "head.temperature_by_shape": list(slopes)}

    def _validation_answers(self) -> list[tuple[Tensor, Tensor]]:
        """The query logits and labels of the validation tasks of each shape."""
        setup, tasks = self.setup, max(2, self.settings.validation_tasks // len(self.val))
        return [
            all_answers(answer, source.draw, tasks, setup.batch_size, setup.seed, "validation")
            for answer, source in zip(self.answers, self.val, strict=True)
        ]

    def _tasks(self, index: int) -> Tasks:
        """The tasks of a step: ready, or, where a GPU records steps and draws them itself, three numbers."""
        source, recorded = self._source(index), self.meta_step.step.replay.on
        if isinstance(source, TaskSource) and source.on_device and recorded:
            numbers = self._numbers(index, source)
            return Tasks(
                partial(self._draw_and_prepare, source), (numbers,), (self.tasks, source.key, self.augment)
            )
        ready = self._prepare(index) if self.prefetch is None else self.prefetch.take(index)
        return Tasks(as_given, (ready,), None)

    def _source(self, index: int) -> Source:
        """The source of a step's tasks: the shape is drawn by the number of the step."""
        if len(self.train) == 1:
            return self.train[0]
        return self.train[int(torch.randint(len(self.train), (), generator=self._generator("shape", index)))]

    def _numbers(self, index: int, source: TaskSource) -> Tensor:
        """What the augmentation of a step and its tasks are drawn from, where the images are."""
        drawn = draw_numbers(self._generator("train", index), source.numbers)
        augment = draw_numbers(self._generator("augment", index))
        parts = [augment, drawn]
        if self.settings.mix:
            parts.append(draw_numbers(self._generator("mix", index), source.numbers + 1))
        return torch.cat(parts).to(source.classes.images.device)

    def _generator(self, purpose: str, index: int) -> torch.Generator:
        return generator(self.setup.seed, purpose, index)

    def _draw_and_prepare(self, source: TaskSource, numbers: Tensor) -> Ready:
        part, look = rank_slice(self.tasks), None
        if self.augment is not None:
            look = augmented(source.classes, self.augment, numbers[0], self.tasks, part)
        count = source.numbers
        drawn, partners = source.draw_from(numbers[1 : 1 + count], self.tasks)[part], None
        if self.settings.mix:
            others = source.draw_from(numbers[1 + count : -1], self.tasks)[part]
            share = uniform(numbers[-1], self.tasks, source.shape.ways)[part].to(self.module.mean.dtype)
            partners = Partners(others, 0.5 + 0.5 * share)
        return source.prepare(drawn, look, partners)

    def _prepare(self, index: int) -> Ready:
        source = self._source(index)
        if isinstance(source, TaskSource):
            return self._draw_and_prepare(source, self._numbers(index, source))
        drawn = source.draw(self.tasks, self._generator("train", index))
        return source.prepare(drawn[rank_slice(self.tasks)])

    def _schedule(self, index: int) -> float:
        progress = index / self.settings.steps
        return {
            "constant": 1.0,
            "cosine": 0.1 + 0.45 * (1 + math.cos(math.pi * progress)),
            "halving": 0.5 ** int(2.5 * progress),
            "fifths": 0.1 ** int(5 * progress),
        }[self.settings.schedule]
