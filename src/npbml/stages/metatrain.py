"""Meta-training, the outer loop (Algorithm 1)."""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from npbml.data.augment import augmented
from npbml.data.settings import AugmentSettings
from npbml.engine.capture import Replay
from npbml.engine.distributed import check_share, rank_slice
from npbml.engine.evaluate import evaluate, learner_answers, over_tasks
from npbml.engine.metastep import MetaStep, Ready, Tasks
from npbml.engine.prefetch import Prefetch
from npbml.engine.source import Source, TaskSource
from npbml.errors import NotFiniteError, RunError, SettingError
from npbml.learner.learner import GROUPS, Learner
from npbml.measures import MEASURES
from npbml.randomness import draw_numbers, generator
from npbml.stages.settings import TrainSettings
from npbml.stages.setup import Setup
from npbml.threads import one_core

WORTH_COMPILING = 3000  # meta-steps: compiling takes one to two minutes, and saves some 20 ms a step
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
}


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
        train: Source,
        val: Source,
        augment: AugmentSettings | None = None,
    ) -> None:
        """`augment` is how tasks are varied, where the settings ask for it."""
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
        if engine.compile == "auto" and settings.steps < WORTH_COMPILING:
            engine = replace(engine, compile="off")
        self.meta_step = MetaStep(learner, self.optimizer, engine, settings.clip, settings.clip_at, self.say)
        self.notes = self.meta_step.notes
        recorded = self.meta_step.settings.cuda_graph == "on"
        self.answer = learner_answers(
            learner, val, Replay("validation", recorded and val.on_device, self.say), tasks=engine.tasks
        )
        on_cpu = next(learner.parameters()).device.type == "cpu"
        self.prefetch = Prefetch(self._prepare) if settings.prefetch and on_cpu else None

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
        tasks = self.settings.validation_tasks
        per_task = evaluate(self.answer, self.val.draw, tasks, setup.batch_size, setup.seed, "validation", measure)
        return over_tasks(measure, per_task).mean

    def result(self) -> Mapping[str, Tensor]:
        return self.module.state_dict()

    def _tasks(self, index: int) -> Tasks:
        """The tasks of a step: ready, or, where a GPU records steps and draws them itself, three numbers."""
        source, recorded = self.train, self.meta_step.step.replay.on
        if isinstance(source, TaskSource) and source.on_device and recorded:
            numbers = self._numbers(index).to(source.classes.images.device)
            return Tasks(
                partial(self._draw_and_prepare, source), (numbers,), (self.tasks, source.key, self.augment)
            )
        ready = self._prepare(index) if self.prefetch is None else self.prefetch.take(index)
        return Tasks(as_given, (ready,), None)

    def _numbers(self, index: int) -> Tensor:
        """What the classes, the images and the augmentation of a step are drawn from."""
        seed = self.setup.seed
        return torch.cat(
            [draw_numbers(generator(seed, "train", index), 2), draw_numbers(generator(seed, "augment", index))]
        )

    def _draw_and_prepare(self, source: TaskSource, numbers: Tensor) -> Ready:
        part, look = rank_slice(self.tasks), None
        if self.augment is not None:
            look = augmented(source.classes, self.augment, numbers[2], self.tasks, part)
        return source.prepare(source.draw_from(numbers, self.tasks)[part], look)

    def _prepare(self, index: int) -> Ready:
        source = self.train
        if isinstance(source, TaskSource):
            return self._draw_and_prepare(source, self._numbers(index).to(source.classes.images.device))
        drawn = source.draw(self.tasks, generator(self.setup.seed, "train", index))
        return source.prepare(drawn[rank_slice(self.tasks)])

    def _schedule(self, index: int) -> float:
        progress = index / self.settings.steps
        return {
            "constant": 1.0,
            "cosine": 0.1 + 0.45 * (1 + math.cos(math.pi * progress)),
            "halving": 0.5 ** int(2.5 * progress),
            "fifths": 0.1 ** int(5 * progress),
        }[self.settings.schedule]
