"""Is a store what it should be: whole, with the published counts, and with the same image in two places or not."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from npbml.data.benchmarks import PUBLISHED
from npbml.data.copies import Copy, find_copies
from npbml.data.store import SPLITS, Store
from npbml.errors import DataError

_EXAMPLES = 3


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `ok` is False where the store is not what it should be."""

    ok: bool
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}" if self.ok else f"{self.subject}: WRONG, {self.text}"


@dataclasses.dataclass(frozen=True)
class Report:
    """What `check` found."""

    name: str
    findings: tuple[Finding, ...]
    copies: tuple[Copy, ...]

    @property
    def ok(self) -> bool:
        """Whether the store is whole and as published. Copies are reported and do not count against it."""
        return all(finding.ok for finding in self.findings)

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(map(str, self.findings))


def check(store: Store, progress: Callable[[int, int], None] | None = None) -> Report:
    """Read the whole store and compare it with its checksum and with what is published of it.

    `progress` is told how many classes are read, of how many.
    """
    copies = tuple(find_copies(store, progress))
    findings = (
        _checksum(store),
        *_counts(store),
        _disjoint(store),
        *_repeated(copies),
        *_normalisation(store),
    )
    return Report(store.name, findings, copies)


def _checksum(store: Store) -> Finding:
    try:
        store.verify()
    except DataError as error:
        return Finding(False, "checksum", str(error))
    return Finding(True, "checksum", f"{store.checksum[:12]}... matches the {len(store.images):,} images")


def _counts(store: Store) -> Iterator[Finding]:
    benchmark = PUBLISHED.get(store.name)
    for split in SPLITS:
        entries = [entry for entry in store.entries if entry.split == split]
        counts = [entry.count for entry in entries]
        text = f"{len(entries):,} classes, {sum(counts):,} images"
        if counts:
            each = f"{min(counts):,}" if min(counts) == max(counts) else f"{min(counts):,} to {max(counts):,}"
            text += f", {each} of each class"
        superclasses = {entry.superclass for entry in entries if entry.superclass}
        text += f", {len(superclasses):,} superclasses" if superclasses else ""
        ok = bool(entries)
        if benchmark:
            expected = benchmark.published(split)
            ok = (len(entries), sum(counts)) == expected
            if benchmark.images is not None:
                ok = ok and set(counts) == {benchmark.images}
            text += (
                ", as published" if ok else f"; published are {expected[0]:,} classes with {expected[1]:,} images"
            )
        yield Finding(ok, split, text)
    if benchmark:
        wanted = benchmark.size, benchmark.channels
        text = f"{store.size}x{store.size}, {store.channels} channels"
        if (store.size, store.channels) != wanted:
            text += f"; the field uses {wanted[0]}x{wanted[0]}, {wanted[1]} channels"
        yield Finding(store.channels == benchmark.channels, "images", text)


def _disjoint(store: Store) -> Finding:
    """Of a benchmark, also that no class is in another split than published."""
    splits: dict[str, set[str]] = defaultdict(set)
    for entry in store.entries:
        splits[entry.name].add(entry.split)
    if shared := [name for name, found in splits.items() if len(found) > 1]:
        return Finding(False, "splits", f"{len(shared)} classes are in two splits, such as {shared[0]!r}")
    if benchmark := PUBLISHED.get(store.name):
        published = benchmark.split_of()
        for entry in store.entries:
            name = entry.name.rpartition("/rot")[0] if benchmark.rotations > 1 else entry.name
            if published.get(name, entry.split) != entry.split:
                return Finding(
                    False, "splits", f"class {entry.name!r} is in {entry.split}; published is {published[name]}"
                )
    return Finding(True, "splits", "no class is in two of them")


def _repeated(copies: Sequence[Copy]) -> Iterator[Finding]:
    for subject, found in (
        ("the same image in two splits", [one for one in copies if one.across_splits]),
        (
            "the same image in two classes of a split",
            [one for one in copies if one.across_classes and not one.across_splits],
        ),
        ("the same image twice in a class", [one for one in copies if not one.across_classes]),
    ):
        exact = sum(one.exact for one in found)
        pairs = Counter(" and ".join(s for s in SPLITS if s in {e.split for e in one.classes}) for one in found)
        kinds = ", ".join(f"{count} {pair}" for pair, count in sorted(pairs.items()))
        text = f"{exact:,} exactly, {len(found) - exact:,} nearly"
        if found:
            text += f" ({kinds}), such as {'; '.join(list(dict.fromkeys(map(str, found)))[:_EXAMPLES])}"
        yield Finding(True, subject, text)


def _normalisation(store: Store) -> Iterator[Finding]:
    mean, std = store.measured()
    show = [" ".join(f"{value:.4f}" for value in values) for values in (store.mean, store.std, mean, std)]
    yield Finding(True, "normalisation", f"mean {show[0]}, std {show[1]}")
    yield Finding(True, "train images", f"mean {show[2]}, std {show[3]}")
