"""The training of what scores query items (docs/method.md).

A relation network learns from episodes, by the squared error of its scores to the one-hot labels; an encoder that
only scores learns as in pre-training.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npbml.config import Config
from npbml.data.tasks import ClassSet, Task
from npbml.engine.capture import Replay
from npbml.engine.device import in_precision, placed, set_precision
from npbml.engine.evaluate import ACCURACY, evaluate, replayed
from npbml.engine.settings import resolved
from npbml.engine.step import GradientStep
from npbml.errors import RunError
from npbml.learner.build import for_scores
from npbml.nets.layers import freeze, initialise, set_norm
from npbml.nets.relation import RelationNetwork
from npbml.randomness import draw_numbers, generator
from npbml.rule.loss import one_hot
from npbml.stages.pretrain import Pretrainer, augmented, classifier


def relation_trainer(
    config: Config,
    train: ClassSet,
    val: ClassSet,
    device: torch.device,
    say: Callable[[str], None] = lambda words: None,
) -> "RelationTrainer | Pretrainer":
    """What trains that by which query items are scored: a relation network, or an encoder as in pre-training."""
    if config.relation.kind == "network":
        return RelationTrainer(config, train, val, device, say)
    return ScorerTrainer(scorer_config(config), train, val, device, say, "relation")


def scorer_config(config: Config) -> Config:
    """The configuration by which an encoder that only scores is pre-trained."""
    names = ("steps", "validate_every", "validation_tasks", "crop_size")
    own = {name: getattr(config.relation, name) for name in names}
    return replace(for_scores(config), pretrain=replace(config.pretrain, warp=False, taught=False, **own))


class ScorerTrainer(Pretrainer):
    """Pre-training of an encoder that scores. Its head is kept as well: another encoder may learn from it."""

    def result(self) -> Mapping[str, Tensor]:
        return self.module.state_dict()


def teacher(config: Config, train: ClassSet) -> nn.Module:
    """The encoder that scores with its head, for weights that its stage has left, from which another may learn."""
    known = freeze(classifier(scorer_config(config), train))
    set_norm(known, "running")
    return known


class RelationTrainer:
    """One episode a step, judged by the highest score on meta-validation tasks.

    One episode is little to divide: of several ranks each takes the same step.
    """

    def __init__(
        self,
        config: Config,
        train: ClassSet,
        val: ClassSet,
        device: torch.device,
        say: Callable[[str], None] = lambda words: None,
    ) -> None:
        self.config, self.train, self.val, self.device = config, train, val, device
        self.engine = resolved(config.engine, device)
        set_precision(self.engine.precision)
        self.module = RelationNetwork(train.images.shape[1], config.relation)
        initialise(self.module, config.init.std, generator(config.seed, "relation"))
        placed(self.module, device)
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=config.relation.lr)
        self.notes: dict[str, Any] = {}
        graph, clip_at = self.engine.graph == "on", config.relation.clip_norm
        self.gradient_step = GradientStep(
            self.optimizer, "relation network's step", graph, "norm" if clip_at else "none", clip_at, say=say
        )
        self.answers = Replay("validation", graph, say)

    def step(self, index: int) -> dict[str, float]:
        numbers = draw_numbers(generator(self.config.seed, "relation", index), 3).to(self.train.images.device)
        loss, *gradients = self.gradient_step.find(self._gradient, (numbers,))
        value = loss.item()
        if not value < float("inf"):
            raise RunError(f"The relation network's loss is {value} at step {index + 1}: lower relation.lr.")
        self.gradient_step.apply(gradients)
        return {"loss": value}

    def _gradient(self, numbers: Tensor) -> list[Tensor]:
        """The loss of the episode drawn from three numbers, and its gradient."""
        config, classes = self.config, self.train
        indices = classes.draw_from(numbers, 1, config.ways, config.shots + config.queries)
        look = augmented(classes, config.pretrain.augment, numbers[2]) if config.relation.augment else None
        task = Task(*(part[0] for part in classes.task(indices, config.shots, look)))
        scores = self._scores(task)
        loss = F.mse_loss(scores, one_hot(task.query_labels, config.ways, scores.dtype))
        return [loss.detach(), *torch.autograd.grad(loss, self.gradient_step.parameters)]

    def _scores(self, task: Task) -> Tensor:
        with in_precision(self.engine.precision, self.device):
            scores = self.module(task.support_images, task.support_labels, task.query_images, self.config.ways)
        return scores.to(task.query_images.dtype)

    def validate(self) -> float:
        config = self.config

        def answer(indices: Tensor) -> tuple[Tensor, Tensor]:
            batch = self.val.task(indices, config.shots)
            scores = [self._scores(Task(*parts)) for parts in zip(*batch, strict=True)]
            return torch.stack(scores), batch.query_labels

        def draw(count: int, random: torch.Generator) -> Tensor:
            return self.val.draw(count, config.ways, config.shots, config.queries, random)

        tasks, together = config.relation.validation_tasks, config.test.together
        per_task = evaluate(replayed(answer, self.answers), draw, tasks, together, config.seed, "validation")
        return ACCURACY.over(per_task).mean

    def result(self) -> Mapping[str, Tensor]:
        return self.module.state_dict()
