"""The commands. Thin: they read settings, open a run and show what it does."""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

import torch

import npbml
from npbml.cli.comparison import compare
from npbml.cli.datasets import data
from npbml.cli.labels import classify
from npbml.cli.lists import methods, settings
from npbml.cli.screen import Command, console, errors, list_commands, one_speaks
from npbml.cli.stages import pretrain, relation, run, test, train
from npbml.cli.tables import report, reproduce
from npbml.engine.capture import first_line
from npbml.engine.distributed import first_to_fail, joined
from npbml.errors import NpbmlError, SettingError
from npbml.stages.loop import Stopped

COMMANDS: dict[str, Command] = {
    command.__name__: command
    for command in (
        run,
        compare,
        reproduce,
        report,
        pretrain,
        relation,
        train,
        test,
        classify,
        data,
        methods,
        settings,
    )
}
GO_ON = "The same command goes on from the last checkpoint."
LESS_MEMORY = (
    "Meta-training takes less of it with --engine.chunk 1 or --engine.remat true, validation and test with "
    "--test.together 1, and pre-training, in a new run, with a smaller --pretrain.batch."
)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `npbml` command."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        _overview()
        return
    if arguments[0] in ("-V", "--version"):
        console.print(f"npbml {npbml.__version__}")
        return
    command = COMMANDS.get(arguments[0])
    if command is None:
        _leave(f"there is no command {arguments[0]!r}: choose from {', '.join(COMMANDS)}.", 2)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        with joined(), one_speaks():
            command(arguments[1:])
    except SettingError as error:
        _leave(str(error), 2)
    except NpbmlError as error:
        _leave(str(error), 1)
    except BrokenPipeError:  # whoever read the output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        _leave(f"{error.filename or 'a file'}: {error.strerror or error}. What was saved before is whole.", 1)
    except torch.OutOfMemoryError:
        _leave(f"the GPU's memory is full. {LESS_MEMORY} {GO_ON}", 1)
    except torch.AcceleratorError as error:
        _leave(f"the GPU failed ({first_line(error)}). {GO_ON}", 1)
    except Stopped as stop:
        _leave(f"{stop} The same command goes on from there.", 128 + stop.number)
    except _Terminated:
        _leave(f"stopped. {GO_ON}", 128 + signal.SIGTERM)
    except KeyboardInterrupt:
        _leave(f"stopped. {GO_ON}", 128 + signal.SIGINT)


def _leave(why: str, code: int) -> NoReturn:
    if first_to_fail():
        errors.print(f"npbml: {why}", markup=False, soft_wrap=True)
    sys.exit(code)


class _Terminated(BaseException):
    """SIGTERM arrived outside a stage's loop, where there is nothing to save."""


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise _Terminated


def _overview() -> None:
    console.print("npbml learns how to learn from a few examples.\n\nusage: npbml COMMAND [OPTIONS]\n")
    list_commands(COMMANDS)
    console.print(
        "\n`npbml COMMAND --help` lists a command's options. `npbml run` alone is a whole run on the embedded "
        "data, of some minutes. A stopped command, given again, goes on where it was stopped."
    )
