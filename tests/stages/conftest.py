"""A disk that is watched: what a power cut may leave of it, and what happens when it is full."""

import builtins
import io
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Names = dict[str, int]  # the file that each path names


class Disk:
    """Records what is written, renamed and synced below a folder; call `full_at` fails as on a full disk."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, full_at: int = 10**9) -> None:
        self.folder, self.calls, self.full_at = folder, 0, full_at
        self.synced: dict[int, bytes] = {}  # of each file, what a power cut leaves
        self.written: dict[int, bytes] = {}  # of each file, what there is
        self.names: Names = {}  # that a power cut leaves
        self.pending: list[tuple[Path, str, str, int | None]] = []  # folder, old name, new name, new file
        self.files: dict[int, int] = {}  # open ones, by descriptor
        self.before: Callable[[], None] = lambda: None  # is called before every change
        self.real = {name: getattr(os, name) for name in ("fsync", "replace")}
        real_open, real_unlink = builtins.open, Path.unlink

        def opened(path: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
            inside = isinstance(path, (str, Path)) and Path(path).is_relative_to(folder)
            if not inside or mode not in ("wb", "ab", "xb"):
                return real_open(path, mode, *rest, **named)
            self.call()
            return io.BufferedWriter(_Watched(self, Path(path), mode))

        def unlinked(path: Path, missing_ok: bool = False) -> None:
            if path.is_relative_to(folder) and path.exists():
                self.before()
                self.pending.append((path.parent, str(path), "", None))
            real_unlink(path, missing_ok)

        patch.setattr(builtins, "open", opened)
        patch.setattr(os, "fsync", self.fsync)
        patch.setattr(os, "replace", self.replace)
        patch.setattr(Path, "unlink", unlinked)

    def call(self) -> None:
        self.before()
        self.calls += 1
        if self.calls == self.full_at:
            raise OSError(28, "No space left on device")

    def fsync(self, number: int) -> None:
        self.call()
        self.real["fsync"](number)
        if not stat.S_ISDIR(os.fstat(number).st_mode):
            file = self.files[number]
            self.synced[file] = self.written[file]
            return
        place = Path(os.readlink(f"/proc/self/fd/{number}"))
        self.names = after(self.names, [one for one in self.pending if one[0] == place])
        self.pending = [one for one in self.pending if one[0] != place]

    def replace(self, aside: Path, path: Path) -> None:
        self.call()
        self.real["replace"](aside, path)
        self.pending.append((path.parent, str(aside), str(path), None))

    def left(self, luck: random.Random, target: Path) -> None:
        """Leave at `target` what a power cut at this moment may leave of the folder."""
        kept = [one for one in self.pending if luck.random() < 0.5]
        for path, file in after(self.names, kept).items():
            old, new = self.synced.get(file, b""), self.written[file]
            cut = luck.randint(min(len(old), len(new)), max(len(old), len(new)))
            longest = new if len(new) >= len(old) else old
            content = luck.choice([old, new, longest[:cut], longest[:cut] + bytes(len(longest) - cut)])
            place = target / Path(path).relative_to(self.folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)


def after(names: Names, changes: list[tuple[Path, str, str, int | None]]) -> Names:
    """The names after some changes of them."""
    names = dict(names)
    for _, old, new, file in changes:
        found = names.pop(old, None) if file is None else file
        if new and found is not None:
            names[new] = found
    return names


class _Watched(io.FileIO):
    def __init__(self, disk: Disk, path: Path, mode: str) -> None:
        there = path.exists()
        super().__init__(path, mode.replace("b", ""))
        self.disk = disk
        known = after(disk.names, disk.pending)
        self.file = known[str(path)] if there and str(path) in known else len(disk.written)
        if self.file not in disk.written:
            disk.written[self.file] = disk.synced[self.file] = b""
            disk.pending.append((path.parent, "", str(path), self.file))
        if mode == "wb":
            disk.written[self.file] = b""
        disk.files[self.fileno()] = self.file

    def write(self, data: Any) -> int:
        self.disk.call()
        self.disk.written[self.file] += bytes(data)
        return super().write(data)

    def truncate(self, size: int | None = None) -> int:
        assert size is not None
        self.disk.call()
        self.disk.written[self.file] = self.disk.written[self.file][:size].ljust(size, b"\0")
        return super().truncate(size)


@pytest.fixture(scope="session")
def make_disk() -> Callable[..., Disk]:
    """make_disk(folder, monkeypatch, full_at=...) -> the disk below a folder, watched"""
    return Disk
