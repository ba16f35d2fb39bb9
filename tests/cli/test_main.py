"""The overview, help, and how a command ends."""

import signal
import textwrap
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

import npbml
from npbml import cli
from npbml.config import Config
from npbml.settings import describe

Npbml = Callable[..., Any]


def test_the_overview_names_every_command_in_eighty_columns(npbml_command: Npbml) -> None:
    texts = [npbml_command(*arguments) for arguments in ((), ("--help",), ("-h",), ("help",))]
    assert len(set(texts)) == 1 and texts[0].code == 0 and texts[0].error == ""
    lines = texts[0].out.splitlines()
    assert max(map(len, lines)) <= 80
    for name, command in cli.COMMANDS.items():
        assert any(line.startswith(f"  {name} ") for line in lines)
        words = (command.__doc__ or "").split()
        assert words and all(word in texts[0].out.split() for word in words)


def test_the_overviews_last_paragraph_is_filled(npbml_command: Npbml) -> None:
    lines = npbml_command().out.rstrip().splitlines()
    last = lines[len(lines) - lines[::-1].index("") :]
    text = " ".join(line.strip() for line in last)
    assert "npbml COMMAND --help" in text and len(last) == len(textwrap.wrap(text, 80))


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_itself(npbml_command: Npbml, command: str) -> None:
    said = npbml_command(command, "--help")
    assert said.code == 0 and f"npbml {command}" in said.out
    assert " ".join((cli.COMMANDS[command].__doc__ or "").split()) in " ".join(said.out.split())
    if command == "classify":
        assert all(option in said.out for option in ("--run", "--support", "--query", "--method", "--device"))
    elif command not in ("methods", "data", "reproduce", "report"):
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
    assert said.code == 2 and "'frobnicate'" in said.error and all(name in said.error for name in cli.COMMANDS)


@pytest.fixture
def ended_by(npbml_command: Npbml, monkeypatch: pytest.MonkeyPatch) -> Npbml:
    """ended_by(exception) -> what is said where a command ends by it"""

    def ended(exception: BaseException) -> Any:
        def command(_: list[str]) -> None:
            raise exception

        monkeypatch.setitem(cli.COMMANDS, "run", command)
        return npbml_command("run")

    return ended


@pytest.mark.parametrize(
    ("stop", "code"),
    [(KeyboardInterrupt(), 130), (cli._Terminated(), 143), (cli.Stopped("pretrain", 3, signal.SIGINT), 130)],
    ids=["ctrl-c", "sigterm", "in a stage"],
)
def test_a_stop_says_how_to_go_on(ended_by: Npbml, stop: BaseException, code: int) -> None:
    said = ended_by(stop)
    assert said.code == code and "The same command goes on from" in said.error


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
    for option in ("engine.chunk", "engine.remat", "test.together", "pretrain.batch"):
        assert option in cli.LESS_MEMORY and option in {name for name, _, _ in describe(Config)}
