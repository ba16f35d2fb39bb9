"""Images that occur twice in a store: exactly, or nearly, as after another compression."""

import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from npbml.data.store import ClassEntry, Store

NEAR = 0.1
"""Two images are nearly the same when they differ by at most this part of their contrast (root mean square)."""
_GRID = 4
_APART = 1.0  # grey levels between the features of two that are nearly the same
_CELL = 6.0
_PIECE = 4096


@dataclasses.dataclass(frozen=True)
class Copy:
    """One image that occurs more than once: the classes that it occurs in, one for each time."""

    classes: tuple[ClassEntry, ...]
    exact: bool

    @property
    def across_splits(self) -> bool:
        return len({entry.split for entry in self.classes}) > 1

    @property
    def across_classes(self) -> bool:
        return len({entry.name for entry in self.classes}) > 1

    def __str__(self) -> str:
        return f" {'=' if self.exact else '~'} ".join(f"{entry.name} ({entry.split})" for entry in self.classes)


def find_copies(store: Store, progress: Callable[[int, int], None] | None = None) -> list[Copy]:
    """All copies, the exact ones first. `progress` is told how many classes are read, of how many."""
    places: dict[bytes, list[int]] = defaultdict(list)
    thumbnails = []
    for done, entry in enumerate(store.entries):
        for first in range(entry.start, entry.start + entry.count, _PIECE):
            images = np.ascontiguousarray(store.images[first : min(first + _PIECE, entry.start + entry.count)])
            for place, image in enumerate(images, first):
                places[hashlib.blake2b(image.data, digest_size=16).digest()].append(place)
            thumbnails.append(_thumbnails(images))
        if progress:
            progress(done + 1, len(store.entries))
    of = np.repeat(np.arange(len(store.entries)), [entry.count for entry in store.entries])

    def copy(images: Sequence[int], exact: bool) -> Copy:
        return Copy(tuple(store.entries[of[place]] for place in images), exact)

    exact = [copy(images, True) for images in places.values() if len(images) > 1]
    firsts = np.array(sorted(images[0] for images in places.values()))
    small = np.concatenate(thumbnails)[firsts]
    pairs = sorted({(int(firsts[a]), int(firsts[b])) for a, b in _alike(small)})
    near = [copy(pair, False) for pair in pairs if _nearly_same(*(store.images[place] for place in pair))]
    return exact + near


def _thumbnails(images: np.ndarray) -> np.ndarray:
    """The means of a grid of fields, float32 [images, channels, grid, grid]."""
    grid = min(_GRID, images.shape[2])
    edges = np.arange(grid) * images.shape[2] // grid
    sides = np.diff(edges, append=images.shape[2])
    sums = np.add.reduceat(np.add.reduceat(images.astype(np.float32), edges, 2), edges, 3)
    return (sums / np.outer(sides, sides)).astype(np.float32)


def _nearly_same(one: np.ndarray, other: np.ndarray) -> bool:
    one, other = one.astype(np.float64), other.astype(np.float64)
    return float(np.sqrt(((one - other) ** 2).mean())) <= NEAR * min(one.std(), other.std())


def _features(thumbnails: np.ndarray) -> np.ndarray:
    """A few numbers that copies share: the mean of each channel, and where it is lighter."""
    means, half = thumbnails.mean((2, 3)), thumbnails.shape[2] // 2
    if not half:
        return means
    grey = thumbnails.mean(1)
    middle = slice(half // 2, half + (half + 1) // 2)
    where = [
        grey[:, :, half:].mean((1, 2)) - grey[:, :, :half].mean((1, 2)),
        grey[:, half:].mean((1, 2)) - grey[:, :half].mean((1, 2)),
        grey[:, middle, middle].mean((1, 2)) - grey.mean((1, 2)),
    ]
    return np.concatenate([means, np.stack(where, 1)], 1)


def _alike(thumbnails: np.ndarray) -> Iterator[tuple[int, int]]:
    """Pairs whose features and thumbnails are alike, without comparing each image with every other.

    Features are sorted into cells. An image is compared with those in each cell that reaches within `_APART` of
    its features: for every feature, that of the lower end and, where it is another, that of the upper end.
    """
    features = _features(thumbnails)
    flat = thumbnails.reshape(len(thumbnails), -1)
    weights = np.random.default_rng(0).integers(1 << 62, size=features.shape[1]) * 2 + 1

    def key(cells: np.ndarray) -> np.ndarray:
        return (cells.astype(np.int64) * weights).sum(1)

    keys = key(np.floor(features / _CELL))
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    low, high = (np.floor((features + apart) / _CELL) for apart in (-_APART, _APART))
    for corner in np.ndindex(*(2,) * features.shape[1]):
        upper = np.array(corner, bool)
        chosen = np.flatnonzero((low != high)[:, upper].all(1))
        wanted = key(np.where(upper, high[chosen], low[chosen]))
        begin, end = (np.searchsorted(keys, wanted, side) for side in ("left", "right"))
        for first in range(0, len(chosen), _PIECE):
            part = slice(first, first + _PIECE)
            counts = end[part] - begin[part]
            within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            one, other = np.repeat(chosen[part], counts), order[np.repeat(begin[part], counts) + within]
            for values, most in ((features, _APART), (flat, _CELL)):
                close = (one < other) & (np.abs(values[one] - values[other]).max(1, initial=0) <= most)
                one, other = one[close], other[close]
            yield from zip(one.tolist(), other.tolist(), strict=True)
