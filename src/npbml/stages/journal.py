"""The metrics of a stage: JSON lines that a resumed run goes on with, and the same for TensorBoard."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import scalar

from npbml.engine.distributed import on_rank_zero
from npbml.json_files import make_folder, saving, sync_file, sync_folder, write_whole

NAME = "metrics.jsonl"


def read_journal(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines of a stage's journal, and how many bytes of it are damaged.

    A stage that was killed may have left its last line unfinished; that is no damage.
    """
    path = folder / NAME
    content = path.read_bytes() if path.exists() else b""
    content = content[: content.rfind(b"\n") + 1]
    lines = _whole_lines(content)
    return [json.loads(line) for line in lines], len(content) - sum(map(len, lines))


def _whole_lines(content: bytes) -> list[bytes]:
    """The lines that are a JSON object and have an end: a crash may leave zeros, or half a line."""
    return [line for line in content.splitlines(keepends=True) if line.endswith(b"\n") and _is_object(line)]


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


class Journal:
    """The metrics of a stage that is at work; what was written after its checkpoint is taken back."""

    def __init__(self, folder: Path, step: int, length: int, say: Callable[[str], None]) -> None:
        """`length` is how many bytes there were at the checkpoint, which was taken at `step`.

        Lines that the disk has lost since are done without, and it is said.
        """
        self.path = folder / NAME

        def begin() -> tuple[Any, ...]:
            with saving(self.path), contextlib.ExitStack() as opened:
                make_folder(folder)
                known = self.path.read_bytes()[:length] if self.path.exists() else b""
                kept = b"".join(_whole_lines(known))
                if len(kept) < length:
                    say(
                        f"{self.path} has lost {length - len(kept)} of the {length} bytes that were written by "
                        f"step {step}: the stage goes on, and its curve has a gap."
                    )
                    write_whole(self.path, kept)
                lines = opened.enter_context(open(self.path, "ab"))
                lines.truncate(len(kept))
                board = opened.enter_context(open(_board_file(folder), "xb"))
                sync_folder(folder)
                opened.pop_all()
                return lines, board

        self.files = on_rank_zero(begin)
        self._tell(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if step:  # curves of steps after it are of a run that was killed
            status = SessionLog(status=SessionLog.SessionStatus.START)
            self._tell(Event(wall_time=time.time(), step=step + 1, session_log=status))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.files is None:
            return
        line = {"step": step, **{name: round(value, 6) for name, value in metrics.items()}}
        with saving(self.path):
            self.files[0].write(json.dumps(line).encode() + b"\n")
        for name, value in metrics.items():
            self._tell(Event(wall_time=time.time(), step=step, summary=scalar(name, value)))

    def _tell(self, event: Event) -> None:
        """Tell TensorBoard; its own writer has a thread, whose errors would come later and elsewhere."""
        if self.files is not None:
            with saving(self.path.parent / "events.out.tfevents"):
                RecordWriter(self.files[1]).write(event.SerializeToString())

    def sync(self) -> int:
        """The length of the lines so far, all of them on disk."""
        if self.files is None:
            return 0
        lines, board = self.files
        with saving(self.path):
            sync_file(lines)
            board.flush()
            return int(lines.tell())

    def close(self) -> None:
        with saving(self.path), contextlib.ExitStack() as closing:
            for file in self.files or ():
                closing.callback(file.close)


@contextlib.contextmanager
def opened(journal: Journal) -> Iterator[Journal]:
    """Close a journal at the end; where the block fails, its error counts and not that of closing."""
    try:
        yield journal
    except BaseException:
        with contextlib.suppress(Exception):
            journal.close()
        raise
    journal.close()


def _board_file(folder: Path) -> Path:
    """A new file of TensorBoard, named as its own writer does."""
    start = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
    return next(path for n in range(10**6) if not (path := folder / f"{start}.{n}").exists())
