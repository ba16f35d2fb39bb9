"""The overview, help, how a command ends, and that torch is imported only where it is needed."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import npbml
from npbml.cli.main import COMMANDS, GO_ON, LESS_MEMORY, OLD_NAMES, _Terminated
from npbml.cli.options import read_configuration
from npbml.cli.stages import run
from npbml.errors import Stopped
from npbml.lab.schema import Config
from npbml.methods import REMOVED
from npbml.settings import describe

Npbml = Callable[..., Any]


def test_the_overview_names_every_command_in_eighty_columns(npbml_command: Npbml) -> None:
    texts = [npbml_command(*arguments) for arguments in ((), ("--help",), ("-h",), ("help",))]
    assert len(set(texts)) == 1 and texts[0].code == 0 and texts[0].error == ""
    lines = texts[0].out.splitlines()
    assert max(map(len, lines)) <= 80
    for name, command in COMMANDS.items():
        assert any(line.startswith(f"  {name} ") for line in lines)
        words = (command.__doc__ or "").split()
        assert words and all(word in texts[0].out.split() for word in words)


def test_the_overviews_last_paragraph_is_filled(npbml_command: Npbml) -> None:
    lines = npbml_command().out.rstrip().splitlines()
    last = lines[len(lines) - lines[::-1].index("") :]
    text = " ".join(line.strip() for line in last)
    assert "npbml COMMAND --help" in text and len(last) == len(textwrap.wrap(text, 80))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(npbml_command: Npbml, command: str) -> None:
    said = npbml_command(command, "--help")
    assert said.code == 0 and f"npbml {command}" in said.out
    assert " ".join((COMMANDS[command].__doc__ or "").split()) in " ".join(said.out.split())
    if command == "classify":
        assert all(option in said.out for option in ("FEW MANY", "--learner", "--out", "--alone", "--device"))
    elif command not in ("methods", "parts", "data", "reproduce", "report"):
        words = said.out.split()
        assert "--run" in words and "--config" in words
        hidden = {"method", "baselines"} if command == "compare" else set()
        for name, _, _ in describe(Config):
            assert (f"--{name.replace('_', '-')}" in words) == (name not in hidden)


def test_help_has_a_line_on_every_setting(npbml_command: Npbml) -> None:
    """An option is followed by its explanation, never by the next option."""
    lines = [line.strip("│ ") for line in npbml_command("run", "--help").out.splitlines()]
    for line, following in pairwise(lines):
        if line.startswith("--") and not line.startswith("---"):
            assert following and not following.startswith("--") and not following.startswith("(default"), line


def test_the_version(npbml_command: Npbml) -> None:
    for option in ("--version", "-V"):
        assert npbml_command(option) == (0, f"npbml {npbml.__version__}\n", "")


def test_an_unknown_command_is_answered_with_the_names(npbml_command: Npbml) -> None:
    said = npbml_command("frobnicate")
    assert said.code == 2 and "'frobnicate'" in said.error and all(name in said.error for name in COMMANDS)


@pytest.fixture
def ended_by(npbml_command: Npbml, monkeypatch: pytest.MonkeyPatch) -> Npbml:
    """ended_by(exception) -> what is said where a command ends by it"""

    def ended(exception: BaseException) -> Any:
        def command(_: list[str]) -> None:
            raise exception

        monkeypatch.setitem(COMMANDS, "run", command)
        return npbml_command("run")

    return ended


@pytest.mark.parametrize(
    ("stop", "code"),
    [(KeyboardInterrupt(), 130), (_Terminated(), 143), (Stopped("pretrain", 3, signal.SIGINT), 130)],
    ids=["ctrl-c", "sigterm", "in a stage"],
)
def test_a_stop_says_how_to_go_on(ended_by: Npbml, stop: BaseException, code: int) -> None:
    said = ended_by(stop)
    assert said.code == code and "The same command goes on from" in said.error


@pytest.mark.parametrize(
    "failure",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: not enough memory: you tried to"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried to"),
    ],
)
def test_full_memory_of_the_machine_is_told_in_a_line(ended_by: Npbml, failure: Exception) -> None:
    said = ended_by(failure)
    assert said.code == 1 and said.error == f"npbml: the memory of this machine is full. {LESS_MEMORY} {GO_ON}\n"


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nTried"), "memory is full. Meta-training takes less"),
        (torch.AcceleratorError("CUDA error: an illegal access\nmore"), "failed (CUDA error: an illegal access)."),
    ],
    ids=["memory", "error"],
)
def test_a_gpu_that_fails_is_told_in_a_line(ended_by: Npbml, failure: Exception, words: str) -> None:
    said = ended_by(failure)
    assert said.code == 1 and said.error.startswith("npbml: the GPU") and words in said.error
    assert said.error.endswith("The same command goes on from the last checkpoint.\n")
    for option in ("engine.chunk", "engine.remat", "test.batch_size", "pretrain.batch_size"):
        assert f"--{option.replace('_', '-')}" in LESS_MEMORY and option in {
            name for name, _, _ in describe(Config)
        }


GUARD = """
import json, sys
from npbml.cli import main
try:
    main(json.loads(sys.argv[1]))
    code = 0
