"""A run folder: what it keeps, whom it lets in, and which settings each of its stages depends on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import npbml
from npbml.cli.stages import prepare_for
from npbml.config import Config, override, preset
from npbml.data.store import ClassEntry, Store
from npbml.engine.evaluate import ACCURACY, evaluate, learner_answers
from npbml.environment import environment
from npbml.errors import DataError, RunError, SettingError
from npbml.files import load_tensors
from npbml.methods import RECIPES
from npbml.runs import Run
from npbml.stages.loop import Loop

SMALL: dict[str, Any] = {
    "ways": 3,
    "queries": 3,
    "device": "cpu",
    "net": {"filters": 3},
    "loss": {"hidden": 4},
    "inner": {"steps": 2},
    "pretrain": {"steps": 3, "batch": 4, "validate_every": 3, "validation_tasks": 2},
    "relation": {"widths": [2], "pools": 1, "steps": 2, "validate_every": 2, "validation_tasks": 2},
    "train": {"steps": 2, "validate_every": 2, "validation_tasks": 2},
    "test": {"tasks": 4},
    "engine": {"tasks": "together"},
}


def write_store(folder: Path, counts: tuple[int, ...] = (6,) * 10) -> Path:
    """A data set of random pictures: four classes to train, three to validate, the others to test."""
    images = np.random.default_rng(0).integers(0, 256, (sum(counts), 1, 16, 16), dtype=np.uint8)
    entries, start = [], 0
    for number, count in enumerate(counts):
        split = "train" if number < 4 else "val" if number < 7 else "test"
        entries.append(ClassEntry(f"class {number}", split, start, count))  # type: ignore[arg-type]
        start += count
    Store.write(folder, name="random", images=images, classes=entries, provenance={})
    return folder


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    dataset = write_store(tmp_path_factory.mktemp("data") / "random")
    return override(preset("quick"), {**SMALL, "dataset": str(dataset)})


@pytest.fixture(scope="module")
def done(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that has trained and tested everything."""
    run = Run.start(tmp_path_factory.mktemp("runs") / "done", config)
    run.pretrain()
    run.relation()
    for method in ("npbml", "maml"):
        run.train(method)
    for method in ("npbml", "maml", "prototypes"):
        run.test(method)
    return run


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_a_record_has_what_tells_the_result(done: Run) -> None:
    records = read(done.folder / "results.json")
    assert [record["method"] for record in records] == ["npbml", "maml", "prototypes"]
    stages = [{"pretrain", "relation", "train", "test"}, {"pretrain", "train", "test"}, {"pretrain", "test"}]
    for record, seconds in zip(records, stages, strict=True):
        assert set(record["seconds"]) == seconds
        assert record["dataset"] == done.config.dataset and record["version"] == npbml.__version__
        assert (record["protocol"], record["backbone"]) == ("quick", "conv4")
        assert (record["ways"], record["shots"], record["seed"], record["tasks"]) == (3, 1, 0, 4)
        per_task = 100 * torch.tensor(read(done.folder / record["method"] / "test.json")["per_task"]).double()
        assert record["accuracy"] == pytest.approx(per_task.mean().item(), abs=1e-3)
        assert record["ci95"] == pytest.approx(1.96 * per_task.std().item() / 2, abs=1e-3)


@pytest.mark.parametrize("method", ["npbml", "maml", "prototypes"])
def test_a_test_that_is_repeated_replaces_its_own_record_where_it_was(done: Run, method: str) -> None:
    before = done.results()
    record = done.test(method)
    expected = [record if old["method"] == method else old for old in before]
    assert done.results() == expected
    assert [old["accuracy"] for old in before] == [new["accuracy"] for new in expected]


def test_ticks_count_the_tasks_of_a_test(done: Run) -> None:
    for method in ("maml", "npbml"):
        ticks: list[int] = []
        done.test(method, ticks.append)
        assert sum(ticks) == 4


def test_a_paired_difference_is_over_the_tasks_that_both_were_given(done: Run) -> None:
    mine, theirs = (np.array(read(done.folder / method / "test.json")["per_task"]) for method in ("npbml", "maml"))
    found, back = (
        done.paired_difference(*pair, done.config.dataset) for pair in (("npbml", "maml"), ("maml", "npbml"))
    )
    assert found is not None and back is not None
    difference = 100 * (mine - theirs)
    assert found.mean == pytest.approx(difference.mean(), abs=1e-9) and back.mean == -found.mean
    assert found.ci95 == pytest.approx(1.96 * difference.std(ddof=1) / 2, abs=1e-9)
    itself = done.paired_difference("maml", "maml", done.config.dataset)
    assert itself is not None and itself == (0.0, 0.0)


