"""How the time and the memory of a meta-step of NPBML grow:

    python benchmarks/scaling.py --sweep meta-batch        1 to 64 tasks in a meta-step
    python benchmarks/scaling.py --sweep steps             1 to 50 inner steps, without and with engine.remat
    python benchmarks/scaling.py --sweep shots             1 to 20 labelled images of each class
    python benchmarks/scaling.py --sweep size              images of 32x32 and 84x84

What is not swept stays at meta-batch 2, 5 inner steps and 5 shots. Meta-steps start from tasks whose frozen work
is done, and the engine decides for itself, unless it is told. Peak memory, on a GPU, comes on top of the tasks.
On a CPU the network, the images and the sweeps are smaller; every size can be given.
"""

import math
from typing import Any

import torch
from common import (
    Engine,
    Variant,
    about,
    begin,
    first_steps,
    make_learner,
    parser,
    print_remarks,
    print_table,
    random_tasks,
    save,
    time_in_turns,
)

from npbml.engine.settings import EngineSettings, resolved
from npbml.stages.metatrain import as_given

ON_GPU = {
    "meta-batch": (1, 2, 4, 8, 16, 32, 64),
    "steps": (1, 2, 5, 10, 20, 50),
    "shots": (1, 2, 5, 10, 20),
    "size": (32, 84),
}
ON_CPU = {"meta-batch": (1, 2, 4), "steps": (1, 2, 5), "shots": (1, 5), "size": (32, 84)}
WORDS = {"meta-batch": "tasks", "steps": "inner steps", "shots": "shots", "size": "side of the images"}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--sweep", choices=tuple(WORDS), required=True)
    made.add_argument("--points", type=int, nargs="+", help="the values of the sweep")
    made.add_argument("--net", choices=("conv4", "resnet12"), default="conv4")
    made.add_argument("--filters", type=int, help="conv4's, or those of resnet12's first block")
    made.add_argument("--size", type=int)
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--tasks", default="vmap", choices=("auto", "vmap", "loop"))
    made.add_argument("--compile", default="auto", choices=("auto", "on", "off"))
    made.add_argument("--cuda-graph", default="auto", choices=("auto", "on", "off"))
    made.add_argument("--precision", default="auto", choices=("auto", "float32", "tf32", "bfloat16"))
    options = made.parse_args()
    device = begin(options)
    small = device.type == "cpu"
    options.points = options.points or list((ON_CPU if small else ON_GPU)[options.sweep])
    options.size = options.size or (32 if small else 84)
    options.filters = options.filters or {"conv4": 128, "resnet12": 64}[options.net] // (8 if small else 1)
    engine = {name: getattr(options, name) for name in ("tasks", "compile", "cuda_graph", "precision")}

    notes: list[str] = []
    rows: list[dict[str, Any]] = []
    for remat in (False, True) if options.sweep == "steps" else (False,):
        for point in options.points:
            now = {"meta-batch": 2, "steps": 5, "shots": 5, "size": options.size, options.sweep: point}
            settings = EngineSettings(**engine, remat=remat)
            variant = one(options, device, now, settings, notes)
            first_steps([variant], device)
            if not variant.failure:
                time_in_turns([variant], device, options.rounds)
            rows.append({"point": point, "remat": remat, "tasks": now["meta-batch"], **variant.record()})
            del variant
            torch._dynamo.reset()

    decided = resolved(EngineSettings(**engine), device.type)
    how = f"compile {decided.compile}, graph {decided.cuda_graph}, {decided.precision}"
    size = "" if options.sweep == "size" else f", {options.size}x{options.size}"
    title = f"NPBML, {options.net}({options.filters}){size}: {how}"
    result = about(device, options, title=title, notes=notes, rows=rows)
    print(f"\n{title}\non {result['device']}\n")
    headings = [WORDS[options.sweep], "remat", "ms a meta-step", "ms a task", "peak MiB", "first s", ""]
    print_table(
        headings,
        [
            [
                *(str(row["point"]), "yes" if row["remat"] else "no", row["ms"], row["ms"] / row["tasks"]),
                *(row["peak_mib"], row["first_s"], row["failure"]),
            ]
            for row in rows
        ],
    )
    print_remarks(notes, {})
    save(
        options.out,
        f"scaling-{options.sweep}-{options.net}-{device.type}",
        result,
        lambda figure: draw(figure, rows, WORDS[options.sweep], f"{title}\n{result['device']}"),
    )


def one(
    options: Any, device: torch.device, now: dict[str, int], engine: EngineSettings, notes: list[str]
) -> Variant:
    """Meta-steps at one point of a sweep."""
    steps = {"steps": now["steps"], "test_steps": None}
    learner = make_learner("npbml", options.net, now["shots"], now["size"], device, options.filters, inner=steps)
    tasks = random_tasks(now["meta-batch"], now["shots"], now["size"], device)
    ready = learner.prepare_batch(tasks), tasks.query_labels
    name = f"{WORDS[options.sweep]}: {now[options.sweep]}{', remat' if engine.remat else ''}"
    return Engine(learner, notes).variant(name, engine, as_given, (ready,))


def draw(figure: Any, rows: list[dict[str, Any]], words: str, title: str) -> None:
    """Time and, where it was measured, memory."""
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    shown = [("ms", "milliseconds a meta-step")]
    if any(math.isfinite(row["peak_mib"]) for row in rows):
        shown.append(("peak_mib", "peak memory, MiB"))
    figure.suptitle(title, fontsize=10)
    for axes, (key, label) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        for remat in sorted({row["remat"] for row in rows}):
            line = [(row["point"], row[key]) for row in rows if row["remat"] is remat]
            axes.plot(*zip(*line, strict=True), marker="o", label="with remat" if remat else "as it is")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        points = sorted({row["point"] for row in rows})
        axes.set_xticks(points, list(map(str, points)), minor=False)
        axes.minorticks_off()
        axes.set_xlabel(words)
        axes.set_ylabel(label)
        axes.legend()
        axes.grid(alpha=0.3)


if __name__ == "__main__":
    main()
