"""Tasks made ready for a learner, with the frozen work done no more often than it must be."""

import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from npbml.data.draws import check_shape, draw_tasks, draw_tasks_from, numbers_for, task_items
from npbml.data.sinusoid import Sinusoids
from npbml.data.store import cache_folder
from npbml.data.tasks import ClassSet, task_noise
from npbml.engine.device import in_precision
from npbml.errors import SettingError
from npbml.learner.learner import Learner
from npbml.learner.prepare import Cacheable, Counts, Prepared, cacheable_features, needs_images, prepare_tasks
from npbml.shapes import Shape

SLOW = 1.0  # minutes of frozen work from which on it is told beforehand
CACHE_BYTES = 4 * 2**30  # of a CPU's memory; of a GPU's it may be half of what is free
# In half precision where products are rounded as much anyway.
KEPT_AS = {"float32": None, "tf32": torch.float16, "bfloat16": torch.bfloat16}

Cache = dict[Any, tuple[Tensor, Tensor | None]]  # images, which are part of the key, and what is made of them
Look = Callable[[Tensor], Tensor]  # indices of images -> images, perhaps augmented


class Partners(NamedTuple):
    """What the classes of tasks are mixed with: as many tasks of other classes, and how much is their own."""

    indices: Tensor  # as `TaskSource.draw` has them
    weight: Tensor  # [tasks, ways], in 0 to 1


class Source(Protocol):
    """Where the tasks of a split come from."""

    @property
    def on_device(self) -> bool:
        """Whether tasks are made ready where the learner is, with nothing asked of the host."""

    @property
    def key(self) -> Hashable:
        """What recorded work on these tasks depends on, beside the numbers that they are drawn from."""

    def draw(self, tasks: int, generator: torch.Generator) -> Tensor:
        """What tells `tasks` tasks apart, [tasks, ...]."""

    def prepare(self, indices: Tensor, look: Look | None = None) -> tuple[Prepared, Tensor]:
        """The frozen work of those tasks, and their query labels."""


