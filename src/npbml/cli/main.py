"""The entry point: which command, and how it ends."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from npbml.cli.arguments import Arguments
from npbml.cli.classify import classify
from npbml.cli.comparison import compare
from npbml.cli.datasets import data
from npbml.cli.lists import methods, parts, settings
from npbml.cli.screen import Command, console, errors, list_commands
from npbml.cli.stages import pretrain, run, scorer, test, train
from npbml.cli.tables import report, reproduce
from npbml.errors import NpbmlError, SettingError, Stopped
from npbml.registry import load_entry_points, load_plugin
from npbml.version import __version__

COMMANDS: dict[str, Command] = {
    command.__name__: command
    for command in (
        run,
        compare,
        reproduce,
        report,
        pretrain,
        scorer,
        train,
        test,
        classify,
        data,
        methods,
        parts,
        settings,
    )
}
OLD_NAMES = {"relation": "scorer"}
GO_ON = "The same command goes on from the last checkpoint."
LESS_MEMORY = (
    "Meta-training takes less of it with --engine.chunk 1 or --engine.remat true, validation and test with "
    "--test.batch-size 1, and pre-training, in a new run, with a smaller --pretrain.batch-size."
)
# In messages of torch's allocator on a CPU, which has no class of errors of its own.
NO_MEMORY = ("not enough memory", "can't allocate memory")


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `npbml` command."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        _overview()
        return
    if arguments[0] in ("-V", "--version"):
        console.print(f"npbml {__version__}")
        return
    name = arguments[0]
    plugins, rest = Arguments(arguments[1:]).take_each("plugin")
    if name in OLD_NAMES:
        errors.print(f"npbml: the command {name} is called {OLD_NAMES[name]} now.", markup=False)
    command = COMMANDS.get(OLD_NAMES.get(name, name))
    if command is None:
        _leave(f"there is no command {name!r}: choose from {', '.join(COMMANDS)}.", 2)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        load_entry_points()
        for plugin in plugins:
            load_plugin(plugin)
        with _joined():
            command(rest.words)
    except SettingError as error:
        _leave(str(error), 2)
    except NpbmlError as error:
        _leave(str(error), 1)
    except BrokenPipeError:  # whoever read the output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        _leave(f"{error.filename or 'a file'}: {error.strerror or error}. What was saved before is whole.", 1)
    except MemoryError:
        _leave(f"the memory of this machine is full. {LESS_MEMORY} {GO_ON}", 1)
    except RuntimeError as error:
        _leave(_of_torch(error), 1)
    except Stopped as stop:
        _leave(f"{stop} The same command goes on from there.", 128 + stop.number)
    except _Terminated:
        _leave(f"stopped. {GO_ON}", 128 + signal.SIGTERM)
    except KeyboardInterrupt:
        _leave(f"stopped. {GO_ON}", 128 + signal.SIGINT)


@contextmanager
def _joined() -> Iterator[None]:
    """Be one of the processes of torchrun, of which the first alone writes to the screen; else just run."""
    if "RANK" not in os.environ:
        yield
        return
    from npbml.cli.ranks import one_speaks
    from npbml.engine.distributed import joined

    with joined(), one_speaks():
        yield


def _of_torch(error: RuntimeError) -> str:
    """What to say of full memory and of an error of the GPU; any other error is raised again."""
    if any(words in str(error) for words in NO_MEMORY):
        return f"the memory of this machine is full. {LESS_MEMORY} {GO_ON}"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return f"the GPU's memory is full. {LESS_MEMORY} {GO_ON}"
    if torch is not None and isinstance(error, torch.AcceleratorError):
        return f"the GPU failed ({str(error).strip().splitlines()[0]}). {GO_ON}"
    raise error


def _leave(why: str, code: int) -> NoReturn:
    distributed = sys.modules.get("npbml.engine.distributed")
    if distributed is None or distributed.first_to_fail():
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
        "data, of some minutes. A stopped command, given again, goes on where it was stopped. Every command takes "
        "--plugin FILE.py, a file that registers parts of your own."
    )
