"""The commands about the paper's tables: one runs their cells, the other sets the results beside the paper's."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from npbml.cli.arguments import Arguments
from npbml.cli.options import Asked, parse, read_settings
from npbml.cli.screen import console, say
from npbml.cli.stages import announce, test_method
from npbml.errors import DataError, RunError, SettingError
from npbml.json_files import write_whole
from npbml.lab.paper import TableCell, paper_tables
from npbml.lab.reproduce import Job, Result, grouped_by_folder, plan, read_result, read_results
from npbml.parts import METHODS
from npbml.report.tables import (
    calibrated_lines,
    lines_of,
    markdown,
    mean,
    notes,
    plain_table,
    terminal_calibration,
    terminal_table,
    terminal_tables,
)
from npbml.report.terminal import Terminal
from npbml.settings import nested

if TYPE_CHECKING:  # it imports torch, which a refused command does without
    from npbml.lab.pipeline import Pipeline

# What says which cells, and the option for it.
CHOICES: dict[str, Callable[[TableCell], str]] = {
    "dataset": lambda cell: cell.dataset,
    "backbone": lambda cell: cell.backbone,
    "shots": lambda cell: str(cell.shots),
    "methods": lambda cell: cell.name,
}
# The settings that a cell has by itself.
OF_CELLS = ("dataset", "backbone", "shots", "method", "seed", "baselines")


@dataclass(frozen=True)
class ReproduceOptions:
    """Which cells, and where their runs and results are kept."""

    dataset: tuple[str, ...] = ()
    """Run the cells of these data sets, with commas between; all of the table's where it is not given"""
    backbone: tuple[str, ...] = ()
    """... with these networks"""
    shots: tuple[str, ...] = ()
    """... these numbers of shots"""
    methods: tuple[str, ...] = ()
    """... these methods, as the list names them; `all` runs the whole table"""
    seeds: tuple[str, ...] = ()
    """... and these seeds; 0 where it is not given."""
    results: str = "results"
    """The folder of the result files, one for each cell and seed."""
    runs: str = "runs"
    """The folder of the run folders."""
    list: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Only list the cells."""

    def words(self, option: str) -> tuple[str, ...]:
        """What was given, each once."""
        given = ",".join(getattr(self, option)).split(",")
        return tuple(dict.fromkeys(word.strip() for word in given if word.strip()))


def reproduce(arguments: list[str]) -> None:
    """List the cells of a table of the paper, table1 to table4, and run those that are asked for."""
    name, *rest = arguments or [""]
    if name in ("-h", "--help"):
        _read_options("TABLE", [name])
    if name not in paper_tables():
        raise SettingError(f"Say which table: `npbml reproduce` takes {', '.join(paper_tables())}, not {name!r}.")
    options, rest = _read_options(name, rest)
    protocol, named = _read_overrides(rest)
    cells = select(name, options)
    if options.list or not any(map(options.words, (*CHOICES, "seeds"))):
        _show_cells(name, cells, protocol, Path(options.results))
        return
    folders = Path(options.runs), Path(options.results)
    jobs = [plan(cell, protocol, seed, nested(named), *folders) for seed in seeds_of(options) for cell in cells]
    for job in jobs:
        Asked(job.config, job.folder, named).check()
    run_jobs(jobs)


def _read_options(table: str, arguments: list[str]) -> tuple[ReproduceOptions, list[str]]:
    """The options of this command, and the arguments that are left, which are settings."""
    return tyro.cli(
        ReproduceOptions,
        prog=f"npbml reproduce {table}",
        description=f"{reproduce.__doc__} Without a choice of cells it lists them. What is done is skipped. "
        "Settings can be given as for `npbml run`, such as --protocol (published where it is not given), "
        "--device, --config FILE or --test.tasks.",
        args=arguments,
        return_unknown_args=True,
    )


def _read_overrides(arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """The protocol, and the settings given on top of it, by full name."""
    if "run" in Arguments(arguments).names:
        raise SettingError("npbml reproduce takes --runs, the folder of all its run folders, and no --run.")
    asked = read_settings(reproduce, arguments, protocol="published")
    for name in OF_CELLS:
        if name in asked.named:
            raise SettingError(
                f"A cell has its own {name}: choose cells with --dataset, --backbone, --shots, --methods and "
                "--seeds."
            )
    return asked.config.protocol, {name: value for name, value in asked.named.items() if name != "protocol"}


def select(name: str, options: ReproduceOptions) -> list[TableCell]:
    """The cells of a table that the options choose."""
    cells = list(paper_tables()[name].cells)
    for option, of in CHOICES.items():
        wanted, known = options.words(option), dict.fromkeys(map(of, paper_tables()[name].cells))
        for word in wanted:
            if word not in (*known, "all"):
                raise SettingError(f"{name} has no {word!r}: --{option} takes {', '.join(known)} or all.")
        if wanted and "all" not in wanted:
            cells = [cell for cell in cells if of(cell) in wanted]
    if not cells:
        raise SettingError(f"No cell of {name} is all of that: `npbml reproduce {name}` lists them.")
    return cells


def seeds_of(options: ReproduceOptions) -> list[int]:
    for word in options.words("seeds"):
        if not word.isdecimal():
            raise SettingError(f"--seeds takes whole numbers with commas between, not {word!r}.")
    return list(dict.fromkeys(map(int, options.words("seeds")))) or [0]


def _show_cells(name: str, cells: Sequence[TableCell], protocol: str, folder: Path) -> None:
    results = read_results(folder) if folder.is_dir() else []
    table = plain_table("row", "data set", "net", "shots", "method", "paper", "seeds done")
    states = [_state(cell, [result for result in results if result.protocol == protocol]) for cell in cells]
    for cell, state in zip(cells, states, strict=True):
        table.add_row(
            cell.system, cell.dataset, cell.backbone, str(cell.shots), cell.name, mean(cell.paper), state
        )
    console.print(f"{paper_tables()[name].title}, {protocol} protocol\n")
    console.print(table)
    if "no data" in states:
        console.print("\nno data: `npbml data prepare NAME --source PATH` makes a data set of what you have.")


def _state(cell: TableCell, results: Sequence[Result]) -> str:
    """The seeds that a cell is done with; where there are none, whether it can be done."""
    seeds = sorted({result.seed for result in results if result.cell.key == cell.key})
    if seeds:
        return ", ".join(map(str, seeds))
    if cell.method not in METHODS:
        return "not in npbml"
    from npbml.data.sets import BENCHMARKS, prepared

    return "no data" if cell.dataset in BENCHMARKS and cell.dataset not in prepared() else "not done"


def run_jobs(jobs: Sequence[Job]) -> None:
    """Run the jobs that are not done, those of one run folder together, and show the results of all."""
    waiting = [job for job in jobs if not job.done()]
    for job in jobs:
        if job not in waiting:
            say(f"{job.title}: done before")
    for job in waiting:
        job.check_folder()
    from npbml.engine.distributed import check_share, on_rank_zero

    for job in waiting:
        check_share("train.meta_batch", job.config.meta_batch)
    failed: dict[str, str] = {}
    for members in grouped_by_folder(waiting).values():
        with Terminal(console) as terminal, _attempt(members, failed, terminal):
            _run_in_folder(members, failed, terminal)
    on_rank_zero(lambda: _show_results([job for job in jobs if job.file.exists()]))
    if len(set(failed.values())) == 1 and len(failed) == len(waiting):
        raise RunError(next(iter(failed.values())))
    for title, reason in failed.items():
        say(f"{title} failed: {reason}")
    if failed:
        raise RunError(f"{len(failed)} of {len(waiting)} cells failed.")


def _show_results(jobs: Sequence[Job]) -> None:
    if jobs:
        results = [read_result(job.file) for job in jobs]
        lines = lines_of(dict.fromkeys(job.cell for job in jobs), results)
        console.print(terminal_table(lines))
        if calibrated := calibrated_lines(lines):
            console.print(terminal_calibration(calibrated))
        for note in notes(results):
            console.print(note, markup=False)
        say(f"results: {jobs[0].file.parent}")


def _run_in_folder(jobs: Sequence[Job], failed: dict[str, str], terminal: Terminal) -> None:
    """Run the jobs of one run folder."""
    from npbml.lab.pipeline import Pipeline

    folder, methods = jobs[0].folder, [job.cell.method for job in jobs]
    work = Pipeline.start(folder, jobs[0].config, terminal)
    announce(work)
    with work.at_work():
        others = sorted(path.parent for path in folder.parent.glob("*/config.json") if path.parent != folder)
        for stage in work.needs(methods):
            work.take_over(stage, others)
            work.run(stage)
        for job in jobs:
            with _attempt([job], failed, terminal):
                _run_one(work, job, terminal)


def _run_one(work: "Pipeline", job: Job, terminal: Terminal) -> None:
    from npbml.engine.distributed import on_rank_zero
    from npbml.lab.environment import environment

    work.run(job.cell.method)
    record = test_method(work, terminal, job.cell.method)
    on_rank_zero(lambda: job.keep(record, environment(work.config, work.device, work.data.checksum)))


@contextmanager
def _attempt(jobs: Sequence[Job], failed: dict[str, str], terminal: Terminal) -> Iterator[None]:
    """Note that jobs have failed, and why, in place of ending all."""
    try:
        yield
    except (RunError, DataError) as error:
        for job in jobs:
            failed.setdefault(job.title, str(error))
            terminal.failed(job.title)


@dataclass(frozen=True)
class ReportOptions:
    """Where the results are, and where the tables go."""

    results: str = "results"
    """The folder that `npbml reproduce` has filled."""
    out: str | None = None
    """The folder for tables.md and tables.html; that of the results if not given."""


def report(arguments: list[str]) -> None:
    """Set the results of `npbml reproduce` beside the paper's figures, in Markdown and in HTML with plots."""
    options = parse(ReportOptions, "report", report, arguments)
    folder = Path(options.results)
    results, out = read_results(folder), Path(options.out or folder)
    from npbml.report.tables_page import html  # with plots, whose library is slow to load

    write_whole(out / "tables.md", markdown(results).encode())
    write_whole(out / "tables.html", html(results).encode())
    console.print(terminal_tables(results) if results else f"There are no results in {folder} yet.")
    say(f"tables: {out / 'tables.md'}, {out / 'tables.html'}")
