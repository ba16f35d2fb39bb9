"""A stage that is stopped anywhere goes on to the bit-identical end, and loses nothing to bad luck."""

import json
import os
import random
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from npbml.errors import RunError, Stopped
from npbml.json_files import read_json
from npbml.measures import ACCURACY, ERROR, Measure
from npbml.randomness import generator
from npbml.stages.loop import run_stage
from npbml.stages.observer import Observer
from npbml.stages.stage import Stage
from npbml.tensor_files import load_tensors

STEPS, RARELY = 12, 1e9


class LineTrainer:
    """Adam with momentum on random lines: small, but with every kind of state that a stage has."""

    def __init__(
        self, fail_at: int | None = None, signal_at: int | None = None, crash_at: int | None = None
    ) -> None:
        self.module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.normal_(generator=generator(0, "start"))
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=0.05)
        self.notes: dict[str, Any] = {}
        self.fail_at, self.signal_at, self.crash_at = fail_at, signal_at, crash_at

    def decide(self, index: int) -> None:
        pass

    def step(self, index: int) -> dict[str, float]:
        if index == self.fail_at:
            raise RunError("the loss is nan")
        if index == self.crash_at:
            raise MemoryError("out of luck")
        if index == self.signal_at:
            os.kill(os.getpid(), signal.SIGTERM)
        x = torch.randn(8, 3, dtype=torch.float64, generator=generator(0, "x", index))
        loss = (self.module(x) - x.sum(1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item()}

    def validate(self) -> float:
        """Neither rising nor falling, so that the best state is not the last one."""
        total = sum(parameter.detach().sum().item() for parameter in self.module.parameters())
        return 50 + 10 * torch.tensor(7 * total).sin().item()

    def result(self) -> Mapping[str, Tensor]:
        return self.module.state_dict()

    def conclude(self, best: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
        return {}


def lines(
    make_trainer: Callable[[], LineTrainer] = LineTrainer, fingerprint: str = "settings", **how: Any
) -> Stage:
    """The stage that trains such a trainer."""
    return Stage("lines", "weights.safetensors", fingerprint, (), "draw", STEPS, 2, make_trainer, **how)


def run(folder: Path, checkpoint_seconds: float = 0.0, **bad_luck: int) -> dict[str, Any]:
    """Train the stage in a run folder, with a checkpoint after every step if nothing else is said."""
    stage = lines(lambda: LineTrainer(**bad_luck))
    return run_stage(stage, folder, Observer(), {}, checkpoint_seconds)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a stage that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder, RARELY)
    return folder


def assert_same_outcome(run: Path, other: Path) -> None:
    folder, whole = run / "lines", other / "lines"
    for name in ("weights.safetensors", "metrics.jsonl"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    mine, theirs = (read_json(place / "done.json") for place in (folder, whole))
    times = {"seconds": 0, "step_ms": 0}
    assert {**mine, **times} == {**theirs, **times}
    assert not (folder / "checkpoint.safetensors").exists()


def test_the_best_state_is_kept_and_not_the_last(whole: Path) -> None:
    told = [json.loads(line) for line in (whole / "lines" / "metrics.jsonl").read_text().splitlines()]
    validations = {line["step"]: line["validation"] for line in told if "validation" in line}
    assert list(validations) == [0, 2, 4, 6, 8, 10, 12]
    summary = read_json(whole / "lines" / "done.json")
    best = max(validations, key=lambda step: validations[step])
    assert summary["best_step"] == best != STEPS
    trainer = LineTrainer()
    for index in range(best):
        trainer.step(index)
    tensors, _ = load_tensors(lines().file(whole))
    for name, tensor in trainer.result().items():
        assert torch.equal(tensor, tensors[name])


class Choosing(LineTrainer):
    """Chooses a setting by the best states."""

    def conclude(self, best: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
        return {"part.scale": sum(state["0.weight"].sum().item() for state in best)}


@pytest.mark.parametrize("keep", [1, 3])
def test_what_is_chosen_at_the_end_is_in_the_summary_and_in_every_file(tmp_path: Path, keep: int) -> None:
    about = {"settings": {"part": {"scale": 1.0, "other": 2}}, "npbml": "x"}
    for folder, bad_luck in (("whole", {}), ("part", {"crash_at": 9})):
        stage = lines(lambda bad_luck=bad_luck: Choosing(**bad_luck), keep=keep)
        if bad_luck:
            with pytest.raises(MemoryError):
                run_stage(stage, tmp_path / folder, Observer(), about, 0.0)
        summary = run_stage(lines(Choosing, keep=keep), tmp_path / folder, Observer(), about, 0.0)
        read = [load_tensors(stage.file(tmp_path / folder, rank)) for rank in range(keep)]
        chosen = sum(tensors["0.weight"].sum().item() for tensors, _ in read)
        assert summary["part.scale"] == chosen != 1.0 and stage.summary(tmp_path / folder) == summary
        assert all(found["settings"] == {"part": {"scale": chosen, "other": 2}} for _, found in read)
        assert all(found["npbml"] == "x" for _, found in read)
    assert_same_outcome(tmp_path / "part", tmp_path / "whole")


@pytest.mark.parametrize("stop", range(STEPS))
def test_a_crash_at_any_step_changes_nothing(tmp_path: Path, whole: Path, stop: int) -> None:
    with pytest.raises(MemoryError):
        run(tmp_path, crash_at=stop)
    run(tmp_path)
    assert_same_outcome(tmp_path, whole)


def test_crashes_between_checkpoints_change_nothing(tmp_path: Path, whole: Path) -> None:
    """The journal's lines that were written after the checkpoint are taken back."""
    with pytest.raises(Stopped):
        run(tmp_path, RARELY, signal_at=4)
    with pytest.raises(MemoryError):
        run(tmp_path, RARELY, crash_at=9)
    run(tmp_path, RARELY)
    assert_same_outcome(tmp_path, whole)


@pytest.mark.parametrize("stop", [0, 5, STEPS - 1])
def test_a_signal_stops_at_a_whole_step_that_is_saved(tmp_path: Path, whole: Path, stop: int) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped, match=f"after step {stop + 1}") as stopped:
        run(tmp_path, RARELY, signal_at=stop)
    assert stopped.value.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    run(tmp_path, RARELY)
    assert_same_outcome(tmp_path, whole)


def test_a_step_that_is_not_finite_keeps_the_state_before_it(tmp_path: Path, whole: Path) -> None:
    with pytest.raises(RunError, match="the loss is nan"):
        run(tmp_path, RARELY, fail_at=7)
    _, about = load_tensors(tmp_path / "lines" / "checkpoint.safetensors")
    assert about["step"] == 7
    run(tmp_path, RARELY)
    assert_same_outcome(tmp_path, whole)


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MemoryError):
        run(tmp_path, crash_at=3)
    with pytest.raises(RunError, match=r"checkpoint\.safetensors was made with other settings"):
        run_stage(lines(fingerprint="other settings"), tmp_path, Observer(), {})


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty"])
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    with pytest.raises(MemoryError):
        run(tmp_path, crash_at=3)
    path = tmp_path / "lines" / "checkpoint.safetensors"
    whole = path.read_bytes()
    path.write_bytes({"truncated": whole[: len(whole) // 2], "garbage": b"\x01" * 500, "empty": b""}[damage])
    with pytest.raises(RunError, match=r"checkpoint\.safetensors is damaged"):
        run(tmp_path)


class Measuring(LineTrainer):
    """Decides by a stopwatch how it computes, and computes a little differently by it."""

    watch = 0.0

    def decide(self, index: int) -> None:
        if "fast" not in self.notes:
            Measuring.watch += 1
            self.notes["fast"] = Measuring.watch

    def step(self, index: int) -> dict[str, float]:
        found = super().step(index)
        with torch.no_grad():
            self.module[0].bias += 1e-3 * self.notes["fast"]
        return found


def test_what_was_measured_is_kept_from_before_the_first_step(tmp_path: Path) -> None:
    """A kill before the first checkpoint must not lead to another decision, and so to other bits."""
    Measuring.watch = 0.0
    run_stage(lines(Measuring), tmp_path / "whole", Observer(), {}, RARELY)
    Measuring.watch = 0.0
    with pytest.raises(MemoryError):
        run_stage(lines(lambda: Measuring(crash_at=0)), tmp_path / "part", Observer(), {}, RARELY)
    run_stage(lines(Measuring), tmp_path / "part", Observer(), {}, RARELY)
    assert Measuring.watch == 1
    assert_same_outcome(tmp_path / "part", tmp_path / "whole")


def test_what_is_done_is_not_done_again(whole: Path) -> None:
    """Nothing is made that a trainer needs: no data set, no network."""
    told: list[str] = []

    class Listener(Observer):
        def end(self, note: str) -> None:
            told.append(note)

    def refuse() -> LineTrainer:
        raise AssertionError("made")

    files = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    summary = run_stage(lines(refuse), whole, Listener(), {})
    assert summary == read_json(whole / "lines" / "done.json")
    assert told == [f"done before: best {summary['validation']:.2f} % on validation"]
    assert {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()} == files


@pytest.mark.parametrize(("measure", "stop"), [(ACCURACY, None), (ERROR, None), (ACCURACY, 9)])
def test_the_best_states_are_kept_in_order(tmp_path: Path, measure: Measure, stop: int | None) -> None:
    """As many as an ensemble has, by what the measure calls better, through a stop as well."""
    how: dict[str, Any] = {"measure": measure, "keep": 3}
    if stop:
        with pytest.raises(MemoryError):
            run_stage(lines(lambda: LineTrainer(crash_at=stop), **how), tmp_path, Observer(), {}, 0.0)
    stage, folder = lines(**how), tmp_path / "lines"
    summary = run_stage(stage, tmp_path, Observer(), {}, 0.0)
    told = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    validations = {line["step"]: line["validation"] for line in told if "validation" in line}
    best = sorted(validations, key=lambda step: validations[step], reverse=not measure.lower)[:3]
    assert summary["kept"] == 3 and summary["best_step"] == best[0]
    assert summary["start"] == pytest.approx(validations[0], abs=1e-6)
    for rank, step in enumerate(best):
        trainer = LineTrainer()
        for index in range(step):
            trainer.step(index)
        tensors, _ = load_tensors(stage.file(tmp_path, rank))
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in trainer.result().items())
    assert sorted(path.name for path in folder.glob("weights*")) == [
        "weights-2.safetensors",
        "weights-3.safetensors",
        "weights.safetensors",
    ]


def test_the_optimisers_state_is_laid_out_as_its_parameters_are(tmp_path: Path) -> None:
    """Filters have channels last on a GPU, where a fused step refuses a momentum with channels first."""

    def trainer(crash_at: int | None = None) -> LineTrainer:
        made = LineTrainer(crash_at=crash_at)
        made.module.append(nn.Conv2d(2, 3, 3).double().to(memory_format=torch.channels_last))
        made.optimizer = torch.optim.Adam(made.module.parameters(), lr=0.05)
        plain = made.module[:3]
        made.module.forward = lambda x: plain(x) + made.module[-1](x.new_ones(1, 2, 3, 3)).sum()  # type: ignore
        return made

    with pytest.raises(MemoryError):
        run_stage(lines(lambda: trainer(crash_at=5)), tmp_path, Observer(), {}, 0.0)
    again = trainer()
    filters = again.module[-1].weight
    run_stage(lines(lambda: again), tmp_path, Observer(), {}, 0.0)
    for name in ("exp_avg", "exp_avg_sq"):
        assert again.optimizer.state[filters][name].stride() == filters.stride() != filters.contiguous().stride()


SAMPLES = 40


def test_a_stage_goes_on_from_whatever_a_power_cut_leaves(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, make_disk: Callable[..., Any]
) -> None:
    luck, states = random.Random(0), list[Path]()
    with monkeypatch.context() as patched:
        disk = make_disk(tmp_path / "run", patched)

        def cut() -> None:
            states.append(tmp_path / f"state{len(states)}")
            disk.left(luck, states[-1])

        disk.before = cut
        run(tmp_path / "run")
    assert_same_outcome(tmp_path / "run", whole)
    assert len(states) > 100
    for state in luck.sample(states, min(SAMPLES, len(states))):
        run(state)
        assert_same_outcome(state, whole)


def test_a_full_disk_at_any_call_loses_nothing(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, make_disk: Callable[..., Any]
) -> None:
    number, failed = 1, True
    while failed:
        folder, failed = tmp_path / str(number), False
        with monkeypatch.context() as patched:
            make_disk(folder, patched, number)
            try:
                run(folder)
            except RunError as error:
                assert "could not be saved: No space left on device" in str(error)
                failed = True
        assert not list(folder.rglob("*.part"))
        run(folder)
        assert_same_outcome(folder, whole)
        number += 4  # a checkpoint takes no multiple of it: all kinds of calls fail in their turn
    assert number > 100


@pytest.mark.parametrize("damage", [b"", b'{"step": 0, "valida', b"\0" * 400])
def test_a_journal_that_is_shorter_than_the_checkpoint_says_is_told(
    tmp_path: Path, whole: Path, damage: bytes
) -> None:
    said: list[str] = []

    class Listener(Observer):
        def said(self, words: str) -> None:
            said.append(words)

    with pytest.raises(MemoryError):
        run(tmp_path, crash_at=6)
    journal = tmp_path / "lines" / "metrics.jsonl"
    journal.write_bytes(damage)
    run_stage(lines(), tmp_path, Listener(), {}, 0.0)
    assert len(said) == 1 and "metrics.jsonl has lost" in said[0]
    rest = (whole / "lines" / "metrics.jsonl").read_bytes()
    assert rest.endswith(journal.read_bytes()) and journal.read_bytes()
    for name in ("weights.safetensors",):
        assert (tmp_path / "lines" / name).read_bytes() == (whole / "lines" / name).read_bytes()
