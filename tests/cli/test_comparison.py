"""Methods side by side, by command: the same tasks for all, one that fails, stopping, resuming and refusals."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from npbml.cli.arguments import Arguments
from npbml.cli.comparison import compared, read_comparison
from npbml.errors import Stopped
from npbml.lab.pipeline import Pipeline
from npbml.lab.run_folder import read_config
from npbml.methods import BUILT_IN

Npbml = Callable[..., Any]

MINE = 'summary = "GAP with a learned loss"\nbase = "npbml-3"\n[precondition]\nchain = ["svd"]\n'
WILD = 'base = "maml"\n[inner]\nlr = 1e30\n'


@pytest.fixture(scope="module")
def place(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two recipes, of which one fails, and a comparison with them that is done."""
    folder = tmp_path_factory.mktemp("comparison")
    (folder / "mine.toml").write_text(MINE)
    (folder / "wild.toml").write_text(WILD)
    return folder


@pytest.fixture(scope="module")
def done(npbml_command: Npbml, shared: Path, place: Path) -> Path:
    said = npbml_command(
        "compare",
        *("--config", shared / "small.toml", "--dataset", shared / "random", "--run", place / "done"),
        *("--methods", "maml, ", "metasgd,", f"{place / 'mine.toml'},{place / 'wild.toml'}"),
    )
    assert said.code == 1, said.error
    assert said.error.strip().splitlines()[-1] == "npbml: 1 of 4 methods failed: wild."
    (place / "said.txt").write_text(said.out, encoding="utf-8")
    return place / "done"


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in json.loads((folder / "comparison.json").read_text())}


def weights_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}


def per_task(path: Path) -> np.ndarray:
    return np.array(json.loads(path.read_text())["per_task"])


def test_a_method_that_fails_does_not_stop_the_others(done: Path) -> None:
    out = (done.parent / "said.txt").read_text(encoding="utf-8")
    assert "common protocol, seed 0, 4 test tasks" in " ".join(out.split())
    lines = out[out.index("accuracy, %") :].splitlines()
    table = {line.split()[0]: line for line in lines if line.strip()}
    rows = rows_of(done)
    assert list(rows) == ["maml", "metasgd", "mine", "wild", "prototypes"]
    assert "failed" in table["wild"] and "Meta-step 1 of wild is not finite" in rows["wild"]["failed"]
    assert f"wild failed: {rows['wild']['failed']}" in out and "accuracy" not in rows["wild"]
    for method in ("maml", "metasgd", "mine", "prototypes"):
        assert f"{rows[method]['accuracy']:.2f} ± {rows[method]['ci95']:.2f}" in table[method]
    for method in ("maml", "metasgd", "mine"):
        assert f" {rows[method]['start']:.2f} " in table[method] and rows[method]["step_ms"] > 0


def test_differences_are_paired_over_the_tasks_of_the_first_method(done: Path) -> None:
    first = per_task(done / "maml" / "test.json")
    for method, row in rows_of(done).items():
        if method in ("maml", "wild"):
            assert "difference" not in row
            continue
        apart = 100 * (per_task(done / method / "test.json") - first)
        assert row["difference"]["to"] == "maml"
        assert row["difference"]["mean"] == pytest.approx(apart.mean(), abs=1e-9)
        assert row["difference"]["ci95"] == pytest.approx(1.96 * apart.std(ddof=1) / 4**0.5, abs=1e-9)


def test_shared_stages_are_done_once_and_methods_share_their_run(done: Path) -> None:
    stages = {path.parent.name for path in done.glob("*/done.json")}
    assert stages == {"pretrain", "relation", "maml", "metasgd", "mine"}
    assert read_config(done).method == "maml" and read_config(done).protocol == "common"
    with Image.open(done / "pictures" / "comparison.png") as picture:
        assert min(picture.size) > 300 and len(picture.convert("L").getcolors(10**6)) > 20


