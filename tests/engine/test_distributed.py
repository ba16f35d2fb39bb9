"""Two processes compute what one does: law by law, then through the commands.

This file is also the program of the two: `python test_distributed.py FOLDER PORT...` does every case below and
leaves what it has found in FOLDER. The tests do the same cases in one process and compare.
"""

import contextlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from npbml.cli.main import main as npbml
from npbml.data.store import ClassEntry, Store
from npbml.data.tasks import ClassSet
from npbml.engine import device, distributed
from npbml.engine.device import choose_device, describe_device
from npbml.engine.distributed import (
    Lost,
    check_share,
    first_to_fail,
    gather,
    joined,
    max_over_ranks,
    mean_over_ranks,
    on_rank_zero,
    rank_slice,
    sum_over_ranks,
    world,
)
from npbml.engine.evaluate import all_answers, evaluate, learner_answers
from npbml.engine.source import TaskSource
from npbml.errors import RunError, SettingError, Stopped
from npbml.lab.protocols import preset
from npbml.lab.schema import Config, method_config, override
from npbml.learner.learner import Learner
from npbml.learner.settings import ImageSpec
from npbml.nets.functional import sharing_copy
from npbml.randomness import generator
from npbml.shapes import benchmark_shape
from npbml.stages.loop import run_stage
from npbml.stages.metatrain import MetaTrainer
from npbml.stages.observer import Observer
from npbml.stages.pretrain import Pretrainer, prototype_accuracies, use_norms
from npbml.stages.setup import Setup
from npbml.stages.stage import Stage
from npbml.tensor_files import load_tensors

STEPS, CPU = 4, torch.device("cpu")
RATES = {"theta": 1e-3, "omega": 2e-3, "phi": 3e-3, "psi": 4e-3}
SMALL: dict[str, Any] = {
    "ways": 3,
    "queries": 2,
    "net": {"filters": 3, "widths": [2, 2, 2, 3]},
    "loss": {"hidden": 4},
    "inner": {"steps": 2},
    "scorer": {"widths": [2], "pools": 1},
    "init": {"std": 0.1},
    "pretrain": {"steps": STEPS, "batch_size": 7, "validation_tasks": 6, "validation_shots": 1, "lr": 0.05},
    "train": {"lr": RATES, "steps": STEPS, "meta_batch": 3, "validation_tasks": 4, "prefetch": False},
    "test": {"batch_size": 3},
}
COMMAND = """
ways = 3
queries = 3
device = "cpu"
[net]
filters = 3
[loss]
hidden = 4
[inner]
steps = 2
[pretrain]
steps = 3
batch_size = 5
validate_every = 2
validation_tasks = 12
[scorer]
widths = [2]
pools = 1
[scorer_training]
steps = 2
validate_every = 2
validation_tasks = 12
[train]
steps = 3
meta_batch = 3
validate_every = 2
validation_tasks = 12
[test]
tasks = 24
"""


class DoubleSet(ClassSet):
    """Classes whose normalised images are in double precision."""

    def normalise(self, images: Tensor) -> Tensor:
        return super().normalise(images).double()


def easy(count: int, name: str) -> ClassSet:
    """Classes of six pictures, each a template with little noise."""
    random = generator(0, name)
    templates = torch.randint(0, 200, (count, 1, 1, 16, 16), generator=random)
    images = templates + torch.randint(0, 55, (count, 6, 1, 16, 16), generator=random)
    counts, half = torch.full((count,), 6), torch.tensor([0.5])
    names = tuple(f"{name} {number}" for number in range(count))
    first = counts.cumsum(0) - counts
    return DoubleSet(images.flatten(0, 1).to(torch.uint8), first, counts, names, half, half / 2)


def settings(**changes: Any) -> Config:
    return override(override(preset("quick"), SMALL), changes)


def setup(config: Config) -> Setup:
    """What the trainers of a configuration are given."""
    batch_size = config.test.batch_size
    return Setup(config.learner, config.shots, config.queries, config.seed, config.engine, CPU, batch_size)


def meta_trainer(method: str = "npbml", tasks: str = "vmap", **train: Any) -> MetaTrainer:
    """A trainer in double precision."""
    config = method_config(settings(train=train, engine={"tasks": tasks}), method)
    learner = Learner(config.learner, ImageSpec(1, 16, (0.5,), (0.25,)), config.seed).double()
    shape = benchmark_shape(learner.settings.ways, config.shots, config.queries)
    sources = [[TaskSource(learner, easy(*of), shape)] for of in ((5, "train"), (4, "val"))]
    return MetaTrainer(setup(config), config.train, method, learner, *sources, config.pretrain.augment)


