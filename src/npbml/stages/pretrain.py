"""Pre-training: the encoder learns to tell all training classes apart."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npbml.config import Config
from npbml.data.augment import TURNS, AugmentSettings, Variation, draw_variation, quarter_turns, vary
from npbml.data.tasks import ClassSet, Task
from npbml.engine.capture import Replay
from npbml.engine.device import in_precision, placed, set_precision
from npbml.engine.distributed import check_share, mine, sum_over_ranks, summed, world
from npbml.engine.evaluate import ACCURACY, evaluate, replayed
from npbml.engine.settings import resolved
from npbml.engine.step import GradientStep
from npbml.errors import RunError
from npbml.learner import ImageSpec
from npbml.learner.build import encoder
from npbml.learner.settings import image_spec
from npbml.nets.layers import Norm, freeze, initialise, set_norm
from npbml.nets.network import Network
from npbml.randomness import draw_numbers, generator, keys, scattered
from npbml.rule.loss import one_hot
from npbml.rule.warp import Warp
from npbml.stages.settings import PretrainSettings
from npbml.threads import each_in_a_thread

SOFTENED = 4.0  # what the logits are divided by from which another network learns


class Pretrainer:
    """Classification of the training classes, judged by prototypes on meta-validation tasks.

    With a `teacher`, which tells the same classes apart, half of the loss is the distance to its predictions. Of
    several ranks each takes a part of the batch, and batch norm the statistics of all of it.
    """

    def __init__(
        self,
        config: Config,
        train: ClassSet,
        val: ClassSet,
        device: torch.device,
        say: Callable[[str], None] = lambda words: None,
        purpose: str = "pretrain",
        teacher: nn.Module | None = None,
    ) -> None:
        self.config, self.train, self.val, self.labels = config, train, val, train.labels
        self.purpose = purpose  # another one draws other weights and batches
        self.engine, self.device = resolved(config.engine, device), device
        set_precision(self.engine.precision)
        settings = config.pretrain
        self.module = classifier(config, train)
        self.network: Network = self.module.get_submodule("network")  # type: ignore[assignment]
        initialise(self.module, config.init.std, generator(config.seed, purpose))
        placed(self.module, device)
        self.teacher = teacher
        if teacher is not None:
            placed(teacher, device)
        set_norm(self.network, "track")
        check_share("pretrain.batch", settings.batch)
        for part in self.network.modules():
            if isinstance(part, Norm) and world()[1] > 1:
                part.total = summed
        self.optimizer = torch.optim.SGD(
            [parameter for parameter in self.module.parameters() if parameter.requires_grad],
            lr=settings.lr,
            momentum=settings.momentum,
            nesterov=settings.momentum > 0,
            weight_decay=settings.weight_decay,
        )
        self.notes: dict[str, Any] = {}
        graph = self.engine.graph == "on" and world()[1] == 1  # of several ranks, batch norm waits for the others
        self.gradient_step = GradientStep(
            self.optimizer, "pre-training step", graph, state=self.module.buffers(), say=say
        )
        self.answers = Replay("validation", graph, say)

    def step(self, index: int) -> dict[str, float]:
        settings, step = self.config.pretrain, self.gradient_step
        numbers = draw_numbers(generator(self.config.seed, self.purpose, index), 2).to(self.train.images.device)
        loss, *gradients = sum_over_ranks(step.find(self._gradient, (numbers,)))
        value, rate = loss.item(), learning_rate(settings, index)
        if not value < float("inf"):
            raise RunError(f"The pre-training loss is {value} at step {index + 1}: lower pretrain.lr.")
        step.set_rate(lambda part: rate)
        step.apply(gradients)
        return {"loss": value, "lr": rate}

    def _gradient(self, numbers: Tensor) -> list[Tensor]:
        """This rank's part of the loss of the batch drawn from two numbers, and the gradient of it."""
        settings, classes = self.config.pretrain, self.train
        chosen = (keys(numbers[0], settings.batch) % len(classes.images))[mine(settings.batch)]
        images = augmented(classes, settings.augment, numbers[1], settings.batch, settings.crop_size)(chosen)
        labels = self.labels[chosen]
        if settings.turns:
            turns = torch.arange(settings.batch, device=images.device)[mine(settings.batch)] % TURNS
            images, labels = turned(images, turns), TURNS * labels + turns
        if images.is_cuda:
            images = images.contiguous(memory_format=torch.channels_last)
        with in_precision(self.engine.precision, self.device):
            logits = self.module(images).to(images.dtype)
        loss = F.cross_entropy(logits, labels)
        if self.teacher is not None:
            with torch.no_grad(), in_precision(self.engine.precision, self.device):
                known = self.teacher(images).to(images.dtype)
            loss = (loss + distance(logits, known)) / 2
        loss = loss * (len(chosen) / settings.batch)
        return [loss.detach(), *torch.autograd.grad(loss, self.gradient_step.parameters)]

    def validate(self) -> float:
        settings = self.config.pretrain
        use_norms(self.network, self.config)
        per_task = prototype_accuracies(
            self.network,
            self.config,
            self.val,
            settings.validation_shots,
            settings.validation_tasks,
            "validation",
            self.answers,
        )
        set_norm(self.network, "track")
        return ACCURACY.over(per_task).mean

    def result(self) -> Mapping[str, Tensor]:
        return self.network.state_dict()


