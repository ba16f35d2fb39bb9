"""Which method of a run to use: the one that does best on validation tasks, nearest class means included."""

from collections.abc import Callable, Iterable
from pathlib import Path

from npbml.engine.distributed import on_rank_zero
from npbml.json_files import read_json, sealed, write_json
from npbml.lab.run import Run
from npbml.lab.testing import validate_method
from npbml.measures import Figure

FILE = "recommended.json"

Tick = Callable[[int], None]  # is told how many more tasks are done


def recommend(run: Run, methods: Iterable[str], tick: Tick = lambda count: None) -> dict[str, Figure]:
    """Judge methods on the same validation tasks and keep which is best.

    Returns:
        The accuracy of each, the best first.
    """
    found = {method: validate_method(run, method, tick) for method in methods}
    ordered = dict(sorted(found.items(), key=lambda item: -item[1].mean))
    kept = {
        "method": next(iter(ordered)),
        "validation": {
            name: {"accuracy": round(one.mean, 3), "ci95": round(one.ci95, 3)} for name, one in ordered.items()
        },
    }
    on_rank_zero(lambda: write_json(run.folder / FILE, sealed(kept)))
    return ordered


def recommended(folder: Path) -> str | None:
    """Return the method that a run recommends, where it does."""
    path = folder / FILE
    if not path.exists():
        return None
    kept = read_json(path)
    return str(kept["method"]) if isinstance(kept, dict) and "method" in kept else None