def test_a_difference_needs_a_pair(done: Run) -> None:
    assert done.paired_difference("npbml", "npbml-quirks", done.config.dataset) is None
    longer = Run(done.folder, override(done.config, {"test": {"tasks": 6}}))
    before = done.paired_difference("npbml", "maml", done.config.dataset)
    longer.test("maml")
    try:  # the first of the longer test's tasks are the others'
        assert done.paired_difference("npbml", "maml", done.config.dataset) == before
    finally:
        done.test("maml")


def test_the_environment_names_what_the_outcome_may_depend_on(done: Run) -> None:
    told = read(done.folder / "environment.json")
    assert told == json.loads(json.dumps(environment(done.config, torch.device("cpu"), done.store.checksum)))
    assert told["npbml"] == npbml.__version__ and told["seed"] == 0 and told["device"].startswith("CPU")
    assert {"python", "torch", "numpy", "pillow", "matplotlib", "safetensors", "platform", "cores"} <= set(told)


def test_an_open_run_is_the_run_that_was_started(done: Run) -> None:
    again = Run.open(done.folder)
    assert again.config == done.config and again.results() == done.results()
    assert again.images == done.images
    assert again.images.channels == 1 and again.images.size == 16


def test_what_is_done_is_not_done_again(done: Run) -> None:
    before = contents(done.folder)
    run = Run.start(done.folder, done.config)
    summaries = [run.pretrain(), run.relation(), run.train("npbml"), run.train("maml")]
    assert [summary["steps"] for summary in summaries] == [3, 2, 2, 2]
    assert contents(done.folder) == before


def test_scores_by_prototypes_need_no_relation_network_and_methods_share_features(
    config: Config, tmp_path: Path
) -> None:
    run = Run.start(tmp_path / "run", override(config, {"relation": {"kind": "prototypes"}}))
    assert run.needs(["npbml", "maml"]) == ["pretrain"]
    with pytest.raises(SettingError, match="nothing is to be trained"):
        run.relation()
    run.pretrain()
    for method in ("npbml", "maml"):
        run.train(method)
        run.test(method)
    assert [record["method"] for record in run.results()] == ["npbml", "maml"]
    made = [key[0] for key in run._features]  # of train, val and test; the features for both
    assert sorted(made) == 3 * ["embeddings"] + 3 * ["features"]


def test_an_encoder_that_only_scores_is_a_stage_that_other_runs_take_over(config: Config, tmp_path: Path) -> None:
    settings = override(config, {"relation": {"kind": "encoder", "widths": [2, 3]}})
    run = Run.start(tmp_path / "run", settings)
    assert run.needs(["npbml"]) == ["pretrain", "relation"] and run.needs(["maml"]) == ["pretrain"]
    run.pretrain()
    assert run.relation()["steps"] == settings.relation.steps
    run.train("npbml")
    run.test("npbml")
    weights, _ = load_tensors(run.folder / "relation" / "relation.safetensors")
    found = run.learner().relation.encoder.state_dict()  # type: ignore[union-attr]
    assert all(torch.equal(tensor, weights[f"network.{name}"]) for name, tensor in found.items())
    changes = {"shots": 2, "net": {"filters": 5}, "pretrain": {"steps": 4}, "relation": {"lr": 0.5}}
    other = Run.start(tmp_path / "other", override(settings, changes))
    for stage in ("pretrain", "relation"):
        other.take_over(stage, [run.folder])
    assert other._loop("relation").done and not other._loop("pretrain").done
    with pytest.raises(SettingError, match=r"halves an image 5 times, 16 pixels are too few: give fewer"):
        Run.start(tmp_path / "deep", override(settings, {"relation": {"widths": [2] * 5}}))
    small = {"image_size": 32, "relation": {"widths": [2] * 5, "crop_size": 16}}
    with pytest.raises(SettingError, match=r"halves an image 5 times, 16 pixels are too few: give fewer"):
        Run.start(tmp_path / "small", override(settings, small))


