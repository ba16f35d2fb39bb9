"""A run: its stages in order, what its tests record, and what it refuses before anything is written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import npbml
from npbml.cli.stages import run_stages
from npbml.engine.calibration import best_temperature, expected_calibration_error, log_loss, score_logits
from npbml.engine.evaluate import accuracy, all_answers, evaluate, learner_answers, over_tasks
from npbml.errors import DataError, RunError, SettingError
from npbml.lab.environment import environment
from npbml.lab.pipeline import Pipeline
from npbml.lab.protocols import preset
from npbml.lab.schema import Config, check_config, override
from npbml.measures import ACCURACY
from npbml.parts import METHODS
from npbml.stages.pretrain import prototype_answers
from npbml.tensor_files import load_tensors

Contents = Callable[[Path], dict[Path, bytes]]


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_a_record_has_what_tells_the_result(done: Pipeline) -> None:
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
        assert (
            0 < record["nll"] == round(record["nll"], 4) and 0 <= record["ece"] == round(record["ece"], 2) <= 100
        )
        assert (record["temperature"] == 1.0) == (record["method"] != "prototypes")
        assert ("scores" in record) == (record["method"] == "npbml")
    assert set(records[0]["scores"]) == {"accuracy", "ci95", "nll", "ece"}


@pytest.mark.parametrize("method", ["npbml", "maml", "prototypes"])
def test_a_test_that_is_repeated_replaces_its_own_record_where_it_was(done: Pipeline, method: str) -> None:
    before = done.records.all()
    record = done.test(method)
    expected = [record if old["method"] == method else old for old in before]
    assert done.records.all() == expected
    assert [old["accuracy"] for old in before] == [new["accuracy"] for new in expected]


def test_ticks_count_the_tasks_of_a_test(done: Pipeline) -> None:
    for method in ("maml", "npbml", "prototypes"):
        ticks: list[int] = []
        done.test(method, ticks.append)
        assert sum(ticks) == 4


def test_a_paired_difference_is_over_the_tasks_that_both_were_given(done: Pipeline) -> None:
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


def test_a_difference_needs_a_pair(done: Pipeline) -> None:
    assert done.paired_difference("npbml", "npbml-quirks", done.config.dataset) is None
    longer = Pipeline(done.folder.path, override(done.config, {"test": {"tasks": 6}}))
    before = done.paired_difference("npbml", "maml", done.config.dataset)
    longer.test("maml")
    try:  # the first of the longer test's tasks are the others'
        assert done.paired_difference("npbml", "maml", done.config.dataset) == before
    finally:
        done.test("maml")


def test_the_environment_names_what_the_outcome_may_depend_on(done: Pipeline) -> None:
    told = read(done.folder / "environment.json")
    assert told == json.loads(json.dumps(environment(done.config, torch.device("cpu"), done.data.checksum)))
    assert told["npbml"] == npbml.__version__ and told["seed"] == 0 and told["device"].startswith("CPU")
    assert {"python", "torch", "numpy", "pillow", "matplotlib", "safetensors", "platform", "cores"} <= set(told)


def test_an_open_run_is_the_run_that_was_started(done: Pipeline) -> None:
    again = Pipeline.open(done.folder.path)
    assert again.config == done.config and again.records.all() == done.records.all()
    assert again.images == done.images
    assert again.images.channels == 1 and again.images.size == 16


def test_what_is_done_is_not_done_again(done: Pipeline, contents: Contents) -> None:
    before = contents(done.folder.path)
    run = Pipeline.start(done.folder.path, done.config)
    summaries = [run.run(stage) for stage in ("pretrain", "relation", "npbml", "maml")]
    assert [summary["steps"] for summary in summaries] == [3, 2, 2, 2]
    assert contents(done.folder.path) == before


def test_scores_by_prototypes_need_no_relation_network_and_methods_share_features(
    config: Config, tmp_path: Path
) -> None:
    run = Pipeline.start(tmp_path / "run", override(config, {"scorer": {"kind": "prototypes"}}))
    assert run.needs(["npbml", "maml"]) == ["pretrain"]
    with pytest.raises(SettingError, match=r"scorer\.kind=prototypes .*nothing to train"):
        run.run("relation")
    run.run("pretrain")
    for method in ("npbml", "maml"):
        run.run(method)
        run.test(method)
    assert [record["method"] for record in run.records.all()] == ["npbml", "maml"]
    made = [key[0] for key in run._cache]  # of train, val and test; the features for both
    assert sorted(made) == 3 * ["embeddings"] + 3 * ["features"]


def test_an_encoder_that_only_scores_is_a_stage_that_other_runs_take_over(config: Config, tmp_path: Path) -> None:
    settings = override(config, {"scorer": {"kind": "encoder", "widths": [2, 3]}})
    run = Pipeline.start(tmp_path / "run", settings)
    assert run.needs(["npbml"]) == ["pretrain", "relation"] and run.needs(["maml"]) == ["pretrain"]
    run.run("pretrain")
    assert run.run("relation")["steps"] == settings.scorer_training.steps
    run.run("npbml")
    run.test("npbml")
    weights, _ = load_tensors(run.folder / "relation" / "relation.safetensors")
    found = run.learner().scorer.encoder.state_dict()  # type: ignore[union-attr]
    assert found and all(torch.equal(tensor, weights[f"network.{name}"]) for name, tensor in found.items())
    changes = {"shots": 2, "net": {"filters": 5}, "pretrain": {"steps": 4}, "scorer_training": {"lr": 0.5}}
    other = Pipeline.start(tmp_path / "other", override(settings, changes))
    for stage in ("pretrain", "relation"):
        other.take_over(stage, [run.folder.path])
    assert [other.stage(stage).done(other.folder.path) for stage in ("relation", "pretrain")] == [True, False]
    with pytest.raises(SettingError, match=r"halves an image 5 times, 16 pixels are too few: give fewer"):
        Pipeline.start(tmp_path / "deep", override(settings, {"scorer": {"widths": [2] * 5}}))
    small = {"image_size": 32, "scorer": {"widths": [2] * 5}, "scorer_training": {"crop_size": 16}}
    with pytest.raises(SettingError, match=r"halves an image 5 times, 16 pixels are too few: give fewer"):
        Pipeline.start(tmp_path / "small", override(settings, small))


def test_a_taught_encoder_waits_for_what_teaches_it_and_depends_on_it(config: Config, tmp_path: Path) -> None:
    settings = override(config, {"scorer": {"kind": "encoder", "widths": [2, 3]}, "pretrain": {"distill": True}})
    run = Pipeline.start(tmp_path / "run", settings)
    assert run.needs(["maml"]) == run.needs(["prototypes"]) == ["relation", "pretrain"]
    with pytest.raises(RunError, match=r"relation is not finished: run `npbml scorer --run"):
        run.run("pretrain")
    run_stages(run, ["maml"])
    run.test("maml")
    assert set(run.records.all()[0]["seconds"]) == {"pretrain", "relation", "train", "test"}

    plain = Pipeline.start(tmp_path / "plain", override(settings, {"pretrain": {"distill": False}}))
    other = Pipeline.start(tmp_path / "other", override(settings, {"scorer_training": {"steps": 3}}))
    same = Pipeline.start(tmp_path / "same", override(settings, {"shots": 2}))
    done = []
    for third in (plain, other, same):
        for stage in ("relation", "pretrain"):
            third.take_over(stage, [run.folder.path])
            done.append(third.stage(stage).done(third.folder.path))
    assert done == [True, False, False, False, True, True]


def test_learners_that_come_along_are_found_by_name(
    done: Pipeline, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "learners").mkdir()
    learner = (done.folder / "npbml" / "learner.safetensors").read_bytes()
    (tmp_path / "learners" / "mine.safetensors").write_bytes(learner)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("npbml.catalogue.LEARNERS", tmp_path / "learners")
    assert npbml.shipped() == ["mine"]
    loaded = npbml.load("mine", device="cpu")
    assert loaded.settings == done.learner().settings and loaded.images == done.images
    assert all(
        torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in done.learner().state_dict().items()
    )
    with pytest.raises(
        RunError, match=r"no learner file or run folder elsewhere, and no such learner comes.*: mine"
    ):
        npbml.load("elsewhere")


def test_a_learner_is_that_of_its_method(done: Pipeline) -> None:
    assert done.learner("maml").settings.warp.kind == "fixed" and done.learner().settings.warp.kind == "learned"
    loaded = npbml.load(done.folder.path, "maml", device="cpu")
    assert loaded.settings == done.learner("maml").settings
    weights = done.learner("maml").state_dict()
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in weights.items())


def test_stages_that_need_others_say_which(config: Config, tmp_path: Path) -> None:
    run = Pipeline.start(tmp_path / "run", config)
    for act in (lambda: run.run("npbml"), lambda: run.test("maml"), lambda: run.test("prototypes")):
        with pytest.raises(RunError, match="pretrain is not finished: run `npbml pretrain --run"):
            act()
    run.run("pretrain")
    with pytest.raises(RunError, match="relation is not finished: run `npbml scorer --run"):
        run.run("npbml")
    with pytest.raises(RunError, match="maml is not finished: run `npbml train --method maml --run"):
        run.test("maml")
    with pytest.raises(RunError, match=r"train it with `npbml train --run .* --method maml`"):
        run.learner("maml")
    assert run.records.all() == []


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
    config: Config,
    make_store: Callable[..., Path],
    tmp_path: Path,
    counts: tuple[int, ...],
    changes: dict[str, Any],
    words: str,
) -> None:
    dataset = make_store(tmp_path / "data", counts)
    with pytest.raises(DataError, match=words):
        Pipeline.start(tmp_path / "run", override(config, {"dataset": str(dataset), **changes}))
    assert not (tmp_path / "run").exists()


def test_unknown_methods_and_baselines_are_refused_before_anything_is_written(
    config: Config, tmp_path: Path
) -> None:
    for changes, words in (
        ({"method": "mamml"}, r"no method 'mamml'\. Did you mean 'maml'\? Choose from npbml"),
        ({"baselines": ["maml", "prototype"]}, "no method 'prototype'. Did you mean 'prototypes'"),
        ({"device": "cuda:99"}, "device=cuda:99 asks for a GPU"),
    ):
        with pytest.raises(SettingError, match=words):
            Pipeline.start(tmp_path / "run", override(config, changes))
    assert not (tmp_path / "run").exists()


def test_images_that_have_changed_are_refused(
    config: Config, make_store: Callable[..., Path], tmp_path: Path
) -> None:
    own = override(config, {"dataset": str(make_store(tmp_path / "data"))})
    Pipeline.start(tmp_path / "run", own)
    make_store(tmp_path / "data", (7,) * 10)
    with pytest.raises(RunError, match=r"The images of .* have changed since .*run was begun"):
        Pipeline.start(tmp_path / "run", own).run("pretrain")


def test_a_folder_lets_in_one_at_a_time(config: Config, tmp_path: Path) -> None:
    run = Pipeline.start(tmp_path, config)
    with (
        run.at_work(),
        pytest.raises(RunError, match="Another process is at work in"),
        Pipeline.open(tmp_path).at_work(),
    ):
        pass
    with run.at_work():
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
def test_damaged_files_are_refused_by_name(done: Pipeline, file: str, content: bytes, words: str) -> None:
    path = done.folder / file
    good = path.read_bytes()
    path.write_bytes(content)
    try:
        with pytest.raises(RunError, match=words):
            Pipeline.open(done.folder.path).test("maml")
    finally:
        path.write_bytes(good)


def test_weights_of_another_size_are_refused_by_name(done: Pipeline, config: Config) -> None:
    other = Pipeline(done.folder.path, override(config, {"net": {"filters": 5}}))
    with pytest.raises(RunError, match=r"learner\.safetensors does not fit its settings"):
        other.learner("maml")
    for stage in ("pretrain", "relation"):  # as if it had been done with these settings
        (done.folder / stage / "done.json").rename(done.folder / stage / "aside")
    try:
        with pytest.raises(RunError, match=r"network\.safetensors does not fit this run's settings"):
            other.pretrained_network()
    finally:
        for stage in ("pretrain", "relation"):
            (done.folder / stage / "aside").rename(done.folder / stage / "done.json")


def test_a_stage_that_is_done_has_both_of_its_files(done: Pipeline) -> None:
    stage, folder = done.stage("pretrain"), done.folder.path
    assert stage.done(folder)
    for missing in ("done.json", stage.weights):
        path = folder / "pretrain" / missing
        content = path.read_bytes()
        path.unlink()
        assert not stage.done(folder)
        path.write_bytes(content)
    assert stage.done(folder)


def test_an_ensemble_is_tested_by_the_mean_of_its_logits(config: Config, tmp_path: Path) -> None:
    changes = {"train": {"steps": 4, "validate_every": 1, "ensemble": 3}}
    run = Pipeline.start(tmp_path / "run", override(config, changes))
    run.run("pretrain")
    assert run.run("maml")["kept"] == 3
    members = run.learners("maml")
    assert len(members) == 3
    best = run.learner("maml").state_dict()
    assert all(torch.equal(tensor, best[name]) for name, tensor in members[0].state_dict().items())
    assert any(not torch.equal(members[1].state_dict()[name], best[name]) for name in best)
    source = run.source(members[0], "test")
    answer = learner_answers(members, source)
    found = evaluate(answer, source.draw, 4, 10, 0, "test")
    assert run.test("maml")["accuracy"] == pytest.approx(100 * found.per_task.mean().item(), abs=1e-3)
    assert found.log_loss is not None
    assert run.test("maml")["nll"] == pytest.approx(found.log_loss.mean().item(), abs=1e-4)


def test_beside_a_learner_the_scores_are_tested_that_it_is_given(config: Config, tmp_path: Path) -> None:
    run = Pipeline.start(tmp_path / "run", override(config, {"scorer": {"kind": "prototypes"}}))
    run_stages(run, ["npbml", "maml"])
    learner = run.learner("npbml")
    source = run.source(learner, "test")

    def scores(indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        prepared, labels = source.prepare(indices)
        return prepared.scores, labels

    tasks = source.draw, run.config.test.tasks, 10, 0, "test"
    found = evaluate(scores, *tasks, as_logits=score_logits)
    expected, (values, labels) = over_tasks(ACCURACY, found.per_task), all_answers(scores, *tasks)
    record = run.test("npbml")
    shares = (values / values.sum(-1, keepdim=True)).gather(-1, labels.unsqueeze(-1)).double()
    assert found.bins is not None
    assert record["scores"] == {
        "accuracy": round(expected.mean, 3),
        "ci95": round(expected.ci95, 3),
        "nll": pytest.approx(-shares.log().mean().item(), abs=1e-4),
        "ece": round(expected_calibration_error(found.bins).item(), 2),
    }
    assert record["nll"] == pytest.approx(own_loss(learner, run, tasks), abs=1e-4)
    assert "scores" not in run.test("maml")


def own_loss(learner: npbml.Learner, run: Pipeline, tasks: Any) -> float:
    """The mean log loss of a learner's predictions."""
    logits, labels = all_answers(learner_answers(learner, run.source(learner, "test")), *tasks)
    return log_loss(logits, labels).mean().item()


