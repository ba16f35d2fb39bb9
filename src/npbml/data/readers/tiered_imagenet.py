"""tiered-ImageNet as Ren et al. publish it: the images of a split in one file, and their labels in another."""

import dataclasses
import zipfile
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from npbml.data.archives import Files, Member, check_unpacked
from npbml.data.benchmarks import Benchmark
from npbml.data.folder import read_pictures_by_class
from npbml.data.reading import (
    RESAMPLE,
    Reading,
    check_names,
    colour_images,
    numbers,
    one_of_each,
    resized,
    table,
    texts,
    unpickled,
)
from npbml.data.store import SPLITS, ClassEntry, Split
from npbml.errors import DataError


@dataclasses.dataclass(frozen=True)
class _Encoded:
    """One picture in a pickle of many."""

    content: bytes
    member: Member
    place: int

    def __str__(self) -> str:
        return f"Image {self.place} of {self.member}"

    def read(self) -> bytes:
        return self.content


Rows = list[tuple[str, np.ndarray]]
"""Each class and where its images are."""


def read_pickles(files: Files, benchmark: Benchmark, size: int) -> Reading | None:
    """`{train,val,test}_images_png.pkl`: a list of encoded pictures."""
    if not (found := one_of_each(files, "{}_images_png.pkl")):
        return None

    def images(split: Split, rows: Rows) -> Iterator[np.ndarray]:
        member = found[split]
        encoded = unpickled(member)
        _check_length(member, encoded, rows)

        def picture(place: int) -> _Encoded:
            one = encoded[place]
            if not isinstance(one, bytes) and not (isinstance(one, np.ndarray) and one.dtype == np.uint8):
                raise DataError(f"{member} holds {type(one).__name__} as image {place}; expected are its bytes.")
            return _Encoded(one if isinstance(one, bytes) else one.tobytes(), member, place)

        classes = ([picture(place) for place in places] for _, places in rows)
        for pictures in classes:
            yield from read_pictures_by_class([pictures], size, benchmark.channels, resample=RESAMPLE)

    return _reading("encoded pickles", files, found, benchmark, images)


def read_npz(files: Files, benchmark: Benchmark, size: int) -> Reading | None:
    """`{train,val,test}_images.npz`: the array `images`, whose channels OpenCV wrote, blue first."""
    if not (found := one_of_each(files, "{}_images.npz")):
        return None

    def images(split: Split, rows: Rows) -> Iterator[np.ndarray]:
        member = found[split]
        try:
            with member.open() as file, zipfile.ZipFile(file) as packed:
                check_unpacked(member, member.size, sum(entry.file_size for entry in packed.infolist()))
            with member.open() as file, np.load(file, allow_pickle=False) as arrays:
                if "images" not in arrays:
                    raise DataError(f"{member} has {', '.join(arrays)}; expected is the array 'images'.")
                data = arrays["images"]
        except DataError:
            raise
        except Exception as error:  # a damaged header can raise anything
            raise member.unreadable(error) from error
        pixels = colour_images(member, data, "images")
        _check_length(member, pixels, rows)
        for _, places in rows:
            yield resized(np.ascontiguousarray(pixels[places][..., ::-1]), size)

    return _reading("npz", files, found, benchmark, images)


def _reading(
    layout: str,
    files: Files,
    found: Mapping[Split, Member],
    benchmark: Benchmark,
    images: Callable[[Split, Rows], Iterator[np.ndarray]],
) -> Reading:
    labels = one_of_each(files, "{}_labels.pkl")
    if labels is None:
        raise DataError(f"{found['train']} is there, and train_labels.pkl is missing from {files.source}.")
    codes = _codes(files)
    rows = {split: _rows(labels[split], split, benchmark, codes) for split in SPLITS}
    made: list[ClassEntry] = []
    names: set[str] = set()
    start = 0
    for split in SPLITS:
        for name, places in rows[split]:
            superclass = benchmark.classes[split].get(name, "")
            # Two classes of ImageNet are called "crane".
            unique = name if name not in names else f"{name} ({split})"
            names.add(unique)
            made.append(ClassEntry(unique, split, start, len(places), superclass))
            start += len(places)
    used = [*found.values(), *labels.values()]
    return Reading(layout, used, made, (piece for split in SPLITS for piece in images(split, rows[split])))


def _rows(member: Member, split: Split, benchmark: Benchmark, codes: Mapping[str, list[str]]) -> Rows:
    """The classes of a split by their WordNet code where it is known, otherwise as the file calls them.

    The published label_general is of no use: it was counted wrongly when the files were made.
    """
    labels, names = table(member, unpickled(member), "label_specific", "label_specific_str")
    labels = numbers(member, labels, "label_specific")
    names = texts(member, names, "label_specific_str")
    expected = benchmark.classes[split]
    if not len(labels):
        raise DataError(f"{member} has no labels in label_specific. Get the file again.")
    if labels.min() < 0 or labels.max() >= len(names):
        raise DataError(f"{member} has labels {labels.min()} to {labels.max()}, and {len(names)} class names.")
    coded = [[code for code in (name, *codes.get(name, ())) if code in expected] for name in names]
    if all(len(found) == 1 for found in coded):
        names = [found[0] for found in coded]
    order = np.argsort(labels, kind="stable")
    ends = np.cumsum(np.bincount(labels, minlength=len(names)))
    places = np.split(order, ends[:-1])
    counts = {name: len(own) for name, own in zip(names, places, strict=True)}
    if len(counts) != len(names) or len(counts) != len(expected) or not all(counts.values()):
        known = sum(map(bool, counts.values()))
        raise DataError(
            f"{member} has images of {known} classes, and {benchmark.name} has {len(expected)} in its {split} "
            "split. Is it another data set?"
        )
    if any(name in expected for name in names):
        check_names(member, f"{benchmark.name}'s {split} split", expected, names)
    total = (benchmark.totals or {}).get(split, len(labels))
    if len(labels) != total:
        raise DataError(
            f"{member} has labels for {len(labels)} images, and {benchmark.name} has {total} in its {split} "
            "split. Get the file again."
        )
    return sorted(zip(names, places, strict=True))


def _codes(files: Files) -> dict[str, list[str]]:
    """WordNet codes by class name, from the lists that lie beside the images in the publisher's archive."""
    if not (found := files.together("synsets.txt", "class_names.txt")):
        return {}
    codes, names = (member.text().splitlines() for member in found)
    by_name: dict[str, list[str]] = {}
    for code, name in zip(codes, names, strict=False):
        by_name.setdefault(name.strip(), []).append(code.strip())
    return by_name


def _check_length(member: Member, images: object, rows: Rows) -> None:
    total = sum(len(places) for _, places in rows)
    listed = isinstance(images, list | tuple) or (isinstance(images, np.ndarray) and images.ndim > 0)
    count = len(images) if listed else type(images).__name__  # type: ignore[arg-type]
    if count != total:
        raise DataError(f"{member} holds {count} images, and its labels are for {total}. Get both files again.")