def test_a_taught_encoder_waits_for_what_teaches_it_and_depends_on_it(config: Config, tmp_path: Path) -> None:
    settings = override(config, {"relation": {"kind": "encoder", "widths": [2, 3]}, "pretrain": {"taught": True}})
    run = Run.start(tmp_path / "run", settings)
    assert run.needs(["maml"]) == run.needs(["prototypes"]) == ["relation", "pretrain"]
    with pytest.raises(RunError, match=r"relation is not finished: run `npbml relation --run"):
        run.pretrain()
    prepare_for(run, ["maml"])
    run.train("maml")
    run.test("maml")
    assert set(run.results()[0]["seconds"]) == {"pretrain", "relation", "train", "test"}

    plain = Run.start(tmp_path / "plain", override(settings, {"pretrain": {"taught": False}}))
    other = Run.start(tmp_path / "other", override(settings, {"relation": {"steps": 3}}))
    same = Run.start(tmp_path / "same", override(settings, {"shots": 2}))
    done = []
    for third in (plain, other, same):
        for stage in ("relation", "pretrain"):
            third.take_over(stage, [run.folder])
            done.append(third._loop(stage).done)
    assert done == [True, False, False, False, True, True]


def test_learners_that_come_along_are_found_by_name(
    done: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(npbml, "LEARNERS", done.folder.parent)
    assert done.folder.name in npbml.shipped()
    loaded = npbml.load(done.folder.name, device="cpu").state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in done.learner().state_dict().items())
    with pytest.raises(RunError, match="no run folder elsewhere, and no such learner comes along: done"):
        npbml.load("elsewhere")


def test_a_learner_is_that_of_its_method(done: Run) -> None:
    assert done.learner("maml").settings.warp.kind == "fixed" and done.learner().settings.warp.kind == "learned"
    loaded = npbml.load(done.folder, "maml", device="cpu").state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in done.learner("maml").state_dict().items())


def test_stages_that_need_others_say_which(config: Config, tmp_path: Path) -> None:
    run = Run.start(tmp_path / "run", config)
    for act in (lambda: run.train("npbml"), lambda: run.test("maml"), lambda: run.test("prototypes")):
        with pytest.raises(RunError, match="pretrain is not finished: run `npbml pretrain --run"):
            act()
    run.pretrain()
    with pytest.raises(RunError, match="relation is not finished: run `npbml relation --run"):
        run.train("npbml")
    with pytest.raises(RunError, match="maml is not finished: run `npbml train --method maml --run"):
        run.test("maml")
    with pytest.raises(RunError, match=r"train it with `npbml train --run .* --method maml`"):
        run.learner("maml")
    assert run.results() == []