class TaskSource:
    """Prepared tasks of one shape from one split.

    Cacheable features, such as those of a stem that normalises by running statistics, are computed once for the
    whole split, and once for all sources that share `cache`. The rest is computed once for a task.
    """

    def __init__(
        self,
        learner: Learner,
        classes: ClassSet,
        shape: Shape,
        precision: str = "float32",
        cache: Cache | None = None,
        say: Callable[[str], None] = lambda words: None,
    ) -> None:
        check_shape(classes, shape)
        learner.check_ways(shape.ways)
        if shape.queries and not learner.settings.independent:
            raise SettingError(
                f"Tasks of the shape {shape} have queries that are answered each by itself, and this learner "
                "normalises them together: it takes shapes all of whose queries are in the pool."
            )
        self.learner, self.classes, self.shape = learner, classes, shape
        self.precision, self.say = precision, say
        self.known: dict[str, Tensor] = {}
        cache = {} if cache is None else cache
        for name, feature in cacheable_features(learner).items():
            key = self._cache_key(name, feature)
            if key not in cache:
                cache[key] = classes.images, self._computed(name, feature)
            if (found := cache[key][1]) is not None:
                self.known[name] = found

    @property
    def key(self) -> Hashable:
        """What recorded work on these tasks depends on, beside the numbers that they are drawn from."""
        return self.shape, self.precision, tuple(self.known)

    @property
    def on_device(self) -> bool:
        return all(tensor.device == self.classes.images.device for tensor in self.known.values())

    def draw(self, tasks: int, generator: torch.Generator) -> Tensor:
        """What `tasks` tasks are made of, [tasks, ways, columns] (data/draws.py)."""
        return draw_tasks(self.classes, self.shape, tasks, generator)

    @property
    def numbers(self) -> int:
        """How many numbers `draw_from` takes."""
        return numbers_for(self.shape)

    def draw_from(self, numbers: Tensor, tasks: int) -> Tensor:
        """`draw`, from numbers that are where the images are."""
        return draw_tasks_from(self.classes, self.shape, numbers, tasks)

    def prepare(
        self, indices: Tensor, look: Look | None = None, partners: "Partners | None" = None
    ) -> tuple[Prepared, Tensor]:
        """The frozen work of tasks that were drawn, and their query labels [tasks, queries].

        `look` may show the images in another way than they are, for instance augmented. With `partners`, the
        features of each class are mixed with those of another.
        """
        classes, known, images = self.classes, {}, None
        support, support_labels, query, query_labels = task_items(self.shape, indices)
        if look is None:
            items = torch.cat([support, query], 1)
            known = {name: self._kept(name, items) for name in self.known}
        if partners is not None:
            labels = torch.cat([support_labels, query_labels], 1)
            known = self._mixed(items, labels, indices, partners)
        if needs_images(self.learner, known):
            look = look or classes.pixels
            images = torch.cat([look(support), look(query)], 1)
        shape = self.shape
        counts = Counts(shape.support + shape.scored, shape.support, shape.pool, shape.scored)
        with in_precision(self.precision, classes.images.device):
            prepared = prepare_tasks(self.learner, images, support_labels, counts, shape.ways, known)
        noise = task_noise(indices, prepared.noise.shape[1])
        return prepared._replace(noise=noise.to(prepared.noise)), query_labels

    def _kept(self, name: str, items: Tensor) -> Tensor:
        """What is kept of images [tasks, items], where the images are."""
        kept = self.known[name]
        return kept[items.to(kept.device)].to(self.classes.images.device)

    @torch.no_grad()
    def _mixed(self, items: Tensor, labels: Tensor, indices: Tensor, partners: "Partners") -> dict[str, Tensor]:
        """The stem's features of items, each mixed with one of its class's partner, and their embeddings."""
        images = partners.indices.shape[-1] - (0 if self.shape.equal else 2)
        others = task_items(self.shape, torch.cat([partners.indices[..., :images], indices[..., images:]], -1))
        weight = partners.weight.gather(1, labels)[..., None, None, None]
        own, other = (
            self._kept("features", part) for part in (items, torch.cat([others.support, others.query], 1))
        )
        mixed = torch.lerp(other.to(weight.dtype), own.to(weight.dtype), weight)
        scorer, found = self.learner.scorer, {"features": mixed}
        if scorer is not None and scorer.embeds:
            flat = scorer.embed(mixed.flatten(0, 1), lambda features: features)
            found["embeddings"] = flat.unflatten(0, mixed.shape[:2])
        return found

    def _cache_key(self, name: str, feature: Cacheable) -> tuple[Any, ...]:
        """The cache key of these features of these images."""
        weights, learner = hashlib.sha256(), self.learner
        states = [tensor for network in feature.networks for tensor in network.state_dict().values()]
        for tensor in (*states, learner.mean, learner.deviation):
            weights.update(tensor.cpu().numpy().tobytes())
        seen = learner.settings.net.activation, *feature.settings
        return name, id(self.classes.images), *seen, self.precision, weights.digest()

    @torch.no_grad()
    def _computed(self, name: str, feature: Cacheable) -> Tensor | None:
        """The features of every image, in memory or on disk; None where there is no room for them."""
        images = self.classes.images

        def part(start: int) -> Tensor:
            with in_precision(self.precision, images.device):
                return feature.of(images[start : start + 512])

        started = time.perf_counter()
        first = part(0)
        minutes = (time.perf_counter() - started) * len(images) / len(first) / 60
        if minutes > SLOW:
            self.say(f"The {name} of {len(images)} images are computed once, in about {minutes:.0f} min.")
        wanted = KEPT_AS[self.precision] or first.dtype
        entries = len(images) * first[0].numel()
        room = torch.cuda.mem_get_info(images.device)[0] // 2 if images.is_cuda else CACHE_BYTES
        if entries * wanted.itemsize <= room:
            kept = torch.empty(len(images), *first.shape[1:], dtype=wanted, device=images.device)
        else:
            mapped = on_disk(entries)
            if mapped is None:
                return None
            kept = mapped.view(len(images), *first.shape[1:])
        for start in range(0, len(images), 512):
            kept[start : start + 512] = part(start)
        return kept


def on_disk(entries: int) -> Tensor | None:
    """float16 [entries] in a file that is mapped into memory and gone with the process, where there is room."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    if entries * torch.float16.itemsize > shutil.disk_usage(folder).free // 2:
        return None
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        return torch.from_file(file.name, shared=True, size=entries, dtype=torch.float16)


class SinusoidSource:
    """Prepared tasks of the sinusoid benchmark."""

    on_device = False  # waves are drawn on the host

    def __init__(self, learner: Learner, waves: Sinusoids, device: torch.device) -> None:
        self.learner, self.waves, self.device = learner, waves, device

    def draw(self, tasks: int, generator: torch.Generator) -> Tensor:
        return self.waves.draw(tasks, generator)

    @property
    def key(self) -> Hashable:
        """Nothing of it is recorded."""
        return None

    def prepare(self, indices: Tensor, look: Look | None = None) -> tuple[Prepared, Tensor]:
        task = self.waves.task(indices.to(self.device))
        prepared = self.learner.prepare_batch(task)
        noise = task_noise(indices.view(torch.int32).long(), prepared.noise.shape[1])
        return prepared._replace(noise=noise.to(prepared.noise)), task.query_labels
