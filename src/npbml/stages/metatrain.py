"""Meta-training, the outer loop (Algorithm 1)."""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from npbml.config import Config
from npbml.data.tasks import ClassSet
from npbml.engine.ahead import Ahead
from npbml.engine.evaluate import accuracy, evaluate, learner_answers
from npbml.engine.metastep import meta_step
from npbml.engine.source import TaskSource
from npbml.errors import RunError, SettingError
from npbml.learner import GROUPS, Learner, Prepared
from npbml.randomness import generator
from npbml.stages.pretrain import augmented
from npbml.threads import one_core


class MetaTrainer:
    """Meta-steps on batches of training tasks, judged on meta-validation tasks."""

    def __init__(self, config: Config, learner: Learner, train: ClassSet, val: ClassSet) -> None:
        self.config, self.module = config, learner
        self.train = TaskSource(learner, train, config.shots, config.queries)
        self.val = TaskSource(learner, val, config.shots, config.queries)
        settings, groups = config.train, learner.groups()
        self.rates = {letter: getattr(settings.lr, letter) for letter in GROUPS}
        parts = [
            {"params": list(groups[letter].values()), "lr": rate, "name": letter}
            for letter, rate in self.rates.items()
            if rate > 0 and groups[letter]
        ]
        if not parts:
            raise SettingError(f"train.lr leaves nothing to meta-learn in {config.method}: set a rate above 0.")
        kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
        self.optimizer = kind(parts, weight_decay=settings.weight_decay)
        on_cpu = train.images.device.type == "cpu"
        self.ahead = Ahead(self._prepare) if settings.ahead and on_cpu else None

    def step(self, index: int) -> dict[str, float]:
        settings = self.config.train
        for part in self.optimizer.param_groups:
            part["lr"] = self.rates[part["name"]] * self._schedule(index)
        try:
            with nullcontext() if self.ahead is None else one_core():
                prepared, labels = self._prepare(index) if self.ahead is None else self.ahead.take(index)
                loss = meta_step(self.module, self.optimizer, prepared, labels, settings.clip, settings.clip_at)
        except RunError as error:
            raise RunError(
                f"Meta-step {index + 1} of {self.config.method} is not finite: {error}. The state before it is "
                "saved. In a new run, lower train.lr of that part or set train.clip=norm."
            ) from None
        return {"loss": loss}

    def validate(self) -> float:
        answer = learner_answers(self.module, self.val)
        tasks, together = self.config.train.validation_tasks, self.config.test.together
        return accuracy(evaluate(answer, self.val.draw, tasks, together, self.config.seed, "validation")).mean

    def result(self) -> Mapping[str, Tensor]:
        return self.module.state_dict()

    def _prepare(self, index: int) -> tuple[Prepared, Tensor]:
        config, classes, tasks = self.config, self.train.classes, self.config.meta_batch
        chosen = None
        if config.train.coverage == "balanced":
            rounds = partial(generator, config.seed, "cover")
            chosen = classes.cover(index * tasks, tasks, config.ways, rounds)
        indices = self.train.draw(tasks, generator(config.seed, "train", index), chosen)
        return self.train.prepare(indices, self._look(index))

    def _look(self, index: int) -> Callable[[Tensor], Tensor] | None:
        if not self.config.train.augment:
            return None
        random = generator(self.config.seed, "augment", index)
        return augmented(self.train.classes, self.config.pretrain.augment, random)

    def _schedule(self, index: int) -> float:
        if self.config.train.schedule == "constant":
            return 1.0
        return 0.1 + 0.45 * (1 + math.cos(math.pi * index / self.config.train.steps))
