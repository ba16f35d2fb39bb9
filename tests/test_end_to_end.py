"""Every stage as a user runs it: the commands in processes of their own, killed and given again."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import npbml

SETTINGS = """
method = "npbml"
baselines = ["maml", "prototypes"]
ways = 3
shots = 1
queries = 4
image_size = 16
checkpoint_seconds = 0
[net]
filters = 4
stem_norm = "running"
[pretrain]
steps = 24
batch_size = 8
validate_every = 8
validation_tasks = 10
validation_shots = 1
[scorer]
widths = [2, 3]
[scorer_training]
steps = 24
validate_every = 8
validation_tasks = 10
[train]
steps = 24
prefetch = true
validate_every = 8
validation_tasks = 10
lr = {theta = 1e-3, omega = 1e-3, phi = 1e-3, psi = 1e-3}
[test]
tasks = 60
[engine]
tasks = "vmap"
"""
# The same in a file of version 0.1.
OLD_NAMES = {
    "batch_size = 8": "batch = 8",
    "[scorer]\n": "[relation]\nkind = 'network'\nclip_norm = 0.0\n",
    "[scorer_training]\n": "",
    "prefetch = true": "ahead = true",
    'tasks = "vmap"': 'tasks = "together"',
}
STAGES = {"pretrain": "pretrain", "scorer": "relation", "train": "npbml"}
WEIGHTS = {"pretrain": "network", "scorer": "relation", "train": "learner"}

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures of sixteen easy classes, dealt to splits, and a settings file."""
    folder, random = tmp_path_factory.mktemp("place"), np.random.default_rng(0)
    for number in range(16):
        split = "train" if number < 8 else "val" if number < 12 else "test"
        pictures = folder / "pictures" / split / f"kind {number}"
        pictures.mkdir(parents=True)
        template = random.integers(0, 200, (16, 16, 3))
        for copy in range(8):
            noisy = template + random.integers(0, 55, (16, 16, 3))
            Image.fromarray(noisy.astype(np.uint8)).save(pictures / f"{copy}.png")
    (folder / "settings.toml").write_text(SETTINGS + "\n", encoding="utf-8")
    old = SETTINGS
    for name, before in OLD_NAMES.items():
        assert name in old
        old = old.replace(name, before)
    (folder / "old.toml").write_text(old + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def start(place: Path) -> Start:
    """Start `npbml COMMAND --run RUN` on those pictures in another process."""

    def begin(command: str, run: Path, *more: str, settings: str = "settings.toml") -> "subprocess.Popen[str]":
        given = ["--config", str(place / settings), "--run", str(run)]
        if "--dataset" not in more:
            given += ["--dataset", str(place / "pictures")]
        environment = {**os.environ, "NPBML_DATA": str(place / "stores"), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "npbml", command, *given, *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=place,
        )

    return begin


def finish(process: "subprocess.Popen[str]", code: int = 0) -> tuple[str, str]:
    out, error = process.communicate(timeout=120)
    assert process.returncode == code, out + error
    return out, error


@pytest.fixture(scope="module")
def whole(place: Path, start: Start) -> Path:
    """A run of every stage, never stopped."""
    out, _ = finish(start("run", place / "whole"))
    assert "npbml" in out and "maml" in out and "prototypes" in out
    return place / "whole"


def tail_of(run: Path, stage: str) -> Path:
    return run / STAGES[stage] / f"{WEIGHTS[stage]}.safetensors"


def test_a_run_leaves_everything_behind(whole: Path) -> None:
    results = json.loads((whole / "results.json").read_text())
    assert [record["method"] for record in results] == ["npbml", "maml", "prototypes"]
    for record in results:
        assert record["protocol"] == "quick" and record["backbone"] == "conv4" and record["seed"] == 0
        assert (record["ways"], record["shots"], record["tasks"]) == (3, 1, 60)
        assert 0 <= record["accuracy"] <= 100 and record["ci95"] > 0
        assert all(seconds > 0 for seconds in record["seconds"].values())
        accuracies = json.loads((whole / record["method"] / "test.json").read_text())["per_task"]
        assert record["accuracy"] == pytest.approx(100 * np.mean(accuracies), abs=1e-3)
        assert record["ci95"] == pytest.approx(196 * np.std(accuracies, ddof=1) / 60**0.5, abs=1e-3)
    assert set(results[0]["seconds"]) == {"pretrain", "relation", "train", "test"}
    config = json.loads((whole / "config.json").read_text())
    assert config["scorer"]["widths"] == [2, 3] and config["train"]["lr"]["phi"] == 1e-3
    environment = json.loads((whole / "environment.json").read_text())
    assert environment["torch"] == version("torch") and environment["seed"] == 0
    for stage in ("pretrain", "relation", "npbml", "maml"):
        assert list((whole / stage).glob("events.out.tfevents.*"))
        assert not (whole / stage / "checkpoint.safetensors").exists()
    for name in ("curves", "tasks", "loss"):
        with Image.open(whole / "pictures" / f"{name}.png") as picture:
            assert min(picture.size) > 100 and len(picture.convert("L").getcolors(10**6)) > 20


def test_easy_pictures_are_learned(whole: Path) -> None:
    """Templates with little noise: an encoder that learned anything is far above the third of chance."""
    for record in json.loads((whole / "results.json").read_text()):
        assert record["accuracy"] - record["ci95"] > 60


def test_what_is_done_is_skipped(whole: Path, start: Start) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*.safetensors")}
    out, _ = finish(start("run", whole))
    assert out.count("done before") == 4
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*.safetensors")} == before


def test_a_settings_file_of_version_0_1_makes_the_same_run(place: Path, whole: Path, start: Start) -> None:
    """It is told, on stderr, what things are called now; nothing else changes."""
    run = place / "old names"
    out, error = finish(start("run", run, "--baselines", "prototypes", settings="old.toml"))
    for old, new in (
        ("pretrain.batch", "pretrain.batch_size"),
        ("relation.widths", "scorer.widths"),
        ("relation.kind", "scorer.kind"),
        ("relation.steps", "scorer_training.steps"),
        ("train.ahead", "train.prefetch"),
    ):
        assert f"npbml: {place / 'old.toml'}: The setting {old} is called {new} now." in error
    assert "The setting relation.clip_norm is gone" in error
    assert "called" not in out and "npbml" in out and "prototypes" in out
    for stage in STAGES:
        assert tail_of(run, stage).read_bytes() == tail_of(whole, stage).read_bytes()
    mine, theirs = (json.loads((folder / "config.json").read_text()) for folder in (run, whole))
    assert {**mine, "baselines": None} == {**theirs, "baselines": None}
    out, error = finish(start("relation", run))
    assert "done before" in out and "the command relation is called scorer now" in error


@pytest.mark.parametrize("stage", STAGES)
def test_kill_9_and_resume(place: Path, whole: Path, start: Start, stage: str) -> None:
    """Killed at two moments without warning, a stage ends with the same bytes as one never stopped."""
    run = place / f"killed in {stage}"
    for earlier in list(STAGES)[: list(STAGES).index(stage)]:
        finish(start(earlier, run))
    checkpoint = run / STAGES[stage] / "checkpoint.safetensors"
    for _ in range(2):
        process = start(stage, run)
        changed = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        deadline = time.monotonic() + 60
        while not checkpoint.exists() or checkpoint.stat().st_mtime_ns == changed:
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.002)
        process.kill()
        process.communicate()
        assert not (run / STAGES[stage] / "done.json").exists(), "killed too late to show anything"
    finish(start(stage, run))
    assert tail_of(run, stage).read_bytes() == tail_of(whole, stage).read_bytes()
    mine, theirs = ((place / STAGES[stage] / "metrics.jsonl").read_bytes() for place in (run, whole))
    assert mine == theirs


