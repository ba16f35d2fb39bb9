"""A benchmark as pictures in class folders, below train/, val/ and test/ or all together."""

from npbml.data.archives import Files, Member
from npbml.data.benchmarks import Benchmark
from npbml.data.reading import Reading, check_counts, entries, is_picture, read_pictures
from npbml.data.store import Split
from npbml.errors import DataError

_SPLIT_FOLDERS: dict[str, Split] = {"train": "train", "val": "val", "test": "test"}
_SPLIT_FOLDERS |= {"valid": "val", "validation": "val"}


def read(files: Files, benchmark: Benchmark, size: int) -> Reading | None:
    """A folder for each class, called as the class is."""
    split_of = benchmark.split_of()
    classes: dict[str, list[Member]] = {}
    for member in files:
        if is_picture(member) and member.folders and member.folders[-1] in split_of:
            _check_split(member, split_of[member.folders[-1]])
            classes.setdefault(member.folders[-1], []).append(member)
    if not classes:
        return None
    counts = {name: len(members) for name, members in classes.items()}
    check_counts(files.source, benchmark, counts)
    made = entries(benchmark, counts)
    used = [member for members in classes.values() for member in members]
    return Reading("class folders", used, made, read_pictures(classes, made, size, benchmark.channels))


def _check_split(member: Member, split: Split) -> None:
    if len(member.folders) > 1 and (given := _SPLIT_FOLDERS.get(member.folders[-2], split)) != split:
        raise DataError(
            f"{member} is in the {given} split, and class {member.folders[-1]!r} belongs to {split}. "
            "Is this another split of the data set?"
        )
