"""Pre-training: the encoder learns to tell all training classes apart."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npbml.data.augment import augmented
from npbml.data.tasks import ClassSet
from npbml.engine.capture import Replay
from npbml.engine.device import in_precision, placed
from npbml.engine.distributed import check_share, rank_slice, sum_over_ranks, summed, world
from npbml.engine.evaluate import Answer, Draw, evaluate, over_tasks, replayed
from npbml.engine.step import GradientStep
from npbml.errors import RunError
from npbml.learner.build import encoder
from npbml.learner.settings import ImageSpec, LearnerSettings
from npbml.measures import ACCURACY
from npbml.nets.functional import sharing_copy
from npbml.nets.layers import Norm, freeze, initialise, set_norm
from npbml.nets.network import Network
from npbml.nets.views import ROTATIONS, rotations
from npbml.randomness import draw_numbers, generator, keys, own_random_state
from npbml.rule.loss import one_hot
from npbml.rule.warp import Warp
from npbml.stages.settings import PretrainSettings
from npbml.stages.setup import Setup
from npbml.tasks import Task, split_batch
from npbml.threads import each_in_a_thread

MOMENTUM = 0.9  # Nesterov's, of SGD
TEMPERATURE = 4.0  # of distillation: what the logits are divided by


class Pretrainer:
    """Classification of the training classes, judged by prototypes on meta-validation tasks.

    With a `teacher`, which tells the same classes apart, half of the loss is the distance to its predictions. Of
    several ranks each takes a part of the batch, and batch norm the statistics of all of it.
    """

    def __init__(
        self,
        setup: Setup,
        settings: PretrainSettings,
        train: ClassSet,
        val: ClassSet,
        purpose: str = "pretrain",
        teacher: nn.Module | None = None,
    ) -> None:
        self.setup, self.settings = setup, settings
        self.train, self.val, self.labels = train, val, train.labels
        self.purpose = purpose  # another one draws other weights and batches
        self.engine, self.device = setup.resolved_engine, setup.device
        check_share("pretrain.batch_size", settings.batch_size)
        self.module = classifier(setup, settings, train)
        self.network: Network = self.module.get_submodule("network")  # type: ignore[assignment]
        initialise(self.module, setup.learner.init.std, generator(setup.seed, purpose))
        placed(self.module, self.device)
        self.teacher = teacher
        if teacher is not None:
            placed(teacher, self.device)
        set_norm(self.network, "track")
        for part in self.network.modules():
            if isinstance(part, Norm) and world()[1] > 1:
                part.total = summed
        self.optimizer = torch.optim.SGD(
            [parameter for parameter in self.module.parameters() if parameter.requires_grad],
            lr=settings.lr,
            momentum=MOMENTUM,
            nesterov=True,
            weight_decay=settings.weight_decay,
        )
        self.notes: dict[str, Any] = {}
        # Of several ranks, batch norm waits for the others.
        graph = self.engine.cuda_graph == "on" and world()[1] == 1
        self.gradient_step = GradientStep(
            self.optimizer, "pre-training step", graph, state=self.module.buffers(), say=setup.say
        )
        self.answers = Replay("validation", graph, setup.say)
        self.judged = sharing_copy(self.network)  # the same weights, normalising as in meta-learning
        use_norms(self.judged, setup.learner)

    def decide(self, index: int) -> None:
        """Nothing is decided by measuring."""

    def step(self, index: int) -> dict[str, float]:
        settings, step = self.settings, self.gradient_step
        numbers = draw_numbers(generator(self.setup.seed, self.purpose, index), 2).to(self.train.images.device)
        loss, *gradients = sum_over_ranks(step.find(self._gradient, (numbers,), settings))
        value, rate = loss.item(), learning_rate(settings, index)
        if not value < float("inf"):
            raise RunError(f"The pre-training loss is {value} at step {index + 1}: lower pretrain.lr.")
        step.set_rate(lambda part: rate)
        step.apply(gradients)
        return {"loss": value, "lr": rate}

    def _gradient(self, numbers: Tensor) -> list[Tensor]:
        """This rank's part of the loss of the batch drawn from two numbers, and the gradient of it."""
        settings, classes, part = self.settings, self.train, rank_slice(self.settings.batch_size)
        chosen = (keys(numbers[0], settings.batch_size) % len(classes.images))[part]
        look = augmented(classes, settings.augment, numbers[1], settings.batch_size, part, settings.crop_size)
        images, labels = classes.normalise(look(chosen)), self.labels[chosen]
        if settings.rotations:
            turns = torch.arange(settings.batch_size, device=images.device)[part] % ROTATIONS
            images, labels = rotated(images, turns), ROTATIONS * labels + turns
        if images.is_cuda:
            images = images.contiguous(memory_format=torch.channels_last)
        with in_precision(self.engine.precision, self.device):
            logits = self.module(images).to(images.dtype)
        loss = F.cross_entropy(logits, labels)
        if self.teacher is not None:
            with torch.no_grad(), in_precision(self.engine.precision, self.device):
                known = self.teacher(images).to(images.dtype)
            loss = (loss + distillation_loss(logits, known)) / 2
        loss = loss * (len(chosen) / settings.batch_size)
        return [loss.detach(), *torch.autograd.grad(loss, self.gradient_step.parameters)]

    def validate(self) -> float:
        settings, setup = self.settings, replace(self.setup, shots=self.settings.validation_shots)
        per_task = prototype_accuracies(
            self.judged, setup, settings, self.val, settings.validation_tasks, "validation", self.answers
        )
        return over_tasks(ACCURACY, per_task).mean

    def result(self) -> Mapping[str, Tensor]:
        return self.network.state_dict()

    def conclude(self, best: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
        return {}


def distillation_loss(logits: Tensor, teacher: Tensor) -> Tensor:
    """How far predictions at a high temperature are from those of a teacher (Hinton et al., 2015)."""
    log_probabilities = F.log_softmax(logits / TEMPERATURE, 1)
    return TEMPERATURE**2 * F.kl_div(log_probabilities, F.softmax(teacher / TEMPERATURE, 1), reduction="batchmean")


def rotated(images: Tensor, quarters: Tensor) -> Tensor:
    """Each image rotated by as many quarters as `quarters` [images] says."""
    return torch.stack(rotations(images))[quarters, torch.arange(len(images), device=images.device)]


def classifier(setup: Setup, settings: PretrainSettings, train: ClassSet) -> nn.Sequential:
    """The encoder as it is pre-trained, and a head that tells the training classes apart."""
    with own_random_state(setup.seed):
        network = pretrain_network(setup.learner, settings, train.spec)
        head = nn.Linear(network.width, len(train) * (ROTATIONS if settings.rotations else 1))
    return nn.Sequential(OrderedDict(network=network, head=head))


def pretrain_network(learner: LearnerSettings, settings: PretrainSettings, images: ImageSpec) -> Network:
    """The encoder as it is pre-trained: without modulation, the warp unit in place but untrained."""
    network = encoder(learner, images, with_film=False, with_warp=settings.warp)
    for part in network.modules():
        if isinstance(part, Norm) and learner.net.affine == "identity":
            freeze(part)
        elif isinstance(part, Warp):
            part.omega.requires_grad_(False)
    return network


def use_norms(network: Network, learner: LearnerSettings) -> None:
    """The batch-norm modes of meta-learning."""
    set_norm(network.stem, learner.net.stem_norm)
    set_norm(network.tail, learner.net.tail_norm)


def prototype_accuracies(
    network: Network,
    setup: Setup,
    settings: PretrainSettings,
    classes: ClassSet,
    tasks: int,
    purpose: str,
    replay: Replay | None = None,
    tick: Callable[[int], None] = lambda count: None,
) -> Tensor:
    """Accuracy of each task by the nearest class mean of the embeddings, [tasks]."""
    answer, draw = prototype_answers(network, setup, settings, classes, replay)
    return evaluate(answer, draw, tasks, setup.batch_size, setup.seed, purpose, tick=tick).per_task


def prototype_answers(
    network: Network, setup: Setup, settings: PretrainSettings, classes: ClassSet, replay: Replay | None = None
) -> tuple[Answer, Draw]:
    """Query logits by the class means of the embeddings, and what draws the tasks."""
    ways, shots, queries = setup.ways, setup.shots, setup.queries

    def answer(indices: Tensor) -> tuple[Tensor, Tensor]:
        batch = classes.task(indices, shots, classes.batch)
        tasks = [(network, task, ways, settings.prototype_batch) for task in split_batch(batch)]
        logits = each_in_a_thread(prototype_logits, tasks, batch.query_labels.device.type == "cpu")
        return torch.stack(logits), batch.query_labels

    def draw(count: int, random: torch.Generator) -> Tensor:
        return classes.draw(count, ways, shots, queries, random)

    return replayed(answer, replay, (shots, settings.prototype_batch)), draw


@torch.no_grad()
def prototype_logits(network: Network, task: Task, ways: int, batch: str) -> Tensor:
    """Minus the squared distance of each query embedding to each class mean: [queries, ways]"""
    shots = len(task.support_images)
    if batch == "joint":
        support, query = network(torch.cat([task.support_images, task.query_images])).tensor_split([shots])
    else:
        support, query = network(task.support_images), network(task.query_images)
    members = one_hot(task.support_labels, ways, support.dtype)
    prototypes = (members / members.sum(0)).T @ support
    return -torch.cdist(query, prototypes).square()


def learning_rate(settings: PretrainSettings, index: int) -> float:
    """The rate of step `index`, a function of the step alone."""
    progress = index / settings.steps
    if settings.schedule == "multistep":
        return settings.lr * 0.1 ** sum(progress >= share for share in (0.5, 0.75, 0.875, 0.95))
    warm = 0.15
    if progress < warm:
        return settings.lr * (index + 1) / (warm * settings.steps + 1)
    return settings.lr * (1 - progress) / (1 - warm)