@pytest.mark.parametrize("ensemble", [1, 2])
def test_a_temperature_is_chosen_on_validation_and_kept_with_the_learner(
    config: Config, tmp_path: Path, ensemble: int
) -> None:
    train = {"steps": 2, "validate_every": 1, "ensemble": ensemble}
    plain = Pipeline.start(tmp_path / "plain", override(config, {"train": train}))
    run = Pipeline.start(tmp_path / "run", override(config, {"train": {**train, "temperature": "validation"}}))
    for one in (plain, run):
        run_stages(one, ["maml"])
    members = plain.learners("maml")
    val, test = (plain.source(members[0], split) for split in ("val", "test"))
    tasks = plain.config.train.validation_tasks, 10, 0
    expected = best_temperature(*all_answers(learner_answers(members, val), val.draw, *tasks, "validation"))

    summary = run.run("maml")  # which is done
    assert summary["head.temperature"] == expected != 1.0
    assert "head.temperature" not in plain.run("maml")
    assert [learner.settings.head.temperature for learner in run.learners("maml")] == [expected] * ensemble
    assert npbml.load(tmp_path / "run", "maml", device="cpu").settings.head.temperature == expected
    for mine, theirs in zip(run.learners("maml"), members, strict=True):
        found = mine.state_dict()
        assert all(torch.equal(tensor, found[name]) for name, tensor in theirs.state_dict().items())

    logits, labels = all_answers(learner_answers(members, test), test.draw, 4, 10, 0, "test")
    record = run.test("maml")
    assert record["temperature"] == expected
    assert record["accuracy"] == plain.test("maml")["accuracy"] and plain.test("maml")["temperature"] == 1.0
    assert record["nll"] == pytest.approx(log_loss(logits / expected, labels).mean().item(), rel=1e-3, abs=1e-4)
    assert plain.test("maml")["nll"] == pytest.approx(log_loss(logits, labels).mean().item(), abs=1e-4)


