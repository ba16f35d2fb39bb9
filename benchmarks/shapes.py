"""How the methods of a run do on tasks of many shapes, beside nearest class means and soft k-means.

python benchmarks/shapes.py RUN --split val --tasks 1000 --methods npbml-any maml-any

Prints a table in Markdown, the differences to the first method task by task, and saves both with a picture under
--out. Meta-validation classes (--split val) are for choices, test classes for what is reported at the end.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from npbml.json_files import write_json, write_whole
from npbml.lab.pipeline import Pipeline
from npbml.lab.run_folder import read_config
from npbml.lab.schema import override
from npbml.lab.shape_tests import known_shapes, paired_on, try_baselines, try_shapes
from npbml.measures import ACCURACY
from npbml.report.drawing import save
from npbml.report.shapes import draw_shapes, shapes_markdown
from npbml.report.words import with_interval


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder whose methods are trained")
    parser.add_argument("--methods", nargs="+", default=["npbml-any", "maml-any"])
    parser.add_argument("--split", choices=("val", "test"), default="val")
    parser.add_argument("--shapes", nargs="+", default=["usual"])
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument(
        "--out", type=Path, default=None, help="a folder for the table, the figures and the picture"
    )
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    tested = {"test": {"shapes": options.shapes, "shape_tasks": options.tasks}, "device": options.device}
    work = Pipeline.start(options.run, override(read_config(options.run), tested))
    with work.at_work():
        for method in options.methods:
            try_shapes(work, method, work.learners(method), lambda count: None, options.split)
        try_baselines(work, lambda count: None, options.split)
    found = known_shapes(work, options.methods, options.split)
    lines = [*shapes_markdown(found), "", *differences(found)]
    print("\n".join(lines))
    if options.out is not None:
        name = f"{Path(work.config.dataset).name}-{options.split}"
        write_whole(options.out / f"{name}.md", ("\n".join(lines) + "\n").encode())
        write_json(options.out / f"{name}.json", json.loads(json.dumps(found), object_hook=_without_tasks))
        save(draw_shapes(found), options.out / f"{name}.png")


def differences(found: dict[str, Any]) -> list[str]:
    """By how much the first method is above each other one, on the same tasks."""
    first, *others = found
    rows = [["shape", *(f"{first} minus {name}" for name in others)], ["---"] * len(found)]
    for shape in found[first]:
        cells = [paired_on(shape, found[first], found[name]) for name in others]
        rows.append([shape, *(with_interval(ACCURACY, *cell, signed=True) if cell else "-" for cell in cells)])
    return [f"| {' | '.join(row)} |" for row in rows]


def _without_tasks(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "per_task"}


if __name__ == "__main__":
    main()
