"""The commands. Thin: they read settings, open a run and show what it does."""

import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal, NoReturn, TypeVar

import tyro
from rich.console import Console
from rich.table import Table

import npbml
from npbml.config import Config, check_config, override, preset, read_file
from npbml.data.check import check as check_store
from npbml.data.folder import read_class_folders, read_pictures
from npbml.data.prepare import LAYOUTS, prepare
from npbml.data.sets import open_dataset, prepared
from npbml.data.show import contact_sheet
from npbml.data.store import SPLITS, data_root
from npbml.engine.device import describe_device
from npbml.errors import NpbmlError, RunError, SettingError
from npbml.methods import RECIPES, flat, method_config, refuse_contradiction
from npbml.report.terminal import (
    Terminal,
    labels_table,
    methods_table,
    results_table,
    settings_table,
)
from npbml.runs import Run, read_config
from npbml.settings import describe, setting
from npbml.stages.loop import Stopped

T = TypeVar("T")
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Options(Config):
    """Where a run is kept and its settings."""

    run: str | None = setting(None)
    """The run folder, new or to be continued. A name made of the settings, below runs/, if not given."""
    config: str | None = setting(None)
    """A TOML or JSON file of settings; what the command line says goes before it."""


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
    except Stopped as stop:
        _leave(f"{stop} The same command goes on from there.", 128 + stop.number)
    except _Terminated:
        _leave("stopped. The same command goes on from the last checkpoint.", 128 + signal.SIGTERM)
    except KeyboardInterrupt:
        _leave("stopped. The same command goes on from the last checkpoint.", 128 + signal.SIGINT)


def _leave(why: str, code: int) -> NoReturn:
    errors.print(f"npbml: {why}", markup=False, soft_wrap=True)
    sys.exit(code)


class _Terminated(BaseException):
    """SIGTERM arrived outside a stage's loop, where there is nothing to save."""


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise _Terminated


def run(arguments: list[str]) -> None:
    """Pre-train, meta-train and test, skipping what is done; then show the results beside the baselines."""
    with _opened("run", arguments) as (work, terminal):
        trained = [work.config.method, *(name for name in work.config.baselines if name != "prototypes")]
        work.pretrain()
        if any(method_config(work.config, method).loss.transductive for method in trained):
            work.relation()
        for method in trained:
            work.train(method)
        for method in dict.fromkeys([*trained, *work.config.baselines]):
            _test(work, terminal, method)
        _show(work, terminal)


def pretrain(arguments: list[str]) -> None:
    """Pre-train the encoder: it learns to tell the training classes apart."""
    with _opened("pretrain", arguments) as (work, _):
        work.pretrain()


def relation(arguments: list[str]) -> None:
    """Train the relation network, whose scores the transductive loss uses."""
    with _opened("relation", arguments) as (work, _):
        work.relation()


def train(arguments: list[str]) -> None:
    """Meta-train a method, from a pre-trained encoder and, where its loss asks for one, a relation network."""
    with _opened("train", arguments) as (work, _):
        work.train(work.config.method)


def test(arguments: list[str]) -> None:
    """Test a meta-trained method, or prototypes, on unseen classes; of another data set, with --dataset."""
    asked = _peek(arguments, ("run", "dataset", "method"))
    other, prototypes = asked.get("dataset"), asked.get("method") == "prototypes"
    folder = Path(asked.get("run", ""))
    if other and (folder / "config.json").exists() and other != read_config(folder).dataset:
        arguments = _without(arguments, "dataset")
    else:
        other = None
    with _opened("test", _without(arguments, "method") if prototypes else arguments) as (work, terminal):
        _test(work, terminal, "prototypes" if prototypes else work.config.method, other)
        _show(work, terminal)


def settings(arguments: list[str]) -> None:
    """List every setting: its name, its default and what it takes."""
    console.print(settings_table(describe(Config, _configuration("settings", arguments)[0])))


def methods(arguments: list[str]) -> None:
    """List the methods that can be trained."""
    _parse(_Nothing, "methods", methods, arguments)
    console.print(methods_table({name: recipe.summary for name, recipe in RECIPES.items()}))


@dataclass(frozen=True)
class ClassifyOptions:
    """Which learner, and which pictures."""

    run: str
    """A run folder with a meta-trained learner."""
    support: str
    """A folder of class folders: the labelled pictures."""
    query: str
    """A folder of pictures to be labelled, or one picture."""
    method: str | None = None
    """Which of the run's methods; its own by default."""
    device: str = "auto"
    """auto (a GPU where there is one), cpu, cuda, or cuda:N."""


