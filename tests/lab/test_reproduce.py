"""Cells as jobs: which of them share a run folder, when one is done, and what a result file must hold."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npbml.data.store import ClassEntry, Store
from npbml.errors import RunError
from npbml.json_files import write_json
from npbml.lab.environment import environment
from npbml.lab.identity import from_file, to_file
from npbml.lab.paper import TableCell, paper_tables
from npbml.lab.pipeline import Pipeline
from npbml.lab.reproduce import Job, commit, grouped_by_folder, plan, read_result, read_results
from npbml.lab.schema import method_config
from npbml.methods import REMOVED
from npbml.settings import leaves, nested
from npbml.stages.observer import Observer

SMALL: dict[str, Any] = {
    "ways": 3,
    "queries": 3,
    "device": "cpu",
    "net": {"filters": 3},
    "loss": {"hidden": 4},
    "inner": {"steps": 2},
    "pretrain": {"steps": 3, "batch_size": 4, "validate_every": 3, "validation_tasks": 2, "validation_shots": 1},
    "scorer": {"widths": [2], "pools": 1},
    "scorer_training": {"steps": 2, "validate_every": 2, "validation_tasks": 2},
    "train": {"steps": 2, "validate_every": 2, "validation_tasks": 2},
    "test": {"tasks": 4},
    "engine": {"tasks": "vmap"},
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Ten classes of nine random pictures."""
    folder = tmp_path_factory.mktemp("data") / "random"
    images = np.random.default_rng(0).integers(0, 256, (90, 1, 16, 16), dtype=np.uint8)
    splits = ["train"] * 4 + ["val"] * 3 + ["test"] * 3
    entries = [ClassEntry(f"class {n}", split, 9 * n, 9) for n, split in enumerate(splits)]  # type: ignore[arg-type]
    Store.write(folder, name="random", images=images, classes=entries, provenance={})
    return str(folder)


def job_of(
    place: Path, dataset: str, shots: int = 1, method: str = "npbml-1", seed: int = 0, **settings: Any
) -> Job:
    cell = TableCell("NPBML", method, dataset, "conv4", shots)
    return plan(cell, "published", seed, SMALL | settings, place / "runs", place / "results")


def finish(job: Job) -> dict[str, Any]:
    """Run a job; the content of its file."""
    run = Pipeline.start(job.folder, job.config)
    run.run("pretrain")
    run.run(job.cell.method)
    job.keep(run.test(job.cell.method), environment(run.config, run.device, run.data.checksum))
    return json.loads(job.file.read_text())