except SystemExit as leave:
    code = int(leave.code or 0)
print("\\nimported:", *sorted({"torch", "matplotlib", "PIL", "tensorboard"} & set(sys.modules)), file=sys.stderr)
sys.exit(code)
"""


class Process:
    """`npbml ARGUMENTS` in a process of its own: how it ended, what it said, and what slow modules it imported."""

    def __init__(self, *arguments: object, place: Path) -> None:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", GUARD, json.dumps([str(word) for word in arguments])],
            capture_output=True,
            text=True,
            cwd=place,
            env={**os.environ, "NPBML_DATA": str(place / ".data"), "COLUMNS": "80"},
        )
        self.code, self.out = done.returncode, done.stdout
        self.error, _, imported = done.stderr.rpartition("\nimported:")
        self.imported = imported.split()


RECIPE = 'base = "npbml"\n[precondition]\nchain = ["svd"]\n'
LIGHT: list[tuple[str, str]] = [
    ("", "usage: npbml COMMAND"),
    ("--help", "usage: npbml COMMAND"),
    ("--version", "npbml "),
    ("settings", "inner.lr"),
    ("settings --protocol best --dataset mini-imagenet --backbone resnet12", "scorer.whiten"),
    ("settings --dataset sinusoid", "mlp"),
    ("settings --help", "usage: npbml settings"),
    ("run --help", "usage: npbml run"),
    ("compare --help", "usage: npbml compare"),
    ("reproduce table1 --help", "usage: npbml reproduce"),
    ("classify --help", "usage: npbml classify"),
    ("methods", "warpgrad"),
    ("methods gap", "gap: a learned spectrum"),
    ("methods mine.toml", "mine: the recipe of mine.toml"),
    ("parts", "resnet12-wide"),
    ("data", "npbml data prepare"),
]


@pytest.mark.parametrize(("arguments", "words"), LIGHT, ids=[arguments or "alone" for arguments, _ in LIGHT])
def test_what_only_lists_and_explains_does_without_torch(tmp_path: Path, arguments: str, words: str) -> None:
    (tmp_path / "mine.toml").write_text(RECIPE)
    said = Process(*arguments.split(), place=tmp_path)
    assert said.code == 0 and words in said.out and said.imported == [], said.error


WRONG: list[tuple[str, str]] = [
    ("frobnicate", "there is no command 'frobnicate'"),
    ("run --frobnicate 3", "--frobnicate"),
    ("run --backbone vgg", "There is no backbone 'vgg'. Choose from conv4"),
    ("run --head.kind vgg", "There is no head 'vgg'. Choose from unicorn"),
    ("run --method mamml", "There is no method 'mamml'. Did you mean 'maml'?"),
    ("run --protocol slow", "protocol takes one of"),
    ("run --shots 0", "shots must be at least 1, not 0"),
    ("run --inner.lr nan", "inner.lr must be above 0"),
    ("run --method maml --loss.inductive True", "maml sets loss.inductive=False, but True was asked for"),
    ("run --inner.batch support", "inner.batch=support leaves the query images out"),
    ("run --dataset sinusoid --backbone conv4", "needs target=values and backbone=mlp"),
    ("run --config gone.toml", "gone.toml cannot be read"),
    ("run --method gone.toml", "gone.toml cannot be read"),
    ("run --plugin gone.py", "There is no plugin gone.py"),
    ("pretrain --dataset sinusoid", "there is no pretrain. Begin with `npbml train`"),
    ("scorer --dataset sinusoid", "there is no scorer. Begin with `npbml train`"),
    ("train", "There is no run in"),
    ("test --run nowhere", "There is no run in nowhere"),
    ("compare", "Say what to compare"),
    ("compare --methods maml --method maml", "takes --methods, with commas between them, and no --method"),
    ("compare --methods maml,mamml", "There is no method 'mamml'"),
    ("compare --methods maml,metal --inner.batch support", "metal: The method metal sets inner.batch=joint"),
    ("reproduce table5", "table1, table2, table3, table4, not 'table5'"),
    ("reproduce table2 --methods nothing", "table2 has no 'nothing'"),
    ("methods mamml", "There is no method 'mamml'"),
    ("data prepair", "There is no `npbml data prepair`"),
    ("report --results nowhere", "There is no folder nowhere"),
    ("settings --inner.stepz 3", "--inner.steps"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=[arguments for arguments, _ in WRONG])
def test_what_is_refused_is_refused_without_torch(tmp_path: Path, arguments: str, words: str) -> None:
    said = Process(*arguments.split(), place=tmp_path)
    assert said.code in (1, 2) and said.out == "" and "Traceback" not in said.error
    assert words in " ".join(said.error.split()) and said.imported == [], said.error
    assert list(tmp_path.iterdir()) == []


def test_importing_npbml_does_without_torch() -> None:
    text = (
        "import npbml, npbml.cli, npbml.cli.main, sys; assert npbml.__version__; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-W", "error", "-c", text]).returncode == 0


def test_an_unfinished_run_is_refused_without_torch(shared: Path, tmp_path: Path) -> None:
    said = Process("run", "--run", shared / "done", "--shots", 0, place=tmp_path)
    assert said.code == 2 and "shots must be at least 1" in said.error and said.imported == []


OLD_OPTIONS: list[tuple[str, str, str, Any]] = [
    ("--relation.kind encoder", "relation.kind", "scorer.kind", "encoder"),
    ("--relation.kind=both", "relation.kind", "scorer.kind", "both"),
    ("--relation.evened True", "relation.evened", "scorer.whiten", True),
    ("--relation.widths 8 16", "relation.widths", "scorer.widths", (8, 16)),
    ("--relation.validation-tasks 7", "relation.validation_tasks", "scorer_training.validation_tasks", 7),
    ("--relation.validation_tasks 7", "relation.validation_tasks", "scorer_training.validation_tasks", 7),
    ("--pretrain.batch 64", "pretrain.batch", "pretrain.batch_size", 64),
    ("--train.skips 3", "train.skips", "train.max_skipped", 3),
    ("--train.ahead false", "train.ahead", "train.prefetch", False),
    ("--test.together 3", "test.together", "test.batch_size", 3),
    ("--engine.graph off", "engine.graph", "engine.cuda_graph", "off"),
    ("--loss.trust 0.5", "loss.trust", "loss.score_weight", 0.5),
    ("--relation.kind network", "relation.kind", "scorer.kind", "relation-network"),
    ("--relation.kind=network", "relation.kind", "scorer.kind", "relation-network"),
]


@pytest.mark.parametrize(
    ("arguments", "old", "new", "value"), OLD_OPTIONS, ids=[option[0] for option in OLD_OPTIONS]
)
def test_options_of_version_one_are_understood_and_told(
    capsys: pytest.CaptureFixture[str], arguments: str, old: str, new: str, value: Any
) -> None:
    asked = read_configuration(run, arguments.split())
    assert {name: setting for name, _, setting in describe(Config, asked.config)}[new] == value
    assert asked.named == {new: value}
    assert capsys.readouterr().err == f"npbml: The setting {old} is called {new} now.\n"


@pytest.mark.parametrize("option", [["--engine.tasks", "together"], ["--engine.tasks=together"]])
def test_a_value_of_version_one_is_understood(capsys: pytest.CaptureFixture[str], option: list[str]) -> None:
    assert read_configuration(run, option).config.engine.tasks == "vmap"
    assert capsys.readouterr().err == ""


CONSTANTS: list[tuple[str, str, bool]] = [
    ("net.group_blocks", "--net.group-blocks 4", True),
    ("net.group_blocks", "--net.group-blocks=4", True),
    ("net.group_blocks", "--net.group_blocks 4", True),
    ("net.group_blocks", "--net.group-blocks 5", False),
    ("net.group_blocks", "--net.group-blocks=5", False),
    ("net.group_blocks", "--net.group_blocks 5", False),
    ("warp.residual", "--warp.residual false", True),
    ("warp.residual", "--warp.residual=False", True),
    ("warp.residual", "--warp.residual True", False),
    ("precondition.decay", "--precondition.decay 5e-4", True),
    ("precondition.decay", "--precondition.decay 0.1", False),
    ("relation.clip_norm", "--relation.clip-norm 0", True),
    ("train.coverage", "--train.coverage balanced", False),
    ("train.coverage", "--train.coverage random", True),
    ("train.crop_scale_low", "--train.crop-scale-low None", True),
    ("train.crop_scale_low", "--train.crop-scale-low 0.5", False),
]


@pytest.mark.parametrize(
    ("name", "arguments", "same"), CONSTANTS, ids=[arguments for _, arguments, _ in CONSTANTS]
)
def test_an_option_that_is_gone_is_left_out_at_its_constant_and_refused_at_another(
    npbml_command: Npbml, name: str, arguments: str, same: bool
) -> None:
    said = npbml_command("settings", *arguments.split(), "--shots", 3)
    assert f"The setting {name} is gone: it is always {REMOVED[name]}." in said.error
    assert said.code == (0 if same else 2) and bool(said.out) is same
    if same:
        assert read_configuration(run, [*arguments.split(), "--shots", "3"]).config.shots == 3


def test_options_of_version_one_are_refused_by_todays_names(npbml_command: Npbml) -> None:
    said = npbml_command("settings", "--pretrain.batch", 1)
    assert said.code == 2 and "pretrain.batch_size must be at least 2, not 1" in said.error
    assert "The setting pretrain.batch is called pretrain.batch_size now." in said.error


def test_a_file_of_version_one_is_understood_and_told(npbml_command: Npbml, tmp_path: Path) -> None:
    (tmp_path / "old.toml").write_text('[relation]\nkind = "network"\nrounds = 3\n[engine]\ntasks = "together"\n')
    said = npbml_command("settings", "--config", "old.toml")
    rows = {line.split()[0]: line.split()[1] for line in said.out.splitlines() if len(line.split()) > 1}
    assert said.code == 0
    assert (rows["scorer.kind"], rows["scorer.rounds"], rows["engine.tasks"]) == ("relation-network", "3", "vmap")
    assert said.error.splitlines() == [
        f"npbml: old.toml: The setting relation.{name} is called scorer.{name} now." for name in ("kind", "rounds")
    ]
    (tmp_path / "gone.toml").write_text("[warp]\nresidual = true\n")
    said = npbml_command("settings", "--config", "gone.toml")
    assert said.code == 2 and "warp.residual=True is from an earlier version" in said.error


def test_a_command_of_version_one_is_understood_and_told(npbml_command: Npbml, shared: Path) -> None:
    assert OLD_NAMES == {"relation": "scorer"} and not OLD_NAMES.keys() & COMMANDS.keys()
    said = npbml_command("relation", "--run", shared / "done")
    assert said.code == 0 and "relation: done before" in said.out
    assert said.error == "npbml: the command relation is called scorer now.\n"


def test_a_plugin_registers_parts_before_the_command_is_read(npbml_command: Npbml, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import npbml\n"
        "npbml.register('plugged', npbml.compose('from a plugin', 'maml', precondition={'chain': ['rates']}))\n"
    )
    for arguments in (
        ("methods", "plugged", "--plugin", "mine.py"),
        ("methods", "--plugin=mine.py", "plugged"),
    ):
        said = npbml_command(*arguments)
        assert said.code == 0 and said.out.startswith("plugged: from a plugin"), said.error
    (tmp_path / "bad.py").write_text("1 / 0\n")
    said = npbml_command("methods", "--plugin", "bad.py")
    assert said.code == 2 and "bad.py failed with ZeroDivisionError" in said.error
