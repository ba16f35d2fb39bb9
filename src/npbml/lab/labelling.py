"""Label the pictures of a folder by a few labelled ones, in memory that does not grow with their number."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from npbml.errors import DataError, SettingError
from npbml.learner.settings import ImageSpec
from npbml.pictures import picture_bytes

POOL = 1000
"""The most unlabelled pictures that a classifier adapts to: its time and memory grow with their number."""
UNKNOWN = "unknown"
"""The label of a picture of which no class reaches the threshold."""
BATCH = 32  # pictures that are read, resized and predicted at a time: of 64, photos takes a gigabyte more
TOGETHER = 200  # the same of learners whose answers depend on the pictures that are predicted together
SEED = 0  # of the order in which pictures are read

Tick = Callable[[str, int, int], None]  # is told what is done, how much of it, of how much


class Classifier(Protocol):
    """What labels pictures: `FewShotClassifier`, or nearest class means."""

    threshold: float | None
    classes_: np.ndarray

    def fit(self, pictures: Any, labels: Any, unlabelled: Any | None = None) -> Any: ...
    def predict_proba(self, pictures: Any) -> np.ndarray: ...


class Picture(NamedTuple):
    """A picture that could be read, resized for the learner: uint8 [channels, size, size]."""

    file: Path
    pixels: np.ndarray


class Reader:
    """Reads pictures at the size of a learner, some at a time, in threads.

    Attributes:
        unreadable: The files that could not be read, each with the reason.
    """

    def __init__(self, images: ImageSpec) -> None:
        self.images = images
        self.unreadable: dict[Path, str] = {}

    def batches(self, files: Sequence[Path], size: int = BATCH) -> Iterator[list[Picture]]:
        """Yield the pictures that can be read, `size` files at a time; meanwhile the next ones are read."""
        with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="pictures") as threads:
            waiting: deque[list[Future[Picture | None]]] = deque()
            for start in range(0, len(files), size):
                waiting.append([threads.submit(self._read, file) for file in files[start : start + size]])
                if len(waiting) > 1:
                    yield self._done(waiting.popleft())
            while waiting:
                yield self._done(waiting.popleft())

    def all(self, files: Sequence[Path], tick: Callable[[int], None] = lambda count: None) -> list[Picture]:
        """Return the pictures that can be read; `tick` is told how many more files are done."""
        found: list[Picture] = []
        for number, batch in enumerate(self.batches(files)):
            found += batch
            tick(min(BATCH, len(files) - number * BATCH))
        return found

    def _read(self, file: Path) -> Picture | None:
        try:
            return Picture(file, picture_bytes(file, self.images.size, self.images.channels))
        except DataError as error:
            self.unreadable[file] = getattr(error, "reason", str(error))
        except OSError as error:
            self.unreadable[file] = error.strerror or str(error)
        except MemoryError:
            self.unreadable[file] = "it is too large for the memory"
        return None

    @staticmethod
    def _done(futures: list["Future[Picture | None]"]) -> list[Picture]:
        return [picture for future in futures if (picture := future.result()) is not None]


@dataclass(frozen=True)
class Labels:
    """The labels of pictures.

    Attributes:
        files: The pictures [n], in the order of their paths.
        classes: The names of the classes.
        probabilities: Of each picture and class, [n, classes].
        pool: How many unlabelled pictures the classifier has adapted to.
        threshold: The label of a picture is unknown where no class has this probability.
        together: Whether answers depend on the pictures that were predicted together.
    """

    files: list[Path]
    classes: list[str]
    probabilities: np.ndarray
    pool: int = 0
    threshold: float = 0.0
    together: bool = False

    @property
    def best(self) -> np.ndarray:
        """The highest probability of each picture, [n]."""
        return self.probabilities.max(1)

    @property
    def names(self) -> list[str]:
        """The label of each picture, which may be unknown."""
        return [
            self.classes[place] if best >= self.threshold else UNKNOWN
            for place, best in zip(self.probabilities.argmax(1), self.best, strict=True)
        ]


def read_labelled(
    reader: Reader, classes: dict[str, list[Path]], tick: Callable[[int], None]
) -> dict[str, list[Path]]:
    """Return the files of labelled pictures that can be read, by class.

    Raises:
        DataError: A class has none.
    """
    readable = {picture.file for picture in reader.all([f for files in classes.values() for f in files], tick)}
    found = {name: [file for file in files if file in readable] for name, files in classes.items()}
    for name, files in classes.items():
        if not found[name]:
            why = reader.unreadable[files[0]]
            raise DataError(f"None of the pictures of the class {name!r} can be read. {files[0]}: {why}.")
    return found


def label_pictures(
    classifier: Classifier,
    reader: Reader,
    classes: dict[str, list[Path]],
    queries: Sequence[Path],
    unlabelled: Sequence[Path] = (),
    alone: bool = False,
    together: bool = False,
    tick: Tick = lambda what, done, total: None,
) -> Labels:
    """Fit a classifier to labelled pictures and label others with it.

    Pictures are decoded, resized and predicted some at a time. Those that the classifier adapts to without a
    label, at most `POOL`, are kept in the learner's size.

    Args:
        classifier: What is fitted.
        reader: Reads the pictures; it keeps those that cannot be read, and why.
        classes: The files of the labelled pictures, by class.
        queries: The files to be labelled.
        unlabelled: More files of the same classes.
        alone: The pictures to be labelled are not used as unlabelled ones.
        together: The classifier's answers depend on the pictures that are predicted together.
        tick: Is told of the progress.

    Raises:
        DataError: The classifier cannot take this number of classes, or nothing can be read.
        SettingError: The classifier cannot do what was asked for.
    """
    if together and (alone or unlabelled):
        raise SettingError(
            f"This learner looks at the pictures that it labels, all at once, and at no others: leave "
            f"{'--alone' if alone else '--unlabelled'} out, or choose a learner of npbml-any."
        )
    # In the order of their paths, pictures of one class would stand together.
    order = [queries[place] for place in np.random.default_rng(SEED).permutation(len(queries))]
    candidates = [] if together else [*unlabelled, *([] if alone else order)]
    if len(candidates) > POOL:
        chosen = np.random.default_rng(SEED).choice(len(candidates), POOL, replace=False)
        candidates = [candidates[place] for place in sorted(chosen)]
    steps = _Steps(tick, "read", sum(map(len, classes.values())) + len(candidates))
    labelled = read_labelled(reader, classes, steps)
    pool = reader.all(candidates, steps)
    names = [name for name, members in labelled.items() for _ in members]
    # The classifier keeps the names of labelled pictures, and reads these few a second time.
    files = [file for members in labelled.values() for file in members]
    classifier.fit(files, names, [picture.pixels for picture in pool])
    labels = predict_pictures(classifier, reader, order, pool, tick, TOGETHER if together else BATCH)
    return replace(labels, together=together)


def predict_pictures(
    classifier: Classifier,
    reader: Reader,
    files: Sequence[Path],
    known: Sequence[Picture] = (),
    tick: Tick = lambda what, done, total: None,
    size: int = BATCH,
) -> Labels:
    """Label pictures with a fitted classifier.

    Args:
        classifier: A fitted classifier.
        reader: Reads the pictures.
        files: What is labelled.
        known: Pictures that are read already; those that are not among `files` are passed over.
        tick: Is told of the progress.
        size: How many pictures are predicted at a time.

    Raises:
        DataError: No picture can be read.
    """
    wanted = set(files)
    kept = [picture for picture in known if picture.file in wanted]
    passed = {picture.file for picture in kept} | reader.unreadable.keys()
    rest = [file for file in files if file not in passed]
    steps = _Steps(tick, "label", len(kept) + len(rest))
    found: dict[Path, np.ndarray] = {}

    def predict(pictures: Sequence[Picture], count: int) -> None:
        if pictures:
            rows = classifier.predict_proba([picture.pixels for picture in pictures])
            found.update(zip((picture.file for picture in pictures), rows, strict=True))
        steps(count)

    for start in range(0, len(kept), size):
        part = kept[start : start + size]
        predict(part, len(part))
    for number, batch in enumerate(reader.batches(rest, size)):
        predict(batch, min(size, len(rest) - number * size))
    if not found:
        why = next(iter(reader.unreadable.items()), None)
        raise DataError("No picture could be read." + (f" {why[0]}: {why[1]}." if why else ""))
    ordered = sorted(found)
    names, probabilities = [str(name) for name in classifier.classes_], np.stack([found[f] for f in ordered])
    return Labels(ordered, names, probabilities, len(known), classifier.threshold or 0.0)


class _Steps:
    """Counts what is done of one thing."""

    def __init__(self, tick: Tick, what: str, total: int) -> None:
        self.tick, self.what, self.done, self.total = tick, what, 0, total
        tick(what, 0, total)

    def __call__(self, count: int) -> None:
        self.done += count
        self.tick(self.what, self.done, self.total)
