"""A stage that is stopped anywhere goes on to the bit-identical end, and loses nothing to bad luck."""

import json
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from npbml.engine.evaluate import ACCURACY, ERROR, Measure
from npbml.errors import RunError
from npbml.files import load_tensors
from npbml.randomness import generator
from npbml.stages.loop import Loop, Observer, Stopped, read_summary, run_loop

STEPS = 12


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


@pytest.fixture
def loop(tmp_path: Path) -> Loop:
    return Loop("lines", tmp_path / "lines", "weights.safetensors", STEPS, 2, 0.0, "settings")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a stage that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    run_loop(
        Loop("lines", folder, "weights.safetensors", STEPS, 2, 1e9, "settings"), LineTrainer(), Observer(), {}
    )
    return folder


def assert_same_outcome(folder: Path, whole: Path) -> None:
    for name in ("weights.safetensors", "metrics.jsonl"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    mine, theirs = (json.loads((place / "done.json").read_text()) for place in (folder, whole))
    times = {"seconds": 0, "step_ms": 0}
    assert {**mine, **times} == {**theirs, **times}
    assert not (folder / "checkpoint.safetensors").exists()


def test_the_best_state_is_kept_and_not_the_last(whole: Path) -> None:
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    validations = {line["step"]: line["validation"] for line in lines if "validation" in line}
    assert list(validations) == [0, 2, 4, 6, 8, 10, 12]
    summary = json.loads((whole / "done.json").read_text())
    best = max(validations, key=lambda step: validations[step])
    assert summary["best_step"] == best != STEPS
    trainer = LineTrainer()
    for index in range(best):
        trainer.step(index)
    tensors, _ = load_tensors(whole / "weights.safetensors")
    for name, tensor in trainer.result().items():
        assert torch.equal(tensor, tensors[name])


@pytest.mark.parametrize("stop", range(STEPS))
def test_a_crash_at_any_step_changes_nothing(loop: Loop, whole: Path, stop: int) -> None:
    with pytest.raises(MemoryError):
        run_loop(loop, LineTrainer(crash_at=stop), Observer(), {})
    run_loop(loop, LineTrainer(), Observer(), {})
    assert_same_outcome(loop.folder, whole)


def test_crashes_between_checkpoints_change_nothing(tmp_path: Path, whole: Path) -> None:
    """The journal's lines that were written after the checkpoint are taken back."""
    rare = Loop("lines", tmp_path / "lines", "weights.safetensors", STEPS, 2, 1e9, "settings")
    with pytest.raises(Stopped):
        run_loop(rare, LineTrainer(signal_at=4), Observer(), {})
    with pytest.raises(MemoryError):
        run_loop(rare, LineTrainer(crash_at=9), Observer(), {})
    run_loop(rare, LineTrainer(), Observer(), {})
    assert_same_outcome(rare.folder, whole)


@pytest.mark.parametrize("stop", [0, 5, STEPS - 1])
def test_a_signal_stops_at_a_whole_step_that_is_saved(tmp_path: Path, whole: Path, stop: int) -> None:
    rare = Loop("lines", tmp_path / "lines", "weights.safetensors", STEPS, 2, 1e9, "settings")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped, match=f"after step {stop + 1}") as stopped:
        run_loop(rare, LineTrainer(signal_at=stop), Observer(), {})
    assert stopped.value.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    run_loop(rare, LineTrainer(), Observer(), {})
    assert_same_outcome(rare.folder, whole)


def test_a_step_that_is_not_finite_keeps_the_state_before_it(tmp_path: Path, whole: Path) -> None:
    rare = Loop("lines", tmp_path / "lines", "weights.safetensors", STEPS, 2, 1e9, "settings")
    with pytest.raises(RunError, match="the loss is nan"):
        run_loop(rare, LineTrainer(fail_at=7), Observer(), {})
    _, about = load_tensors(rare.folder / "checkpoint.safetensors")
    assert about["step"] == 7
    run_loop(rare, LineTrainer(), Observer(), {})
    assert_same_outcome(rare.folder, whole)


