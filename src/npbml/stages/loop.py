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
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from npbml.errors import RunError
from npbml.files import load_tensors, read_json, save_tensors, write_json


class Trainer(Protocol):
    """What a stage trains, how it steps and how it is judged. Step `i` depends on the state and `i` alone."""

    module: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, index: int) -> dict[str, float]:
        """One gradient step; the metrics to log."""

    def validate(self) -> float:
        """Accuracy in percent on meta-validation tasks, always the same ones."""

    def result(self) -> Mapping[str, Tensor]:
        """The tensors worth keeping from the current state."""


class Observer:
    """Told what happens while a stage runs; does nothing by itself."""

    def begin(self, stage: str, steps: int, done: int) -> None: ...

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def validated(self, step: int, accuracy: float, best: float) -> None: ...

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

    @property
    def done(self) -> bool:
        return (self.folder / "done.json").is_file() and (self.folder / self.weights).is_file()


def run_loop(loop: Loop, trainer: Trainer, observer: Observer, about: Mapping[str, Any]) -> dict[str, Any]:
    """Train to the end from the last checkpoint, if there is one. Returns the stage's summary.

    The best state on meta-validation is left in `loop.weights`, with `about` in its header.
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
            state.save(loop, trainer)

        def judge() -> None:
            accuracy = trainer.validate()
            if accuracy > state.best_accuracy:
                state.best_accuracy, state.best_step = accuracy, state.step
                state.best = {name: tensor.detach().clone() for name, tensor in trainer.result().items()}
            journal.write(state.step, {"validation": accuracy})
            observer.validated(state.step, accuracy, state.best_accuracy)

        if state.step == 0 and not state.best:
            judge()
        log_every = max(1, loop.steps // 2000)
        while state.step < loop.steps:
            try:
                metrics = trainer.step(state.step)
            except RunError:
                save()
                raise
            state.step += 1
            observer.stepped(state.step, metrics)
            if state.step % log_every == 0:
                journal.write(state.step, metrics)
            if state.step % loop.validate_every == 0 or state.step == loop.steps:
                judge()
            if signals.received:
                save()
                raise Stopped(loop.stage, state.step, signals.received)
            if state.step < loop.steps and time.monotonic() - saved >= loop.checkpoint_seconds:
                save()
        journal.sync()
    save_tensors(loop.folder / loop.weights, state.best, about)
    summary = {
        "fingerprint": loop.fingerprint,
        "steps": state.step,
        "best_step": state.best_step,
        "validation": state.best_accuracy,
        "seconds": round(before + time.monotonic() - started, 2),
    }
    write_json(loop.folder / "done.json", summary)
    (loop.folder / "checkpoint.safetensors").unlink(missing_ok=True)
    observer.end(f"best {state.best_accuracy:.2f} % on validation, at step {state.best_step}")
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
        self.step, self.best_step, self.journal = 0, 0, 0
        self.best_accuracy, self.seconds = -1.0, 0.0
        self.best: dict[str, Tensor] = {}

    def save(self, loop: Loop, trainer: Trainer) -> None:
        tensors = {f"module.{name}": tensor for name, tensor in trainer.module.state_dict().items()}
        tensors |= {f"best.{name}": tensor for name, tensor in self.best.items()}
        for index, entry in trainer.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": value for name, value in entry.items() if value is not None}
        about = {name: value for name, value in vars(self).items() if name != "best"}
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
        vars(state).update(about)
        state.best = _below("best.", tensors)
        trainer.module.load_state_dict(_below("module.", tensors))
        entries: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _below("optimizer.", tensors).items():
            index, _, key = name.partition(".")
            entries.setdefault(int(index), {})[key] = tensor
        groups = trainer.optimizer.state_dict()["param_groups"]
        trainer.optimizer.load_state_dict({"state": entries, "param_groups": groups})
        return state


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


class _Journal:
    """Metrics as JSON lines and for TensorBoard; what was written after the checkpoint is taken back."""

    def __init__(self, folder: Path, state: _State) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.lines = open(folder / "metrics.jsonl", "ab")  # noqa: SIM115
            self.lines.truncate(state.journal)
            purge = state.step + 1 if state.step else None
            self.board = SummaryWriter(str(folder), purge_step=purge)
        except OSError as error:
            raise RunError(f"Metrics cannot be written below {folder}: {error.strerror}.") from None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        line = {"step": step, **{name: round(value, 6) for name, value in metrics.items()}}
        self.lines.write(json.dumps(line).encode() + b"\n")
        for name, value in metrics.items():
            self.board.add_scalar(name, value, step)

    def sync(self) -> int:
        """The length of the lines so far, all of them on disk."""
        self.lines.flush()
        return self.lines.tell()

    def __enter__(self) -> "_Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.lines.close()
        self.board.close()


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