def pretrainer(**changes: Any) -> Pretrainer:
    """A trainer in double precision."""
    config = settings(**changes)
    trainer = Pretrainer(setup(config), config.pretrain, easy(5, "train"), easy(4, "val"))
    trainer.module.double()
    trainer.judged = sharing_copy(trainer.network)  # which was of its tensors in single precision
    use_norms(trainer.judged, config.learner)
    return trainer


def train(folder: Path, make_trainer: Callable[[], MetaTrainer] = meta_trainer) -> dict[str, Any]:
    """The stage of meta-training in a run folder, without checkpoints but the last."""
    stage = Stage("npbml", "learner.safetensors", "settings", (), "train", STEPS, 2, make_trainer)
    return run_stage(stage, folder, Observer(), {}, 1e9)


def meta_training(**changes: Any) -> dict[str, Any]:
    """Losses, the last meta-gradient, the state after a few meta-steps and how it is judged."""
    trainer = meta_trainer(**changes)
    losses = [trainer.step(index)["loss"] for index in range(STEPS)]
    gradients = {name: p.grad for name, p in trainer.module.named_parameters() if p.grad is not None}
    return {
        "losses": torch.tensor(losses, dtype=torch.float64),
        "gradients": gradients,
        "state": dict(trainer.module.state_dict()),
        "validation": trainer.validate(),
    }


def pre_training(backbone: str) -> dict[str, Any]:
    """Losses, the state with its running statistics after a few steps, and how it is judged."""
    trainer = pretrainer(backbone=backbone)
    losses = [trainer.step(index)["loss"] for index in range(STEPS)]
    return {
        "losses": torch.tensor(losses, dtype=torch.float64),
        "state": dict(trainer.module.state_dict()),
        "validation": trainer.validate(),
    }


def evaluation() -> dict[str, Any]:
    """The result of each of 8 tasks, three of which are answered together, by a learner and by prototypes."""
    trainer, ticks = meta_trainer(), list[int]()
    answer = learner_answers(trainer.module, trainer.val[0])
    adapted = evaluate(answer, trainer.val[0].draw, 8, 3, 0, "test", tick=ticks.append)
    answers = all_answers(answer, trainer.val[0].draw, 8, 3, 0, "test")
    config, network = settings(shots=1), pretrainer().network
    use_norms(network, config.learner)
    by_prototypes = prototype_accuracies(network, setup(config), config.pretrain, easy(4, "val"), 8, "test")
    return {
        "adapted": adapted.per_task,
        "log loss": adapted.log_loss,
        "bins": adapted.bins,
        "answers": answers,
        "prototypes": by_prototypes,
        "ticks": sum(ticks),
    }


def poisoned() -> str:
    """What is said of a meta-step whose last task alone, which is the last rank's, is not finite."""
    trainer = meta_trainer()
    prepare, whole = trainer.train[0].prepare, trainer.tasks

    def poison(*given: Any) -> Any:
        prepared, labels = prepare(*given)
        if rank_slice(whole).stop == whole:
            prepared.inner[-1].fill_(float("inf"))
        return prepared, labels

    trainer.train[0].prepare = poison  # type: ignore[method-assign]
    try:
        trainer.step(0)
    except RunError as error:
        return str(error)
    return "nothing"


def stopped(folder: Path) -> tuple[str, int]:
    """The last rank alone is told to stop in the second step."""
    trainer = meta_trainer()
    step, (rank, size) = trainer.step, world()

    def signalled(index: int) -> dict[str, float]:
        if index == 1 and rank == size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(index)

    trainer.step = signalled  # type: ignore[method-assign]
    try:
        train(folder, lambda: trainer)
    except Stopped as stop:
        return str(stop), stop.number
    return "not at all", 0


def resumed(folder: Path) -> float:
    """A stage that one process has left half-way, to its end."""
    return train(folder)["validation"]


def talk(folder: Path) -> dict[str, Any]:
    """The words of the conversation, one by one."""
    rank, _ = world()
    one, other = torch.full((2, 2), rank + 1.0), torch.tensor(10 * (rank + 1.0), dtype=torch.float64)
    made = on_rank_zero(lambda: (folder / "once").write_text("x" * world()[1]))
    with pytest.raises(RunError, match="by the first alone"):
        on_rank_zero(lambda: refuse("by the first alone"))
    return {
        "world": world(),
        "sums": sum_over_ranks([one, other]),
        "means": mean_over_ranks([one], rank + 1),
        "highest": max_over_ranks(rank, -rank),
        "gathered": gather(list(range(rank + 1))),
        "made": made,
        "first": first_to_fail(),
        "described": describe_device(torch.device("cpu")),
    }


