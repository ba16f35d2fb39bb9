"""The paper's tables by command: listing, running, skipping, stopping, going on, and the report."""

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npbml.data.store import ClassEntry, Store
from npbml.lab.paper import paper_tables
from npbml.lab.run_folder import read_config
from npbml.stages.metatrain import MetaTrainer

Npbml = Callable[..., Any]
CHOICE = ("--dataset", "cifar-fs", "--backbone", "conv4", "--methods", "npbml,maml")
# How tasks run is said: where it is measured, two runs may decide otherwise, and round in another way.
SAME = '[engine]\ntasks = "vmap"\n[pretrain]\nvalidation_shots = 1\n'
NAME = "cifar-fs-conv4-3way-{}shot-{}-published-seed0.json"


def write_data(root: Path, name: str) -> None:
    """A benchmark's store of ten classes of nine random pictures."""
    images = np.random.default_rng(0).integers(0, 256, (90, 1, 16, 16), dtype=np.uint8)
    splits = ["train"] * 4 + ["val"] * 3 + ["test"] * 3
    entries = [ClassEntry(f"class {n}", split, 9 * n, 9) for n, split in enumerate(splits)]  # type: ignore[arg-type]
    Store.write(root / name, name=name, images=images, classes=entries, provenance={})


@pytest.fixture(scope="module")
def place(npbml_command: Npbml, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which four cells of table 2 are done."""
    folder = tmp_path_factory.mktemp("tables")
    write_data(folder / ".data", "cifar-fs")
    settings = (shared / "small.toml").read_text().replace("[pretrain]\n", SAME)
    (folder / "small.toml").write_text(settings.replace("steps = 2\n[pre", "steps = 2\ntest_steps = 2\n[pre"))
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder):
        patch.setenv("NPBML_DATA", str(folder / ".data"))
        said = npbml_command("reproduce", "table2", *CHOICE, "--config", "small.toml")
    assert said.code == 0, said.error
    (folder / "said.txt").write_text(said.out, encoding="utf-8")
    return folder


@pytest.fixture
def here(place: Path, tmp_path: Path) -> Path:
    """A copy of that folder to work in."""
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    return tmp_path


def weights_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}


def results_of(folder: Path) -> dict[str, float]:
    return {path.name: json.loads(path.read_text())["accuracy"] for path in folder.glob("*.json")}


def test_a_table_is_listed_in_eighty_columns(npbml_command: Npbml) -> None:
    for name, table in paper_tables().items():
        said = npbml_command("reproduce", name)
        assert said.code == 0 and max(map(len, said.out.splitlines())) <= 80
        assert said.out.startswith(f"{table.title}, published protocol")
        lines = [line for line in said.out.splitlines() if line.rstrip().endswith("no data")]
        assert len(lines) == len(table.cells) and "npbml data prepare" in said.out
        for line, cell in zip(lines, table.cells, strict=True):
            figure = f"{cell.paper.mean:.2f}" if cell.paper else "-"
            assert line.split()[-7:-2] == [cell.dataset, cell.backbone, str(cell.shots), cell.name, figure]
    assert not Path("runs").exists() and not Path("results").exists()


def test_the_list_says_what_is_done_with_which_seeds(npbml_command: Npbml, here: Path) -> None:
    said = npbml_command("reproduce", "table2", *CHOICE, "--list")
    assert [line.split()[-1] for line in said.out.splitlines() if "cifar-fs" in line] == ["0"] * 4
    said = npbml_command("reproduce", "table2")
    assert said.out.count("not done") == 20 - 4 and said.out.count("no data") == 20 + 1
    said = npbml_command("reproduce", "table2", "--protocol", "common", "--list", "--dataset=cifar-fs")
    assert "common protocol" in said.out and said.out.count("not done") == 20


def test_cells_are_run_and_shown_beside_the_papers_figures(place: Path) -> None:
    out = (place / "said.txt").read_text(encoding="utf-8")
    names = {NAME.format(shots, method) for shots in (1, 5) for method in ("npbml", "maml")}
    assert {path.name for path in (place / "results").iterdir()} == names
    for name, accuracy in results_of(place / "results").items():
        assert f"{accuracy:.2f} ± " in out, name
    assert "64.90" in out and "[1]: with ways=3" in out and max(map(len, out.splitlines())) <= 80


def test_pre_training_is_done_once_for_both_numbers_of_shots(place: Path) -> None:
    out = (place / "said.txt").read_text(encoding="utf-8")
    one, five = (place / "runs" / f"cifar-fs-conv4-3way-{shots}shot-published-seed0" for shots in (1, 5))
    assert f"pretrain: taken over from {one.relative_to(place)}" in out and out.count("pretrain: step 3") == 1
    name = "pretrain/network.safetensors"
    assert (one / name).read_bytes() == (five / name).read_bytes() and read_config(five).shots == 5
    own = place / "runs" / "cifar-fs-conv4-3way-1shot-maml-published-seed0"
    assert {path.name for path in own.iterdir() if path.is_dir()} == {"maml"}


def test_what_is_done_is_skipped(npbml_command: Npbml, here: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in here.rglob("*") if path.is_file()}
    said = npbml_command("reproduce", "table2", *CHOICE, "--config", "small.toml")
    assert said.code == 0 and said.out.count("done before") == 4 and "step" not in said.out.split("row")[0]
    assert {path: path.stat().st_mtime_ns for path in here.rglob("*") if path.is_file()} == before


def test_a_cell_without_a_result_goes_on_from_its_run(npbml_command: Npbml, here: Path) -> None:
    before, weights = results_of(here / "results"), weights_of(here)
    (here / "results" / NAME.format(5, "npbml")).unlink()
    said = npbml_command("reproduce", "table2", *CHOICE, "--config", "small.toml")
    assert said.code == 0 and "npbml: done before: best" in said.out
    assert results_of(here / "results") == before and weights_of(here) == weights


def test_stopped_in_a_cell_it_goes_on_to_the_same_end(
    npbml_command: Npbml, place: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(here / "runs")
    shutil.rmtree(here / "results")
    step, stops = MetaTrainer.step, [True]

    def stopped(trainer: MetaTrainer, index: int) -> dict[str, float]:
        if stops and trainer.method == "npbml":
            stops.clear()
            os.kill(os.getpid(), signal.SIGINT)
        return step(trainer, index)

    monkeypatch.setattr(MetaTrainer, "step", stopped)
    said = npbml_command("reproduce", "table2", *CHOICE, "--config", "small.toml")
    assert said.code == 130 and "Stopped in npbml after step 1" in said.error, said.error
    assert len(results_of(here / "results")) == 2  # of maml, which comes first
    said = npbml_command("reproduce", "table2", *CHOICE, "--config", "small.toml")
    assert said.code == 0 and said.out.count("seed 0: done before") == 2
    assert weights_of(here) == weights_of(place) and results_of(here / "results") == results_of(place / "results")


def test_seeds_have_runs_and_results_of_their_own(npbml_command: Npbml, here: Path) -> None:
    one = ("--dataset", "cifar-fs", "--backbone", "conv4", "--methods", "maml", "--shots", "1")
    said = npbml_command("reproduce", "table2", *one, "--seeds", "0,2", "--config", "small.toml")
    assert said.code == 0 and "seed 2" in said.out, said.error
    name = "cifar-fs-conv4-3way-1shot-maml-published-seed{}"
    accuracies = [json.loads((here / "results" / f"{name.format(seed)}.json").read_text()) for seed in (0, 2)]
    assert [data["seed"] for data in accuracies] == [0, 2]
    mean = sum(data["accuracy"] for data in accuracies) / 2
    assert f"{mean:.2f} ± " in said.out
    assert npbml_command("report").code == 0
    assert f"{mean:.2f} ± " in (here / "results" / "tables.md").read_text(encoding="utf-8")


def test_the_support_batch_has_a_run_of_its_own_with_the_same_encoder(npbml_command: Npbml, here: Path) -> None:
    write_data(here / ".data", "mini-imagenet")
    said = npbml_command("reproduce", "table3", "--methods", "npbml-1,npbml-1-support", "--config", "small.toml")
    assert said.code == 0 and said.out.count("pretrain: taken over") == 1, said.error
    places = [here / "runs" / f"mini-imagenet-conv4-3way-5shot{more}-published-seed0" for more in ("", "-support")]
    assert [read_config(folder).learner.inner.batch for folder in places] == ["joint", "support"]
    assert "(1) support" in said.out and len(list((here / "results").glob("mini*npbml-1-support*"))) == 1


def test_a_cell_without_data_does_not_keep_the_others(npbml_command: Npbml, here: Path) -> None:
    shutil.rmtree(here / "results")
    one = ("--dataset", "cifar-fs,fc100", "--backbone", "conv4", "--methods", "maml", "--shots", "1")
    said = npbml_command("reproduce", "table2", *one, "--config", "small.toml")
    assert said.code == 1 and "1 of 2 cells failed" in said.error
    assert "fc100 is not prepared" in said.out and list(results_of(here / "results")) == [NAME.format(1, "maml")]
    said = npbml_command("reproduce", "table1", "--dataset", "tiered-imagenet", "--methods", "npbml")
    assert said.code == 1 and said.error.startswith("npbml: tiered-imagenet is not prepared")
    assert "npbml data prepare tiered-imagenet" in said.error


def test_a_method_that_fails_does_not_stop_the_others(npbml_command: Npbml, here: Path) -> None:
    (here / "results" / NAME.format(1, "maml")).unlink()
    (here / "results" / NAME.format(1, "npbml")).unlink()
    (here / "runs" / "cifar-fs-conv4-3way-1shot-maml-published-seed0" / "maml" / "done.json").write_text("{}")
    said = npbml_command("reproduce", "table2", *CHOICE, "--config", "small.toml")
    assert said.code == 1 and "1 of 2 cells failed" in said.error and "made with other settings" in said.out
    assert (here / "results" / NAME.format(1, "npbml")).exists()


def test_other_settings_are_refused_before_anything_is_run(npbml_command: Npbml, here: Path) -> None:
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    given = ("reproduce", "table2", *CHOICE, "--config", "small.toml", "--train.steps", 3)
    said = npbml_command(*given)
    assert said.code == 1 and "another train.steps" in said.error and "--results" in said.error
    said = npbml_command(*given, "--results", "other")
    assert said.code == 1 and "another train.steps" in said.error and "--runs" in said.error
    assert {path: path.read_bytes() for path in here.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "Say which table"),
        (("table5",), "table1, table2, table3, table4, not 'table5'"),
        (("table2", "--dataset", "mini-imagenet"), "--dataset takes cifar-fs, fc100 or all"),
        (("table2", "--methods", "npbml,gap"), "table2 has no 'gap'"),
        (("table2", "--shots", "1,3"), "--shots takes 1, 5 or all"),
        (("table2", "--methods", "boil", "--backbone", "resnet12"), "No cell of table2 is all of that"),
        (("table2", "--methods", "maml", "--seeds", "0,x"), "--seeds takes whole numbers"),
        (("table2", "--methods", "maml", "--seed", 1), "choose cells with"),
        (("table2", "--methods", "maml", "--run", "runs/mine"), "takes --runs"),
        (("table2", "--methods", "maml", "--protocol", "mine"), "protocol takes one of"),
        (("table2", "--methods", "metal", "--inner.batch", "support"), "The method metal sets inner.batch=joint"),
    ],
)
def test_what_makes_no_sense_is_refused(npbml_command: Npbml, arguments: tuple[object, ...], why: str) -> None:
    said = npbml_command("reproduce", *arguments)
    assert said.code == 2 and why in said.error
    assert not Path("runs").exists() and not Path("results").exists()


def test_the_report_is_a_document_and_a_page(npbml_command: Npbml, here: Path) -> None:
    said = npbml_command("report", "--out", "elsewhere")
    assert said.code == 0 and max(map(len, said.out.splitlines())) <= 80
    text = Path("elsewhere/tables.md").read_text(encoding="utf-8")
    page = Path("elsewhere/tables.html").read_text(encoding="utf-8")
    for mark in (1, 2):  # MAML asks for no scores, and their settings are not named
        tables = text.partition("## Calibration")
        assert [part.count(f"published [{mark}]") for part in tables] == [2, 0, 2]
        assert page.count(f"<td>published [{mark}]</td>") == 4
        line = next(line for line in text.splitlines() if line.startswith(f"[{mark}]: "))
        assert ("scorer." in line) == (f"NPBML | npbml | cifar-fs | conv4 | 1 | published [{mark}]" in text)
    scored = [line for line in text.splitlines() if " published [" in line and " ± " in line.split(" | ")[7]]
    assert [line.split(" | ")[1] for line in scored] == ["npbml", "npbml"]
    assert page.count("data:image/png;base64,") == 1 and not (here / "results" / "tables.md").exists()
    for accuracy in results_of(here / "results").values():
        assert all(f"{accuracy:.2f} ± " in shown for shown in (said.out, text, page))


def test_a_report_names_what_is_missing_or_damaged(npbml_command: Npbml, here: Path) -> None:
    said = npbml_command("report", "--results", "nowhere")
    assert said.code == 1 and "There is no folder nowhere" in said.error
    Path("empty").mkdir()
    said = npbml_command("report", "--results", "empty")
    assert said.code == 0 and "There are no results in empty yet" in said.out and Path("empty/tables.md").exists()
    (here / "results" / NAME.format(1, "maml")).write_text('{"method": "ma')
    for command in (("report",), ("reproduce", "table2")):
        said = npbml_command(*command)
        assert said.code == 1 and f"results/{NAME.format(1, 'maml')} cannot be read" in said.error
