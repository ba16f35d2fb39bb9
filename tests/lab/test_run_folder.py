"""A run folder: what it keeps, whom it lets in, what it refuses, and that those of version 0.1 go on."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import npbml
from npbml.cli.stages import run_stages
from npbml.errors import RunError
from npbml.json_files import read_json, write_json
from npbml.lab.identity import to_file
from npbml.lab.pipeline import Pipeline
from npbml.lab.protocols import PROTOCOLS, preset
from npbml.lab.run_folder import RunFolder, read_config
from npbml.lab.schema import Config, override
from npbml.lab.stages import stage_fingerprint
from npbml.methods import REMOVED, find_recipe
from npbml.parts import BACKBONES, METHODS
from npbml.settings import leaves, nested, to_dict
from npbml.tensor_files import load_tensors, save_tensors

Contents = Callable[[Path], dict[Path, bytes]]

CHANGES: dict[str, Any] = {
    "ways": 7,
    "shots": 5,
    "image_size": 32,
    "net.filters": 9,
    "net.widths": (1, 2),
    "inner.lr": 0.5,
    "train.lr.phi": 0.0,
    "train.meta_batch": 3,
    "pretrain.augment.crop_scale_low": 0.5,
    "scorer.combine": "mean",
    "loss.share": True,
    "baselines": (),
    "checkpoint_seconds": 1.0,
    "device": "cpu",
    "method": "maml",
    "test.tasks": 5,
    "test.batch_size": 3,
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("backbone", [name for name in BACKBONES if name != "mlp"])
def test_a_configuration_survives_the_run_folder(tmp_path: Path, protocol: str, backbone: str) -> None:
    config = override(preset(protocol, "cifar-fs", backbone), nested(CHANGES))
    (tmp_path / "config.json").write_text(json.dumps(to_file(config)))
    assert read_config(tmp_path, pytest.fail) == RunFolder(tmp_path).config() == config
    (tmp_path / "config.json").write_text(json.dumps(to_dict(config)))  # which does not say who wrote it
    assert read_config(tmp_path, pytest.fail) == config


def test_a_configuration_that_is_not_there_or_not_one_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is not a run folder: it has no config\.json"):
        read_config(tmp_path)
    with pytest.raises(RunError, match=r"is not a run folder: it has no config\.json"):
        npbml.load(tmp_path)
    for whole in (to_dict(Config()), to_file(Config())):
        for content in (
            "",
            "{",
            "[]",
            "3",
            '"quick"',
            "[[1]]",
            "{}",
            json.dumps({**whole, "wayz": 3}),
            json.dumps({**whole, "ways": 1}),
            json.dumps({**whole, "protocol": ["quick"]}),
            json.dumps({**whole, "dataset": None}),
            json.dumps({**whole, "inner": 3}),
            json.dumps({**whole, "backbone": "vgg"}),
        ):
            (tmp_path / "config.json").write_text(content)
            with pytest.raises(RunError, match=r"config\.json (cannot be read|is damaged or of another version)"):
                read_config(tmp_path)
            with pytest.raises(RunError):
                npbml.load(tmp_path)


def test_another_configuration_is_refused_and_loses_nothing(done: Pipeline, contents: Contents) -> None:
    before = contents(done.folder.path)
    for changes, names in (
        ({"inner": {"steps": 3}}, "another inner.steps:"),
        ({"ways": 2, "train": {"lr": {"phi": 0.5}}}, "another ways, train.lr.phi:"),
        ({"ways": 2, "shots": 2, "seed": 2, "queries": 2, "net": {"filters": 2}}, "and more: choose another"),
        ({"scorer": {"rounds": 2}, "pretrain": {"distill": True}}, "another scorer.rounds, pretrain.distill:"),
    ):
        with pytest.raises(RunError, match=names):
            RunFolder(done.folder.path).begun(override(done.config, changes))
    with pytest.raises(RunError, match=r"another inner\.steps:"):
        Pipeline.start(done.folder.path, override(done.config, {"inner": {"steps": 3}}))
    assert contents(done.folder.path) == before


def test_free_settings_may_differ(done: Pipeline) -> None:
    changes = {"method": "maml", "baselines": [], "checkpoint_seconds": 1.0, "test": {"tasks": 6}}
    run = Pipeline.start(done.folder.path, override(done.config, changes))
    assert run.config.test.tasks == 6 and run.config.method == "maml"
    assert Pipeline.open(done.folder.path).config == done.config


Occupy = Callable[[Path], None]


def file_instead(path: Path) -> None:
    path.write_text("a file")


def other_folder(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").write_text("years of work")


@pytest.mark.parametrize("occupy", [file_instead, other_folder])
def test_what_is_not_a_run_folder_is_refused_and_untouched(
    config: Config, contents: Contents, tmp_path: Path, occupy: Occupy
) -> None:
    occupy(tmp_path / "place")
    before = contents(tmp_path)
    with pytest.raises(RunError, match="place is there, but it is not a run folder"):
        Pipeline.start(tmp_path / "place", config)
    assert contents(tmp_path) == before


def test_a_folder_below_a_file_is_refused(config: Config, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="could not be saved"):
        Pipeline.start(tmp_path / "file" / "run", config)


def test_an_empty_folder_is_taken(config: Config, tmp_path: Path) -> None:
    assert not RunFolder(tmp_path).there
    Pipeline.start(tmp_path, config)
    assert RunFolder(tmp_path).there and Pipeline.open(tmp_path).config == config


@pytest.mark.parametrize(
    "left", [["environment.json"], ["environment.json", ".config.json.part"], [".lock", ".config.json.7-0a.part"]]
)
def test_a_start_that_was_killed_half_way_can_be_given_again(
    config: Config, tmp_path: Path, left: list[str]
) -> None:
    """kill -9 between the two files of a new run leaves a folder that is the run's all the same."""
    for name in left:
        (tmp_path / name).write_text("{}")
    Pipeline.start(tmp_path, config)
    assert Pipeline.open(tmp_path).config == config