def refuse(words: str) -> None:
    raise RunError(words)


def command(*arguments: object) -> tuple[int, str, str]:
    """`npbml ARGUMENTS` in this process: the code, and what it has written to the screen."""
    out, error, code = io.StringIO(), io.StringIO(), 0
    handler = signal.getsignal(signal.SIGTERM)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            npbml([str(argument) for argument in arguments])
        except SystemExit as leave:
            code = int(leave.code or 0)
        finally:
            signal.signal(signal.SIGTERM, handler)
    return code, out.getvalue(), error.getvalue()


def given(folder: Path) -> tuple[object, ...]:
    return ("--config", folder / "small.toml", "--dataset", folder / "random")


DIVERGES = ("--methods", "maml", "--inner.lr", "1e30")
CASES: dict[str, Callable[[Path], Any]] = {
    "npbml": lambda folder: meta_training(),
    "maml, augmented": lambda folder: meta_training(method="maml", augment=True),
    "prefetched": lambda folder: meta_training(prefetch=True),
    "as measured": lambda folder: meta_training(tasks="auto"),
    "conv4": lambda folder: pre_training("conv4"),
    "resnet12": lambda folder: pre_training("resnet12"),
    "evaluation": lambda folder: evaluation(),
    "poisoned": lambda folder: poisoned(),
    "stopped": lambda folder: stopped(folder / "stopped"),
    "resumed": lambda folder: resumed(folder / "resumed"),
    "talk": talk,
}
COMMANDS: dict[str, Callable[[Path], Any]] = {
    "run": lambda folder: command("run", *given(folder), "--run", folder / "run"),
    "test again": lambda folder: command("test", "--run", folder / "run", "--method", "prototypes"),
    "another": lambda folder: command("run", *given(folder), "--run", folder / "run", "--inner.steps", "3"),
    "too few": lambda folder: command("run", *given(folder), "--run", folder / "few", "--train.meta-batch", "1"),
    "diverges": lambda folder: command("compare", *given(folder), "--run", folder / "diverges", *DIVERGES),
}


def main(folder: Path, ports: list[str]) -> None:
    """What each of the processes does."""
    torch.set_num_threads(1)
    rank, found = os.environ["RANK"], {}
    for (name, case), port in zip((CASES | COMMANDS).items(), ports, strict=False):
        os.environ["MASTER_PORT"] = port
        try:
            with joined() if name in CASES else contextlib.nullcontext():
                found[name] = case(folder)
        except Exception:
            found[name] = traceback.format_exc()
        if dist.is_initialized():
            dist.destroy_process_group()
    os.environ["MASTER_PORT"] = ports[-1]
    with joined():
        if rank == "1":
            torch.save(found, folder / f"found-{rank}.pt")
            os._exit(3)
        try:
            max_over_ranks(0)
        except Lost as error:
            found["lost"] = str(error)
        torch.save(found, folder / f"found-{rank}.pt")
        os._exit(0)


def write_store(folder: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (60, 1, 16, 16), dtype=np.uint8)
    splits = ["train"] * 4 + ["val"] * 3 + ["test"] * 3
    entries = [ClassEntry(f"class {n}", split, 6 * n, 6) for n, split in enumerate(splits)]  # type: ignore[arg-type]
    Store.write(folder, name="random", images=images, classes=entries, provenance={})


