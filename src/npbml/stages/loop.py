"""The loop that every trained stage shares: step, validate, keep the best, checkpoint, resume."""

import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from npbml.engine.distributed import max_over_ranks, on_rank_zero
from npbml.errors import RunError, Stopped
from npbml.json_files import sealed, write_json
from npbml.settings import merged, nested
from npbml.stages.journal import Journal, opened
from npbml.stages.observer import Observer
from npbml.stages.stage import Stage
from npbml.tensor_files import load_tensors, save_tensors


class Trainer(Protocol):
    """What a stage trains, how it steps and how it is judged. Step `i` depends on the state and `i` alone."""

    notes: dict[str, Any]  # what `decide` found out by measuring, and must stay as it is through a stop

    @property
    def module(self) -> nn.Module:
        """What is trained."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What steps it."""

    def decide(self, index: int) -> None:
        """Put into `notes` what step `index` needs to be decided by measuring, and is not yet."""

    def step(self, index: int) -> dict[str, float]:
        """One gradient step; the metrics to log."""

    def validate(self) -> float:
        """The measure on meta-validation tasks, always the same ones; an accuracy in percent."""

    def result(self) -> Mapping[str, Tensor]:
        """The tensors worth keeping from the current state."""

    def conclude(self, best: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
        """What is chosen when the best states are known, of the settings of what is trained, by full name."""


def run_stage(
    stage: Stage, folder: Path, observer: Observer, about: Mapping[str, Any], checkpoint_seconds: float = 20.0
) -> dict[str, Any]:
    """Train a stage to its end from its last checkpoint, if there is one. Returns its summary.

    The best state on meta-validation is left in the stage's file, with `about` in its header. Several ranks hold
    the same state: rank zero writes, and they agree at each step whether to stop or to save.
    """
    if stage.done(folder):
        summary = stage.summary(folder)
        on_rank_zero(
            lambda: _checkpoint(folder / stage.name).unlink(missing_ok=True)
        )  # of a crash at the very end
        observer.begin(stage.name, stage.steps, stage.steps)
        observer.end(f"done before: best {stage.measure.show(summary['validation'])} on validation")
        return summary
    trainer, place = stage.make_trainer(), folder / stage.name
    state = _State.resume(stage, place, trainer) or _State()
    observer.begin(stage.name, stage.steps, state.step)
    with _signals() as signals, opened(Journal(place, state.step, state.journal, observer.said)) as journal:
        started = saved = time.monotonic()
        before = state.seconds

        def save() -> None:
            nonlocal saved
            state.seconds, saved = before + time.monotonic() - started, time.monotonic()
            state.journal = journal.sync()
            on_rank_zero(lambda: state.save(stage, place, trainer))

        def judge() -> None:
            value = trainer.validate()
            state.judged(value, trainer, stage)
            journal.write(state.step, {"validation": value})
            observer.validated(state.step, stage.measure.show(value))

        if state.step == 0 and not state.kept:
            judge()
        log_every = max(1, stage.steps // 2000)
        while state.step < stage.steps:
            stepped = time.monotonic()
            try:
                decided = dict(trainer.notes)
                trainer.decide(state.step)
                if trainer.notes != decided:
                    save()  # a run that is killed before its first checkpoint must not decide anew
                metrics = trainer.step(state.step)
            except RunError:
                save()
                raise
            state.stepping += time.monotonic() - stepped
            state.step += 1
            observer.stepped(state.step, metrics)
            if state.step % log_every == 0:
                journal.write(state.step, metrics)
            if state.step % stage.validate_every == 0 or state.step == stage.steps:
                judge()
            stop, due = max_over_ranks(signals.received, time.monotonic() - saved >= checkpoint_seconds)
            if stop:
                save()
                raise Stopped(stage.name, state.step, int(stop))
            if state.step < stage.steps and due:
                save()
        journal.sync()
    state.seconds = before + time.monotonic() - started
    return _finish(stage, folder, state, observer, about, trainer.conclude(state.best))


def _finish(
    stage: Stage,
    folder: Path,
    state: "_State",
    observer: Observer,
    about: Mapping[str, Any],
    chosen: Mapping[str, Any],
) -> dict[str, Any]:
    """Leave the best states and the summary of a stage that has ended, in the place of its checkpoint.

    Settings that were chosen at its end stand in both.
    """
    (validation, best_step), *_ = state.kept
    about = merged(about, {"settings": nested(chosen)} if chosen else {})
    summary = {
        "fingerprint": stage.fingerprint,
        "steps": state.step,
        "best_step": best_step,
        "start": state.start,
        "validation": validation,
        "kept": len(state.kept),
        "seconds": round(state.seconds, 2),
        "step_ms": round(1000 * state.stepping / state.step, 3),
        **chosen,
    }

    def leave() -> None:
        for rank, tensors in enumerate(state.best):
            save_tensors(stage.file(folder, rank), tensors, about)
        write_json(folder / stage.name / "done.json", sealed(summary))
        _checkpoint(folder / stage.name).unlink(missing_ok=True)

    on_rank_zero(leave)
    observer.end(f"best {stage.measure.show(validation)} on validation, at step {best_step}")
    return summary


class _State:
    """Everything that a stage needs to go on as if it had never stopped."""

    def __init__(self) -> None:
        self.step, self.journal = 0, 0
        self.seconds, self.stepping, self.start = 0.0, 0.0, 0.0
        self.kept: list[tuple[float, int]] = []  # value and step of the best states, the best first
        self.best: list[dict[str, Tensor]] = []

    def judged(self, value: float, trainer: Trainer, stage: Stage) -> None:
        """Keep the present state where it is among the best; of equals, the earlier is the better."""
        if self.step == 0:
            self.start = value
        place = sum(not stage.measure.better(value, other) for other, _ in self.kept)
        if place < stage.keep:
            now = {name: tensor.detach().clone() for name, tensor in trainer.result().items()}
            self.kept.insert(place, (value, self.step))
            self.best.insert(place, now)
            del self.kept[stage.keep :], self.best[stage.keep :]

    def save(self, stage: Stage, folder: Path, trainer: Trainer) -> None:
        tensors = {f"module.{name}": tensor for name, tensor in trainer.module.state_dict().items()}
        for rank, kept in enumerate(self.best):
            tensors |= {f"best.{rank}.{name}": tensor for name, tensor in kept.items()}
        for index, entry in trainer.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": value for name, value in entry.items() if value is not None}
        about = {name: value for name, value in vars(self).items() if name != "best"} | {"notes": trainer.notes}
        save_tensors(_checkpoint(folder), tensors, {**about, "fingerprint": stage.fingerprint})

    @classmethod
    def resume(cls, stage: Stage, folder: Path, trainer: Trainer) -> "_State | None":
        path = _checkpoint(folder)
        if not path.exists():
            return None
        device = next(iter(trainer.module.parameters())).device
        tensors, about = load_tensors(path, device)
        if about.pop("fingerprint", None) != stage.fingerprint:
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


def _checkpoint(folder: Path) -> Path:
    return folder / "checkpoint.safetensors"


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


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