def test_a_start_that_is_killed_before_the_recipe_is_kept_begins_again(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    npbml.register("mine", npbml.compose("mine", "maml", precondition={"chain": ["rates"]}))
    own = override(config, {"method": "mine"})
    for name in ("to_file", "RunFolder.keep_recipe"):
        folder = tmp_path / name
        with monkeypatch.context() as patched:
            patched.setattr(f"npbml.lab.run_folder.{name}", killed)
            with pytest.raises(KeyboardInterrupt):
                Pipeline.start(folder, own)
        run = Pipeline.start(folder, own)
        run_stages(run, ["mine"])
        assert (folder / "mine" / "recipe.json").exists()


def test_a_lock_is_kept_until_it_is_closed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.lock(), pytest.raises(RunError, match="Another process is at work in"):
        RunFolder(tmp_path).lock()
    RunFolder(tmp_path).lock().close()
    with pytest.raises(RunError, match="cannot be written to"):
        RunFolder(tmp_path / "nowhere").lock()


def test_of_two_starts_at_once_the_settings_are_those_of_the_one_that_works(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find the folder free; the second comes while the first writes, and after it has written."""
    other, late = override(config, {"inner": {"steps": 3}}), RunFolder(tmp_path / "run")
    assert not late.begun(other)
    with monkeypatch.context() as patched:

        def meanwhile(config: Config) -> dict[str, Any]:
            with pytest.raises(RunError, match="Another process is at work in"):
                late.begin(other, {})
            return to_file(config)

        patched.setattr("npbml.lab.run_folder.to_file", meanwhile)
        Pipeline.start(tmp_path / "run", config)
    with pytest.raises(RunError, match=r"another inner\.steps:"):
        late.begin(other, {})
    assert late.config() == config


def test_what_killed_processes_left_is_removed_under_the_lock(tmp_path: Path) -> None:
    (tmp_path / "maml").mkdir()
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = [f".config.json.{dead.pid}-0a1b2c3d.part", "maml/.done.json.part", f"maml/.x.{os.getpid()}-00.part"]
    alive = f".comparison.json.{os.getppid()}-0a1b2c3d.part"
    for name in (*left, alive):
        (tmp_path / name).write_text("half")
    RunFolder(tmp_path).lock().close()
    assert [path.name for path in tmp_path.rglob("*.part")] == [alive]


def old_file(config: Config) -> dict[str, Any]:
    """A configuration as version 0.1 wrote it."""
    return nested(
        {leaf.old_name: leaf.old_value for leaf in leaves(config) if leaf.name != "loss.terms"} | REMOVED
    )


@pytest.fixture
def old(done: Pipeline, tmp_path: Path) -> Path:
    """The run as version 0.1 would have left it: old names, and no settings in the files of learners."""
    folder = tmp_path / "old"
    shutil.copytree(done.folder.path, folder)
    write_json(folder / "config.json", old_file(done.config))
    for path in folder.glob("*/*.safetensors"):
        tensors, about = load_tensors(path)
        save_tensors(path, tensors, {"images": about["images"]})
    return folder


def test_a_run_of_version_one_goes_on_where_it_was(done: Pipeline, old: Path) -> None:
    told: list[str] = []
    assert read_config(old, told.append) == done.config
    renamed = sum(leaf.old_name != leaf.name for leaf in leaves(Config()))
    assert len(told) == 1 and f"of version 0.1: {renamed} of its settings have other names now" in told[0]
    run = Pipeline.start(old, done.config)
    for stage in ("pretrain", "relation", "npbml", "maml"):
        assert run.stage(stage).done(old)
        assert run.run(stage) == read_json(done.folder / stage / "done.json")
    for method in ("npbml", "maml", "prototypes"):
        assert run.test(method)["accuracy"] == done.test(method)["accuracy"]


@pytest.mark.parametrize("method", [None, "npbml", "maml"])
def test_a_learner_of_version_one_is_loaded(done: Pipeline, old: Path, method: str | None) -> None:
    learner, expected = npbml.load(old, method, device="cpu"), done.learner(method)
    assert learner.settings == expected.settings and learner.images == expected.images
    weights = expected.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in learner.state_dict().items())


def test_a_setting_that_is_gone_ends_a_run_of_version_one_with_its_name(old: Path) -> None:
    data = json.loads((old / "config.json").read_text())
    data["warp"]["residual"] = True
    write_json(old / "config.json", data)
    for act in (lambda: read_config(old), lambda: npbml.load(old, device="cpu")):
        with pytest.raises(RunError, match=r"config\.json is .*another version.*warp\.residual=True"):
            act()


RULE = {"loss": {"trust": 0.5}, "relation": {"kind": "network", "evened": True}, "precondition": {"decay": 0.0005}}


def test_a_recipe_of_version_one_is_read_by_todays_names(done: Pipeline, old: Path) -> None:
    (old / "mine").mkdir()
    shutil.copy(old / "npbml" / "learner.safetensors", old / "mine")
    tensors, about = load_tensors(old / "mine" / "learner.safetensors")
    tensors["loss.trust"] = torch.tensor(0.5)
    save_tensors(old / "mine" / "learner.safetensors", tensors, about)
    write_json(old / "mine" / "recipe.json", {"summary": "mine", "rule": RULE})
    read_config(old)
    today = {"loss": {"score_weight": 0.5}, "scorer": {"kind": "relation-network", "whiten": True}}
    assert find_recipe("mine").rule == today
    read_config(old)
    del METHODS.parts["mine"]
    settings = npbml.load(old, "mine", device="cpu").settings
    assert (settings.loss.score_weight, settings.scorer.whiten) == (0.5, True)
    for damaged in ({}, [], {"summary": "mine", "rule": {"relation": {"kin": 3}}}):
        write_json(old / "mine" / "recipe.json", damaged)
        with pytest.raises(RunError, match=r"recipe\.json is damaged or of another version"):
            read_config(old)


def test_the_fingerprints_of_a_run_of_version_one_are_todays(done: Pipeline, old: Path) -> None:
    config = read_config(old)
    for stage in ("pretrain", "relation", "npbml", "maml"):
        known = json.loads((old / stage / "done.json").read_text())["fingerprint"]
        assert stage_fingerprint(config, stage) == known