def classify(arguments: list[str]) -> None:
    """Label your own pictures with a meta-trained learner and a few labelled examples."""
    options = _parse(ClassifyOptions, "classify", classify, arguments)
    labelled, unlabelled = read_class_folders(Path(options.support)), read_pictures(Path(options.query))
    learner = npbml.load(options.run, options.method, options.device)
    pictures = [picture for members in labelled.values() for picture in members]
    labels = [name for name, members in labelled.items() for _ in members]
    classifier = npbml.FewShotClassifier(learner).fit(pictures, labels)
    probabilities = classifier.predict_proba(list(unlabelled.values()))
    console.print(labels_table(list(unlabelled), list(classifier.classes_), probabilities))


@dataclass(frozen=True)
class PrepareOptions:
    """What to make a data set of."""

    name: Annotated[str, tyro.conf.Positional]
    """mini-imagenet, tiered-imagenet, cifar-fs, fc100 or omniglot; or a name for your own pictures."""
    source: str
    """The file or folder that you have downloaded; for your own pictures, a folder of class folders."""
    size: int | None = None
    """Side of the images; the benchmark's own, or 84, if not given."""
    fractions: tuple[float, float, float] = (0.6, 0.2, 0.2)
    """For class folders without train/, val/ and test/: how many of the classes go to each."""
    seed: int = 0
    """... and the seed by which they are dealt."""


@dataclass(frozen=True)
class CheckOptions:
    """Which data set."""

    name: Annotated[str, tyro.conf.Positional]
    """A data set that is prepared, or glyphs."""


@dataclass(frozen=True)
class ShowOptions:
    """Which pictures, and where to."""

    name: Annotated[str, tyro.conf.Positional]
    """A data set that is prepared, or glyphs."""
    split: Literal["train", "val", "test"] = "test"
    """Which classes."""
    classes: int = 10
    """How many of them, one in a row."""
    images: int = 12
    """How many images of each."""
    seed: int = 0
    """Which ones."""
    out: str | None = None
    """The PNG file; NAME-SPLIT.png in this folder if not given."""


def data(arguments: list[str]) -> None:
    """Prepare, check and show data sets: npbml data prepare | check | show | list."""
    actions = {"prepare": data_prepare, "check": data_check, "show": data_show, "list": data_list}
    if not arguments or arguments[0] in ("-h", "--help"):
        console.print(f"{data.__doc__}\n")
        _table_of({f"npbml data {name}": action for name, action in actions.items()})
    elif arguments[0] not in actions:
        raise SettingError(f"There is no `npbml data {arguments[0]}`: choose from {', '.join(actions)}.")
    else:
        actions[arguments[0]](arguments[1:])


def data_prepare(arguments: list[str]) -> None:
    """Make a data set of what you have downloaded, or of a folder of your own pictures."""
    options = _parse(PrepareOptions, "data prepare", data_prepare, arguments)
    terminal = Terminal(console)
    with terminal, terminal.counting("classes", 1) as tick:
        store = prepare(
            options.name,
            Path(options.source),
            size=options.size,
            fractions=options.fractions,
            seed=options.seed,
            progress=tick.reached,
        )
    counts = ", ".join(f"{sum(entry.split == split for entry in store.entries)} {split}" for split in SPLITS)
    console.print(f"{store.folder}: {len(store.images)} images of {counts} classes", markup=False, soft_wrap=True)


def data_check(arguments: list[str]) -> None:
    """Verify a data set: its bytes, its classes and counts against the published ones, and duplicates."""
    options = _parse(CheckOptions, "data check", data_check, arguments)
    report = check_store(open_dataset(options.name))
    for line in report.lines:
        console.print(line, markup=False, soft_wrap=True)
    if not report.ok:
        sys.exit(1)


def data_show(arguments: list[str]) -> None:
    """Draw a contact sheet of a data set."""
    options = _parse(ShowOptions, "data show", data_show, arguments)
    sheet = contact_sheet(open_dataset(options.name), options.split, options.classes, options.images, options.seed)
    path = Path(options.out or f"{Path(options.name).name}-{options.split}.png")
    sheet.save(path)
    console.print(str(path), markup=False, soft_wrap=True)


def data_list(arguments: list[str]) -> None:
    """List the data sets that are there, and what the benchmarks are made of."""
    _parse(_Nothing, "data list", data_list, arguments)
    console.print(f"in {data_root()}: {', '.join(['glyphs', *prepared()])}", markup=False, soft_wrap=True)
    for name, layouts in LAYOUTS.items():
        console.print(f"{name}: {layouts}", markup=False)


@dataclass(frozen=True)
class _Nothing:
    pass


def _parse(kind: type[T], command: str, function: Callable[[list[str]], None], arguments: list[str]) -> T:
    return tyro.cli(kind, prog=f"npbml {command}", description=function.__doc__, args=arguments)


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "run": run,
    "pretrain": pretrain,
    "relation": relation,
    "train": train,
    "test": test,
    "classify": classify,
    "data": data,
    "methods": methods,
    "settings": settings,
}