def test_kill_9_while_testing(place: Path, whole: Path, start: Start) -> None:
    """A test that is killed leaves the results as they were, and gives the same figure when it is done."""
    before = (whole / "results.json").read_bytes()
    process = start("test", whole, "--test.tasks", "3000")
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.5)
    process.kill()
    process.communicate()
    assert (whole / "results.json").read_bytes() == before
    finish(start("test", whole))
    first, again = (json.loads(text) for text in (before, (whole / "results.json").read_text()))
    assert {r["method"]: r["accuracy"] for r in first} == {r["method"]: r["accuracy"] for r in again}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_polite_signal_saves_and_says_so(place: Path, whole: Path, start: Start, number: signal.Signals) -> None:
    run = place / f"stopped by {number.name}"
    process = start("pretrain", run, "--checkpoint-seconds", "1000")
    while not (run / "pretrain" / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(number)
    _, error = finish(process, 128 + number)
    assert "Stopped in pretrain" in error and "goes on from there" in error
    assert (run / "pretrain" / "checkpoint.safetensors").exists()
    finish(start("pretrain", run))
    assert tail_of(run, "pretrain").read_bytes() == tail_of(whole, "pretrain").read_bytes()


def test_a_second_process_is_kept_out(place: Path, start: Start) -> None:
    run = place / "shared"
    first = start("pretrain", run)
    while not (run / "pretrain" / "metrics.jsonl").exists():
        assert first.poll() is None
        time.sleep(0.002)
    first.send_signal(signal.SIGSTOP)
    _, error = finish(start("pretrain", run), 1)
    assert "Another process is at work" in error
    first.send_signal(signal.SIGCONT)
    finish(first)


def test_stages_in_the_wrong_order_are_refused(place: Path, start: Start) -> None:
    run = place / "disordered"
    _, error = finish(start("train", run), 1)
    assert f"There is no run in {run}: begin it with `npbml pretrain --run" in error
    assert not run.exists()
    finish(start("scorer", run))
    _, error = finish(start("train", run), 1)
    assert "pretrain is not finished: run `npbml pretrain --run" in error


def test_another_configuration_is_refused_and_loses_nothing(whole: Path, start: Start) -> None:
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    _, error = finish(start("run", whole, "--inner.steps", "3"), 1)
    assert "another inner.steps" in error
    after = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    assert after == before


def test_load_gives_the_learner_that_was_tested(whole: Path) -> None:
    learner = npbml.load(whole, device="cpu")
    assert isinstance(learner, npbml.Learner) and learner.settings.loss.transductive
    assert set(learner.groups()) == {"theta", "omega", "phi", "psi"}
    assert not npbml.load(whole, "maml", device="cpu").settings.loss.transductive
    with pytest.raises(npbml.SettingError, match="no method 'prototypical'"):
        npbml.load(whole, "prototypical")


def test_a_damaged_learner_is_refused_by_name(place: Path, whole: Path) -> None:
    path = whole / "maml" / "learner.safetensors"
    good = path.read_bytes()
    try:
        path.write_bytes(good[:100])
        with pytest.raises(npbml.RunError, match=r"learner\.safetensors is damaged"):
            npbml.load(whole, "maml")
    finally:
        path.write_bytes(good)


def test_a_classifier_of_the_trained_learner_knows_the_pictures(place: Path, whole: Path) -> None:
    classifier = npbml.FewShotClassifier(npbml.load(whole, device="cpu"))
    pictures = place / "pictures" / "test"
    kinds = sorted(folder.name for folder in pictures.iterdir())[:3]
    opened = {kind: [Image.open(file) for file in sorted((pictures / kind).iterdir())] for kind in kinds}
    classifier.fit([opened[kind][0] for kind in kinds], kinds)
    queries = [(picture, kind) for kind in kinds for picture in opened[kind][1:]]
    assert classifier.score(*map(list, zip(*queries, strict=True))) > 0.7


def test_classify_labels_pictures_from_the_command_line(place: Path, whole: Path) -> None:
    support, query = place / "few", place / "many"
    query.mkdir()
    for kind in ("kind 12", "kind 13", "kind 14"):
        (support / kind).mkdir(parents=True)
        source = place / "pictures" / "test" / kind
        (support / kind / "one.png").write_bytes((source / "0.png").read_bytes())
        for copy in range(1, 6):
            (query / f"{kind}-{copy}.png").write_bytes((source / f"{copy}.png").read_bytes())
    command = [sys.executable, "-m", "npbml", "classify", "--run", str(whole)]
    more = ["--support", str(support), "--query", str(query), "--device", "cpu"]
    out = subprocess.run([*command, *more], capture_output=True, text=True, check=True, timeout=60).stdout
    rows = [line.split() for line in out.splitlines() if line.startswith(" kind") or line.startswith("kind")]
    assert len(rows) == 15
    right = sum(row[1].split("-")[0] == row[3] for row in rows)
    assert right >= 8  # five would be chance


def test_a_learner_is_tested_on_another_data_set(place: Path, whole: Path, start: Start) -> None:
    """Grey pictures of another size are shown to it as its own were; its own result stays."""
    random = np.random.default_rng(1)
    for number in range(9):
        folder = place / "others" / ("train", "val", "test")[number // 3] / f"sort {number}"
        folder.mkdir(parents=True)
        template = random.integers(0, 200, (24, 24))
        for copy in range(6):
            noisy = template + random.integers(0, 55, (24, 24))
            Image.fromarray(noisy.astype(np.uint8)).save(folder / f"{copy}.png")
    before = json.loads((whole / "results.json").read_text())
    out, _ = finish(start("test", whole, "--dataset", str(place / "others")))
    after = json.loads((whole / "results.json").read_text())
    foreign = [record for record in after if record["dataset"] == str(place / "others")]
    assert [record["method"] for record in foreign] == ["npbml"] and foreign[0]["accuracy"] > 50
    assert [record for record in after if record not in foreign] == before and "others" in out


def test_prototypes_are_tested_by_name(whole: Path, start: Start) -> None:
    before = json.loads((whole / "results.json").read_text())
    finish(start("test", whole, "--method", "prototypes"))
    after = json.loads((whole / "results.json").read_text())
    assert [record["accuracy"] for record in after] == [record["accuracy"] for record in before]
