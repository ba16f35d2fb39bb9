"""Tasks made ready for a learner, with the frozen work done no more often than it must be."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from npbml.data.sinusoid import Sinusoids
from npbml.data.tasks import ClassSet, task_noise
from npbml.learner import Learner, Prepared

CACHE_BYTES = 4 * 2**30


class Source(Protocol):
    """Where the tasks of a split come from."""

    def draw(self, tasks: int, generator: torch.Generator, chosen: Tensor | None = None) -> Tensor:
        """What tells `tasks` tasks apart, [tasks, ...]."""

    def prepare(self, indices: Tensor, look: Callable[[Tensor], Tensor] | None = None) -> tuple[Prepared, Tensor]:
        """The frozen work of those tasks, and their query labels."""


class TaskSource:
    """Prepared tasks from one split.

    Where the stem normalises by running statistics, an image's features do not depend on its task: they are
    computed once for the whole split. Otherwise they are computed once for a task.
    """

    def __init__(self, learner: Learner, classes: ClassSet, shots: int, queries: int) -> None:
        self.learner, self.classes, self.shots, self.queries = learner, classes, shots, queries
        self.features = self._features() if learner.settings.net.stem_norm == "running" else None

    def draw(self, tasks: int, generator: torch.Generator, chosen: Tensor | None = None) -> Tensor:
        """Images of `tasks` tasks, [tasks, ways, shots + queries]; of `chosen` classes, if given."""
        ways = self.learner.settings.ways
        return self.classes.draw(tasks, ways, self.shots, self.queries, generator, chosen)

    def draw_from(self, numbers: Tensor, tasks: int) -> Tensor:
        """`draw`, from numbers that are where the images are."""
        return self.classes.draw_from(numbers, tasks, self.learner.settings.ways, self.shots + self.queries)

    def prepare(self, indices: Tensor, look: Callable[[Tensor], Tensor] | None = None) -> tuple[Prepared, Tensor]:
        """The frozen work of the tasks with these images, and their query labels [tasks, queries].

        `look` may show the images in another way than they are, for instance augmented.
        """
        task = self.classes.task(indices, self.shots, look or self.classes.pixels)
        features = None
        if self.features is not None and look is None:
            support, query = indices[..., : self.shots].flatten(1), indices[..., self.shots :].flatten(1)
            features = self.features[torch.cat([support, query], 1).to(self.features.device)]
        prepared = self.learner.prepare_tasks(task, features)
        noise = task_noise(indices, prepared.noise.shape[1])
        return prepared._replace(noise=noise.to(prepared.noise)), task.query_labels

    @torch.no_grad()
    def _features(self) -> Tensor | None:
        chunks = self.classes.images.split(512)
        first = self._stem(chunks[0])
        if first[0].numel() * first.element_size() * len(self.classes.images) > CACHE_BYTES:
            return None
        return torch.cat([first, *(self._stem(chunk) for chunk in chunks[1:])])

    def _stem(self, images: Tensor) -> Tensor:
        return self.learner.network.stem(self.learner.see(images))


class SinusoidSource:
    """Prepared tasks of the sinusoid benchmark."""

    def __init__(self, learner: Learner, waves: Sinusoids, device: torch.device) -> None:
        self.learner, self.waves, self.device = learner, waves, device

    def draw(self, tasks: int, generator: torch.Generator, chosen: Tensor | None = None) -> Tensor:
        return self.waves.draw(tasks, generator)

    def prepare(self, indices: Tensor, look: Callable[[Tensor], Tensor] | None = None) -> tuple[Prepared, Tensor]:
        task = self.waves.task(indices.to(self.device))
        prepared = self.learner.prepare_tasks(task)
        noise = task_noise(indices.view(torch.int32).long(), prepared.noise.shape[1])
        return prepared._replace(noise=noise.to(prepared.noise)), task.query_labels
