"""What the tests of a run have found: results.json, and the measure of every test task."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from npbml.engine.evaluate import over_tasks
from npbml.json_files import read_json, sealed, write_json
from npbml.measures import Figure, Measure


class Records:
    """The records of a run folder, of which `dataset` is its own."""

    def __init__(self, folder: Path, dataset: str) -> None:
        self.folder, self.dataset = folder, dataset

    def all(self) -> list[dict[str, Any]]:
        """Those of results.json."""
        path = self.folder / "results.json"
        return read_json(path) if path.exists() else []

    def keep(self, record: dict[str, Any], per_task: Tensor) -> None:
        """Put a record in the place of the one before of the same method and data set."""
        key = (record["method"], record["dataset"])
        records = {(other["method"], other["dataset"]): other for other in self.all()}
        write_json(self.file(*key), sealed({"per_task": per_task.tolist()}))
        write_json(self.folder / "results.json", list((records | {key: record}).values()))

    def file(self, method: str, dataset: str) -> Path:
        """The measure of every test task."""
        own = dataset == self.dataset
        return self.folder / method / ("test.json" if own else f"test-{Path(dataset).name}.json")

    def difference(self, measure: Measure, method: str, other: str, dataset: str) -> Figure | None:
        """How much more `method` has than `other`, over the test tasks that both were given."""
        files = [self.file(name, dataset) for name in (method, other)]
        return paired(measure, *files) if all(file.exists() for file in files) else None


def paired(measure: Measure, mine: Path, theirs: Path) -> Figure:
    """The difference between two methods over the test tasks that both were given."""
    one, other = (torch.tensor(read_json(path)["per_task"], dtype=torch.float64) for path in (mine, theirs))
    count = min(len(one), len(other))  # more tasks begin with the same ones
    return over_tasks(measure, one[:count] - other[:count])
