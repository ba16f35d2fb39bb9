"""The commands, as a user types them: what they print, what they refuse, and that a refusal costs nothing."""

import contextlib
import io
import json
import os
import signal
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

import npbml
from npbml import cli
from npbml.config import Config
from npbml.data.store import ClassEntry, Store
from npbml.methods import RECIPES
from npbml.runs import read_config
from npbml.settings import describe

SETTINGS = """
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
batch = 4
validate_every = 3
validation_tasks = 2
[relation]
widths = [2]
pools = 1
steps = 2
validate_every = 2
validation_tasks = 2
[train]
steps = 2
validate_every = 2
validation_tasks = 2
[test]
tasks = 4
"""


class Said(NamedTuple):
    code: int
    out: str
    error: str


def npbml_command(*arguments: object) -> Said:
    """`npbml ARGUMENTS` in this process."""
    out, error, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            cli.main([str(argument) for argument in arguments])
        except SystemExit as leave:
            code = int(leave.code or 0)
    return Said(code, out.getvalue(), error.getvalue())


def write_store(folder: Path, last: int = 6) -> Path:
    """A data set of ten classes of six random pictures, the last one of `last`."""
    counts = [6] * 9 + [last]
    images = np.random.default_rng(0).integers(0, 256, (sum(counts), 1, 16, 16), dtype=np.uint8)
    entries, start = [], 0
    for number, count in enumerate(counts):
        split = "train" if number < 4 else "val" if number < 7 else "test"
        entries.append(ClassEntry(f"class {number}", split, start, count))  # type: ignore[arg-type]
        start += count
    Store.write(folder, name="random", images=images, classes=entries, provenance={})
    return folder


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data set, a settings file and a run that is done."""
    folder, handler = tmp_path_factory.mktemp("place"), signal.getsignal(signal.SIGTERM)
    write_store(folder / "random")
    (folder / "small.toml").write_text(SETTINGS)
    try:
        said = npbml_command(
            "run", "--config", folder / "small.toml", "--dataset", folder / "random", "--run", folder / "done"
        )
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert said.code == 0, said.error
    (folder / "said.txt").write_text(said.out, encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder to work in, 80 columns, and SIGTERM as it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NPBML_DATA", str(tmp_path / ".data"))
    monkeypatch.setattr(cli, "console", Console(highlight=False, width=80))
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def given(shared: Path) -> tuple[object, ...]:
    """The options of the small run, in the folder `run`."""
    return ("--config", shared / "small.toml", "--dataset", shared / "random", "--run", "run")


def test_the_overview_names_every_command_in_eighty_columns() -> None:
    texts = [npbml_command(*arguments) for arguments in ((), ("--help",), ("-h",), ("help",))]
    assert len(set(texts)) == 1 and texts[0].code == 0 and texts[0].error == ""
    lines = texts[0].out.splitlines()
    assert max(map(len, lines)) <= 80
    for name, command in cli.COMMANDS.items():
        assert any(line.startswith(f"  {name} ") for line in lines)
        words = (command.__doc__ or "").split()
        assert words and all(word in texts[0].out.split() for word in words)


def test_the_overviews_last_paragraph_is_filled() -> None:
    lines = npbml_command().out.rstrip().splitlines()
    last = lines[len(lines) - lines[::-1].index("") :]
    text = " ".join(line.strip() for line in last)
    assert "npbml COMMAND --help" in text and len(last) == len(textwrap.wrap(text, 80))


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    said = npbml_command(command, "--help")
    assert said.code == 0 and f"npbml {command}" in said.out
    assert " ".join((cli.COMMANDS[command].__doc__ or "").split()) in " ".join(said.out.split())
    if command == "classify":
        assert all(option in said.out for option in ("--run", "--support", "--query", "--method", "--device"))
    elif command not in ("methods", "data"):
        words = said.out.split()
        assert "--run" in words and "--config" in words
        for name, _, _ in describe(Config):
            assert f"--{name.replace('_', '-')}" in words


def test_help_has_a_line_on_every_setting() -> None:
    """An option is followed by its explanation, never by the next option."""
    lines = [line.strip("│ ") for line in npbml_command("run", "--help").out.splitlines()]
    for line, following in pairwise(lines):
        if line.startswith("--") and not line.startswith("---"):
            assert following and not following.startswith("--") and not following.startswith("(default"), line


def test_the_version() -> None:
    for option in ("--version", "-V"):
        assert npbml_command(option) == (0, f"npbml {npbml.__version__}\n", "")


def test_methods_are_listed() -> None:
    said = npbml_command("methods")
    assert said.code == 0 and all(name in said.out.split() for name in RECIPES)


def test_settings_are_listed_as_the_arguments_make_them() -> None:
    said = npbml_command("settings", "--inner.steps", "77", "--protocol", "published")
    rows = {line.split()[0]: line.split()[1] for line in said.out.splitlines() if len(line.split()) > 1}
    assert said.code == 0 and rows["inner.steps"] == "77" and rows["train.steps"] == "30000"
    assert all(name in said.out.split() for name, _, _ in describe(Config))


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
    ("--backbone vgg", "backbone takes one of conv4, resnet12, not 'vgg'"),
    ("--protocol slow", "protocol takes one of published, quick, not 'slow'"),
    ("--method mamml", "no method 'mamml': choose from npbml, maml"),
    ("--baselines mamml", "no baseline 'mamml': choose from prototypes, npbml, maml"),
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
    given: tuple[object, ...], tmp_path: Path, arguments: str, words: str
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
    ("a.toml", 'backbone = "vgg"', "backbone takes one of conv4, resnet12, not 'vgg'"),
    ("a.toml", 'protocol = "slow"', "protocol takes one of published, quick, not 'slow'"),
    ("a.toml", "dataset = 3", "dataset takes text, not 3"),
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
    shared: Path, tmp_path: Path, name: str, content: str, words: str
) -> None:
    (tmp_path / name).write_text(content)
    given = ("--dataset", shared / "random", "--run", "run", "--pretrain.steps", 1, "--queries", 3)
    said = npbml_command("pretrain", "--config", name, *given)
    assert said.code == 2 and said.out == "" and words in said.error
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_missing_settings_file_is_refused_by_name(tmp_path: Path) -> None:
    said = npbml_command("run", "--config", "gone.toml")
    assert said.code == 2 and "gone.toml cannot be read: No such file" in said.error
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_command_is_answered_with_the_names() -> None:
    said = npbml_command("frobnicate")
    assert said.code == 2 and "'frobnicate'" in said.error and all(name in said.error for name in cli.COMMANDS)


def settled(*arguments: object) -> Config:
    return cli._configuration("run", [str(argument) for argument in arguments])[0]


def test_the_command_line_goes_before_the_file_and_the_file_before_the_protocol(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('ways = 7\n[inner]\nsteps = 3\nlr = 0.5\n[train]\nschedule = "constant"\n')
    config = settled("--config", "a.toml", "--inner.steps", "9")
    assert (config.ways, config.inner.steps, config.inner.lr) == (7, 9, 0.5)
    assert config.train.schedule == "constant" and settled().train.schedule == "cosine"
    assert config.net == settled().net and config.pretrain == settled().pretrain


@pytest.mark.parametrize("where", ["option", "equals", "file"])
def test_the_protocol_the_data_and_the_backbone_choose_the_defaults(tmp_path: Path, where: str) -> None:
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


def test_the_option_goes_before_the_file_in_choosing_the_protocol(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('protocol = "published"\n')
    assert settled("--config", "a.toml").train.steps == 30_000
    config = settled("--config", "a.toml", "--protocol", "quick")
    assert (config.protocol, config.train.steps) == ("quick", settled().train.steps)


@pytest.mark.parametrize(("word", "value"), [("False", False), ("false", False), ("True", True), ("true", True)])
def test_true_and_false_are_written_as_in_a_file(word: str, value: bool) -> None:
    assert settled("--train.augment", word).train.augment is value
    assert settled(f"--train.augment={word}").train.augment is value


def test_a_run_takes_its_own_settings_again(shared: Path) -> None:
    before = read_config(shared / "done")
    assert before.ways == 3 and settled("--run", shared / "done") == before
    assert settled("--run", shared / "done", "--test.tasks", "9").test.tasks == 9
    said = npbml_command("pretrain", "--run", shared / "done")
    assert said.code == 0 and "pretrain: done before" in said.out


def test_other_settings_for_a_run_are_refused_and_change_nothing(shared: Path) -> None:
    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in (shared / "done").rglob("*") if path.is_file()}

    before = contents()
    said = npbml_command("run", "--run", shared / "done", "--inner.steps", "3")
    assert said.code == 1 and "another inner.steps: choose another folder with --run" in said.error
    assert contents() == before


def test_a_run_without_a_name_is_named_by_its_settings() -> None:
    names = {
        str(cli._configuration("run", arguments.split())[1])
        for arguments in ("", "--seed 1", "--shots 5", "--ways 3", "--backbone resnet12", "--dataset fc100")
    }
    assert "runs/glyphs-conv4-5way-1shot-quick-seed0" in names and len(names) == 6
    assert cli._configuration("run", ["--run", "here"])[1] == Path("here")


def test_a_whole_run_tells_what_it_does(shared: Path) -> None:
    out = (shared / "said.txt").read_text(encoding="utf-8")
    assert out.startswith(f"3-way 1-shot {shared / 'random'}, conv4, seed 0, on CPU")
    assert f"run folder: {shared / 'done'}" in out
    for stage in ("pretrain", "relation", "npbml", "maml"):
        assert f"{stage}: best " in out
    assert f"results: {shared / 'done' / 'results.json'}" in out
    for record in json.loads((shared / "done" / "results.json").read_text()):
        assert f"{record['accuracy']:.2f} ± {record['ci95']:.2f}" in out


def test_a_method_is_trained_and_tested_by_itself(shared: Path, given: tuple[object, ...]) -> None:
    for command in ("pretrain", "train", "test"):
        said = npbml_command(command, *given, "--method", "maml", "--baselines")
        assert said.code == 0, said.error
    records = json.loads(Path("run/results.json").read_text())
    theirs = json.loads((shared / "done" / "results.json").read_text())
    assert [record["method"] for record in records] == ["maml"]
    assert records[0]["accuracy"] == theirs[1]["accuracy"] and not Path("run/relation").exists()


def test_too_few_images_are_told_with_the_class_and_the_numbers(shared: Path, tmp_path: Path) -> None:
    write_store(tmp_path / "few", last=3)
    said = npbml_command("run", "--config", shared / "small.toml", "--dataset", "few", "--run", "run")
    assert said.code == 1
    assert "Class 'class 9' has 3 images, and a task needs 4 of each class (1 shots + 3 queries)" in said.error
    assert [path.name for path in tmp_path.iterdir()] == ["few"]


def test_an_empty_class_folder_is_refused_by_name(shared: Path, tmp_path: Path) -> None:
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
def test_data_that_is_not_there_is_refused_by_name(tmp_path: Path, name: str, words: str) -> None:
    said = npbml_command("run", "--dataset", name, "--run", "run", "--device", "cpu")
    assert said.code == 1 and words in said.error
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_run_is_refused_and_untouched(given: tuple[object, ...], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    said = npbml_command("run", *given)
    assert said.code == 1 and "run is there, but it is not a run folder" in said.error
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]
    assert (tmp_path / "run" / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"ways": 3}'])
def test_a_damaged_configuration_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(content)
    for command in ("run", "test"):
        said = npbml_command(command, "--run", "run")
        assert said.code == 1 and "config.json" in said.error and "Traceback" not in said.error
    assert (tmp_path / "run" / "config.json").read_text() == content


def test_a_folder_below_a_file_is_refused(given: tuple[object, ...], tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    said = npbml_command("run", *given[:-1], "run/below")
    assert said.code == 1 and "run/below" in said.error and "could not be saved" in said.error


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_to_is_refused(given: tuple[object, ...], tmp_path: Path) -> None:
    (tmp_path / "shut").mkdir(mode=0o500)
    said = npbml_command("run", *given[:-1], "shut/run")
    assert said.code == 1 and "could not be saved: Permission denied" in said.error


def test_testing_what_was_never_trained_says_what_to_do(given: tuple[object, ...]) -> None:
    said = npbml_command("test", *given)
    assert said.code == 1 and "begin it with `npbml pretrain --run run`" in said.error


@pytest.mark.parametrize("missing", ["run", "support", "query"])
def test_classify_says_what_is_missing(shared: Path, tmp_path: Path, missing: str) -> None:
    for kind in ("cat", "dog", "owl"):
        (tmp_path / "support" / kind).mkdir(parents=True)
        Image.new("L", (16, 16), 9).save(tmp_path / "support" / kind / "1.png")
    places = {"run": shared / "done", "support": "support", "query": "support/cat", missing: "nowhere"}
    said = npbml_command("classify", *(word for key, value in places.items() for word in (f"--{key}", value)))
    assert said.code == 1 and "nowhere" in said.error


def test_classify_labels_every_picture(shared: Path, tmp_path: Path) -> None:
    for shade, kind in enumerate(("cat", "dog", "owl")):
        (tmp_path / "support" / kind).mkdir(parents=True)
        Image.new("L", (16, 16), 90 * shade).save(tmp_path / "support" / kind / f"{kind}.png")
    said = npbml_command(
        "classify", "--run", shared / "done", "--support", "support", "--query", "support/dog", "--device", "cpu"
    )
    assert said.code == 0, said.error
    rows = [line.split() for line in said.out.splitlines() if "dog.png" in line]
    assert len(rows) == 1 and rows[0][1] in ("cat", "dog", "owl") and 0.333 <= float(rows[0][2]) <= 1


@pytest.mark.parametrize(
    ("stop", "code"),
    [(KeyboardInterrupt(), 130), (cli._Terminated(), 143), (cli.Stopped("pretrain", 3, signal.SIGINT), 130)],
    ids=["ctrl-c", "sigterm", "in a stage"],
)
def test_a_stop_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, stop: BaseException, code: int) -> None:
    def stopped(_: list[str]) -> None:
        raise stop

    monkeypatch.setitem(cli.COMMANDS, "run", stopped)
    said = npbml_command("run")
    assert said.code == code and "The same command goes on from" in said.error


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """A folder of six class folders with four grey pictures each."""
    for number in range(6):
        (tmp_path / "pets" / f"kind {number}").mkdir(parents=True)
        for copy in range(4):
            Image.new("L", (20, 24), 20 * number + copy).save(tmp_path / "pets" / f"kind {number}" / f"{copy}.png")
    return tmp_path / "pets"


def test_data_is_prepared_checked_listed_and_shown(
    pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPBML_DATA", str(tmp_path / "stores"))
    made = npbml_command("data", "prepare", "pets", "--source", pets, "--size", 16, "--seed", 1)
    assert made.code == 0 and "24 images of 4 train, 1 val, 1 test classes" in made.out
    checked = npbml_command("data", "check", "pets")
    assert checked.code == 0 and "train" in checked.out
    assert "pets" in npbml_command("data", "list").out
    shown = npbml_command("data", "show", "pets", "--split", "train", "--out", tmp_path / "sheet.png")
    assert shown.code == 0
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert min(sheet.size) > 50
    store = tmp_path / "stores" / "pets" / "images.npy"
    store.write_bytes(store.read_bytes()[:-1] + b"\x07")
    assert npbml_command("data", "check", "pets").code == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("data", "prepair"), "no `npbml data prepair`: choose from prepare"),
        (("data", "prepare", "cifar-fs", "--source", "nowhere"), "nowhere"),
        (("data", "check", "cifar-fs"), "`npbml data prepare cifar-fs --source PATH`"),
    ],
)
def test_data_that_is_not_there_is_named(
    words: tuple[str, ...], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPBML_DATA", str(tmp_path))
    said = npbml_command(*words)
    assert said.code in (1, 2) and expected in said.error
