"""The command that sets methods side by side."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tyro

from npbml.cli.options import Asked, Options, method_name, peek, read_settings
from npbml.cli.screen import console, say
from npbml.cli.stages import announce, prepare_for, test_method
from npbml.config import Config
from npbml.engine.distributed import by_first, check_share
from npbml.errors import RunError, SettingError
from npbml.files import write_json
from npbml.methods import BUILT_IN, RECIPES, find_recipe
from npbml.report.comparison import comparison_rows, comparison_table
from npbml.report.terminal import Terminal
from npbml.run_folder import read_config
from npbml.runs import Run
from npbml.settings import setting

# What decides the test tasks: methods with another of these cannot be compared task by task.
SAME = ("dataset", "ways", "shots", "queries", "seed", "image_size")


@dataclass(frozen=True)
class CompareOptions(Options):
    """What is compared, where it is kept and its settings."""

    methods: tuple[str, ...] = setting(())
    """Names, or files of recipes, with commas between; or all. The others are measured against the first."""
    # They are for the other commands: here `methods` stands in their place.
    method: tyro.conf.Suppress[str] = setting("npbml")
    baselines: tyro.conf.Suppress[tuple[str, ...]] = setting(())


def compare(arguments: list[str]) -> None:
    """Meta-train several methods under one protocol, test them on the same tasks and set them side by side."""
    folder, asked = read_comparison(arguments)
    check_comparison(asked)
    check_share("train.meta_batch", min(one.config.meta_batch for one in asked.values()))
    members: dict[Path, list[str]] = {}
    for method, one in asked.items():
        members.setdefault(one.folder, []).append(method)
    for place, methods in members.items():
        _begin(place, [asked[method].config for method in methods])
    terminal = Terminal(console)
    outcome = Outcome()
    with terminal:
        for place, methods in members.items():
            work = Run.start(place, asked[methods[0]].config, terminal)
            announce(work)
            with work.locked():
                _train_and_test(work, terminal, methods, outcome)
    by_first(lambda: _show(folder, comparison_rows(list(asked), outcome.records, outcome.failed, outcome.files)))
    if outcome.failed:
        raise RunError(f"{len(outcome.failed)} of {len(asked)} methods failed: {', '.join(outcome.failed)}.")


def _begin(place: Path, configs: list[Config]) -> None:
    """Begin a run, or refuse it for the sake of any of its methods, before the first is trained."""
    by_first(lambda: Run(place, configs[0]).check_sizes(config.method for config in configs))
    Run.start(place, configs[0])


@dataclass
class Outcome:
    """What has become of the methods."""

    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)  # with the result of each task
    failed: dict[str, str] = field(default_factory=dict)  # and why

    @contextmanager
    def attempt(self, method: str, terminal: Terminal) -> Iterator[None]:
        """Note that the method has failed, and why, in place of ending all."""
        try:
            yield
        except RunError as error:
            self.failed[method] = str(error)
            terminal.failed(method)


def _train_and_test(work: Run, terminal: Terminal, methods: list[str], outcome: Outcome) -> None:
    """Train and test the methods of one run, and test prototypes where methods share an encoder."""
    alone = work.config.protocol == "published"  # with an encoder of its own
    with outcome.attempt(methods[0], terminal) if alone else nullcontext():
        prepare_for(work, methods)
    for method in methods:
        if method not in outcome.failed:
            with outcome.attempt(method, terminal):
                work.train(method)
    shared = not alone and "pretrain" in work.needs(methods)
    for method in [*(m for m in methods if m not in outcome.failed), *["prototypes"] * shared]:
        with outcome.attempt(method, terminal):
            outcome.records[method] = test_method(work, terminal, method)
            outcome.files[method] = work.folder / method / "test.json"


def _show(folder: Path, rows: list[dict[str, Any]]) -> None:
    write_json(folder / "comparison.json", rows)
    console.print(comparison_table(rows))
    for row in rows:
        if "failed" in row:
            say(f"{row['method']} failed: {row['failed']}")
    say(f"results: {folder / 'comparison.json'}")
    if any("step_ms" in row for row in rows):
        from npbml.report.comparison_picture import draw_comparison  # matplotlib is slow to load
        from npbml.report.pictures import save

        path = folder / "pictures" / "comparison.png"
        save(draw_comparison(rows), path)
        say(f"picture: {path}")


def read_comparison(arguments: list[str]) -> tuple[Path, dict[str, Asked]]:
    """The folder of a comparison, and the run folder and settings of each of its methods, in order.

    Under the published protocol each method has a run of its own, below that folder; else they share one.
    """
    given = peek(arguments, ("run", "method"))
    if "method" in given:
        raise SettingError("npbml compare takes --methods, with commas between them, and no --method.")
    methods, protocol = compared(arguments), "common"
    if given.get("run"):
        place = Path(given["run"])
        below = [path.parent for path in place.glob("*/config.json")]
        protocol = "published" if below else protocol
        for begun in [place, *below] if (place / "config.json").exists() else below:
            read_config(begun)  # the recipes that it was begun with are known by their names from here on
    for method in methods:
        find_recipe(method)

    def read(method: str, folder: Path | None = None) -> Asked:
        return read_settings(compare, arguments, CompareOptions, protocol, method, folder)

    asked = read(methods[0])
    if asked.config.protocol != "published":
        return asked.folder, {m: asked._replace(config=replace(asked.config, method=m)) for m in methods}
    if not given.get("run"):
        folder = asked.folder.with_name(f"compare-{asked.folder.name}")
    elif (asked.folder / "config.json").exists():
        raise RunError(
            f"{asked.folder} is the run of one method. A comparison under the published protocol has a run for "
            "each: choose another folder with --run."
        )
    else:
        folder = asked.folder
    return folder, {method: read(method, folder / method) for method in methods}


def compared(arguments: list[str]) -> list[str]:
    """The methods that --methods names, each once; prototypes need no name, and every method but the one with
    the defects of the reference code is `all`."""
    names = [name.strip() for word in _words(arguments) for name in word.split(",") if name.strip()]
    every = [name for name in RECIPES if name in BUILT_IN and name != "npbml-quirks"]
    methods = [method_name(given) for name in names for given in (every if name == "all" else [name])]
    methods = [method for method in dict.fromkeys(methods) if method != "prototypes"]
    if methods:
        return methods
    if {"-h", "--help"} & set(arguments):
        return ["npbml"]
    raise SettingError("Say what to compare: --methods maml,npbml or --methods all. `npbml methods` lists them.")


def _words(arguments: list[str]) -> list[str]:
    """What follows --methods."""
    words: list[str] = []
    taken = False
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if argument.startswith("-"):
            taken = option == "--methods"
            words += [value] if taken and equals else []
        elif taken:
            words.append(argument)
    return words


def check_comparison(asked: dict[str, Asked]) -> None:
    """Refuse a comparison of which a method makes no sense, with the names of all such methods."""
    wrong: dict[str, str] = {}
    for method, one in asked.items():
        try:
            one.check()
        except SettingError as error:
            wrong[method] = str(error)
    if len(wrong) == len(asked) and len(set(wrong.values())) == 1:
        raise SettingError(next(iter(wrong.values())))  # it is not about the methods
    if wrong:
        raise SettingError("\n".join(f"{method}: {reason}" for method, reason in wrong.items()))
    first = next(iter(asked.values()))
    for one in asked.values():
        for name in SAME:
            mine, theirs = getattr(one.config, name), getattr(first.config, name)
            if mine != theirs:
                raise RunError(
                    f"{one.folder} has {name}={mine}, but {first.folder} has {name}={theirs}: methods are "
                    "compared on the same tasks. Give the settings that the comparison was begun with."
                )
