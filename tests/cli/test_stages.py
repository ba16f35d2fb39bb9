"""A run and its stages, by command."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

Npbml = Callable[..., Any]


def test_a_whole_run_tells_what_it_does(shared: Path) -> None:
    out = (shared / "said.txt").read_text(encoding="utf-8")
    assert out.startswith(f"3-way 1-shot {shared / 'random'}, conv4, seed 0, on CPU")
    assert f"run folder: {shared / 'done'}" in out
    for stage in ("pretrain", "relation", "npbml", "maml"):
        assert f"{stage}: best " in out
    assert f"results: {shared / 'done' / 'results.json'}" in out
    for record in json.loads((shared / "done" / "results.json").read_text()):
        assert f"{record['accuracy']:.2f} ± {record['ci95']:.2f}" in out
        assert f" {record['nll']:.3f} " in out and f" {record['ece']:.2f} " in out


def test_a_method_is_trained_and_tested_by_itself(
    npbml_command: Npbml, shared: Path, given: tuple[object, ...]
) -> None:
    for command in ("pretrain", "train", "test"):
        said = npbml_command(command, *given, "--method", "maml", "--baselines")
        assert said.code == 0, said.error
    records = json.loads(Path("run/results.json").read_text())
    theirs = json.loads((shared / "done" / "results.json").read_text())
    assert [record["method"] for record in records] == ["maml"]
    assert records[0]["accuracy"] == theirs[1]["accuracy"] and not Path("run/relation").exists()


def test_too_few_images_are_told_with_the_class_and_the_numbers(
    npbml_command: Npbml, shared: Path, tmp_path: Path, make_store: Callable[..., Path]
) -> None:
    make_store(tmp_path / "few", last=3)
    said = npbml_command("run", "--config", shared / "small.toml", "--dataset", "few", "--run", "run")
    assert said.code == 1
    assert "Class 'class 9' has 3 images, and a task needs 4 of each class (1 shots + 3 queries)" in said.error
    assert [path.name for path in tmp_path.iterdir()] == ["few"]


def test_an_empty_class_folder_is_refused_by_name(npbml_command: Npbml, shared: Path, tmp_path: Path) -> None:
    for name in ("cat", "dog", "hen", "owl"):
        (tmp_path / "mine" / name).mkdir(parents=True)
        if name != "hen":
            Image.new("L", (16, 16)).save(tmp_path / "mine" / name / "1.png")
    said = npbml_command("run", "--config", shared / "small.toml", "--dataset", "mine", "--run", "run")
    assert said.code == 1 and f"{tmp_path / 'mine' / 'hen'} has no images" in said.error
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("glyph", "no data set 'glyph', nor a folder of that name. Did you mean 'glyphs'?"),
        ("fc100", "fc100 is not prepared"),
        ("./nowhere", "There is no folder"),
    ],
)
def test_data_that_is_not_there_is_refused_by_name(
    npbml_command: Npbml, tmp_path: Path, name: str, words: str
) -> None:
    said = npbml_command("run", "--dataset", name, "--run", "run", "--device", "cpu")
    assert said.code == 1 and words in said.error
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_run_is_refused_and_untouched(
    npbml_command: Npbml, given: tuple[object, ...], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    said = npbml_command("run", *given)
    assert said.code == 1 and "run is there, but it is not a run folder" in said.error
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]
    assert (tmp_path / "run" / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"ways": 3}'])
def test_a_damaged_configuration_is_refused_by_name(npbml_command: Npbml, tmp_path: Path, content: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(content)
    for command in ("run", "test"):
        said = npbml_command(command, "--run", "run")
        assert said.code == 1 and "config.json" in said.error and "Traceback" not in said.error
    assert (tmp_path / "run" / "config.json").read_text() == content


def test_a_folder_below_a_file_is_refused(npbml_command: Npbml, given: tuple[object, ...], tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    said = npbml_command("run", *given[:-1], "run/below")
    assert said.code == 1 and "run/below" in said.error and "could not be saved" in said.error


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_to_is_refused(
    npbml_command: Npbml, given: tuple[object, ...], tmp_path: Path
) -> None:
    (tmp_path / "shut").mkdir(mode=0o500)
    said = npbml_command("run", *given[:-1], "shut/run")
    assert said.code == 1 and "could not be saved: Permission denied" in said.error


def test_testing_what_was_never_trained_says_what_to_do(npbml_command: Npbml, given: tuple[object, ...]) -> None:
    said = npbml_command("test", *given)
    assert said.code == 1 and "begin it with `npbml pretrain --run run`" in said.error


def test_a_recipe_is_trained_by_its_file_and_then_known_by_its_name(
    npbml_command: Npbml, given: tuple[object, ...], tmp_path: Path
) -> None:
    (tmp_path / "mine.toml").write_text('base = "maml"\n[precondition]\nchain = ["diagonal"]\n')
    said = npbml_command("run", *given, "--method", "mine.toml", "--baselines", "metasgd")
    assert said.code == 0, said.error
    mine, metasgd = json.loads(Path("run/results.json").read_text())
    assert (mine["method"], metasgd["method"]) == ("mine", "metasgd")
    assert mine["accuracy"] == metasgd["accuracy"], "the recipe of Meta-SGD by another name"
    (tmp_path / "mine.toml").unlink()
    said = npbml_command("test", "--run", "run", "--method", "mine")
    assert said.code == 0 and "mine" in said.out, said.error


WAVES = ("--dataset", "sinusoid", "--run", "run", "--device", "cpu", "--train.validation-tasks", 4)
FEW = (*WAVES, "--train.steps", 3, "--test.tasks", 5)


def test_waves_are_learned_from_scratch_and_measured_by_their_error(npbml_command: Npbml) -> None:
    said = npbml_command("run", *FEW, "--baselines", "maml")
    assert said.code == 0, said.error
    assert said.out.startswith("10-shot sinusoid, mlp, seed 0, on CPU") and "%" not in said.out
    for record in json.loads(Path("run/results.json").read_text()):
        assert "accuracy" not in record and record["squared error"] > 0
        assert f"{record['squared error']:.4f} ± {record['ci95']:.4f}" in said.out
    assert {path.name for path in Path("run/pictures").iterdir()} == {"curves.png", "waves.png"}
    with Image.open("run/pictures/waves.png") as picture:
        assert min(picture.size) > 100 and len(picture.convert("L").getcolors(10**6)) > 20


def test_waves_need_no_stage_before_training(npbml_command: Npbml, tmp_path: Path) -> None:
    for stage in ("pretrain", "scorer"):
        said = npbml_command(stage, *FEW)
        assert said.code == 2 and f"there is no {stage}. Begin with `npbml train`" in said.error
    said = npbml_command("test", *FEW)
    assert said.code == 1 and "begin it with `npbml train --run run`" in said.error
    said = npbml_command("run", *FEW, "--baselines", "prototypes")
    assert said.code == 2 and "prototypes stands for classes, and sinusoid has none" in said.error
    assert list(tmp_path.iterdir()) == []
    assert npbml_command("train", *FEW, "--method", "maml").code == 0
    said = npbml_command("test", "--run", "run")
    assert said.code == 0 and "squared error" in said.out, said.error


def test_training_begins_a_run_only_where_nothing_comes_before_it(
    npbml_command: Npbml, given: tuple[object, ...]
) -> None:
    said = npbml_command("train", *given, "--method", "maml")
    assert said.code == 1 and "begin it with `npbml pretrain --run run`" in said.error
    scratch = ("--init.source", "scratch", "--net.frozen-blocks", 0, "--net.affine", "meta")
    assert npbml_command("train", *given, "--method", "maml", *scratch).code == 0


@pytest.mark.parametrize("words", ["run", "pretrain", "scorer", "train", "compare --methods maml"])
def test_a_learner_that_comes_along_is_not_trained(npbml_command: Npbml, tmp_path: Path, words: str) -> None:
    said = npbml_command(*words.split(), "--run", "cifar-fs-conv4")
    assert said.code == 1 and "cifar-fs-conv4 comes with npbml and is trained already" in said.error
    assert "npbml test --run cifar-fs-conv4 --dataset NAME" in said.error and list(tmp_path.iterdir()) == []


def test_a_learner_that_comes_along_is_tested_by_its_name(
    npbml_command: Npbml, shared: Path, tmp_path: Path
) -> None:
    given = ("--run", "cifar-fs-conv4", "--device", "cpu", "--ways", 3, "--queries", 3, "--test.tasks", 4)
    said = npbml_command("test", *given, "--dataset", shared / "random")
    assert said.code == 0 and "cifar-fs-conv4, 3-way 1-shot" in said.out and "% over 4 tasks" in said.out, (
        said.error
    )
    assert list(tmp_path.iterdir()) == []
    said = npbml_command("test", *given)
    assert said.code == 2 and "say what to test it on with --dataset NAME" in said.error