def fingerprints(config: Config, changes: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """The fingerprint of every stage without and with some changes."""
    runs = [Run(Path("nowhere"), c) for c in (config, override(config, changes))]
    stages = ("pretrain", "relation", "npbml", "maml")
    return {stage: tuple(run._loop(stage).fingerprint for run in runs) for stage in stages}  # type: ignore[misc]


DEPENDS: list[tuple[dict[str, Any], set[str]]] = [
    ({"train": {"steps": 9}}, {"npbml", "maml"}),
    ({"train": {"lr": {"phi": 0.5}}}, {"npbml", "maml"}),
    ({"inner": {"lr": 0.5}}, {"npbml", "maml"}),
    ({"loss": {"hidden": 7}}, {"npbml", "maml"}),
    ({"loss": {"inductive": False}}, {"npbml"}),
    ({"film": {"enabled": False}}, {"npbml"}),
    ({"pretrain": {"lr": 0.5}}, {"pretrain", "npbml", "maml"}),
    ({"relation": {"lr": 0.5}}, {"relation", "npbml", "maml"}),
    ({"shots": 2}, {"relation", "npbml", "maml"}),
    ({"warp": {"kernel": 1}}, {"pretrain", "npbml", "maml"}),
    ({"net": {"filters": 5}}, {"pretrain", "relation", "npbml", "maml"}),
    ({"seed": 5}, {"pretrain", "relation", "npbml", "maml"}),
    ({"dataset": "elsewhere"}, {"pretrain", "relation", "npbml", "maml"}),
    ({"pretrain": {"augment": {"jitter": 0.1}}}, {"pretrain", "relation", "npbml", "maml"}),
    ({"test": {"tasks": 99}}, set()),
    ({"device": "auto"}, set()),
    ({"baselines": []}, set()),
    ({"checkpoint_seconds": 0.0}, set()),
    ({"train": {"skips": 3}}, set()),
    ({"method": "maml"}, set()),
]


@pytest.mark.parametrize(("changes", "stages"), DEPENDS, ids=[str(changes) for changes, _ in DEPENDS])
def test_a_change_of_settings_is_a_change_of_the_stages_that_depend_on_them(
    config: Config, changes: dict[str, Any], stages: set[str]
) -> None:
    """A stage may be refused too often, but it must not be taken for one that it is not."""
    found = fingerprints(config, changes)
    assert {stage for stage, (before, after) in found.items() if before != after} >= stages
    if "train" in changes or "inner" in changes or not stages:
        assert {stage for stage, (before, after) in found.items() if before != after} == stages


def test_every_stage_has_a_fingerprint_of_its_own(config: Config) -> None:
    found = fingerprints(config, {})
    assert len({before for before, _ in found.values()}) == 4


def test_a_loop_is_the_stages_own(config: Config) -> None:
    run = Run(Path("somewhere"), config)
    loops = [run._loop(stage) for stage in ("pretrain", "relation", "maml")]
    found = [(loop.folder, loop.weights, loop.steps, loop.validate_every) for loop in loops]
    assert found == [
        (Path("somewhere/pretrain"), "network.safetensors", 3, 3),
        (Path("somewhere/relation"), "relation.safetensors", 2, 2),
        (Path("somewhere/maml"), "learner.safetensors", 2, 2),
    ]


def test_another_configuration_is_refused_and_loses_nothing(done: Run) -> None:
    before = contents(done.folder)
    for changes, names in (
        ({"inner": {"steps": 3}}, "another inner.steps:"),
        ({"ways": 2, "train": {"lr": {"phi": 0.5}}}, "another ways, train.lr.phi:"),
        ({"ways": 2, "shots": 2, "seed": 2, "queries": 2, "net": {"filters": 2}}, "and more: choose another"),
    ):
        with pytest.raises(RunError, match=names):
            Run.start(done.folder, override(done.config, changes))
    assert contents(done.folder) == before


def test_free_settings_may_differ(done: Run) -> None:
    changes = {"method": "maml", "baselines": [], "checkpoint_seconds": 1.0, "test": {"tasks": 6}}
    run = Run.start(done.folder, override(done.config, changes))
    assert run.config.test.tasks == 6 and run.config.method == "maml"
    assert Run.open(done.folder).config == done.config


Occupy = Callable[[Path], None]


def file_instead(path: Path) -> None:
    path.write_text("a file")


def other_folder(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").write_text("years of work")


@pytest.mark.parametrize("occupy", [file_instead, other_folder])
def test_what_is_not_a_run_folder_is_refused_and_untouched(config: Config, tmp_path: Path, occupy: Occupy) -> None:
    occupy(tmp_path / "place")
    before = contents(tmp_path)
    with pytest.raises(RunError, match="place is there, but it is not a run folder"):
        Run.start(tmp_path / "place", config)
    assert contents(tmp_path) == before


def test_a_folder_below_a_file_is_refused(config: Config, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="could not be saved"):
        Run.start(tmp_path / "file" / "run", config)


def test_an_empty_folder_is_taken(config: Config, tmp_path: Path) -> None:
    Run.start(tmp_path, config)
    assert Run.open(tmp_path).config == config


@pytest.mark.parametrize("left", [["environment.json"], ["environment.json", ".config.json.part"]])
def test_a_start_that_was_killed_half_way_can_be_given_again(
    config: Config, tmp_path: Path, left: list[str]
) -> None:
    """kill -9 between the two files of a new run leaves a folder that is the run's all the same."""
    for name in left:
        (tmp_path / name).write_text("{}")
    Run.start(tmp_path, config)
    assert Run.open(tmp_path).config == config


@pytest.mark.parametrize(
    ("counts", "changes", "words"),
    [
        ((6,) * 9 + (3,), {}, r"Class 'class 9' has 3 images, and a task needs 4 .*1 shots \+ 3 queries"),
        ((6, 2) + (6,) * 8, {}, r"Class 'class 1' has 2 images"),
        ((6,) * 10, {"shots": 4}, r"has 6 images, and a task needs 7 of each class \(4 shots \+ 3 queries\)"),
        ((6,) * 9, {}, "3 ways were asked for, and there are only 2 classes"),
        ((6,) * 7, {}, "no classes in its test split"),
        ((6,) * 10, {"pretrain": {"validation_shots": 5}}, r"needs 8 of each class \(5 shots \+ 3 queries\)"),
    ],
)
def test_data_that_cannot_fill_the_tasks_is_refused_before_anything_is_written(
    config: Config, tmp_path: Path, counts: tuple[int, ...], changes: dict[str, Any], words: str
) -> None:
    dataset = write_store(tmp_path / "data", counts)
    with pytest.raises(DataError, match=words):
        Run.start(tmp_path / "run", override(config, {"dataset": str(dataset), **changes}))
    assert not (tmp_path / "run").exists()


def test_unknown_methods_and_baselines_are_refused_before_anything_is_written(
    config: Config, tmp_path: Path
) -> None:
    for changes, words in (
        ({"method": "mamml"}, "no method 'mamml': choose from npbml"),
        ({"baselines": ["maml", "prototype"]}, "no baseline 'prototype': choose from prototypes, npbml"),
        ({"device": "cuda:99"}, "device=cuda:99 asks for a GPU"),
    ):
        with pytest.raises(SettingError, match=words):
            Run.start(tmp_path / "run", override(config, changes))
    assert not (tmp_path / "run").exists()


def test_a_folder_lets_in_one_at_a_time(config: Config, tmp_path: Path) -> None:
    run = Run.start(tmp_path, config)
    with run.locked(), pytest.raises(RunError, match="Another process is at work in"), Run.open(tmp_path).locked():
        pass
    with run.locked():
        pass


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("maml/learner.safetensors", b"\x01" * 99, r"learner\.safetensors is damaged"),
        ("pretrain/done.json", b"{", r"done\.json cannot be read"),
        ("maml/done.json", b"{}", "made with other settings"),
        ("results.json", b"[", r"results\.json cannot be read"),
    ],
)
def test_damaged_files_are_refused_by_name(done: Run, file: str, content: bytes, words: str) -> None:
    path = done.folder / file
    good = path.read_bytes()
    path.write_bytes(content)
    try:
        with pytest.raises(RunError, match=words):
            Run.open(done.folder).test("maml")
    finally:
        path.write_bytes(good)


