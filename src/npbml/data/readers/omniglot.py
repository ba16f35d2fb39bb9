"""Omniglot as Lake publishes it: alphabets of characters, each drawn by twenty people."""

from npbml.data.archives import Files, Member
from npbml.data.benchmarks import Benchmark
from npbml.data.reading import Reading, check_counts, entries, is_picture, read_pictures

_PARTS = ("images_background", "images_evaluation")


def read(files: Files, benchmark: Benchmark, size: int) -> Reading | None:
    """`images_background` and `images_evaluation`, each alphabet/character/drawing.png."""
    classes: dict[str, list[Member]] = {}
    split_of = benchmark.split_of()
    for member in files:
        name = "/".join(member.folders[-2:])
        if is_picture(member) and len(member.folders) > 2 and member.folders[-3] in _PARTS and name in split_of:
            classes.setdefault(name, []).append(member)
    if not classes:
        return None
    counts = {name: len(members) for name, members in classes.items()}
    check_counts(files.source, benchmark, counts)
    made = entries(benchmark, counts)
    used = [member for members in classes.values() for member in members]
    return Reading("drawings", used, made, read_pictures(classes, made, size, benchmark.channels))