def test_a_comparison_goes_on_where_it_was_and_knows_its_recipes_by_name(
    npbml_command: Npbml, done: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(done, copy)
    said = npbml_command("compare", "--run", copy, "--methods", "mine,maml,metasgd")
    assert said.code == 0, said.error
    assert said.out.count("done before") == 5 and weights_of(copy) == weights_of(done)
    before, after = rows_of(done), rows_of(copy)
    assert list(after) == ["mine", "maml", "metasgd", "prototypes"]
    for method, row in after.items():
        assert row["accuracy"] == before[method]["accuracy"] and row.get("step_ms") == before[method].get(
            "step_ms"
        )
    assert after["maml"]["difference"]["mean"] == pytest.approx(-before["mine"]["difference"]["mean"], abs=1e-9)


def test_stopped_and_given_again_it_ends_as_if_it_had_never_been(
    npbml_command: Npbml, shared: Path, done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("--config", shared / "small.toml", "--dataset", shared / "random", "--run", "again")
    train, stops = Pipeline.run, ["metasgd"]

    def stopped(run: Pipeline, method: str) -> dict[str, Any]:
        if method in stops:
            stops.remove(method)
            raise Stopped(method, 1, signal.SIGINT)
        return train(run, method)

    monkeypatch.setattr(Pipeline, "run", stopped)
    methods = ("--methods", f"maml,metasgd,{done.parent / 'mine.toml'}")
    said = npbml_command("compare", *given, *methods)
    assert said.code == 130 and "Stopped in metasgd" in said.error and "The same command goes on" in said.error
    said = npbml_command("compare", *given, *methods)
    assert said.code == 0 and "maml: done before" in said.out, said.error
    mine, theirs = weights_of(Path("again")), weights_of(done)
    assert mine == {name: content for name, content in theirs.items() if not name.startswith("wild")}


def test_another_recipe_of_the_same_name_is_refused(npbml_command: Npbml, done: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(MINE.replace("svd", "svd_approx"))
    before = weights_of(done)
    said = npbml_command("compare", "--run", done, "--methods", "maml,mine.toml")
    assert said.code == 1 and "mine" in said.error and "another" in said.error
    assert weights_of(done) == before


REFUSED: list[tuple[str, str]] = [
    ("", "Say what to compare: --methods maml,npbml or --methods all"),
    ("--methods", "Say what to compare"),
    ("--methods prototypes", "Say what to compare"),
    ("--methods maml,mamml", "There is no method 'mamml'. Did you mean 'maml'? Choose from npbml, maml"),
    ("--methods maml,gone.toml", "gone.toml cannot be read: No such file"),
    ("--method maml --methods gap,maml", "takes --methods, with commas between them, and no --method"),
    ("--methods maml,gap --shots 0", "npbml: shots must be at least 1, not 0."),
    ("--methods maml,boil,gap --head.kind unicorn", "boil: The method boil sets head.kind=linear"),
    ("--methods maml,maml++ --inner.test-steps 9", "maml++: rates is learned for each of inner.steps=2 steps"),
    ("--methods maml,metal --inner.batch support", "metal: The method metal sets inner.batch=joint"),
    ("--methods npbml,maml --inner.batch support", "npbml: npbml: inner.batch=support leaves the query images"),
    (
        "--methods maml,npbml --protocol slow",
        "takes one of published, fast, best, plain, quick, common, not 'slow'",
    ),
    ("--methods maml --frobnicate 3", "--frobnicate"),
    (
        "--methods maml,npbml --scorer.widths 2 2 2 --scorer.pools 3",
        "The scorer halves an image 5 times",
    ),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED, ids=[arguments for arguments, _ in REFUSED])
def test_what_makes_no_sense_is_refused_by_name_and_makes_nothing(
    npbml_command: Npbml, given: tuple[object, ...], tmp_path: Path, arguments: str, words: str
) -> None:
    said = npbml_command("compare", *given, *arguments.split())
    assert said.code == 2 and said.out == ""
    assert words in said.error and "Traceback" not in said.error
    assert list(tmp_path.iterdir()) == []


def test_every_method_that_makes_no_sense_is_named(npbml_command: Npbml) -> None:
    said = npbml_command("compare", "--dataset", "sinusoid", "--methods", "metal,maml,npbml-8", "--run", "run")
    assert said.code == 2 and "metal: loss.adaptive_query" in said.error and "npbml-8: loss.tr" in said.error


def test_methods_are_named_in_any_of_the_usual_ways() -> None:
    for arguments in (
        ["--methods", "gap,maml,npbml"],
        ["--methods=gap,maml,npbml"],
        ["--methods", "gap,", "maml", ",npbml", "--shots", "5"],
        ["--shots", "5", "--methods", "gap", "maml", "npbml", "gap"],
        ["--methods", " gap , maml,prototypes ,npbml,"],
    ):
        assert compared(Arguments(arguments)) == ["gap", "maml", "npbml"]
    every = compared(Arguments(["--methods", "all"]))
    assert set(every) == BUILT_IN.keys() - {"npbml-quirks"} and len(every) == len(set(every))
    assert compared(Arguments(["--methods", "sca,all"]))[:2] == ["sca", "npbml"]


def test_the_protocol_is_common_unless_something_else_says_so(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('protocol = "quick"\n')

    def protocol(*more: object) -> str:
        folder, asked = read_comparison(["--methods", "maml,gap", *map(str, more)])
        assert [one.config.method for one in asked.values()] == ["maml", "gap"]
        assert {one.folder for one in asked.values()} == {folder}
        return asked["maml"].config.protocol

    assert protocol() == "common"
    assert protocol("--protocol", "quick") == protocol("--config", "a.toml") == "quick"
    assert protocol("--config", "a.toml", "--protocol", "common") == "common"
    assert protocol("--run", shared / "done") == "quick"


def test_an_existing_run_keeps_its_method_and_lends_its_encoder(
    npbml_command: Npbml, shared: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(shared / "done", copy)
    said = npbml_command("compare", "--run", copy, "--methods", "fomaml,maml")
    assert said.code == 0, said.error
    assert "pretrain: done before" in said.out and "maml: done before" in said.out and "relation" not in said.out
    assert read_config(copy).method == "npbml" and list(rows_of(copy)) == ["fomaml", "maml", "prototypes"]


PUBLISHED = """
[net]
filters = 3
[loss]
hidden = 4
[inner]
steps = 2
test_steps = 2
[pretrain]
validation_shots = 1
"""


@pytest.fixture
def published(shared: Path, tmp_path: Path) -> tuple[object, ...]:
    """The options of a small comparison under the published protocol, in the folder `own`."""
    text = (shared / "small.toml").read_text().split("[net]")[0] + PUBLISHED
    (tmp_path / "own.toml").write_text(text + (shared / "small.toml").read_text().split("[pretrain]")[1])
    return (*("--config", "own.toml", "--dataset", shared / "random", "--run", "own"), "--protocol", "published")


def test_under_the_published_protocol_each_method_has_a_run_of_its_own(
    npbml_command: Npbml, published: tuple[object, ...], place: Path
) -> None:
    methods = f"maml,npbml,{place / 'mine.toml'}"
    said = npbml_command("compare", *published, "--methods", methods)
    assert said.code == 0, said.error
    names = ["maml", "npbml", "mine"]
    assert sorted(path.parent.name for path in Path("own").glob("*/config.json")) == sorted(names)
    assert list(rows_of(Path("own"))) == names
    configs = {name: read_config(Path("own") / name) for name in names}
    assert [config.learner.init.source for config in configs.values()] == ["scratch", "pretrained", "pretrained"]
    assert all(config.learner.inner.steps == 2 and config.protocol == "published" for config in configs.values())
    assert not Path("own/maml/pretrain").exists() and Path("own/npbml/pretrain").exists()
    results = [per_task(Path("own") / name / name / "test.json") for name in ("npbml", "maml")]
    row = rows_of(Path("own"))["npbml"]["difference"]
    assert row["mean"] == pytest.approx(100 * (results[0] - results[1]).mean(), abs=1e-9)
    before = weights_of(Path("own"))
    said = npbml_command("compare", "--run", "own", "--methods", "maml,mine")
    assert said.code == 0 and weights_of(Path("own")) == before, said.error
    said = npbml_command("compare", "--run", "own", "--methods", "maml,gap")
    assert said.code == 1 and "own/gap has dataset=glyphs, but own/maml has" in said.error
    assert not Path("own/gap").exists()


def test_published_comparisons_keep_out_of_the_runs_of_one_method(
    npbml_command: Npbml, published: tuple[object, ...], shared: Path
) -> None:
    said = npbml_command("compare", *published[:4], "--protocol", "published", "--methods", "maml")
    assert said.code == 0 and (Path("runs/compare-random-conv4-3way-1shot-published-seed0") / "maml").is_dir()
    assert npbml_command("train", *published[:4], *published[6:], "--method", "maml", "--run", "one").code == 0
    said = npbml_command("compare", *published[:4], *published[6:], "--run", "one", "--methods", "maml,npbml")
    assert said.code == 1 and "one is the run of one method" in said.error


def test_of_waves_the_smaller_error_is_the_better(npbml_command: Npbml) -> None:
    small = ("--train.steps", 3, "--train.validation-tasks", 4, "--test.tasks", 6, "--device", "cpu")
    said = npbml_command(
        "compare", "--dataset", "sinusoid", "--methods", "maml,metasgd,tnet", "--run", "waves", *small
    )
    assert said.code == 0, said.error
    rows = rows_of(Path("waves"))
    assert list(rows) == ["maml", "metasgd", "tnet"] and not Path("waves/pretrain").exists()
    for row in rows.values():
        assert f"{row['squared error']:.4f} ± {row['ci95']:.4f}" in said.out
    assert "10-shot sinusoid" in said.out and "%" not in said.out and "way" not in said.out
    assert Path("waves/pictures/comparison.png").exists()
