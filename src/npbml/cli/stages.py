"""The commands that make a run: all of it, or one stage."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from npbml.cli.options import peek, read_configuration, without
from npbml.cli.screen import Command, console, say
from npbml.config import Config
from npbml.engine.device import describe_device
from npbml.engine.distributed import by_first, check_share
from npbml.errors import RunError, SettingError
from npbml.report.terminal import Terminal, results_table, task_words
from npbml.run_folder import read_config
from npbml.runs import Run


def run(arguments: list[str]) -> None:
    """Pre-train, meta-train and test, skipping what is done; then show the results beside the baselines."""
    with opened(run, arguments) as (work, terminal):
        trained = [work.config.method, *(name for name in work.config.baselines if name != "prototypes")]
        prepare_for(work, [*trained, *work.config.baselines])
        for method in trained:
            work.train(method)
        for method in dict.fromkeys([*trained, *work.config.baselines]):
            test_method(work, terminal, method)
        by_first(lambda: _show(work, terminal))


def pretrain(arguments: list[str]) -> None:
    """Pre-train the encoder: it learns to tell the training classes apart."""
    with opened(pretrain, arguments) as (work, _):
        prepare_for(work, ["prototypes"])


def relation(arguments: list[str]) -> None:
    """Train the relation network, whose scores the transductive loss uses."""
    with opened(relation, arguments) as (work, _):
        work.relation()


def train(arguments: list[str]) -> None:
    """Meta-train a method, from a pre-trained encoder and, where its loss asks for one, a relation network."""
    with opened(train, arguments) as (work, _):
        work.train(work.config.method)


def test(arguments: list[str]) -> None:
    """Test a meta-trained method, or prototypes, on unseen classes; of another data set, with --dataset."""
    asked = peek(arguments, ("run", "dataset", "method"))
    other, prototypes = asked.get("dataset"), asked.get("method") == "prototypes"
    folder = Path(asked.get("run", ""))
    if other and (folder / "config.json").exists() and other != read_config(folder).dataset:
        arguments = without(arguments, "dataset")
    else:
        other = None
    with opened(test, without(arguments, "method") if prototypes else arguments) as (work, terminal):
        test_method(work, terminal, "prototypes" if prototypes else work.config.method, other)
        by_first(lambda: _show(work, terminal))


@contextmanager
def opened(command: Command, arguments: list[str]) -> Iterator[tuple[Run, Terminal]]:
    """The run that the arguments ask for, kept from other processes, and the terminal that shows it."""
    asked = read_configuration(command, arguments)
    config, folder = asked.config, asked.folder
    _check_order(command, config, folder)
    if command in (run, train):
        check_share("train.meta_batch", config.meta_batch)
    terminal = Terminal(console)
    work = Run.start(folder, config, terminal)
    announce(work)
    with work.locked(), terminal:
        yield work, terminal


def _check_order(command: Command, config: Config, folder: Path) -> None:
    """Refuse a stage that needs an earlier one, or that the run does not have."""
    if config.dataset == "sinusoid" and command in (pretrain, relation):
        raise SettingError(
            f"Learners of sinusoid start from scratch: there is no {command.__name__}. Begin with `npbml train`."
        )
    begun = (folder / "config.json").exists()
    if not begun and (command is test or (command is train and Run(folder, config).needs([config.method]))):
        first = "train" if config.dataset == "sinusoid" else "pretrain"
        raise RunError(f"There is no run in {folder}: begin it with `npbml {first} --run {folder}`.")


def announce(work: Run) -> None:
    """What is run, on what and where."""
    config = work.config
    task = f"{task_words(config.dataset, config.ways, config.shots)}, {config.backbone}, seed {config.seed}"
    say(f"{task}, on {describe_device(work.device)}\nrun folder: {work.folder}")


def prepare_for(work: Run, methods: list[str]) -> None:
    """The stages that these methods need before they can be trained."""
    for stage in work.needs(methods):
        getattr(work, stage)()


def test_method(work: Run, terminal: Terminal, method: str, dataset: str | None = None) -> dict[str, object]:
    """Test under the eyes of the user; the record."""
    with terminal.counting(f"test {method}", work.config.test.tasks) as tick:
        return work.test(method, tick, dataset)


def _show(work: Run, terminal: Terminal) -> None:
    terminal.close()
    from npbml.report.pictures import draw_pictures  # matplotlib is slow to load, and only needed here

    records = work.results()
    for dataset in dict.fromkeys(record["dataset"] for record in records):
        of_dataset = [record for record in records if record["dataset"] == dataset]
        console.print(results_table(of_dataset, work.paired_difference))
    say(f"results: {work.folder / 'results.json'}\npictures: {draw_pictures(work)}")