def test_prototypes_have_a_temperature_of_validation_tasks(done: Pipeline) -> None:
    setup, pretrain, network = done.setup(), done.config.pretrain, done.pretrained_network()
    val, test = (prototype_answers(network, setup, pretrain, done.splits[name]) for name in ("val", "test"))
    expected = best_temperature(*all_answers(*val, done.config.train.validation_tasks, 10, 0, "validation"))
    record = next(record for record in done.records.all() if record["method"] == "prototypes")
    logits, labels = all_answers(*test, 4, 10, 0, "test")
    assert record["temperature"] == expected
    assert record["nll"] == pytest.approx(log_loss(logits.double() / expected, labels).mean().item(), abs=1e-4)
    assert record["accuracy"] == pytest.approx(100 * accuracy(logits, labels).mean().item(), abs=1e-3)


def test_values_have_no_temperature() -> None:
    waves = override(preset("quick", "sinusoid"), {"device": "cpu", "baselines": []})
    with pytest.raises(SettingError, match=r"train\.temperature is about probabilities"):
        check_config(override(waves, {"train": {"temperature": "validation"}}))
    with pytest.raises(SettingError, match=r"head\.temperature is about probabilities"):
        check_config(override(waves, {"head": {"temperature": 2.0}}))


def test_a_run_from_scratch_needs_no_pretraining(config: Config, tmp_path: Path) -> None:
    changes = {
        "init": {"source": "scratch"},
        "net": {"frozen_blocks": 0, "affine": "meta", "stem_norm": "batch"},
        "pretrain": {"warp": False},
    }
    run = Pipeline.start(tmp_path / "run", override(config, {**changes, "baselines": []}))
    assert run.needs(["maml"]) == [] and run.needs(["npbml"]) == ["relation"]
    run.run("maml")
    record = run.test("maml")
    assert set(record["seconds"]) == {"train", "test"}
    with pytest.raises(RunError, match="pretrain is not finished"):
        run.test("prototypes")


