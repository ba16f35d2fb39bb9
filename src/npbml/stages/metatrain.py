"""Meta-training, the outer loop (Algorithm 1)."""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from npbml.config import Config
from npbml.engine.ahead import Ahead
from npbml.engine.capture import Replay
from npbml.engine.distributed import check_share, mine
from npbml.engine.evaluate import MEASURES, evaluate, learner_answers
from npbml.engine.metastep import MetaStep, Work
from npbml.engine.source import Source, TaskSource
from npbml.errors import NotFiniteError, RunError, SettingError
from npbml.learner import GROUPS, Learner, Prepared
from npbml.randomness import draw_numbers, generator
from npbml.stages.pretrain import augmented
from npbml.threads import one_core

WORTH_COMPILING = 3000  # meta-steps: compiling takes one to two minutes, and saves some 20 ms a step
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
}


def as_they_are(*tensors: Tensor) -> tuple[Prepared, Tensor]:
    return Prepared(*tensors[:-1]), tensors[-1]


class MetaTrainer:
    """Meta-steps on batches of training tasks, judged on meta-validation tasks.

    Of several ranks each takes a part of the tasks, which all of them draw alike.
    """

    def __init__(
        self,
        config: Config,
        learner: Learner,
        train: Source,
        val: Source,
        say: Callable[[str], None] = lambda words: None,
    ) -> None:
        check_share("train.meta_batch", config.meta_batch)
        self.config, self.module, self.train, self.val, self.say = config, learner, train, val, say
        settings, groups = config.train, learner.groups()
        self.rates = {letter: getattr(settings.lr, letter) for letter in GROUPS}
        parts = [
            {"params": list(groups[letter].values()), "lr": rate, "name": letter}
            for letter, rate in self.rates.items()
            if rate > 0 and groups[letter]
        ]
        if not parts:
            raise SettingError(f"train.lr leaves nothing to meta-learn in {config.method}: set a rate above 0.")
        device = next(learner.parameters()).device
        self.optimizer = OPTIMIZERS[settings.optimizer](parts, weight_decay=settings.weight_decay)
        engine = config.engine
        if engine.compile == "auto" and settings.steps < WORTH_COMPILING:
            engine = replace(engine, compile="off")
        self.meta_step = MetaStep(learner, self.optimizer, engine, settings.clip, settings.clip_at, say)
        self.notes = self.meta_step.notes
        replay = Replay("validation", self.meta_step.settings.graph == "on" and val.on_device, say)
        self.answer = learner_answers(learner, val, replay, tasks=engine.tasks)
        self.ahead = Ahead(self._prepare) if settings.ahead and device.type == "cpu" else None

    def step(self, index: int) -> dict[str, float]:
        outer = self.module.outer(index / self.config.train.steps)
        self.meta_step.step.set_rate(lambda part: self.rates[part["name"]] * self._schedule(index))
        try:
            with nullcontext() if self.ahead is None else one_core():
                loss = self.meta_step(*self._work(index), outer)
        except NotFiniteError as error:
            skipped = self.notes.get("skipped", 0)
            if skipped < self.config.train.skips:
                self.notes["skipped"] = skipped + 1
                self.say(f"Meta-step {index + 1} of {self.config.method} is left out: {error}.")
                return {"skipped": skipped + 1}
            raise RunError(
                f"Meta-step {index + 1} of {self.config.method} is not finite: {error}. The state before it is "
                "saved. Go on with train.skips, which leaves such steps out; or, in a new run, lower train.lr of "
                "that part or set train.clip=norm."
            ) from None
        return {"loss": loss}

    def validate(self) -> float:
        config, measure = self.config, MEASURES[self.config.target]
        tasks, at_a_time = config.train.validation_tasks, config.test.together
        per_task = evaluate(self.answer, self.val.draw, tasks, at_a_time, config.seed, "validation", measure)
        return measure.over(per_task).mean

    def result(self) -> Mapping[str, Tensor]:
        return self.module.state_dict()

    def _work(self, index: int) -> tuple[Work, tuple[Tensor, ...]]:
        """What makes the tasks of a step, and from which tensors: three numbers where that is all it takes, so
        that a GPU records the drawing as well; else the frozen work itself."""
        source, balanced = self.train, self.config.train.coverage == "balanced"
        if isinstance(source, TaskSource) and source.on_device and not balanced and self.meta_step.step.replay.on:
            return self._draw_and_prepare, (self._numbers(index).to(source.classes.images.device),)
        prepared, labels = self._prepare(index) if self.ahead is None else self.ahead.take(index)
        return as_they_are, (*prepared, labels)

    def _numbers(self, index: int) -> Tensor:
        """What the classes, the images and the augmentation of a step are drawn from."""
        seed = self.config.seed
        return torch.cat(
            [draw_numbers(generator(seed, "train", index), 2), draw_numbers(generator(seed, "augment", index))]
        )

    def _draw_and_prepare(self, numbers: Tensor, chosen: Tensor | None = None) -> tuple[Prepared, Tensor]:
        config, source, tasks = self.config, self.train, self.config.meta_batch
        assert isinstance(source, TaskSource)
        look = None
        if config.train.augment:
            varied, low = config.pretrain.augment, config.train.crop_scale_low
            varied = varied if low is None else replace(varied, crop_scale_low=low)
            look = augmented(source.classes, varied, numbers[2], tasks)
        return source.prepare(source.draw_from(numbers, tasks, chosen)[mine(tasks)], look)

    def _prepare(self, index: int) -> tuple[Prepared, Tensor]:
        config, source, tasks = self.config, self.train, self.config.meta_batch
        if not isinstance(source, TaskSource):
            return source.prepare(source.draw(tasks, generator(config.seed, "train", index))[mine(tasks)])
        chosen = None
        if config.train.coverage == "balanced":
            rounds = partial(generator, config.seed, "cover")
            chosen = source.classes.cover(index * tasks, tasks, config.ways, rounds)
        return self._draw_and_prepare(self._numbers(index).to(source.classes.images.device), chosen)

    def _schedule(self, index: int) -> float:
        progress = index / self.config.train.steps
        return {
            "constant": 1.0,
            "cosine": 0.1 + 0.45 * (1 + math.cos(math.pi * progress)),
            "halving": 0.5 ** int(2.5 * progress),
            "fifths": 0.1 ** int(5 * progress),
        }[self.config.train.schedule]
