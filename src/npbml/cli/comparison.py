"""The command that sets methods side by side."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from npbml.cli.arguments import Arguments
from npbml.cli.options import Asked, Options, method_name, read_settings
from npbml.cli.screen import console, say
from npbml.cli.stages import announce, refuse_shipped, show_shapes, test_method
from npbml.errors import RunError, SettingError
from npbml.json_files import write_json
from npbml.lab.run_folder import read_config
from npbml.lab.schema import Config, override
from npbml.lab.stages import PRETRAIN
from npbml.methods import find_recipe, trained_methods, trains
from npbml.parts import METHODS, MethodName
from npbml.report.terminal import Terminal
from npbml.settings import flat, setting, to_dict

if TYPE_CHECKING:  # it imports torch, which a refused command does without
    from npbml.lab.pipeline import Pipeline

# What decides the test tasks: methods with another of these cannot be compared task by task.
SAME = ("dataset", "ways", "shots", "queries", "seed", "image_size")


@dataclass(frozen=True)
class SharedConfig(Config):
    """The settings that methods share: --methods stands in the place of the two that are hidden."""

    method: tyro.conf.Suppress[MethodName] = setting("npbml")
    baselines: tyro.conf.Suppress[tuple[str, ...]] = setting(())


@dataclass(frozen=True)
class CompareOptions(Options):
    """What is compared, where it is kept and its settings."""

    settings: Annotated[SharedConfig, tyro.conf.arg(name="")] = field(default_factory=SharedConfig)
    shown = SharedConfig
    methods: tuple[str, ...] = setting(())
    """Names, or files of recipes, with commas between; or all. The others are measured against the first."""


def compare(arguments: list[str]) -> None:
    """Meta-train several methods under one protocol, test them on the same tasks and set them side by side."""
    folder, asked = read_comparison(arguments)
    check_comparison(asked)
    from npbml.engine.distributed import check_share, on_rank_zero
    from npbml.lab.pipeline import Pipeline
    from npbml.report.comparison import comparison_rows

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
            work = Pipeline.start(place, asked[methods[0]].config, terminal)
            announce(work)
            with work.at_work():
                _train_and_test(work, terminal, methods, outcome)
                show_shapes(work, terminal, methods)
    on_rank_zero(
        lambda: _show(folder, comparison_rows(list(asked), outcome.records, outcome.failed, outcome.files))
    )
    if outcome.failed:
        raise RunError(f"{len(outcome.failed)} of {len(asked)} methods failed: {', '.join(outcome.failed)}.")


def _begin(place: Path, configs: list[Config]) -> None:
    """Begin a run, or refuse it for the sake of any of its methods, before the first is trained."""
    from npbml.engine.distributed import on_rank_zero
    from npbml.lab.pipeline import Pipeline

    on_rank_zero(lambda: Pipeline(place, configs[0]).check_sizes(config.method for config in configs))
    Pipeline.start(place, configs[0])


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


def _train_and_test(work: "Pipeline", terminal: Terminal, methods: list[str], outcome: Outcome) -> None:
    """Train and test the methods of one run, and test prototypes where methods share an encoder."""
    alone = work.config.protocol == "published"  # with an encoder of its own
    needs = work.needs(methods)
    with outcome.attempt(methods[0], terminal) if alone else nullcontext():
        for stage in needs:
            work.run(stage)
    for method in methods:
        if method not in outcome.failed:
            with outcome.attempt(method, terminal):
                work.run(method)
    untrained = [name for name in METHODS if not trains(name)] if not alone and PRETRAIN.name in needs else []
    for method in [*(m for m in methods if m not in outcome.failed), *untrained]:
        with outcome.attempt(method, terminal):
            outcome.records[method] = test_method(work, terminal, method)
            outcome.files[method] = work.folder / method / "test.json"


def _show(folder: Path, rows: list[dict[str, Any]]) -> None:
    from npbml.report.comparison import comparison_table

    write_json(folder / "comparison.json", rows)
    console.print(comparison_table(rows))
    for row in rows:
        if "failed" in row:
            say(f"{row['method']} failed: {row['failed']}")
    say(f"results: {folder / 'comparison.json'}")
    if any("step_ms" in row for row in rows):
        from npbml.report.comparison_picture import draw_comparison  # matplotlib is slow to load
        from npbml.report.drawing import save

        path = folder / "pictures" / "comparison.png"
        save(draw_comparison(rows), path)
        say(f"picture: {path}")


def read_comparison(arguments: list[str]) -> tuple[Path, dict[str, Asked]]:
    """The folder of a comparison, and the run folder and settings of each of its methods, in order.

    Under the published protocol each method has a run of its own, below that folder; else they share one.
    """
    given = Arguments(arguments)
    refuse_shipped(given.get("run"))
    for name in ("method", "baselines"):
        if name in given.names:
            raise SettingError(f"npbml compare takes --methods, with commas between them, and no --{name}.")
    methods, protocol = compared(given), "common"
    if run := given.get("run"):
        place = Path(run)
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
        return asked.folder, {m: asked._replace(config=override(asked.config, {"method": m})) for m in methods}
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


def compared(given: Arguments) -> list[str]:
    """The methods that --methods names, each once; those that train nothing need no name, and every method but the
    one with the defects of the reference code is `all`."""
    every = [name for name in trained_methods() if METHODS.part(name).built_in and name != "npbml-quirks"]
    names = given.listed("methods")
    methods = [method_name(word) for name in names for word in (every if name == "all" else [name])]
    methods = [name for name in dict.fromkeys(methods) if name not in METHODS or trains(name)]
    if methods:
        return methods
    if given.asks_help:
        return ["npbml"]
    raise SettingError("Say what to compare: --methods maml,npbml or --methods all. `npbml methods` lists them.")


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
            mine, theirs = (asked_for[name] for asked_for in (flat(to_dict(c.config)) for c in (one, first)))
            if mine != theirs:
                raise RunError(
                    f"{one.folder} has {name}={mine}, but {first.folder} has {name}={theirs}: methods are "
                    "compared on the same tasks. Give the settings that the comparison was begun with."
                )
