"""The training of what scores query items (docs/method.md).

A relation network learns from episodes, by the squared error of its scores to the one-hot labels; an encoder that
only scores learns as in pre-training.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npbml.data.augment import augmented
from npbml.data.settings import AugmentSettings
from npbml.data.tasks import ClassSet
from npbml.engine.calibration import score_logits
from npbml.engine.capture import Replay
from npbml.engine.device import in_precision, placed
from npbml.engine.evaluate import evaluate, over_tasks, replayed
from npbml.engine.step import GradientStep
from npbml.errors import RunError
from npbml.measures import ACCURACY
from npbml.nets.layers import freeze, initialise, set_norm
from npbml.parts import SCORERS
from npbml.randomness import draw_numbers, generator, own_random_state
from npbml.rule.loss import one_hot
from npbml.stages.pretrain import Pretrainer, classifier
from npbml.stages.settings import PretrainSettings, ScorerTrainingSettings
from npbml.stages.setup import Setup
from npbml.tasks import Task, split_batch


class EncoderTrainer(Pretrainer):
    """Pre-training of an encoder that scores. Its head is kept as well: another encoder may learn from it."""

    def result(self) -> Mapping[str, Tensor]:
        return self.module.state_dict()


def teacher(setup: Setup, settings: PretrainSettings, train: ClassSet) -> nn.Module:
    """The encoder that scores with its head, for weights that its stage has left, from which another may learn."""
    known = freeze(classifier(setup, settings, train))
    set_norm(known, "running")
    return known


class EpisodicTrainer:
    """A scorer that learns from episodes, one a step, judged by the highest score on meta-validation tasks.

    One episode is little to divide: of several ranks each takes the same step.
    """

    def __init__(
        self,
        setup: Setup,
        settings: ScorerTrainingSettings,
        augment: AugmentSettings,
        train: ClassSet,
        val: ClassSet,
    ) -> None:
        self.setup, self.settings, self.augment, self.train, self.val = setup, settings, augment, train, val
        self.engine = setup.resolved_engine
        scorer = setup.learner.scorer
        with own_random_state(setup.seed):
            self.module: nn.Module = SCORERS.get(scorer.kind)(train.images.shape[1], scorer)
        initialise(self.module, setup.learner.init.std, generator(setup.seed, "relation"))
        placed(self.module, setup.device)
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=settings.lr)
        self.notes: dict[str, Any] = {}
        graph = self.engine.cuda_graph == "on"
        self.gradient_step = GradientStep(self.optimizer, "scorer's step", graph, say=setup.say)
        self.answers = Replay("validation", graph, setup.say)

    def decide(self, index: int) -> None:
        """Nothing is decided by measuring."""

    def step(self, index: int) -> dict[str, float]:
        numbers = draw_numbers(generator(self.setup.seed, "relation", index), 3).to(self.train.images.device)
        loss, *gradients = self.gradient_step.find(self._gradient, (numbers,), self._key)
        value = loss.item()
        if not value < float("inf"):
            raise RunError(f"The scorer's loss is {value} at step {index + 1}: lower scorer_training.lr.")
        self.gradient_step.apply(gradients)
        return {"loss": value}

    @property
    def _key(self) -> tuple[int, ...]:
        return self.setup.ways, self.setup.shots, self.setup.queries

    def _gradient(self, numbers: Tensor) -> list[Tensor]:
        """The loss of the episode drawn from three numbers, and its gradient."""
        setup, classes = self.setup, self.train
        indices = classes.draw_from(numbers, 1, setup.ways, setup.shots + setup.queries)
        varied = augmented(classes, self.augment, numbers[2])
        look = varied if self.settings.augment else classes.pixels
        batch = classes.task(indices, setup.shots, lambda items: classes.normalise(look(items)))
        task = batch.map(lambda part: part[0])
        scores = self._scores(task)
        loss = F.mse_loss(scores, one_hot(task.query_labels, setup.ways, scores.dtype))
        return [loss.detach(), *torch.autograd.grad(loss, self.gradient_step.parameters)]

    def _scores(self, task: Task) -> Tensor:
        with in_precision(self.engine.precision, self.setup.device):
            scores = self.module(task.support_images, task.support_labels, task.query_images, self.setup.ways)
        return scores.to(task.query_images.dtype)

    def validate(self) -> float:
        setup = self.setup

        def answer(indices: Tensor) -> tuple[Tensor, Tensor]:
            batch = self.val.task(indices, setup.shots, self.val.batch)
            scores = [self._scores(task) for task in split_batch(batch)]
            return torch.stack(scores), batch.query_labels

        def draw(count: int, random: torch.Generator) -> Tensor:
            return self.val.draw(count, setup.ways, setup.shots, setup.queries, random)

        recorded, tasks = replayed(answer, self.answers, self._key), self.settings.validation_tasks
        found = evaluate(recorded, draw, tasks, setup.batch_size, setup.seed, "validation", as_logits=score_logits)
        return over_tasks(ACCURACY, found.per_task).mean

    def result(self) -> Mapping[str, Tensor]:
        return self.module.state_dict()

    def conclude(self, best: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
        return {}
