"""The test of a learner that has no run: one that comes with the package, or a file."""

from collections.abc import Callable

from npbml.catalogue import load
from npbml.data.image_data import ImageData, shown_to
from npbml.data.request import Request
from npbml.data.sets import open_data
from npbml.engine.capture import Replay
from npbml.engine.evaluate import evaluate, learner_answers, over_tasks
from npbml.engine.settings import resolved
from npbml.engine.source import TaskSource
from npbml.errors import SettingError
from npbml.lab.schema import Config
from npbml.measures import ACCURACY, Figure
from npbml.shapes import benchmark_shape


def test_learner(name: str, config: Config, tick: Callable[[int], None]) -> Figure:
    """The accuracy of a learner on test tasks of a data set.

    Args:
        name: What `load` takes.
        config: Its data set, ways, shots, queries, seed, device and test settings are those of the test.
        tick: Is told how many more tasks are done.

    Raises:
        SettingError: The data set has no images.
        DataError: It cannot fill the tasks, or the learner cannot take them.
    """
    learner = load(name, device=config.device)
    ways, shots, queries = config.learner.ways, config.shots, config.queries
    learner.check_ways(ways)
    images = learner.images
    data = open_data(Request(config.dataset, ways, shots, queries, size=images.size, channels=images.channels))
    if not isinstance(data, ImageData):
        raise SettingError(f"{config.dataset} has no images: {name} cannot be tested on it.")
    device = next(learner.parameters()).device
    classes = shown_to(data.store.classes("test"), images)
    classes.check(ways, shots, queries)
    precision = resolved(config.engine, device.type).precision
    source = TaskSource(learner, classes.to(device), benchmark_shape(ways, shots, queries), precision, {}, print)
    answer = learner_answers([learner], source, Replay("test", False, print), tasks=config.engine.tasks)
    tested = config.test
    found = evaluate(answer, source.draw, tested.tasks, tested.batch_size, config.seed, "test", tick=tick)
    return over_tasks(ACCURACY, found.per_task)


test_learner.__test__ = False  # type: ignore[attr-defined]  # not a test case, whatever a collector thinks of the name