def test_weights_of_another_size_are_refused_by_name(done: Run, config: Config) -> None:
    other = Run(done.folder, override(config, {"net": {"filters": 5}}))
    with pytest.raises(RunError, match=r"learner\.safetensors does not fit this run's settings"):
        other.learner("maml")


def test_a_stage_that_is_done_has_both_of_its_files(done: Run) -> None:
    loop = done._loop("pretrain")
    assert loop.done
    for missing in ("done.json", loop.weights):
        path = loop.folder / missing
        content = path.read_bytes()
        path.unlink()
        assert not Loop(**vars(loop)).done
        path.write_bytes(content)
    assert loop.done


def test_an_ensemble_is_tested_by_the_mean_of_its_logits(config: Config, tmp_path: Path) -> None:
    changes = {"train": {"steps": 4, "validate_every": 1, "ensemble": 3}}
    run = Run.start(tmp_path / "run", override(config, changes))
    run.pretrain()
    assert run.train("maml")["kept"] == 3
    members = run.learners("maml")
    assert len(members) == 3
    best = run.learner("maml").state_dict()
    assert all(torch.equal(tensor, best[name]) for name, tensor in members[0].state_dict().items())
    assert any(not torch.equal(members[1].state_dict()[name], best[name]) for name in best)
    source = run.source(members[0], "test")
    answer = learner_answers(members, source)
    per_task = evaluate(answer, source.draw, 4, 10, 0, "test")
    assert run.test("maml")["accuracy"] == pytest.approx(100 * per_task.mean().item(), abs=1e-3)