def free_ports(count: int) -> list[str]:
    with contextlib.ExitStack() as open_ones:
        sockets = [open_ones.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [str(one.getsockname()[1]) for one in sockets]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders for two processes and for one: a data set, settings, and a stage that one process has left."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("two", "one"):
        write_store(folder / name / "random")
        (folder / name / "small.toml").write_text(COMMAND)
    stopped(folder / "two" / "resumed")
    return folder


@pytest.fixture(scope="module")
def two(place: Path) -> list[dict[str, Any]]:
    """What each of two processes has found, which torchrun would have started so."""
    ports = free_ports(len(CASES | COMMANDS) + 1)
    processes = []
    for rank in "01":
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        processes.append(
            subprocess.Popen(
                [sys.executable, __file__, str(place / "two"), *ports],
                env={**os.environ, **names, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 3], said
    return [torch.load(place / "two" / f"found-{rank}.pt", weights_only=False) for rank in "01"]


@pytest.fixture(scope="module")
def one(place: Path) -> Callable[[str], Any]:
    """one(case) -> what one process finds"""
    return lambda case: (CASES | COMMANDS)[case](place / "one")


def assert_close(mine: Any, theirs: Any) -> None:
    assert isinstance(mine, dict), mine  # else the words of an error
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", ["npbml", "maml, augmented", "prefetched", "as measured"])
def test_meta_steps_on_divided_tasks_are_those_of_one_process(
    one: Callable[[str], Any], two: list[dict[str, Any]], case: str
) -> None:
    """Three tasks over two ranks: the mean gradient, and everything that several steps make of it."""
    expected = one(case)
    assert len(expected["gradients"]) > 2 and expected["losses"].std() > 1e-4
    for rank in (0, 1):
        assert_close(two[rank][case], expected)
    torch.testing.assert_close(two[0][case], two[1][case], rtol=0, atol=0)


@pytest.mark.parametrize("case", ["conv4", "resnet12"])
def test_pretraining_on_divided_batches_is_that_of_one_process(
    one: Callable[[str], Any], two: list[dict[str, Any]], case: str
) -> None:
    """Seven images over two ranks, with the batch statistics and running averages of all seven."""
    expected = one(case)
    assert any("running_var" in name and (tensor != 1).any() for name, tensor in expected["state"].items())
    for rank in (0, 1):
        assert_close(two[rank][case], expected)
    torch.testing.assert_close(two[0][case], two[1][case], rtol=0, atol=0)


def test_every_rank_knows_the_result_of_every_task(one: Callable[[str], Any], two: list[dict[str, Any]]) -> None:
    expected = one("evaluation")
    assert expected["adapted"].std() > 0 and expected["ticks"] == 8
    for rank in (0, 1):
        torch.testing.assert_close(two[rank]["evaluation"], expected, rtol=0, atol=0)


def test_a_step_that_one_rank_spoils_is_refused_by_all_with_the_same_words(
    one: Callable[[str], Any], two: list[dict[str, Any]]
) -> None:
    assert "the stem's features, in task 2 of the batch" in one("poisoned")
    assert two[0]["poisoned"] == two[1]["poisoned"] == one("poisoned")


def test_all_stop_at_the_step_at_which_one_is_told_to_and_one_process_goes_on(
    place: Path, two: list[dict[str, Any]], tmp_path: Path
) -> None:
    words = ("Stopped in npbml after step 2; it is saved.", signal.SIGTERM)
    assert two[0]["stopped"] == two[1]["stopped"] == words
    shutil.copytree(place / "two" / "stopped", tmp_path / "part")
    train(tmp_path / "part")
    assert_same_stage(tmp_path / "part", whole_stage(tmp_path))


def test_two_go_on_where_one_was_stopped(place: Path, two: list[dict[str, Any]], tmp_path: Path) -> None:
    assert two[0]["resumed"] == two[1]["resumed"]
    assert_same_stage(place / "two" / "resumed", whole_stage(tmp_path))


def whole_stage(folder: Path) -> Path:
    train(folder / "whole")
    return folder / "whole"


def assert_same_stage(run: Path, other: Path) -> None:
    folder, whole = run / "npbml", other / "npbml"
    (mine, _), (theirs, _) = (load_tensors(place / "learner.safetensors") for place in (folder, whole))
    assert_close(mine, theirs)
    assert (folder / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()
    assert not (folder / "checkpoint.safetensors").exists()


def files_of(run: Path) -> set[str]:
    paths = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    return {path.partition(".tfevents")[0] for path in paths}


def test_a_run_of_two_leaves_what_a_run_of_one_leaves(
    place: Path, one: Callable[[str], Any], two: list[dict[str, Any]]
) -> None:
    code, out, error = one("run")
    assert (code, error) == (0, "") and "CPU, 1 thread" in out
    (code, told, error), quiet = two[0]["run"], two[1]["run"]
    assert (code, error) == (0, "") and "2 x CPU, 1 thread" in told and "prototypes" in told
    assert quiet == (0, "", "")
    mine, theirs = place / "two" / "run", place / "one" / "run"
    assert files_of(mine) == files_of(theirs)
    assert (mine / "config.json").read_text() == (theirs / "config.json").read_text().replace("/one/", "/two/")
    for path in theirs.rglob("*.safetensors"):
        (found, about), (expected, told) = load_tensors(mine / path.relative_to(theirs)), load_tensors(path)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        assert about == told
    for path in theirs.rglob("metrics.jsonl"):
        texts = ((run / path.relative_to(theirs)).read_text() for run in (mine, theirs))
        for line, other in zip(*map(str.splitlines, texts), strict=True):
            assert json.loads(line) == pytest.approx(json.loads(other), abs=1e-5)
    found, expected = (json.loads((run / "results.json").read_text()) for run in (mine, theirs))
    assert [(r["method"], r["accuracy"], r["tasks"]) for r in found] == [
        (r["method"], r["accuracy"], r["tasks"]) for r in expected
    ]
    code, told, _ = two[0]["test again"]
    assert code == 0 and "prototypes" in told


def test_refusals_are_told_once(place: Path, two: list[dict[str, Any]]) -> None:
    for case, code, words in (
        ("another", 1, "is a run with another inner.steps"),
        ("too few", 2, "train.meta_batch is 1, which cannot be divided over 2 processes"),
        ("diverges", 1, "1 of 1 methods failed: maml"),
    ):
        assert [found[case][0] for found in two] == [code, code], two
        assert sorted(words in found[case][2] for found in two) == [False, True]
        assert two[1][case][1] == ""
    assert not (place / "two" / "few").exists()
    (row,) = [r for r in json.loads((place / "two/diverges/comparison.json").read_text()) if "failed" in r]
    assert "of maml is not finite" in row["failed"]


def test_a_conversation(place: Path, two: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        found = two[rank]["talk"]
        assert isinstance(found, dict), found
        assert found["world"] == (rank, 2) and found["highest"] == (1, 0) and found["gathered"] == [0, 0, 1]
        one, other = found["sums"]
        assert torch.equal(one, torch.full((2, 2), 3.0)) and other == 30 and other.dtype == torch.float64
        torch.testing.assert_close(found["means"], [torch.full((2, 2), 5 / 3)])
        assert found["described"] == "2 x CPU, 1 thread"
    assert [found["talk"]["made"] for found in two] == [1, None]
    assert sorted(found["talk"]["first"] for found in two) == [False, True]
    assert (place / "two" / "once").read_text() == "x", "while it acts, the first is alone"


def test_a_process_that_has_ended_is_missed(two: list[dict[str, Any]]) -> None:
    assert "Another process of this run has ended" in two[0]["lost"]


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    """as_rank(rank, size): be told so, without the others being there"""

    def pretend(rank: int, size: int) -> None:
        for module in (distributed, device):
            monkeypatch.setattr(module, "world", lambda: (rank, size))
        monkeypatch.setenv("LOCAL_RANK", str(rank))

    yield pretend


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_parts_make_up_the_whole_and_differ_by_one_at_most(as_rank: Callable[[int, int], None], size: int) -> None:
    for count in range(size, 20):
        parts = []
        for rank in range(size):
            as_rank(rank, size)
            parts.append(list(range(count))[rank_slice(count)])
        assert [item for part in parts for item in part] == list(range(count))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1 and min(map(len, parts)) > 0


def test_alone_everything_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    with joined():
        assert not dist.is_initialized() and world() == (0, 1)
        tensor = torch.ones(3)
        assert sum_over_ranks([tensor])[0] is tensor and mean_over_ranks([tensor], 5)[0] is tensor
        assert max_over_ranks(3, 4) == (3, 4) and gather([1, 2]) == [1, 2] and on_rank_zero(lambda: 7) == 7
        assert first_to_fail() and first_to_fail()
        check_share("train.meta_batch", 1)


def test_a_share_for_each_or_none(as_rank: Callable[[int, int], None]) -> None:
    as_rank(0, 4)
    check_share("pretrain.batch_size", 4)
    with pytest.raises(SettingError, match=r"pretrain\.batch_size is 3, which cannot be divided over 4 processes"):
        check_share("pretrain.batch_size", 3)


def test_each_process_has_a_gpu_of_its_own(
    as_rank: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for rank in (0, 1):
        as_rank(rank, 2)
        assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", rank)
        assert choose_device("cpu") == torch.device("cpu")
    assert taken == [0, 0, 1, 1]
    with pytest.raises(SettingError, match=r"cuda:1 is one GPU for 2 processes: use device=auto"):
        choose_device("cuda:1")
    as_rank(2, 3)
    with pytest.raises(SettingError, match=r"more processes on this machine than the GPUs.*--nproc-per-node 2"):
        choose_device("auto")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