def test_another_data_set_is_shown_as_the_runs_own(
    done: Pipeline, make_store: Callable[..., Path], tmp_path: Path
) -> None:
    other = str(make_store(tmp_path / "other", (8,) * 10))
    before = done.records.all()
    try:
        record = done.test("maml", dataset=other)
        assert record["dataset"] == other and done.records.all() == [*before, record]
        assert len(read(done.folder / "maml" / "test-other.json")["per_task"]) == 4
    finally:
        (done.folder / "results.json").write_text(json.dumps(before))
    with pytest.raises(SettingError, match="sinusoid has no images"):
        done.test("maml", dataset="sinusoid")


def test_a_recipe_of_ones_own_is_kept_with_its_run(config: Config, tmp_path: Path) -> None:
    npbml.register("mine", npbml.compose("rates and matrices", "maml", precondition={"chain": ["kronecker"]}))
    run = Pipeline.start(tmp_path / "run", override(config, {"method": "mine"}))
    run.run("pretrain")
    run.run("mine")
    before = run.test("mine")["accuracy"]
    weights = run.learner("mine").state_dict()
    assert any("precondition" in name for name in weights)

    del METHODS.parts["mine"]  # as in another process
    again = npbml.load(tmp_path / "run", device="cpu")
    assert again.settings.precondition.chain == ("kronecker",)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in again.state_dict().items())
    assert Pipeline.open(tmp_path / "run").test("mine")["accuracy"] == before

    npbml.register("mine", npbml.compose("another", "maml", precondition={"chain": ["rates"]}))
    with pytest.raises(RunError, match="another recipe than the mine given now"):
        Pipeline.open(tmp_path / "run")


