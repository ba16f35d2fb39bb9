"""The paper's benchmarks as their publishers describe them: classes, splits, counts, image size, normalisation."""

import dataclasses
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from npbml.data.store import SPLITS, Split

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_CIFAR = ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """What is published of a benchmark."""

    name: str
    size: int
    """Height and width that the field uses."""
    channels: int
    classes: Mapping[Split, Mapping[str, str]]
    """The superclass of every class, by split; empty where there are none."""
    images: int | None
    """Of every class; None where classes differ."""
    totals: Mapping[Split, int] | None = None
    """Images of every split, where classes differ."""
    mean: tuple[float, ...] | None = None
    """None: that of the train images."""
    std: tuple[float, ...] | None = None
    rotations: int = 1
    """In how many of the four upright positions a class is shown, each a class of its own."""
    archives: tuple[str, ...] = ()
    """What its archives are called."""

    def split_of(self) -> dict[str, Split]:
        """The split of every class."""
        return {name: split for split in SPLITS for name in self.classes[split]}

    def published(self, split: Split) -> tuple[int, int]:
        """How many classes and images the split has in a store."""
        classes = len(self.classes[split])
        images = classes * self.images if self.images is not None else (self.totals or {})[split]
        return classes * self.rotations, images * self.rotations


def _list(name: str) -> dict[str, Any]:
    return json.loads((files("npbml.data") / "splits" / f"{name}.json").read_text("utf-8"))


def _cifar(name: str) -> Benchmark:
    lists = _list("cifar100")
    above = {member: superclass for superclass, members in lists["superclasses"].items() for member in members}
    return Benchmark(
        name=name,
        size=32,
        channels=3,
        classes={split: {member: above[member] for member in lists[name][split]} for split in SPLITS},
        images=600,
        mean=_CIFAR[0],
        std=_CIFAR[1],
        archives=("cifar-100*",),
    )


def _mini_imagenet() -> Benchmark:
    lists = _list("mini-imagenet")
    return Benchmark(
        name="mini-imagenet",
        size=84,
        channels=3,
        classes={split: dict.fromkeys(lists[split], "") for split in SPLITS},
        images=600,
        mean=_IMAGENET[0],
        std=_IMAGENET[1],
        archives=("mini*", "images.*"),
    )


def _tiered_imagenet() -> Benchmark:
    lists = _list("tiered-imagenet")
    return Benchmark(
        name="tiered-imagenet",
        size=84,
        channels=3,
        classes={
            split: {member: category for category, members in lists[split].items() for member in members}
            for split in SPLITS
        },
        images=None,
        totals={"train": 448_695, "val": 124_261, "test": 206_209},
        mean=_IMAGENET[0],
        std=_IMAGENET[1],
        archives=("tiered*",),
    )


def _omniglot() -> Benchmark:
    """The list holds runs of characters: alphabet to [first, last] pairs."""
    lists = _list("omniglot")
    return Benchmark(
        name="omniglot",
        size=28,
        channels=1,
        classes={
            split: {
                f"{alphabet}/character{number:02}": alphabet
                for alphabet, runs in lists[split].items()
                for first, last in runs
                for number in range(first, last + 1)
            }
            for split in SPLITS
        },
        images=20,
        rotations=4,
        archives=("images_background.*", "images_evaluation.*", "omniglot*"),
    )


PUBLISHED: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (_mini_imagenet(), _tiered_imagenet(), _cifar("cifar-fs"), _cifar("fc100"), _omniglot())
}
