"""What the documents say is so: settings, links, files, examples and figures."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from safetensors import safe_open

from npbml.catalogue import LEARNERS
from npbml.lab.reproduce import read_results
from npbml.lab.schema import Config
from npbml.methods import REMOVED
from npbml.report.tables import summary
from npbml.settings import describe, leaves

ROOT = Path(__file__).parent.parent
README, RESULTS = ROOT / "README.md", ROOT / "results" / "README.md"
DOCUMENTS = [README, RESULTS, *sorted((ROOT / "docs").glob("*.md"))]
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [
    pytest.param(block, id=f"{path.name}-{number}")
    for path in DOCUMENTS
    for number, block in enumerate(PYTHON.findall(path.read_text(encoding="utf-8")), 1)
]


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


METHOD = text_of(ROOT / "docs" / "method.md")
ROWS = re.findall(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \|", METHOD, re.MULTILINE)


def test_every_open_point_has_a_row() -> None:
    assert [int(number) for number, _, _ in ROWS] == list(range(1, 37))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"item {row[0]}")
def test_a_row_names_settings_that_exist(row: tuple[str, str, str]) -> None:
    known = {name for name, _, _ in describe(Config)}
    named = re.findall(r"`([a-z_.]+)`", row[2])
    assert named and set(named) <= known


def test_every_setting_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """The help text has a line on each setting, beside its default."""
    from npbml.cli import main

    with pytest.raises(SystemExit):
        main(["run", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for name, _, _ in describe(Config):
        option = name.replace("_", "-")
        described = re.search(rf"--{re.escape(option)} (\S+ )*?[A-Za-z(][^(]*\(", text)
        assert described, f"{name} is not explained"


def test_the_readme_is_short_and_has_both_commands() -> None:
    lines = text_of(README).splitlines()
    assert len(lines) <= 150
    assert not [line for line in lines if len(line) > 120]
    assert "make run" in text_of(README) and "make test" in text_of(README)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text_of(path))]
    own = [link for link in links if link and "://" not in link]
    assert not [link for link in own if not (path.parent / link).exists()]


# A dotted name, as a setting or as an option; what belongs to a path or a file's name is none.
DOTTED = re.compile(r"(?<![\w/.-])(?:--)?([a-z][a-z_-]*(?:\.[a-z_*][a-z_-]*)+)")


def dotted_names(text: str) -> set[str]:
    return {name.replace("-", "_") for name in DOTTED.findall(PYTHON.sub("", text))}


def test_dotted_names_are_found_in_text() -> None:
    text = "`--scorer-training.crop-size 48`, (`train.lr.*`), loss.averaged. docs/loss.png rule/loss.py:\n"
    text += "```python\nloss.backward()\n```\n"
    assert dotted_names(text) == {"scorer_training.crop_size", "train.lr.*", "loss.averaged"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_settings_that_are_named_exist(path: Path) -> None:
    known = {leaf.name for leaf in leaves(Config())}
    tables = {name[: place.start()] for name in known for place in re.finditer(r"\.", name)}
    groups = {name.partition(".")[0] for name in tables}
    named = {name for name in dotted_names(text_of(path)) if name.partition(".")[0] in groups}
    assert not named - known - tables - {f"{table}.*" for table in tables}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_setting_has_its_old_name(path: Path) -> None:
    today = {leaf.name for leaf in leaves(Config())}
    old = {leaf.old_name for leaf in leaves(Config())} | set(REMOVED)
    assert not dotted_names(text_of(path)) & (old - today)


PLACES = sorted(set(re.findall(r"`([a-z_/0-9]+\.py)(?:: (\w+))?`", "".join(map(text_of, DOCUMENTS)))))


@pytest.mark.parametrize(("file", "name"), PLACES, ids=lambda word: str(word) or "whole")
def test_code_is_where_the_documents_say(file: str, name: str) -> None:
    folders = (ROOT / "src" / "npbml", ROOT, ROOT / "benchmarks")
    found = [folder / file for folder in folders if (folder / file).exists()]
    assert found, f"there is no {file}"
    if name:
        assert re.search(rf"^\s*(?:def|class) {name}\b", text_of(found[0]), re.MULTILINE)


def in_process(folder: Path, *command: str) -> str:
    """The output of a Python command in a process of its own: examples register parts."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "NPBML_DATA": str(folder / "data"),
        "COLUMNS": "120",
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", *command], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("block", BLOCKS)
def test_examples_run(block: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(block)
    printed = in_process(tmp_path, "example.py")
    said = re.search(r"^print\(.*\)  # ([\w, ]+)", block, re.MULTILINE)
    if said:
        assert re.findall(r"\w+", printed) == said.group(1).replace(",", "").split()


SMALL = """
dataset = "blobs"
ways = 3
queries = 3
image_size = 16
net.filters = 4
pretrain = {steps = 4, batch_size = 8, validate_every = 2, validation_tasks = 4}
scorer = {widths = [2, 3], pools = 1}
scorer_training = {steps = 2, validate_every = 2, validation_tasks = 4}
train = {steps = 2, validate_every = 2, validation_tasks = 4}
test.tasks = 6
"""


def test_the_plugin_of_the_readme_works_in_its_command(tmp_path: Path) -> None:
    """On a small data set and with few steps, which the command itself does not say."""
    plugin = next(block for block in PYTHON.findall(text_of(README)) if block.startswith("# mine.py"))
    command = re.search(r"^    npbml (compare .*--plugin mine\.py)$", text_of(README), re.MULTILINE)
    assert command
    (tmp_path / "mine.py").write_text(plugin)
    (tmp_path / "small.toml").write_text(SMALL)
    words = [*shlex.split(command.group(1)), "--plugin", str(ROOT / "tests" / "plugins" / "blobs.py")]
    in_process(tmp_path, "-m", "npbml", *words, "--config", "small.toml", "--run", "run")
    rows = json.loads((tmp_path / "run" / "comparison.json").read_text())
    assert {"npbml", "maml", "unit-maml"} <= {row["method"] for row in rows}
    assert not [row for row in rows if "failed" in row]


@pytest.fixture
def refresh() -> ModuleType:
    spec = importlib.util.spec_from_file_location("refresh", ROOT / "docs" / "refresh.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_blocks_stand_where_refresh_puts_them(refresh: ModuleType) -> None:
    marked = re.compile(r"<!-- python docs/refresh\.py (.+?) -->\n.*?\n<!-- end of \1 -->", re.DOTALL)
    found = {kind: path for path in DOCUMENTS for kind in marked.findall(text_of(path))}
    assert found == refresh.BLOCKS


def test_refresh_replaces_a_block_and_nothing_else(refresh: ModuleType, tmp_path: Path) -> None:
    file, (begin, end) = tmp_path / "page.md", refresh.marks("runs")
    file.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    refresh.put("runs", ["new", "lines"], file)
    assert file.read_text() == f"before\n{begin}\nnew\nlines\n{end}\nafter\n"
    with pytest.raises(SystemExit, match="no block 'results'"):
        refresh.put("results", ["new"], file)
    assert file.read_text() == f"before\n{begin}\nnew\nlines\n{end}\nafter\n"


def test_the_cells_of_npbml_are_those_of_the_result_files(refresh: ModuleType) -> None:
    """`python docs/refresh.py results results` puts them there."""
    begin, end = refresh.marks("results")
    _, _, rest = text_of(RESULTS).partition(begin + "\n")
    assert rest.partition("\n" + end)[0] == "\n".join(summary(read_results(ROOT / "results")))


def test_figures_of_the_readme_are_results() -> None:
    """Those of its section on results: of the tables, by shape, or of the learner that comes with the package."""
    section = text_of(README).partition("## Results\n")[2].partition("\n## ")[0]
    with safe_open(LEARNERS / "cifar-fs-conv4.safetensors", "pt") as file:
        (own,) = json.loads(file.metadata()["about"])["results"]
    known = text_of(ROOT / "results" / "tables.md") + f"{own['accuracy']:.2f} ± {own['ci95']:.2f}"
    known += "".join(text_of(file) for file in sorted((ROOT / "results" / "shapes").glob("*.md")))
    figures = re.findall(r"\d+\.\d\d ± \d+\.\d\d", section)
    assert len(figures) > 20
    assert not [figure for figure in figures if figure not in known]
