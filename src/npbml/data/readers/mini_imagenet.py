"""mini-ImageNet, split by Ravi & Larochelle: the cache pickles, or pictures with their csv files."""

import csv
import io
from collections.abc import Iterator

import numpy as np

from npbml.data.archives import Files, Member
from npbml.data.benchmarks import Benchmark
from npbml.data.reading import (
    Reading,
    check_counts,
    check_names,
    colour_images,
    entries,
    is_picture,
    numbers,
    one_of_each,
    read_pictures,
    resized,
    table,
    texts,
    unpickled,
)
from npbml.data.store import SPLITS, Split
from npbml.errors import DataError


def read_cache(files: Files, benchmark: Benchmark, size: int) -> Reading | None:
    """`mini-imagenet-cache-{train,val,test}.pkl`: image_data, and class_dict from class to rows."""
    found = one_of_each(files, "mini-imagenet-cache-{}.pkl", "mini*cache*{}*.pkl", "mini*cache*{}*.pickle")
    if not found:
        return None
    # How many images a class has is known before the pickles are: one split is in memory at a time.
    made = entries(benchmark, dict.fromkeys(benchmark.split_of(), benchmark.images or 0))

    def images(split: Split) -> Iterator[np.ndarray]:
        member, names = found[split], benchmark.classes[split]
        data, rows = table(member, unpickled(member), "image_data", "class_dict")
        pixels = colour_images(member, data, "image_data")
        if not isinstance(rows, dict):
            raise DataError(
                f"{member} holds {type(rows).__name__} as class_dict, where a dictionary was expected."
            )
        classes = texts(member, list(rows), "class_dict")
        by_class = dict(zip(classes, rows.values(), strict=True))
        check_names(member, f"{benchmark.name}'s {split} split", names, list(by_class))
        for name in names:
            own = numbers(member, by_class[name], f"class_dict[{name!r}]")
            yield resized(pixels[_rows(member, own, name, len(pixels), benchmark.images)], size)

    pieces = (piece for split in SPLITS for piece in images(split))
    return Reading("cache pickles", list(found.values()), made, pieces)


def _rows(member: Member, rows: np.ndarray, name: str, total: int, expected: int | None) -> np.ndarray:
    if len(rows) != expected:
        raise DataError(
            f"{member} holds {len(rows)} images of class {name!r}, and mini-imagenet has {expected} of every "
            "class. Get the file again."
        )
    if rows.min() < 0 or rows.max() >= total:
        raise DataError(
            f"{member}: class_dict gives class {name!r} rows that image_data, of {total}, does not have."
        )
    return rows


def _csv_rows(member: Member) -> list[dict[str, str]]:
    try:
        return list(csv.DictReader(io.StringIO(member.text())))
    except csv.Error as error:
        raise member.unreadable(error) from error


def read_csv(files: Files, benchmark: Benchmark, size: int) -> Reading | None:
    """`images/` with train.csv, val.csv and test.csv, whose rows are filename,label."""
    found = files.together(*(f"{split}.csv" for split in SPLITS))
    if not found:
        if some := files.named(*(f"{split}.csv" for split in SPLITS)):
            raise DataError(
                f"{some[0]} is there; train.csv, val.csv and test.csv are expected together in a folder."
            )
        return None
    pictures = {member.name: member for member in files if is_picture(member)}
    classes: dict[str, list[Member]] = {}
    for split, member in zip(SPLITS, found, strict=True):
        own: dict[str, list[Member]] = {}
        for number, row in enumerate(_csv_rows(member), 2):
            name, label = row.get("filename"), row.get("label")
            if not name or not label:
                raise DataError(
                    f"{member}, line {number}, has no filename and label: it must begin with both names."
                )
            if name not in pictures:
                raise DataError(
                    f"{member}, line {number}, names the picture {name}, which is not in {files.source}. "
                    "Its images/ folder must hold them all."
                )
            own.setdefault(label, []).append(pictures[name])
        check_names(member, f"{benchmark.name}'s {split} split", benchmark.classes[split], list(own))
        classes |= {label: own[label] for label in benchmark.classes[split]}
    counts = {name: len(members) for name, members in classes.items()}
    check_counts(" and ".join(map(str, found)), benchmark, counts)
    made = entries(benchmark, counts)
    used = [*found, *(member for members in classes.values() for member in members)]
    return Reading("images with csv files", used, made, read_pictures(classes, made, size, benchmark.channels))
