"""Pre-training: the encoder learns to tell all training classes apart."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npbml.config import Config
from npbml.data.augment import AugmentSettings, Variation, draw_variation, vary
from npbml.data.tasks import ClassSet, Task
from npbml.engine.distributed import check_share, mine, sum_gradients, summed, world
from npbml.engine.evaluate import ACCURACY, evaluate
from npbml.errors import RunError
from npbml.learner import ImageSpec
from npbml.learner.build import encoder
from npbml.learner.settings import image_spec
from npbml.nets.layers import Norm, freeze, initialise, set_norm
from npbml.nets.network import Network
from npbml.randomness import generator
from npbml.rule.warp import Warp
from npbml.stages.settings import PretrainSettings
from npbml.threads import each_in_a_thread


class Pretrainer:
    """Classification of the training classes, judged by prototypes on meta-validation tasks.

    Of several ranks each takes a part of the batch, and batch norm the statistics of all of it.
    """

    def __init__(self, config: Config, train: ClassSet, val: ClassSet, device: torch.device) -> None:
        self.config, self.train, self.val, self.labels = config, train, val, train.labels
        self.network = pretrain_network(config, image_spec(train))
        head = nn.Linear(self.network.width, len(train))
        self.module = nn.ModuleDict({"network": self.network, "head": head})
        initialise(self.module, config.init.std, generator(config.seed, "pretrain"))
        self.module.to(device)
        set_norm(self.network, "track")
        settings = config.pretrain
        check_share("pretrain.batch", settings.batch)
        for part in self.network.modules():
            if isinstance(part, Norm) and world()[1] > 1:
                part.total = summed
        self.optimizer = torch.optim.SGD(
            self.module.parameters(),
            lr=settings.lr,
            momentum=settings.momentum,
            nesterov=settings.momentum > 0,
            weight_decay=settings.weight_decay,
        )
        self.notes: dict[str, Any] = {}

    def step(self, index: int) -> dict[str, float]:
        settings, random = self.config.pretrain, generator(self.config.seed, "pretrain", index)
        chosen = torch.randint(len(self.train.images), (settings.batch,), generator=random)[mine(settings.batch)]
        images = augmented(self.train, settings.augment, random, settings.batch)(chosen)
        loss = F.cross_entropy(self.module["head"](self.network(images)), self.labels[chosen.to(images.device)])
        loss = loss * (len(chosen) / settings.batch)
        rate = learning_rate(settings, index)
        for part in self.optimizer.param_groups:
            part["lr"] = rate
        self.optimizer.zero_grad()
        loss.backward()
        value = sum_gradients(loss, self.module.parameters()).item()
        if not value < float("inf"):
            raise RunError(f"The pre-training loss is {value} at step {index + 1}: lower pretrain.lr.")
        self.optimizer.step()
        return {"loss": value, "lr": rate}

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
        )
        set_norm(self.network, "track")
        return ACCURACY.over(per_task).mean

    def result(self) -> Mapping[str, Tensor]:
        return self.network.state_dict()


def augmented(
    classes: ClassSet, settings: AugmentSettings, random: torch.Generator, whole: int | None = None
) -> Callable[[Tensor], Tensor]:
    """A function of indices [rows, *]: their images, augmented and normalised, [rows, *, C, H, W].

    Where the rows are this rank's of a `whole` batch, what is random is drawn for all of it, as by one process.
    """

    def look(indices: Tensor) -> Tensor:
        images = classes.pixels(indices.flatten())
        rows, part = (len(indices), slice(None)) if whole is None else (whole, mine(whole))
        height, width = images.shape[-2:]
        drawn = draw_variation(rows * indices[0].numel(), height, width, settings, random)
        variation = Variation(*(field.unflatten(0, (rows, -1))[part].flatten(0, 1) for field in drawn))
        return classes.normalise(vary(images, variation)).unflatten(0, tuple(indices.shape))

    return look


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
    network: Network, config: Config, classes: ClassSet, shots: int, tasks: int, purpose: str
) -> Tensor:
    """Accuracy of each task by the nearest class mean of the embeddings, [tasks]."""
    ways, queries = config.ways, config.queries

    def answer(indices: Tensor) -> tuple[Tensor, Tensor]:
        batch = classes.task(indices, shots)
        tasks = [
            (network, Task(*task), ways, config.pretrain.prototype_batch) for task in zip(*batch, strict=True)
        ]
        return torch.stack(each_in_a_thread(prototype_logits, tasks)), batch.query_labels

    def draw(count: int, random: torch.Generator) -> Tensor:
        return classes.draw(count, ways, shots, queries, random)

    return evaluate(answer, draw, tasks, config.test.together, config.seed, purpose)


@torch.no_grad()
def prototype_logits(network: Network, task: Task, ways: int, batch: str) -> Tensor:
    """Minus the squared distance of each query embedding to each class mean: [queries, ways]"""
    count = len(task.support_images)
    if batch == "joint":
        support, query = network(torch.cat([task.support_images, task.query_images])).tensor_split([count])
    else:
        support, query = network(task.support_images), network(task.query_images)
    prototypes = torch.stack([support[task.support_labels == label].mean(0) for label in range(ways)])
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