def test_beside_a_learner_the_scores_are_tested_that_it_is_given(config: Config, tmp_path: Path) -> None:
    run = Run.start(tmp_path / "run", override(config, {"relation": {"kind": "prototypes"}}))
    run.pretrain()
    for method in ("npbml", "maml"):
        run.train(method)
    learner = run.learner("npbml")
    source = run.source(learner, "test")

    def scores(indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        prepared, labels = source.prepare(indices)
        return prepared.scores, labels

    expected = ACCURACY.over(evaluate(scores, source.draw, run.config.test.tasks, 10, 0, "test"))
    record = run.test("npbml")
    assert record["scores"] == {"accuracy": round(expected.mean, 3), "ci95": round(expected.ci95, 3)}
    assert "scores" not in run.test("maml")


def test_a_run_from_scratch_needs_no_pretraining(config: Config, tmp_path: Path) -> None:
    changes = {
        "init": {"source": "scratch"},
        "net": {"frozen_blocks": 0, "affine": "meta", "stem_norm": "batch"},
        "pretrain": {"warp": False},
    }
    run = Run.start(tmp_path / "run", override(config, {**changes, "baselines": []}))
    assert run.needs(["maml"]) == [] and run.needs(["npbml"]) == ["relation"]
    run.train("maml")
    record = run.test("maml")
    assert set(record["seconds"]) == {"train", "test"}
    with pytest.raises(RunError, match="pretrain is not finished"):
        run.test("prototypes")


def test_a_recipe_of_ones_own_is_kept_with_its_run(config: Config, tmp_path: Path) -> None:
    try:
        npbml.register("mine", npbml.compose("rates and matrices", "maml", precondition={"chain": ["kronecker"]}))
        run = Run.start(tmp_path / "run", override(config, {"method": "mine"}))
        run.pretrain()
        run.train("mine")
        before = run.test("mine")["accuracy"]
        weights = run.learner("mine").state_dict()
        assert any("precondition" in name for name in weights)

        del RECIPES["mine"]  # as in another process
        again = npbml.load(tmp_path / "run", device="cpu")
        assert again.settings.precondition.chain == ("kronecker",)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in again.state_dict().items())
        assert Run.open(tmp_path / "run").test("mine")["accuracy"] == before

        npbml.register("mine", npbml.compose("another", "maml", precondition={"chain": ["rates"]}))
        with pytest.raises(RunError, match="another recipe than the mine given now"):
            Run.open(tmp_path / "run")
    finally:
        RECIPES.pop("mine", None)


def test_a_method_that_makes_no_sense_in_a_run_is_refused_before_it_begins(config: Config, tmp_path: Path) -> None:
    changes = {"head": {"kind": "unicorn"}, "inner": {"layers": "head"}}
    with pytest.raises(SettingError, match=r"inner\.layers=head adapts none of them"):
        Run.start(tmp_path / "run", override(config, changes))
    with pytest.raises(SettingError, match=r"loss\.transductive needs"):
        Run.start(
            tmp_path / "run",
            override(config, {"method": "maml", "inner": {"batch": "support"}, "baselines": ["npbml"]}),
        )
    assert not (tmp_path / "run").exists()


def test_a_gradient_without_an_svd_is_told_as_any_other(config: Config, tmp_path: Path) -> None:
    run = Run.start(tmp_path / "run", override(config, {"inner": {"lr": 1e25}}))
    run.pretrain()
    with pytest.raises(RunError, match=r"Meta-step 1 of gap is not finite"):
        run.train("gap")


def test_the_sizes_of_baselines_count_too(config: Config, tmp_path: Path) -> None:
    changes = {"method": "maml", "baselines": ["npbml"], "relation": {"widths": [2, 2, 2, 2], "pools": 3}}
    with pytest.raises(SettingError, match=r"lower relation\.pools"):
        Run.start(tmp_path / "run", override(config, changes))


def test_a_start_that_is_killed_before_the_recipe_is_kept_begins_again(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    try:
        npbml.register("mine", npbml.compose("mine", "maml", precondition={"chain": ["rates"]}))
        own = override(config, {"method": "mine"})
        for name in ("npbml.runs.to_dict", "npbml.runs.keep_recipe"):
            folder = tmp_path / name
            with monkeypatch.context() as patched:
                patched.setattr(name, killed)
                with pytest.raises(KeyboardInterrupt):
                    Run.start(folder, own)
            run = Run.start(folder, own)
            run.pretrain()
            run.train("mine")
            assert (folder / "mine" / "recipe.json").exists()
    finally:
        RECIPES.pop("mine", None)