def _overview() -> None:
    console.print("npbml learns how to learn from a few examples.\n\nusage: npbml COMMAND [OPTIONS]\n")
    _table_of(COMMANDS)
    console.print(
        "\n`npbml COMMAND --help` lists a command's options. `npbml run` alone is a whole run on the embedded "
        "data, of some minutes. A stopped command, given again, goes on where it was stopped."
    )


def _table_of(commands: dict[str, Callable[[list[str]], None]]) -> None:
    table = Table.grid(padding=(0, 2))
    for name, command in commands.items():
        table.add_row(f"  {name}", (command.__doc__ or "").strip())
    console.print(table)


@contextmanager
def _opened(command: str, arguments: list[str]) -> Iterator[tuple[Run, Terminal]]:
    """The run that the arguments ask for, kept from other processes, and the terminal that shows it."""
    config, folder = _configuration(command, arguments)
    if command in ("train", "test") and not (folder / "config.json").exists():
        raise RunError(f"There is no run in {folder}: begin it with `npbml pretrain --run {folder}`.")
    terminal = Terminal(console)
    work = Run.start(folder, config, terminal)
    task = f"{config.ways}-way {config.shots}-shot {config.dataset}, {config.backbone}, seed {config.seed}"
    console.print(f"{task}, on {describe_device(work.device)}\nrun folder: {folder}", markup=False, soft_wrap=True)
    with work.locked(), terminal:
        yield work, terminal


def _configuration(command: str, arguments: list[str]) -> tuple[Config, Path]:
    """The settings, and the run folder, that the arguments ask for.

    A setting is looked for on the command line, then in the settings file, then in the run folder, then among
    the protocol's defaults; so the places it may come from are read first.
    """
    asked = _peek(arguments, ("run", "config", "protocol", "dataset", "backbone", "method"))
    file = read_file(Path(asked["config"])) if asked.get("config") else {}
    if asked.get("run") and (Path(asked["run"]) / "config.json").exists():
        config = read_config(Path(asked["run"]))
    else:
        names = {**file, **asked}
        usual = Config()
        config = preset(*(str(names.get(key, getattr(usual, key))) for key in ("protocol", "dataset", "backbone")))
    config = override(config, file)
    default = Options(**{field.name: getattr(config, field.name) for field in dataclasses.fields(Config)})
    options = tyro.cli(
        Options,
        prog=f"npbml {command}",
        description=COMMANDS[command].__doc__,
        default=default,
        args=[_spelt(argument) for argument in arguments],
        config=(tyro.conf.FlagConversionOff,),
    )
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(Config)}
    config = Config(**values)
    check_config(config)
    given = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in arguments if word[:2] == "--"}
    asked = {name: value for name, _, value in describe(Config, config) if name in given}
    refuse_contradiction(config, {**flat(file), **asked})
    return config, Path(options.run) if options.run else Path("runs") / _name(config)


def _spelt(argument: str) -> str:
    """true and false as Python spells them: a file, and the list of settings, spell them in lower case."""
    option, equals, value = argument.rpartition("=")
    return f"{option}{equals}{value.capitalize()}" if value in ("true", "false") else argument


def _peek(arguments: list[str], names: tuple[str, ...]) -> dict[str, str]:
    """The values of a few options, before the others can be read."""
    found: dict[str, str] = {}
    for place, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        name = option.removeprefix("--")
        if option.startswith("--") and name in names:
            if equals:
                found[name] = value
            elif place + 1 < len(arguments):
                found[name] = arguments[place + 1]
    return found


def _without(arguments: list[str], name: str) -> list[str]:
    """The arguments less an option and its value."""
    if f"--{name}" in arguments:
        place = arguments.index(f"--{name}")
        return arguments[:place] + arguments[place + 2 :]
    return [argument for argument in arguments if not argument.startswith(f"--{name}=")]


def _name(config: Config) -> str:
    """The run folder's name where none is given."""
    data = Path(config.dataset).name or "pictures"
    return f"{data}-{config.backbone}-{config.ways}way-{config.shots}shot-{config.protocol}-seed{config.seed}"


def _test(work: Run, terminal: Terminal, method: str, dataset: str | None = None) -> None:
    with terminal.counting(f"test {method}", work.config.test.tasks) as tick:
        work.test(method, tick, dataset)


def _show(work: Run, terminal: Terminal) -> None:
    terminal.close()
    from npbml.report.pictures import draw_pictures  # matplotlib is slow to load, and only needed here

    records = work.results()
    for dataset in dict.fromkeys(record["dataset"] for record in records):
        of_dataset = [record for record in records if record["dataset"] == dataset]
        console.print(results_table(of_dataset, work.paired_difference))
    folder = draw_pictures(work)
    console.print(f"results: {work.folder / 'results.json'}\npictures: {folder}", markup=False, soft_wrap=True)
