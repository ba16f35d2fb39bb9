"""Where settings come from, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from npbml.cli.options import read_configuration
from npbml.cli.stages import run
from npbml.lab.run_folder import read_config
from npbml.lab.schema import Config, method_config

Npbml = Callable[..., Any]


BAD: list[tuple[str, str]] = [
    ("--shots 0", "shots must be at least 1, not 0"),
    ("--queries 0", "queries must be at least 1, not 0"),
    ("--ways 0", "ways must be at least 2, not 0"),
    ("--ways 1", "ways must be at least 2, not 1"),
    ("--ways=-3", "ways must be at least 2, not -3"),
    ("--seed -1", "seed must be at least 0, not -1"),
    ("--inner.lr -1", "inner.lr must be above 0, not -1.0"),
    ("--inner.lr nan", "inner.lr must be above 0"),
    ("--train.lr.theta -1", "train.lr.theta must be at least 0, not -1.0"),
    ("--train.lr.theta inf", "train.lr.theta"),
    (
        "--backbone vgg",
        "backbone: There is no backbone 'vgg'. Choose from conv4, resnet12, resnet12-wide, wrn28-10, mlp, "
        "efficientnet-lite0.",
    ),
    ("--protocol slow", "protocol takes one of published, fast, best, plain, quick, common, not 'slow'"),
    ("--method mamml", "no method 'mamml'. Did you mean 'maml'? Choose from npbml, maml"),
    ("--baselines mamml", "no method 'mamml'. Did you mean 'maml'? Choose from npbml, maml"),
    ("--device gpu", "device takes auto, cpu, cuda or cuda:N, not 'gpu'"),
    ("--device cuda:99", "device=cuda:99 asks for a GPU, but this machine has"),
    ("--image-size 8", "image_size must be at least 16, not 8"),
    ("--method maml --loss.inductive True", "method maml sets loss.inductive=False, but True was asked for"),
    ("--frobnicate 3", "--frobnicate"),
    ("--inner.stepz 3", "--inner.steps"),
    ("--inner.steps", "--inner.steps"),
    ("--shots three", "--shots"),
    ("--warp.kind round", "--warp.kind"),
    ("stray", "stray"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=[arguments for arguments, _ in BAD])
def test_bad_options_are_refused_by_name_and_make_nothing(
    npbml_command: Npbml, given: tuple[object, ...], tmp_path: Path, arguments: str, words: str
) -> None:
    said = npbml_command("run", *given, *arguments.split())
    assert said.code == 2 and said.out == ""
    assert words in said.error and "Traceback" not in said.error
    assert list(tmp_path.iterdir()) == []


FILES: list[tuple[str, str, str]] = [
    ("a.toml", "shots = 0", "shots must be at least 1, not 0"),
    ("a.toml", "ways = 1", "ways must be at least 2, not 1"),
    ("a.toml", "ways = 3.0", "ways takes a whole number, not 3.0"),
    ("a.toml", "[inner]\nlr = -1", "inner.lr must be above 0, not -1"),
    (
        "a.toml",
        'backbone = "vgg"',
        "backbone: There is no backbone 'vgg'. Choose from conv4, resnet12, resnet12-wide, wrn28-10, mlp, "
        "efficientnet-lite0.",
    ),
    (
        "a.toml",
        'protocol = "slow"',
        "protocol takes one of published, fast, best, plain, quick, common, not 'slow'",
    ),
    (
        "a.toml",
        "dataset = 3",
        "dataset takes one of glyphs, mini-imagenet, tiered-imagenet, cifar-fs, fc100, omniglot, sinusoid, "
        "a folder, not 3",
    ),
    ("a.toml", "wayz = 3", "no setting 'wayz'. Did you mean 'ways'?"),
    ("a.toml", "[inner]\nstepz = 3", "no setting 'inner.stepz'. Did you mean 'inner.steps'?"),
    ("a.toml", "inner = 3", "inner must be a table of settings, not 3"),
    ("a.toml", "ways = \n[", "a.toml is not TOML"),
    ("a.json", "{ways: 3}", "a.json is not JSON"),
    ("a.json", '{"wayz": 3}', "Did you mean 'ways'?"),
    ("a.json", "[1]", "table of settings"),
    ("a.toml", 'method = "maml"\n[loss]\ninductive = true', "method maml sets loss.inductive=False"),
]


@pytest.mark.parametrize(("name", "content", "words"), FILES, ids=[content for _, content, _ in FILES])
def test_bad_files_are_refused_by_name_and_make_nothing(
    npbml_command: Npbml, shared: Path, tmp_path: Path, name: str, content: str, words: str
) -> None:
    (tmp_path / name).write_text(content)
    given = ("--dataset", shared / "random", "--run", "run", "--pretrain.steps", 1, "--queries", 3)
    said = npbml_command("pretrain", "--config", name, *given)
    assert said.code == 2 and said.out == "" and words in said.error
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_missing_settings_file_is_refused_by_name(npbml_command: Npbml, tmp_path: Path) -> None:
    said = npbml_command("run", "--config", "gone.toml")
    assert said.code == 2 and "gone.toml cannot be read: No such file" in said.error
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_goes_before_the_file_and_the_file_before_the_protocol(
    settled: Callable[..., Config], tmp_path: Path
) -> None:
    (tmp_path / "a.toml").write_text('ways = 7\n[inner]\nsteps = 3\nlr = 0.5\n[train]\nschedule = "constant"\n')
    config = settled("--config", "a.toml", "--inner.steps", "9")
    assert (config.learner.ways, config.learner.inner.steps, config.learner.inner.lr) == (7, 9, 0.5)
    assert config.train.schedule == "constant" and settled().train.schedule == "cosine"
    assert config.learner.net == settled().learner.net and config.pretrain == settled().pretrain


@pytest.mark.parametrize("where", ["option", "equals", "file"])
def test_the_protocol_the_data_and_the_backbone_choose_the_defaults(
    settled: Callable[..., Config], tmp_path: Path, where: str
) -> None:
    names = {"protocol": "published", "dataset": "fc100", "backbone": "resnet12"}
    (tmp_path / "a.json").write_text(json.dumps(names))
    arguments = {
        "option": [word for key, value in names.items() for word in (f"--{key}", value)],
        "equals": [f"--{key}={value}" for key, value in names.items()],
        "file": ["--config", "a.json"],
    }[where]
    config = settled(*arguments)
    assert (config.train.steps, config.pretrain.weight_decay) == (30_000, 0.01)
    assert config.pretrain.augment.flip and not settled().pretrain.augment.flip


def test_the_option_goes_before_the_file_in_choosing_the_protocol(
    settled: Callable[..., Config], tmp_path: Path
) -> None:
    (tmp_path / "a.toml").write_text('protocol = "published"\n')
    assert settled("--config", "a.toml").train.steps == 30_000
    config = settled("--config", "a.toml", "--protocol", "quick")
    assert (config.protocol, config.train.steps) == ("quick", settled().train.steps)


@pytest.mark.parametrize(("word", "value"), [("False", False), ("false", False), ("True", True), ("true", True)])
def test_true_and_false_are_written_as_in_a_file(settled: Callable[..., Config], word: str, value: bool) -> None:
    assert settled("--train.augment", word).train.augment is value
    assert settled(f"--train.augment={word}").train.augment is value


def test_a_run_takes_its_own_settings_again(
    settled: Callable[..., Config], npbml_command: Npbml, shared: Path
) -> None:
    before = read_config(shared / "done")
    assert before.learner.ways == 3 and settled("--run", shared / "done") == before
    assert settled("--run", shared / "done", "--test.tasks", "9").test.tasks == 9
    said = npbml_command("pretrain", "--run", shared / "done")
    assert said.code == 0 and "pretrain: done before" in said.out


def test_other_settings_for_a_run_are_refused_and_change_nothing(npbml_command: Npbml, shared: Path) -> None:
    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in (shared / "done").rglob("*") if path.is_file()}

    before = contents()
    said = npbml_command("run", "--run", shared / "done", "--inner.steps", "3")
    assert said.code == 1 and "another inner.steps: choose another folder with --run" in said.error
    assert contents() == before


def test_a_run_without_a_name_is_named_by_its_settings() -> None:
    names = {
        str(read_configuration(run, arguments.split()).folder)
        for arguments in ("", "--seed 1", "--shots 5", "--ways 3", "--backbone resnet12", "--dataset fc100")
    }
    assert "runs/glyphs-conv4-5way-1shot-quick-seed0" in names and len(names) == 6
    assert read_configuration(run, ["--run", "here"]).folder == Path("here")
    waves = read_configuration(run, ["--dataset", "sinusoid"])
    assert str(waves.folder) == "runs/sinusoid-mlp-10shot-quick-seed0"  # waves have no classes


RECIPE = 'base = "npbml"\n[precondition]\nchain = ["svd"]\n'


def test_baselines_take_spaces_or_commas(settled: Callable[..., Config]) -> None:
    assert settled("--baselines", "maml", "anil").baselines == ("maml", "anil")
    assert settled("--baselines", "maml,anil", "prototypes").baselines == ("maml", "anil", "prototypes")
    assert settled("--baselines").baselines == ()


@pytest.mark.parametrize("where", ["option", "equals", "file", "json"])
def test_the_file_of_a_recipe_stands_for_a_method(
    settled: Callable[..., Config], tmp_path: Path, where: str
) -> None:
    (tmp_path / "mine.toml").write_text(RECIPE)
    (tmp_path / "other.json").write_text('{"base": "maml", "inner": {"layers": "head"}}')
    (tmp_path / "settings.toml").write_text('method = "mine.toml"\nbaselines = ["other.json", "prototypes"]\n')
    config = {
        "option": lambda: settled("--method", "mine.toml", "--baselines", "maml", "other.json"),
        "equals": lambda: settled("--method=mine.toml"),
        "file": lambda: settled("--config", "settings.toml"),
        "json": lambda: settled("--method", tmp_path / "other.json"),
    }[where]()
    assert config.method == ("other" if where == "json" else "mine")
    if where == "option":
        assert config.baselines == ("maml", "other")
    if where == "file":
        assert config.baselines == ("other", "prototypes")
    assert method_config(config, config.method).learner.precondition.chain == (() if where == "json" else ("svd",))


def test_under_the_published_protocol_a_recipe_begins_with_the_papers_settings(
    settled: Callable[..., Config], tmp_path: Path
) -> None:
    (tmp_path / "mine.toml").write_text(RECIPE)
    config = settled("--protocol", "published", "--method", "mine.toml")
    assert (config.method, config.train.steps) == ("mine", 30_000)


RECIPES_REFUSED: list[tuple[str, str, str]] = [
    ("gap.toml", RECIPE, "'gap' cannot be the name of a new method: it is taken"),
    ("mine.toml", 'base = "mamml"', "There is no method 'mamml'"),
    ("mine.toml", "shots = 3", "'shots'"),
    (
        "mine.toml",
        "[inner]\nstepz = 3",
        "'inner.stepz' is no setting of it: see `npbml settings`. Did you mean 'inner.steps'?",
    ),
    ("mine.toml", "[inner\n", "mine.toml is not TOML"),
    ("mine.toml", 'base = "anil"\n[warp]\nkind = "learned"', "inner.layers=head adapts none of them"),
]


@pytest.mark.parametrize(
    ("name", "content", "words"), RECIPES_REFUSED, ids=[text for _, text, _ in RECIPES_REFUSED]
)
def test_bad_recipes_are_refused_by_name_and_make_nothing(
    npbml_command: Npbml, given: tuple[object, ...], tmp_path: Path, name: str, content: str, words: str
) -> None:
    (tmp_path / name).write_text(content)
    said = npbml_command("run", *given, "--method", name)
    assert said.code == 2 and said.out == "" and words in said.error
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_missing_recipe_is_refused_by_name(npbml_command: Npbml, given: tuple[object, ...]) -> None:
    said = npbml_command("run", *given, "--method", "gone.toml")
    assert said.code == 2 and "gone.toml cannot be read: No such file" in said.error