def test_a_checkpoint_of_other_settings_is_refused(loop: Loop) -> None:
    with pytest.raises(MemoryError):
        run_loop(loop, LineTrainer(crash_at=3), Observer(), {})
    other = Loop(loop.stage, loop.folder, loop.weights, STEPS, 2, 0.0, "other settings")
    with pytest.raises(RunError, match=r"checkpoint\.safetensors was made with other settings"):
        run_loop(other, LineTrainer(), Observer(), {})


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty"])
def test_a_damaged_checkpoint_is_refused_by_name(loop: Loop, damage: str) -> None:
    with pytest.raises(MemoryError):
        run_loop(loop, LineTrainer(crash_at=3), Observer(), {})
    path = loop.folder / "checkpoint.safetensors"
    whole = path.read_bytes()
    path.write_bytes({"truncated": whole[: len(whole) // 2], "garbage": b"\x01" * 500, "empty": b""}[damage])
    with pytest.raises(RunError, match=r"checkpoint\.safetensors is damaged"):
        run_loop(loop, LineTrainer(), Observer(), {})


def test_a_summary_of_other_settings_is_refused(whole: Path) -> None:
    loop = Loop("lines", whole, "weights.safetensors", STEPS, 2, 0.0, "other settings")
    assert loop.done
    with pytest.raises(RunError, match="other settings"):
        read_summary(loop)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """From a given call on, syncing a file to disk fails as on a full disk."""
    calls, real = [0, 5], os.fsync

    def fsync(number: int) -> None:
        calls[0] += 1
        if calls[0] >= calls[1]:
            raise OSError(28, "No space left on device")
        real(number)

    monkeypatch.setattr(os, "fsync", fsync)
    yield calls


def test_a_full_disk_loses_nothing(loop: Loop, whole: Path, full_disk: list[int]) -> None:
    with pytest.raises(RunError, match=r"checkpoint\.safetensors could not be saved: No space left on device"):
        run_loop(loop, LineTrainer(), Observer(), {})
    assert [path.name for path in loop.folder.glob(".*")] == []
    _, about = load_tensors(loop.folder / "checkpoint.safetensors")
    assert about["step"] == 4
    full_disk[1] = 10**6
    run_loop(loop, LineTrainer(), Observer(), {})
    assert_same_outcome(loop.folder, whole)


@pytest.mark.parametrize(("measure", "stop"), [(ACCURACY, None), (ERROR, None), (ACCURACY, 9)])
def test_the_best_states_are_kept_in_order(tmp_path: Path, measure: Measure, stop: int | None) -> None:
    """As many as an ensemble has, by what the measure calls better, through a stop as well."""
    loop = Loop("lines", tmp_path, "weights.safetensors", STEPS, 2, 0.0, "settings", measure, keep=3)
    if stop:
        with pytest.raises(MemoryError):
            run_loop(loop, LineTrainer(crash_at=stop), Observer(), {})
    summary = run_loop(loop, LineTrainer(), Observer(), {})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    validations = {line["step"]: line["validation"] for line in lines if "validation" in line}
    best = sorted(validations, key=lambda step: validations[step], reverse=not measure.lower)[:3]
    assert summary["kept"] == 3 and summary["best_step"] == best[0]
    assert summary["start"] == pytest.approx(validations[0], abs=1e-6)
    for rank, step in enumerate(best):
        trainer = LineTrainer()
        for index in range(step):
            trainer.step(index)
        tensors, _ = load_tensors(loop.file(rank))
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in trainer.result().items())
    assert sorted(path.name for path in tmp_path.glob("weights*")) == [
        "weights-2.safetensors",
        "weights-3.safetensors",
        "weights.safetensors",
    ]


def test_the_optimisers_state_is_laid_out_as_its_parameters_are(loop: Loop) -> None:
    """Filters have channels last on a GPU, where a fused step refuses a momentum with channels first."""

    def trainer(crash_at: int | None = None) -> LineTrainer:
        made = LineTrainer(crash_at=crash_at)
        made.module.append(nn.Conv2d(2, 3, 3).double().to(memory_format=torch.channels_last))
        made.optimizer = torch.optim.Adam(made.module.parameters(), lr=0.05)
        plain = made.module[:3]
        made.module.forward = lambda x: plain(x) + made.module[-1](x.new_ones(1, 2, 3, 3)).sum()  # type: ignore
        return made

    with pytest.raises(MemoryError):
        run_loop(loop, trainer(crash_at=5), Observer(), {})
    again = trainer()
    filters = again.module[-1].weight
    run_loop(loop, again, Observer(), {})
    for name in ("exp_avg", "exp_avg_sq"):
        assert again.optimizer.state[filters][name].stride() == filters.stride() != filters.contiguous().stride()
