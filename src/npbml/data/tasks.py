"""Few-shot tasks as index gathers from one uint8 tensor of images."""

import dataclasses
from collections.abc import Callable
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from npbml.errors import DataError
from npbml.learner.settings import ImageSpec
from npbml.nets.views import ROTATIONS, rotations
from npbml.randomness import counter, draw_numbers, keys, scattered
from npbml.tasks import Task

LUMA = (0.299, 0.587, 0.114)


@dataclasses.dataclass(frozen=True, eq=False)
class ClassSet:
    """The classes of one split.

    images uint8 [images, channels, height, width] on any device, those of class c at starts[c] to
    starts[c] + counts[c]; mean and std [channels] of pixels in 0..1. Tasks are drawn and gathered where the
    images are, and a generator gives the same ones on every device.
    """

    images: Tensor
    starts: Tensor
    counts: Tensor
    names: tuple[str, ...]
    mean: Tensor
    std: Tensor

    def __len__(self) -> int:
        """How many classes."""
        return len(self.names)

    @property
    def labels(self) -> Tensor:
        """The class of each image [images]."""
        return torch.repeat_interleave(self.counts).to(self.images.device)

    def to(self, device: torch.device | str) -> "ClassSet":
        """The same classes with their images on `device`."""
        moved = {name: getattr(self, name).to(device) for name in ("images", "mean", "std")}
        return dataclasses.replace(self, **moved)

    def sample(
        self,
        tasks: int,
        ways: int,
        shots: int,
        queries: int,
        generator: torch.Generator,
        look: "Callable[[Tensor], Tensor] | None" = None,
    ) -> Task:
        """A batch of `tasks` tasks; images are bytes, or as `look` shows them (see `task`)."""
        return self.task(self.draw(tasks, ways, shots, queries, generator), shots, look)

    def draw(self, tasks: int, ways: int, shots: int, queries: int, generator: torch.Generator) -> Tensor:
        """Which images make up each task: indices [tasks, ways, shots + queries] into `images`, where those are.

        In each row the first `shots` are the support. Classes and images are drawn uniformly, without
        replacement, as the places of the largest of as many random numbers.
        """
        self.check(ways, shots, queries, tasks)
        numbers = draw_numbers(generator, 2).to(self.images.device)
        return self.draw_from(numbers, tasks, ways, shots + queries)

    def draw_from(self, numbers: Tensor, tasks: int, ways: int, images: int) -> Tensor:
        """`draw`, from two numbers that are where the images are: nothing is asked of the host, so that a GPU can
        record it."""
        starts, counts, most = self._tables
        device = starts.device
        drawn = keys(numbers[0], tasks, len(self)).topk(ways).indices
        order = keys(numbers[1], tasks, ways, most)
        order = order.masked_fill(torch.arange(most, device=device) >= counts[drawn][..., None], -1)
        return starts[drawn][..., None] + order.topk(images).indices

    @cached_property
    def _tables(self) -> tuple[Tensor, Tensor, int]:
        """Starts and counts where the images are, and the highest count."""
        device = self.images.device
        return self.starts.to(device), self.counts.to(device), int(self.counts.max())

    def task(self, indices: Tensor, shots: int, look: Callable[[Tensor], Tensor] | None = None) -> Task:
        """The batch of tasks whose images are `indices` [tasks, ways, shots + queries].

        `look` turns indices into images: `pixels`, if it is not given; `batch` for normalised ones.
        """
        look = look or self.pixels
        (support, query), (own, others) = self.items(indices, shots), self.task_labels(indices, shots)
        return Task(look(support), own, look(query), others)

    @staticmethod
    def items(indices: Tensor, shots: int) -> tuple[Tensor, Tensor]:
        """The support and the query images of tasks, [tasks, items] each."""
        return indices[..., :shots].flatten(1), indices[..., shots:].flatten(1)

    def task_labels(self, indices: Tensor, shots: int) -> tuple[Tensor, Tensor]:
        """The support and the query labels of tasks, [tasks, items] each."""
        tasks, ways, images = indices.shape
        labels = torch.arange(ways, device=self.images.device)
        support, query = (labels.repeat_interleave(n).repeat(tasks, 1) for n in (shots, images - shots))
        return support, query

    @property
    def spec(self) -> ImageSpec:
        """What a learner of these classes takes."""
        _, channels, _, size = self.images.shape
        return ImageSpec(channels, size, tuple(self.mean.tolist()), tuple(self.std.tolist()))

    def batch(self, indices: Tensor) -> Tensor:
        """Normalised images float32 [*indices.shape, channels, height, width]."""
        return self.normalise(self.pixels(indices))

    def shown_as(self, channels: int, size: int) -> "ClassSet":
        """The same classes with images of other channels and size, for a learner that expects these."""
        if tuple(self.images.shape[1:]) == (channels, size, size):
            return self
        return dataclasses.replace(
            self, images=torch.cat([_shown_as(part, channels, size) for part in self.images.split(1024)])
        )

    def with_rotations(self) -> "ClassSet":
        """Four times as many classes: images rotated by 90, 180 and 270 degrees are classes of their own."""
        count = len(self.images)
        return dataclasses.replace(
            self,
            images=torch.cat(rotations(self.images)),
            starts=torch.cat([self.starts + quarter * count for quarter in range(ROTATIONS)]),
            counts=self.counts.repeat(ROTATIONS),
            names=tuple(f"{name}, {90 * quarter} degrees" for quarter in range(ROTATIONS) for name in self.names),
        )

    def pixels(self, indices: Tensor) -> Tensor:
        """Images as they are stored, uint8 [*indices.shape, channels, height, width]."""
        rows = self.images.index_select(0, indices.flatten().to(self.images.device))
        return rows.unflatten(0, tuple(indices.shape))

    def normalise(self, images: Tensor) -> Tensor:
        """(x - mean) / std of [*, channels, height, width], uint8 or float in 0..1, as float32."""
        unit = 255 if images.dtype == torch.uint8 else 1
        mean, std = self.mean[:, None, None] * unit, self.std[:, None, None] * unit
        return images.to(torch.float32, copy=True).sub_(mean).mul_(1 / std)

    def check(self, ways: int, shots: int, queries: int, tasks: int = 1) -> None:
        """Refuse tasks that these classes cannot fill."""
        for name, value in (("tasks", tasks), ("ways", ways), ("shots", shots), ("queries", queries)):
            if value < 1:
                raise DataError(f"{name} is {value}; a task needs at least 1.")
        if ways > len(self):
            raise DataError(f"{ways} ways were asked for, and there are only {len(self)} classes. Use fewer ways.")
        least = int(self.counts.argmin())
        if int(self.counts[least]) < shots + queries:
            raise DataError(
                f"Class {self.names[least]!r} has {int(self.counts[least])} images, and a task needs "
                f"{shots + queries} of each class ({shots} shots + {queries} queries). Use fewer shots or "
                "queries, or add images."
            )


def _shown_as(images: Tensor, channels: int, size: int) -> Tensor:
    """uint8 [n, c, h, w] -> uint8 [n, channels, size, size]: grey by luma, filtered where it shrinks."""
    pictures = images.to(torch.float32)
    if channels == 1 and images.shape[1] == 3:
        pictures = (pictures * pictures.new_tensor(LUMA)[:, None, None]).sum(1, keepdim=True)
    elif channels != images.shape[1]:
        pictures = pictures[:, :1].expand(-1, channels, -1, -1)
    if images.shape[-1] != size:
        pictures = F.interpolate(pictures, (size, size), mode="bilinear", antialias=True, align_corners=False)
    return pictures.round().clamp(0, 255).to(torch.uint8)


def task_noise(indices: Tensor, count: int) -> Tensor:
    """`count` random numbers in (0, 1) for each task, float32 [tasks, count], fixed by which images it has."""
    task = scattered(indices.flatten(1) + counter(indices[0].numel(), indices.device)).sum(1, keepdim=True)
    # 23 bits and a half: the highest is still below 1 in single precision.
    return ((scattered(task + counter(count, indices.device)) >> 40).float() + 0.5) / 2**23