@pytest.fixture(scope="module")
def done(dataset: str, tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = job_of(tmp_path_factory.mktemp("place"), dataset)
    finish(job)
    return job


def table_jobs(name: str, protocol: str, *seeds: int) -> list[Job]:
    cells = paper_tables()[name].cells
    return [plan(cell, protocol, seed, {}, Path("runs"), Path("results")) for seed in seeds for cell in cells]


def test_methods_with_one_encoder_share_a_run_folder() -> None:
    assert len(grouped_by_folder(table_jobs("table2", "common", 0))) == 12
    places = grouped_by_folder(table_jobs("table3", "published", 0, 1))
    assert [len(jobs) for jobs in places.values()] == [5, 2, 5, 2]
    assert list(grouped_by_folder(table_jobs("table4", "published", 0))) == list(places)[:1]
    support = list(places.values())[1]
    assert all(job.config.learner.inner.batch == "support" and "support" in job.folder.name for job in support)


def test_a_method_with_settings_of_its_own_has_a_run_folder_of_its_own() -> None:
    jobs = {job.cell.key: job for job in table_jobs("table2", "published", 0)}
    names = {method: jobs[method, "", "cifar-fs", "conv4", 1].folder.name for method in ("maml", "alfa", "npbml")}
    assert names["npbml"] == "cifar-fs-conv4-5way-1shot-published-seed0"
    assert names["maml"] == "cifar-fs-conv4-5way-1shot-maml-published-seed0"
    assert len({job.folder for job in jobs.values()}) == len(jobs)


def test_every_job_has_a_file_of_its_own() -> None:
    jobs = [
        job
        for name in paper_tables()
        for protocol in ("common", "published")
        for job in table_jobs(name, protocol, 0, 1)
    ]
    files = {(job.cell.key, job.config.protocol, job.config.seed): job.file for job in jobs}
    assert len(set(files.values())) == len(files)


@pytest.mark.parametrize(
    ("method", "settings", "changed"),
    [
        ("npbml-1", {"inner": {"steps": 5}, "device": "cpu", "test": {"tasks": 7}}, ""),
        ("npbml-1", {"inner": {"steps": 9}, "ways": 4}, "ways=4, inner.steps=9"),
        ("npbml-1", {"scorer": {"rounds": 3}, "loss": {"score_weight": 0.1}}, ""),  # it asks for no scores
        (
            "npbml-8",
            {"scorer": {"rounds": 3}, "loss": {"score_weight": 0.1}, "scorer_training": {"steps": 5}},
            "loss.score_weight=0.1, scorer.rounds=3, scorer_training.steps=5",
        ),
    ],
)
def test_a_result_is_told_apart_by_what_differs_from_the_protocol(
    tmp_path: Path, method: str, settings: dict[str, Any], changed: str
) -> None:
    variation = "support" if method == "npbml-1" else ""
    cell = TableCell("NPBML", method, "cifar-fs", "conv4", 1, variation=variation)
    job = plan(cell, "published", 3, settings, tmp_path, tmp_path)
    assert job.config.learner.inner.batch == (variation or "joint")
    words = [f"cifar-fs-conv4-{job.config.learner.ways}way-1shot", method, variation, "published-seed3.json"]
    assert job.file.name == "-".join(word for word in words if word)
    about = {name: getattr(cell, name) for name in ("method", "variation", "dataset", "backbone", "shots")}
    found = {"protocol": "published", "seed": 3, "tasks": 7, "accuracy": 50.0, "ci95": 1.0}
    write_json(job.file, about | found | {"config": to_file(method_config(job.config, cell.method))})
    assert read_result(job.file).changed == changed
    own = {leaf.old_name: leaf.old_value for leaf in leaves(method_config(job.config, cell.method))}
    write_json(job.file, about | found | {"config": nested(own | REMOVED)})  # as version 0.1 wrote it
    assert read_result(job.file).changed == changed


def test_a_result_tells_where_it_comes_from(done: Job) -> None:
    data = json.loads(done.file.read_text())
    assert from_file(data["config"]) == method_config(done.config, done.cell.method)
    assert data["config"]["net"]["filters"] == 3 and data["config"]["loss"]["inductive"] is False
    assert set(data["seconds"]) == {"pretrain", "train", "test"} and data["tasks"] == 4
    assert data["environment"]["torch"] and data["device"]
    assert {"date", "commit", "validation", "ci95", "version"} <= data.keys() and "paper" not in data
    result = read_result(done.file)
    assert (result.accuracy, result.seed, result.cell.key) == (data["accuracy"], 0, done.cell.key)
    assert result.calibration == (data["nll"], data["ece"]) and result.scores_calibration is None
    assert "net.filters=3" in result.changed and "seed" not in result.changed
    assert read_results(done.file.parent) == [result]


def test_a_result_of_an_older_version_says_nothing_of_calibration(done: Job, tmp_path: Path) -> None:
    data = json.loads(done.file.read_text())
    old = {name: value for name, value in data.items() if name not in ("nll", "ece", "temperature")}
    scores = {"accuracy": 50.0, "ci95": 1.0}
    for number, given in enumerate(
        (old, data | {"scores": scores | {"nll": 0.5, "ece": 2.0}}, old | {"scores": scores})
    ):
        (tmp_path / f"{number}.json").write_text(json.dumps(given))
    first, second, third = read_results(tmp_path)
    assert first.calibration is None and first.accuracy == data["accuracy"]
    assert second.scores_calibration == (0.5, 2.0) and third.scores == (50.0, 1.0)
    assert third.scores_calibration is None


def test_it_is_done_until_more_tasks_are_asked_for(done: Job, dataset: str, tmp_path: Path) -> None:
    assert done.done()
    place = done.file.parent.parent
    assert job_of(place, dataset, test={"tasks": 2}).done()
    assert not job_of(place, dataset, test={"tasks": 5}).done()
    assert not job_of(place, dataset, seed=1).done() and not job_of(tmp_path, dataset).done()


def test_a_result_or_a_run_with_other_settings_is_refused(done: Job, dataset: str) -> None:
    other = job_of(done.file.parent.parent, dataset, inner={"steps": 3})
    with pytest.raises(RunError, match=r"seed0\.json has a result with another inner\.steps.*--results"):
        other.done()
    with pytest.raises(RunError, match=r"is a run with another inner\.steps.*--runs"):
        other.check_folder()
    done.check_folder()


class Heard(Observer):
    def __init__(self) -> None:
        self.words: list[str] = []

    def said(self, words: str) -> None:
        self.words.append(words)


def test_a_stage_is_taken_over_from_another_number_of_shots(done: Job, dataset: str, tmp_path: Path) -> None:
    heard, five = Heard(), job_of(tmp_path, dataset, shots=5)
    run = Pipeline.start(five.folder, five.config, heard)
    run.take_over("pretrain", [tmp_path / "none", done.folder])
    assert heard.words == [f"pretrain: taken over from {done.folder}"]
    names = ("network.safetensors", "done.json", "metrics.jsonl")
    before = {name: (done.folder / "pretrain" / name).read_bytes() for name in names}
    assert {path.name: path.read_bytes() for path in (five.folder / "pretrain").iterdir()} == before
    run.take_over("pretrain", [done.folder])
    assert len(heard.words) == 1
    run.run("npbml-1")


def test_a_stage_with_other_settings_or_images_is_not_taken_over(done: Job, dataset: str, tmp_path: Path) -> None:
    for number, settings in enumerate(({"seed": 1}, {"pretrain": SMALL["pretrain"] | {"steps": 2}})):
        job = job_of(tmp_path / str(number), dataset, **settings)
        run = Pipeline.start(job.folder, job.config)
        run.take_over("pretrain", [done.folder])
        assert not (job.folder / "pretrain").exists()
    job = job_of(tmp_path / "images", dataset, shots=5)
    run = Pipeline.start(job.folder, job.config)
    other = tmp_path / "other"
    shutil.copytree(done.folder, other)
    (other / "environment.json").write_text('{"data": "other images"}')
    run.take_over("pretrain", [other])
    assert not (job.folder / "pretrain").exists()


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda text: text[:40], "cannot be read"),
        (lambda text: "[]", "is damaged"),
        (lambda text: json.dumps(json.loads(text) | {"accuracy": "high"}), "accuracy takes a number"),
        (lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "tasks"}), "has no 'tasks'"),
    ],
)
def test_a_damaged_file_is_named(done: Job, tmp_path: Path, damage: Any, why: str) -> None:
    (tmp_path / "bad.json").write_text(damage(done.file.read_text()))
    with pytest.raises(RunError, match=why) as error:
        read_results(tmp_path)
    assert "bad.json" in str(error.value)


def test_a_configuration_of_another_version_is_named(done: Job, dataset: str, tmp_path: Path) -> None:
    job = job_of(tmp_path, dataset)
    data = json.loads(done.file.read_text())
    job.file.parent.mkdir()
    job.file.write_text(json.dumps(data | {"config": data["config"] | {"unheard_of": 1}}))
    with pytest.raises(RunError, match=r"seed0\.json is damaged or of another version of npbml"):
        job.done()


def test_the_commit_is_known_in_a_checkout_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = commit()
    assert found is None or len(found.removesuffix("-dirty")) == 40
    monkeypatch.setattr("npbml.lab.reproduce.__file__", str(tmp_path / "reproduce.py"))
    assert commit() is None
    monkeypatch.setenv("PATH", "")
    assert commit() is None