def test_a_method_that_makes_no_sense_in_a_run_is_refused_before_it_begins(config: Config, tmp_path: Path) -> None:
    changes = {"head": {"kind": "unicorn"}, "inner": {"layers": "head"}}
    with pytest.raises(SettingError, match=r"inner\.layers=head adapts none of them"):
        Pipeline.start(tmp_path / "run", override(config, changes))
    with pytest.raises(SettingError, match=r"loss\.transductive needs"):
        Pipeline.start(
            tmp_path / "run",
            override(config, {"method": "maml", "inner": {"batch": "support"}, "baselines": ["npbml"]}),
        )
    waves = override(preset("quick", "sinusoid"), {"device": "cpu", "baselines": ["maml", "prototypes"]})
    with pytest.raises(SettingError, match="prototypes stands for classes, and sinusoid has none"):
        Pipeline.start(tmp_path / "run", waves)
    assert not (tmp_path / "run").exists()


def test_a_gradient_without_an_svd_is_told_as_any_other(config: Config, tmp_path: Path) -> None:
    run = Pipeline.start(tmp_path / "run", override(config, {"inner": {"lr": 1e25}}))
    run.run("pretrain")
    with pytest.raises(RunError, match=r"Meta-step 1 of gap is not finite"):
        run.run("gap")


def test_the_sizes_of_baselines_count_too(config: Config, tmp_path: Path) -> None:
    changes = {"method": "maml", "baselines": ["npbml"], "scorer": {"widths": [2, 2, 2, 2], "pools": 3}}
    with pytest.raises(SettingError, match=r"halves an image 5 times, 16 pixels are too few: lower scorer\.pools"):
        Pipeline.start(tmp_path / "run", override(config, changes))
    with pytest.raises(SettingError, match=r"resnet12 needs images of at least 32 pixels, 16 pixels are too few"):
        deep = {"backbone": "resnet12", "net": {"widths": [2] * 5}, "baselines": []}
        Pipeline.start(tmp_path / "run", override(config, {"method": "maml", **deep}))
