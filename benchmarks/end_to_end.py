"""How long a whole `npbml run` takes, stage by stage:

    python benchmarks/end_to_end.py
    python benchmarks/end_to_end.py --protocol quick --dataset cifar-fs --train.steps 100

Options that are not this program's are given to `npbml run`. The run is made in a temporary folder; its stages'
times are its own, and the rest is starting, loading and drawing. On a GPU it is made twice, the first time with no
compiled code on disk.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import about, begin, parser, print_table, save

CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--protocol", default="quick")
    made.add_argument("--dataset", default="glyphs")
    made.add_argument("--once", action="store_true", help="on a GPU: leave out the second run")
    options, more = made.parse_known_args()
    device = begin(options)
    given = ["--protocol", options.protocol, "--dataset", options.dataset, "--device", options.device, *more]
    names = ["cold", "warm"][: 1 if options.once else 2] if device.type == "cuda" else ["run"]
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ) | {name: str(Path(folder) / name.lower()) for name in CACHES}
        if options.threads:
            environment["OMP_NUM_THREADS"] = str(options.threads)
        runs = {name: timed_run(Path(folder) / name, given, environment) for name in names}

    title = f"npbml run --protocol {options.protocol} --dataset {options.dataset} {' '.join(more)}".strip()
    result = about(device, options, title=title, arguments=given, runs=runs)
    print(f"\n{title}\non {result['device']}\n")
    headings = ["", "steps", *(f"{name}, s" for name in names), *(f"{name}, ms a step" for name in names)]
    stages = {row["stage"]: row["steps"] for row in runs[names[0]]}
    seconds, steps_ms = (
        {name: {row["stage"]: row[key] for row in runs[name]} for name in names} for key in ("seconds", "step_ms")
    )
    table = [
        [
            stage,
            steps,
            *(seconds[name].get(stage) for name in names),
            *(steps_ms[name].get(stage) for name in names),
        ]
        for stage, steps in stages.items()
    ]
    print_table(headings, table)
    name = f"end-to-end-{options.protocol}-{Path(options.dataset).name}-{device.type}"
    save(options.out, name, result, lambda figure: draw(figure, result))


def draw(figure: Any, result: dict[str, Any]) -> None:
    """Every run as a bar of its stages."""
    runs = result["runs"]
    figure.set_size_inches(8, 1.6 + 0.6 * len(runs))
    axes = figure.subplots()
    left = dict.fromkeys(runs, 0.0)
    for stage in [row["stage"] for row in next(iter(runs.values())) if row["stage"] != "whole"]:
        widths = [sum(row["seconds"] for row in rows if row["stage"] == stage) for rows in runs.values()]
        axes.barh(list(runs), widths, left=list(left.values()), height=0.6, label=stage)
        left = {name: left[name] + width for name, width in zip(runs, widths, strict=True)}
    axes.set_xlabel("seconds")
    axes.set_title(f"{result['title']}\n{result['device']}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)


def timed_run(folder: Path, arguments: list[str], environment: dict[str, str]) -> list[dict[str, Any]]:
    """A row for each stage of a new run, and one for the whole of it."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "npbml", "run", "--run", str(folder), *arguments]
    if subprocess.run(command, env=environment, check=False).returncode:
        raise SystemExit("The run failed: see above.")
    whole = time.perf_counter() - started
    done = sorted(folder.glob("*/done.json"), key=lambda path: path.stat().st_mtime)
    rows = []
    for path in done:
        summary = json.loads(path.read_text())
        rows.append({"stage": path.parent.name, **{key: summary[key] for key in ("steps", "seconds", "step_ms")}})
    for record in json.loads((folder / "results.json").read_text()):
        stage = f"test {record['method']}"
        rows.append(
            {"stage": stage, "steps": record["tasks"], "seconds": record["seconds"]["test"], "step_ms": None}
        )
    rest = whole - sum(row["seconds"] for row in rows)
    rows.append({"stage": "the rest", "steps": None, "seconds": rest, "step_ms": None})
    return [*rows, {"stage": "whole", "steps": None, "seconds": whole, "step_ms": None}]


if __name__ == "__main__":
    main()
