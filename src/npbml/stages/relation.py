"""The relation network's own training: squared error of the scores to the one-hot labels (docs/method.md)."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npbml.config import Config
from npbml.data.tasks import ClassSet, Task
from npbml.engine.evaluate import ACCURACY, evaluate
from npbml.errors import RunError
from npbml.nets.layers import initialise
from npbml.nets.relation import RelationNetwork
from npbml.randomness import generator
from npbml.rule.loss import one_hot
from npbml.stages.pretrain import augmented


class RelationTrainer:
    """One episode a step, judged by the highest score on meta-validation tasks.

    One episode is little to divide: of several ranks each takes the same step.
    """

    def __init__(self, config: Config, train: ClassSet, val: ClassSet, device: torch.device) -> None:
        self.config, self.train, self.val = config, train, val
        self.module = RelationNetwork(train.images.shape[1], config.relation)
        initialise(self.module, config.init.std, generator(config.seed, "relation"))
        self.module.to(device)
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=config.relation.lr)
        self.notes: dict[str, Any] = {}

    def step(self, index: int) -> dict[str, float]:
        config, random = self.config, generator(self.config.seed, "relation", index)
        indices = self.train.draw(1, config.ways, config.shots, config.queries, random)
        look = augmented(self.train, config.pretrain.augment, random) if config.relation.augment else None
        task = Task(*(part[0] for part in self.train.task(indices, config.shots, look)))
        scores = self.module(task.support_images, task.support_labels, task.query_images, config.ways)
        loss = F.mse_loss(scores, one_hot(task.query_labels, config.ways, scores.dtype))
        self.optimizer.zero_grad()
        loss.backward()
        value = loss.item()
        if not value < float("inf"):
            raise RunError(f"The relation network's loss is {value} at step {index + 1}: lower relation.lr.")
        if config.relation.clip_norm:
            nn.utils.clip_grad_norm_(self.module.parameters(), config.relation.clip_norm)
        self.optimizer.step()
        return {"loss": value}

    def validate(self) -> float:
        config = self.config

        def answer(indices: Tensor) -> tuple[Tensor, Tensor]:
            batch = self.val.task(indices, config.shots)
            scores = [
                self.module(task.support_images, task.support_labels, task.query_images, config.ways)
                for task in (Task(*parts) for parts in zip(*batch, strict=True))
            ]
            return torch.stack(scores), batch.query_labels

        def draw(count: int, random: torch.Generator) -> Tensor:
            return self.val.draw(count, config.ways, config.shots, config.queries, random)

        tasks, together = config.relation.validation_tasks, config.test.together
        return ACCURACY.over(evaluate(answer, draw, tasks, together, config.seed, "validation")).mean

    def result(self) -> Mapping[str, Tensor]:
        return self.module.state_dict()