def augmented(
    classes: ClassSet,
    settings: AugmentSettings,
    number: Tensor,
    whole: int | None = None,
    size: int | None = None,
) -> Callable[[Tensor], Tensor]:
    """A function of indices [rows, *]: their images, augmented and normalised, [rows, *, C, H, W].

    Each call draws anew. Where the rows are this rank's of a `whole` batch, what is random is drawn for all of it,
    as by one process.
    """
    calls = count()

    def look(indices: Tensor) -> Tensor:
        drawn_from = scattered(number + next(calls))
        images = classes.pixels(indices.flatten())
        rows, part = (len(indices), slice(None)) if whole is None else (whole, mine(whole))
        height, width = images.shape[-2:]
        drawn = draw_variation(rows * indices[0].numel(), height, width, settings, drawn_from)
        variation = Variation(*(field.unflatten(0, (rows, -1))[part].flatten(0, 1) for field in drawn))
        return classes.normalise(vary(images, variation, size)).unflatten(0, tuple(indices.shape))

    return look


def distance(logits: Tensor, known: Tensor) -> Tensor:
    """How far softened predictions are from known ones (Hinton et al., 2015)."""
    softened = F.log_softmax(logits / SOFTENED, 1)
    return SOFTENED**2 * F.kl_div(softened, F.softmax(known / SOFTENED, 1), reduction="batchmean")


def turned(images: Tensor, turns: Tensor) -> Tensor:
    """Each image turned by as many quarters as `turns` [images] says."""
    return torch.stack(quarter_turns(images))[turns, torch.arange(len(images), device=images.device)]


def classifier(config: Config, train: ClassSet) -> nn.Sequential:
    """The encoder as it is pre-trained, and a head that tells the training classes apart."""
    network = pretrain_network(config, image_spec(train))
    head = nn.Linear(network.width, len(train) * (TURNS if config.pretrain.turns else 1))
    return nn.Sequential(OrderedDict(network=network, head=head))


def pretrain_network(config: Config, images: ImageSpec) -> Network:
    """The encoder as it is pre-trained: without modulation, the warp unit in place but untrained."""
    network = encoder(config, images, with_film=False, with_warp=config.pretrain.warp)
    for part in network.modules():
        if isinstance(part, Norm) and config.net.affine == "identity":
            freeze(part)
        elif isinstance(part, Warp):
            part.omega.requires_grad_(False)
    return network


def use_norms(network: Network, config: Config) -> None:
    """The batch-norm modes of meta-learning."""
    set_norm(network.stem, config.net.stem_norm)
    set_norm(network.tail, config.net.tail_norm)


def prototype_accuracies(
    network: Network,
    config: Config,
    classes: ClassSet,
    shots: int,
    tasks: int,
    purpose: str,
    replay: Replay | None = None,
) -> Tensor:
    """Accuracy of each task by the nearest class mean of the embeddings, [tasks]."""
    ways, queries = config.ways, config.queries

    def answer(indices: Tensor) -> tuple[Tensor, Tensor]:
        batch = classes.task(indices, shots)
        tasks = [
            (network, Task(*task), ways, config.pretrain.prototype_batch) for task in zip(*batch, strict=True)
        ]
        logits = each_in_a_thread(prototype_logits, tasks, batch.query_labels.device.type == "cpu")
        return torch.stack(logits), batch.query_labels

    def draw(count: int, random: torch.Generator) -> Tensor:
        return classes.draw(count, ways, shots, queries, random)

    return evaluate(replayed(answer, replay), draw, tasks, config.test.together, config.seed, purpose)


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
