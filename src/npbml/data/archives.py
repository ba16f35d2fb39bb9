"""A download as it is: the files below a folder, and those in its archives, by their path.

A zip is read in place. A tar is unpacked first, since it cannot be read out of order. No member of either can
be written, or be read from, outside the archive: names that lead elsewhere, links and devices are refused. So is
an archive that would unpack to many times its size, before anything of it is written.
"""

import dataclasses
import lzma
import os
import re
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Self

from npbml.errors import DataError

_TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
_DAMAGE = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error),
    *(EOFError, OSError, RuntimeError, ValueError, OverflowError),
)

_RATIO, _FREE = 100, 1 << 26  # an archive may unpack to so many times its size, and to 64 MiB in any case
_HEADER = 1 << 20  # bytes of a header of a tar


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """One file of a download; `path` is relative, with forward slashes."""

    path: str
    size: int
    holder: Path | zipfile.ZipFile

    def __str__(self) -> str:
        """Where it is, for a person."""
        if isinstance(self.holder, Path):
            return str(self.holder / self.path)
        return f"{self.path} in {self.holder.filename}"

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders above it, from the outermost."""
        return tuple(self.path.split("/")[:-1])

    def open(self) -> IO[bytes]:
        try:
            if isinstance(self.holder, Path):
                return open(self.holder / self.path, "rb")
            return self.holder.open(self.path)
        except _DAMAGE as error:
            raise self.unreadable(error) from error

    def read(self) -> bytes:
        try:
            with self.open() as file:
                return file.read()
        except _DAMAGE as error:
            raise self.unreadable(error) from error

    def text(self) -> str:
        """The content of a text file."""
        try:
            return self.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise self.unreadable(error) from error

    def unreadable(self, error: Exception) -> DataError:
        return DataError(f"{self} cannot be read ({' '.join(str(error).split())}). It is damaged: get it again.")


class Files(Sequence[Member]):
    """The files of a download, by path."""

    def __init__(self, source: Path, members: Sequence[Member]) -> None:
        self.source = source
        self._members = sorted(members, key=lambda member: member.path)

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, place):  # type: ignore[no-untyped-def]
        return self._members[place]

    def close(self) -> None:
        for archive in {member.holder for member in self if isinstance(member.holder, zipfile.ZipFile)}:
            archive.close()

    def named(self, *patterns: str) -> list[Member]:
        """The files whose name matches one of `patterns`, nearest to the top first."""
        found = [member for member in self if any(fnmatch(member.name, pattern) for pattern in patterns)]
        return sorted(found, key=lambda member: len(member.folders))

    def together(self, *names: str) -> list[Member] | None:
        """The files of these names that lie in one folder, the nearest to the top that has them all."""
        for first in self.named(names[0]):
            beside = {m.name: m for m in self.named(*names) if m.folders == first.folders}
            if len(beside) == len(names):
                return [beside[name] for name in names]
        return None


def is_archive(path: Path) -> bool:
    return path.name.lower().endswith((".zip", *_TARS))


def open_files(source: Path, archives: Sequence[str], room: Path) -> Files:
    """The files of `source`, a folder or an archive, and those in the archives in it that match `archives`.

    Tars are unpacked into the folder `room`, which the caller removes.
    """
    if not source.exists():
        raise DataError(f"There is no {source}. Give the folder or the archive that was downloaded.")
    if source.is_file():
        if is_archive(source):
            return Files(source, list(_inside(source, room)))
        return Files(source, list(_walk(source.parent, depth=1)))
    members = list(_walk(source))
    packed = [
        source / member.path
        for member in members
        if is_archive(Path(member.path)) and any(fnmatch(member.name.lower(), pattern) for pattern in archives)
    ]
    loose = {member.path for member in members}
    for archive in packed:
        # What lies unpacked beside its archive is read once.
        members += [member for member in _inside(archive, room) if _beside(source, archive, member) not in loose]
    return Files(source, members)


def unpack(archive: Path, room: Path) -> None:
    """Write the files of a zip or tar below `room`."""
    if archive.name.lower().endswith(".zip"):
        for member in _zipped(archive):
            with member.open() as packed:
                _write(archive, room / member.path, packed)
        return
    try:
        with tarfile.open(archive, tarinfo=_Entry) as tar:
            total = 0
            for entry in tar:
                total += entry.size
                check_unpacked(archive, archive.stat().st_size, total)
                _check_name(archive, entry.name)
                if not entry.isreg() and not entry.isdir():
                    kind = "a link" if entry.issym() or entry.islnk() else "a device"
                    raise DataError(f"{archive} is refused: its member {entry.name!r} is {kind}, not a file.")
                if entry.isreg() and (content := tar.extractfile(entry)):
                    _write(archive, room / entry.name, content)
    except _DAMAGE as error:
        raise _damaged(archive, error) from error


class _Entry(tarfile.TarInfo):
    """A header of a tar. A damaged one is an error, and not the end of the archive, which tarfile takes it for."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tar)
        except tarfile.HeaderError as error:
            # What is no tar at all is told by the first header; two empty blocks are the end.
            if tar.offset == 0 or type(error).__name__ == "EOFHeaderError":
                raise
            raise tarfile.ReadError(f"the header at byte {tar.offset} is damaged, {error}") from None

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        entry = super().frombuf(buf, encoding, errors)
        if entry.size < 0 or (not entry.isreg() and entry.size > _HEADER):
            raise tarfile.ReadError(f"a header in it says that it has {entry.size} bytes")
        return entry


