"""The loop that every trained stage shares: step, validate, keep the best, checkpoint, resume."""

import json
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from npbml.engine.distributed import by_first, highest
from npbml.engine.evaluate import ACCURACY, Measure
from npbml.errors import RunError
from npbml.files import load_tensors, read_json, save_tensors, write_json


class Trainer(Protocol):
    """What a stage trains, how it steps and how it is judged. Step `i` depends on the state and `i` alone."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    notes: dict[str, Any]  # what was found out by measuring, and must stay as it is through a stop

    def step(self, index: int) -> dict[str, float]:
        """One gradient step; the metrics to log."""

    def validate(self) -> float:
        """The measure on meta-validation tasks, always the same ones; an accuracy in percent."""

    def result(self) -> Mapping[str, Tensor]:
        """The tensors worth keeping from the current state."""


class Observer:
    """Told what happens while a stage runs; does nothing by itself."""

    def begin(self, stage: str, steps: int, done: int) -> None: ...

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def validated(self, step: int, value: str) -> None: ...

    def said(self, words: str) -> None: ...

    def end(self, note: str) -> None: ...


class Stopped(Exception):
    """The user asked the run to stop; everything up to `step` is saved."""

    def __init__(self, stage: str, step: int, number: int) -> None:
        super().__init__(f"Stopped in {stage} after step {step}; it is saved.")
        self.number = number


@dataclass(frozen=True)
class Loop:
    """How long a stage runs, how often it is judged, and where it is kept."""

    stage: str
    folder: Path
    weights: str  # the file, below the folder, that the stage leaves behind
    steps: int
    validate_every: int
    checkpoint_seconds: float
    fingerprint: str  # of the settings: a checkpoint made with others is refused
    measure: Measure = ACCURACY
    keep: int = 1  # states, the best ones

    def file(self, rank: int) -> Path:
        """Where the best state, of rank 0, and those after it are left."""
        name = Path(self.weights)
        return self.folder / (self.weights if rank == 0 else f"{name.stem}-{rank + 1}{name.suffix}")

    @property
    def done(self) -> bool:
        return (self.folder / "done.json").is_file() and (self.folder / self.weights).is_file()


def run_loop(loop: Loop, trainer: Trainer, observer: Observer, about: Mapping[str, Any]) -> dict[str, Any]:
    """Train to the end from the last checkpoint, if there is one. Returns the stage's summary.

    The best state on meta-validation is left in `loop.weights`, with `about` in its header. Of several ranks, all
    of which hold the same state, one writes; they agree at each step whether to stop or to save.
    """
    state = _State.resume(loop, trainer) or _State()
    observer.begin(loop.stage, loop.steps, state.step)
    with _signals() as signals, _Journal(loop.folder, state) as journal:
        started = saved = time.monotonic()
        before = state.seconds

        def save() -> None:
            nonlocal saved
            state.seconds, saved = before + time.monotonic() - started, time.monotonic()
            state.journal = journal.sync()
            by_first(lambda: state.save(loop, trainer))

        def judge() -> None:
            value = trainer.validate()
            state.judged(value, trainer, loop)
            journal.write(state.step, {"validation": value})
            observer.validated(state.step, loop.measure.show(value))

        if state.step == 0 and not state.kept:
            judge()
        log_every = max(1, loop.steps // 2000)
        while state.step < loop.steps:
            stepped = time.monotonic()
            try:
                metrics = trainer.step(state.step)
            except RunError:
                save()
                raise
            state.stepping += time.monotonic() - stepped
            state.step += 1
            observer.stepped(state.step, metrics)
            if state.step % log_every == 0:
                journal.write(state.step, metrics)
            if state.step % loop.validate_every == 0 or state.step == loop.steps:
                judge()
            stop, due = highest(signals.received, time.monotonic() - saved >= loop.checkpoint_seconds)
            if stop:
                save()
                raise Stopped(loop.stage, state.step, int(stop))
            if state.step < loop.steps and due:
                save()
        journal.sync()
    (validation, best_step), *_ = state.kept
    summary = {
        "fingerprint": loop.fingerprint,
        "steps": state.step,
        "best_step": best_step,
        "start": state.start,
        "validation": validation,
        "kept": len(state.kept),
        "seconds": round(before + time.monotonic() - started, 2),
        "step_ms": round(1000 * state.stepping / state.step, 3),
    }

    def leave() -> None:
        for rank, tensors in enumerate(state.best):
            save_tensors(loop.file(rank), tensors, about)
        write_json(loop.folder / "done.json", summary)
        (loop.folder / "checkpoint.safetensors").unlink(missing_ok=True)

    by_first(leave)
    observer.end(f"best {loop.measure.show(validation)} on validation, at step {best_step}")
    return summary


def read_summary(loop: Loop) -> dict[str, Any]:
    """The summary of a stage that is done."""
    summary = read_json(loop.folder / "done.json")
    if summary.get("fingerprint") != loop.fingerprint:
        raise RunError(f"{loop.folder} was made with other settings than this run's: choose another --run.")
    return summary


class _State:
    """Everything that a stage needs to go on as if it had never stopped."""

    def __init__(self) -> None:
        self.step, self.journal = 0, 0
        self.seconds, self.stepping, self.start = 0.0, 0.0, 0.0
        self.kept: list[tuple[float, int]] = []  # value and step of the best states, the best first
        self.best: list[dict[str, Tensor]] = []

    def judged(self, value: float, trainer: Trainer, loop: Loop) -> None:
        """Keep the present state where it is among the best; of equals, the earlier is the better."""
        if self.step == 0:
            self.start = value
        place = sum(not loop.measure.better(value, other) for other, _ in self.kept)
        if place < loop.keep:
            now = {name: tensor.detach().clone() for name, tensor in trainer.result().items()}
            self.kept.insert(place, (value, self.step))
            self.best.insert(place, now)
            del self.kept[loop.keep :], self.best[loop.keep :]

    def save(self, loop: Loop, trainer: Trainer) -> None:
        tensors = {f"module.{name}": tensor for name, tensor in trainer.module.state_dict().items()}
        for rank, kept in enumerate(self.best):
            tensors |= {f"best.{rank}.{name}": tensor for name, tensor in kept.items()}
        for index, entry in trainer.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": value for name, value in entry.items() if value is not None}
        about = {name: value for name, value in vars(self).items() if name != "best"} | {"notes": trainer.notes}
        save_tensors(loop.folder / "checkpoint.safetensors", tensors, {**about, "fingerprint": loop.fingerprint})

    @classmethod
    def resume(cls, loop: Loop, trainer: Trainer) -> "_State | None":
        path = loop.folder / "checkpoint.safetensors"
        if not path.exists():
            return None
        device = next(iter(trainer.module.parameters())).device
        tensors, about = load_tensors(path, device)
        if about.pop("fingerprint", None) != loop.fingerprint:
            raise RunError(f"{path} was made with other settings than this run's: choose another --run.")
        state = cls()
        trainer.notes.update(about.pop("notes", {}))
        vars(state).update(about)
        state.best = [_below(f"best.{rank}.", tensors) for rank in range(len(state.kept))]
        trainer.module.load_state_dict(_below("module.", tensors))
        entries: dict[int, dict[str, Tensor]] = {}
        parameters = [parameter for part in trainer.optimizer.param_groups for parameter in part["params"]]
        for name, tensor in _below("optimizer.", tensors).items():
            index, _, key = name.partition(".")
            parameter = parameters[int(index)].detach()
            if tensor.shape == parameter.shape:  # fused optimisers want it laid out as its parameter is
                tensor = torch.empty_like(parameter).copy_(tensor)
            entries.setdefault(int(index), {})[key] = tensor
        groups = trainer.optimizer.state_dict()["param_groups"]
        trainer.optimizer.load_state_dict({"state": entries, "param_groups": groups})
        return state


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


class _Journal:
    """Metrics as JSON lines and for TensorBoard; what was written after the checkpoint is taken back."""

    def __init__(self, folder: Path, state: _State) -> None:
        def begin() -> tuple[BinaryIO, SummaryWriter]:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lines = open(folder / "metrics.jsonl", "ab")  # noqa: SIM115
                lines.truncate(state.journal)
                purge = state.step + 1 if state.step else None
                return lines, SummaryWriter(str(folder), purge_step=purge)
            except OSError as error:
                raise RunError(f"Metrics cannot be written below {folder}: {error.strerror}.") from None

        self.files = by_first(begin)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.files is None:
            return
        lines, board = self.files
        line = {"step": step, **{name: round(value, 6) for name, value in metrics.items()}}
        lines.write(json.dumps(line).encode() + b"\n")
        for name, value in metrics.items():
            board.add_scalar(name, value, step)

    def sync(self) -> int:
        """The length of the lines so far, all of them on disk."""
        if self.files is None:
            return 0
        self.files[0].flush()
        return self.files[0].tell()

    def __enter__(self) -> "_Journal":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files or ():
            file.close()


class _Signals:
    received = 0


@contextmanager
def _signals() -> Iterator[_Signals]:
    """Let the first Ctrl-C or SIGTERM end the loop at a whole step; a second one ends it at once."""
    seen = _Signals()

    def note(number: int, _: FrameType | None) -> None:
        if seen.received:
            raise KeyboardInterrupt
        seen.received = number

    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