def check_unpacked(name: object, packed: int, unpacked: int) -> None:
    """Raise a DataError when an archive would unpack to far more than archives of images do."""
    if unpacked > _RATIO * packed + _FREE:
        raise DataError(
            f"{name} is refused: it has {packed:,} bytes and would unpack to {unpacked:,} or more. "
            "It may be hostile; get it from its publisher again."
        )


def _inside(archive: Path, room: Path) -> Iterator[Member]:
    if archive.name.lower().endswith(".zip"):
        return _zipped(archive)
    own = room / archive.name
    unpack(archive, own)
    return _walk(own)


def _zipped(archive: Path) -> Iterator[Member]:
    try:
        packed = zipfile.ZipFile(archive)
    except _DAMAGE as error:
        raise _damaged(archive, error) from error
    check_unpacked(archive, archive.stat().st_size, sum(entry.file_size for entry in packed.infolist()))
    for entry in packed.infolist():
        _check_name(archive, entry.filename)
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            what = "a link" if kind == stat.S_IFLNK else "a device"
            raise DataError(f"{archive} is refused: its member {entry.filename!r} is {what}, not a file.")
        if not entry.is_dir():
            yield Member(entry.filename, entry.file_size, packed)


def _check_name(archive: Path, name: str) -> None:
    if name.startswith(("/", "\\")) or re.match(r"[A-Za-z]:", name) or ".." in re.split(r"[/\\]", name):
        raise DataError(f"{archive} is refused: its member {name!r} would be written outside the folder.")


def _write(archive: Path, target: Path, packed: IO[bytes]) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)
    except _DAMAGE as error:
        raise _damaged(archive, error) from error


def _damaged(archive: Path, error: Exception) -> DataError:
    why = " ".join(str(error).split())
    return DataError(f"{archive} cannot be unpacked ({why}). It is damaged, or the disk is full: get it again.")


def _beside(source: Path, archive: Path, member: Member) -> str:
    """The path that the member of an archive has when it is unpacked where the archive is."""
    return "/".join((*archive.relative_to(source).parts[:-1], member.path))


def _walk(top: Path, depth: int | None = None) -> Iterator[Member]:
    seen: set[str] = set()
    for folder, inner, names in os.walk(top, followlinks=True):
        # A link may lead back to a folder above it.
        if (real := os.path.realpath(folder)) in seen:
            inner.clear()
            continue
        seen.add(real)
        # Those of a system's own do not count.
        inner[:] = sorted(name for name in inner if not name.startswith((".", "__")))
        within = Path(folder).relative_to(top).parts
        if depth is not None and len(within) + 1 >= depth:
            inner.clear()
        for name in names:
            path = os.path.join(folder, name)
            if not name.startswith(".") and os.path.isfile(path):
                yield Member("/".join((*within, name)), os.path.getsize(path), top)
