"""What the benchmarks share: options, random tasks, meta-steps, measuring, and what is printed and saved."""

import argparse
import gc
import importlib
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import npbml
from npbml.engine.capture import first_line
from npbml.engine.device import WORKSPACES, choose_device, describe_device, in_precision, set_tf32
from npbml.engine.evaluate import over_tasks
from npbml.engine.metastep import MetaStep, Ready, Tasks
from npbml.engine.settings import EngineSettings, resolved
from npbml.lab.protocols import preset
from npbml.lab.schema import method_config, override
from npbml.learner.learner import Learner
from npbml.learner.prepare import normalised
from npbml.learner.settings import ImageSpec
from npbml.measures import ACCURACY
from npbml.tasks import Task

RESULTS = Path(__file__).parent / "results"
WAYS, QUERIES = 5, 15
# Pixels are 0.5 and a sixteenth of noise, and normalised back to it. On a grid this is exact: the networks see the
# same images in single and in double precision.
MEAN, STD, GRID = 0.5, 1 / 16, 2**20
NUDGE = 1e-6  # relative: about what the roundings of single precision add up to inside a network
LEAST = 0.05  # seconds that a timing takes at least, by repetition
Make = Callable[..., Ready]  # some tensors, or trees of them -> tasks that are ready


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    form = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=description, formatter_class=form, allow_abbrev=False)
    made.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    made.add_argument("--threads", type=int, help="threads of the CPU")
    made.add_argument("--out", type=Path, default=RESULTS, help="the folder for JSON and PNG")
    return made


def begin(options: argparse.Namespace) -> torch.device:
    """The device, with torch set up for a benchmark."""
    if options.threads:
        torch.set_num_threads(options.threads)
    # One inner step is compiled for many settings here; past a limit torch would go on without a word, uncompiled.
    torch._dynamo.config.recompile_limit = 64
    for name, value in WORKSPACES.items():  # as in every run
        os.environ.setdefault(name, value)
    set_tf32(False)  # the tasks' frozen work is done once, for all variants: not in TF32, which cudnn has on
    return choose_device(options.device)


def make_learner(
    method: str, backbone: str, shots: int, size: int, device: torch.device, filters: int, **settings: Any
) -> Learner:
    """A learner as published for mini-ImageNet, with random weights and a small scorer.

    `filters` are conv4's, or those of the first block of resnet12, which are doubled from block to block. R sees
    means: with random weights, the sums over resnet12's block make the first inner step diverge.
    """
    net = {"filters": filters} if backbone == "conv4" else {"widths": [filters << block for block in range(4)]}
    config = override(preset("published", "mini-imagenet", backbone, method, shots), {"net": net})
    config = override(override(config, {"scorer": {"widths": [8, 8]}, "loss": {"averaged": True}}), settings)
    images = ImageSpec(3, size, (MEAN,) * 3, (STD,) * 3)
    return Learner(method_config(config, method).learner, images).to(device)


def random_tasks(tasks: int, shots: int, size: int, device: torch.device, seed: int = 0) -> Task:
    """A batch of tasks whose classes are noise around a pattern each; images are floats in 0 to 1."""
    random = torch.Generator().manual_seed(seed)
    patterns = torch.randn(tasks, WAYS, 1, 3, size, size, generator=random)

    def images(count: int) -> Tensor:
        noise = torch.randn(tasks, WAYS, count, 3, size, size, generator=random)
        steps = (STD * GRID * (0.5 * patterns + noise)).round()
        return (MEAN + steps / GRID).clamp(0, 1).flatten(1, 2).to(device)

    def labels(count: int) -> Tensor:
        return torch.arange(WAYS, device=device).repeat_interleave(count).repeat(tasks, 1)

    return Task(images(shots), labels(shots), images(QUERIES), labels(QUERIES))


def seen_by(learner: Learner, tasks: Task) -> Task:
    """The same tasks with the images as the learner's networks see them, for libraries that do not normalise."""
    support, query = (normalised(learner, images) for images in (tasks.support_images, tasks.query_images))
    return tasks._replace(support_images=support, query_images=query)


def in_double(tasks: Task) -> Task:
    """The same tasks in double precision."""
    return tasks.map(lambda part: part.double() if part.is_floating_point() else part)


def nudged(tasks: Task) -> Task:
    """The same tasks, with every pixel changed by a millionth of itself or so."""
    random = torch.Generator(tasks.support_images.device).manual_seed(0)

    def nudge(images: Tensor) -> Tensor:
        noise = torch.randn(images.shape, generator=random, device=images.device, dtype=images.dtype)
        return images * (1 + NUDGE * noise)

    return tasks._replace(support_images=nudge(tasks.support_images), query_images=nudge(tasks.query_images))


@dataclass
class Variant:
    """One way to take the same meta-step, and what was measured of it."""

    name: str
    run: Callable[[], object]
    gradient: Callable[[], Tensor]  # of the meta-step that was run last, flat
    tf32: bool = False
    forget: Callable[[], None] = lambda: None  # what was recorded, but not what was compiled
    found: Tensor | None = None
    failure: str = ""
    first_s: float = math.nan
    peak_mib: float = math.nan
    seconds: list[float] = field(default_factory=list)

    @property
    def ms(self) -> float:
        """The median time of a meta-step."""
        return 1000 * statistics.median(self.seconds) if self.seconds else math.nan

    def record(self) -> dict[str, Any]:
        values = {"ms": self.ms, "first_s": self.first_s, "peak_mib": self.peak_mib, "rounds": len(self.seconds)}
        low_high = (
            {"ms_low": 1000 * min(self.seconds), "ms_high": 1000 * max(self.seconds)} if self.seconds else {}
        )
        return {"name": self.name, "failure": self.failure, **values, **low_high}


# What the engine can do, in words and as its settings: vmap is all tasks at once, loop each by itself (on a core
# or GPU stream of its own).
ON_GPU: dict[str, dict[str, Any]] = {
    "loop": {"tasks": "loop"},
    "vmap": {},
    "loop, captured": {"tasks": "loop", "cuda_graph": "on"},
    "vmap, captured": {"cuda_graph": "on"},
    "vmap, compiled, captured": {"compile": "on", "cuda_graph": "on"},
    "vmap, compiled, captured, tf32": {"compile": "on", "cuda_graph": "on", "precision": "tf32"},
    "vmap, compiled, captured, bf16": {"compile": "on", "cuda_graph": "on", "precision": "bfloat16"},
    "loop, compiled, captured, tf32": {"tasks": "loop", "compile": "on", "cuda_graph": "on", "precision": "tf32"},
    "loop, compiled, captured, bf16": {
        "tasks": "loop",
        "compile": "on",
        "cuda_graph": "on",
        "precision": "bfloat16",
    },
}
ON_CPU: dict[str, dict[str, Any]] = {
    "loop": {"tasks": "loop"},
    "vmap": {},
    "loop, compiled": {"tasks": "loop", "compile": "on"},
    "vmap, compiled": {"compile": "on"},
    "vmap, bf16": {"precision": "bfloat16"},
}
PLAIN = {"tasks": "vmap", "compile": "off", "cuda_graph": "off", "precision": "float32"}


class Engine:
    """npbml's variants on one learner. What was compiled for one of them is used by the others."""

    def __init__(self, learner: Learner, notes: list[str], skip: str = "", only: str = "") -> None:
        """Variants that have a word of `skip` in their names, or lack one of `only`, are left out."""
        self.learner, self.notes, self.skip, self.only = learner, notes, skip.split(), only.split()
        self.device = next(learner.parameters()).device
        self.executors: dict[tuple[str, str], Any] = {}

    def eager(self, make: Make, inputs: Sequence[Any], words: str) -> list[Variant]:
        """The plain loop and the plain vmap alone, for checks."""
        ways = {way: EngineSettings(**PLAIN | {"tasks": way}) for way in ("loop", "vmap")}
        return [self.variant(f"npbml, {way}, {words}", engine, make, inputs) for way, engine in ways.items()]

    def variants(self, make: Make, inputs: Sequence[Any], suffix: str = "") -> list[Variant]:
        """Every variant on tasks that `make(*inputs)` makes ready."""
        ways = ON_GPU if self.device.type == "cuda" else ON_CPU
        return [
            self.variant(f"npbml, {name}{suffix}", EngineSettings(**PLAIN | changes), make, inputs)
            for name, changes in ways.items()
            if not any(word in name for word in self.skip) and all(word in name for word in self.only)
        ]

    def variant(self, name: str, settings: EngineSettings, make: Make, inputs: Sequence[Any]) -> Variant:
        """Meta-steps with these settings of the engine."""
        key = (settings.tasks, settings.compile)
        steps: list[MetaStep] = []

        def in_its_precision(*inputs: Any) -> Ready:
            with in_precision(settings.precision, self.device):
                return make(*inputs)

        def run() -> None:
            if not steps:
                steps.append(self._step(settings, partial(self._say, name)))
                steps[0].executor = self.executors.get(key)
            steps[0](Tasks(in_its_precision, tuple(inputs), None), self.learner.outer(1.0))
            self.executors.setdefault(key, steps[0].executor)

        def gradient() -> Tensor:
            return flat(parameter.grad for parameter in self.learner.parameters())

        rounded = resolved(settings, self.device.type).precision != "float32"
        return Variant(name, run, gradient, rounded, steps.clear)

    def _step(self, settings: EngineSettings, say: Callable[[str], None]) -> MetaStep:
        # Of rate 0: a step costs what all do, and each finds the same gradient as the one before.
        optimizer = torch.optim.Adam(self.learner.parameters(), lr=0.0)
        return MetaStep(self.learner, optimizer, settings, say=say)

    def _say(self, name: str, words: str) -> None:
        if (note := f"{name}: {words}") not in self.notes:
            self.notes.append(note)


def flat(gradients: Iterable[Tensor | None]) -> Tensor:
    """One vector in double precision, in the order of the learner's parameters."""
    return torch.cat([g.detach().flatten().double().cpu() for g in gradients if g is not None])


def relative_error(found: Tensor | None, expected: Tensor | None) -> float:
    """|found - expected| / |expected|"""
    if found is None or expected is None:
        return math.nan
    return ((found - expected).norm() / expected.norm()).item()


def errors_by_group(learner: Learner, found: Tensor | None, expected: Tensor | None) -> dict[str, float]:
    """The relative errors of theta, omega, phi and psi apart: a large part of a gradient hides a small one."""
    if found is None or expected is None:
        return {}
    letters = {name: letter for letter, part in learner.groups().items() for name in part}
    sizes = [parameter.numel() for parameter in learner.parameters()]
    pieces: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for (name, _), *pair in zip(
        learner.named_parameters(), found.split(sizes), expected.split(sizes), strict=True
    ):
        pieces.setdefault(letters[name], []).append(tuple(pair))
    return {letter: relative_error(*map(torch.cat, zip(*pairs, strict=True))) for letter, pairs in pieces.items()}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def first_steps(variants: Iterable[Variant], device: torch.device) -> None:
    """A meta-step of each variant for its gradient, compiling included, and on a GPU another for its peak memory:
    what is in use at most, less what was in use before; recording, but not compiling, included. Errors of the
    gradients are printed against the first that is found."""
    first: Tensor | None = None
    for variant in variants:
        print(f"  {variant.name} ... ", end="", flush=True)
        set_tf32(variant.tf32)
        try:
            started = time.perf_counter()
            variant.run()
            wait(device)
            variant.first_s = time.perf_counter() - started
            variant.found = variant.gradient()
            first = variant.found if first is None else first
            error = relative_error(variant.found, first)
            print(f"{show(variant.first_s)} s, error {show(error)}", flush=True)
            if device.type == "cuda":
                variant.forget()
                gc.collect()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_allocated(device)
                variant.run()
                wait(device)
                variant.peak_mib = (torch.cuda.max_memory_allocated(device) - before) / 2**20
        except Exception as error:
            variant.failure = first_line(error)
            variant.forget()
            print(f"failed: {variant.failure}", flush=True)


def time_in_turns(variants: Iterable[Variant], device: torch.device, rounds: int) -> None:
    """Time every variant once in each round, so that whatever slows the machine down slows down all."""
    working = [variant for variant in variants if not variant.failure]
    counts = [max(1, math.ceil(LEAST / _seconds(variant, 1, device))) for variant in working]
    for number in range(rounds):
        print(f"  round {number + 1} of {rounds}", flush=True)
        for variant, count in zip(working, counts, strict=True):
            variant.seconds.append(_seconds(variant, count, device))


def _seconds(variant: Variant, count: int, device: torch.device) -> float:
    set_tf32(variant.tf32)
    wait(device)
    started = time.perf_counter()
    for _ in range(count):
        variant.run()
    wait(device)
    return (time.perf_counter() - started) / count


def try_import(name: str, left_out: dict[str, str]) -> ModuleType | None:
    """A peer, where it is installed and works; else it is noted why not."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        left_out[name] = first_line(error)
        return None


def about(device: torch.device, options: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """What a result depends on."""
    versions = {"python": platform.python_version(), "npbml": npbml.__version__, "torch": torch.__version__}
    for name in ("higher", "torchopt", "learn2learn"):
        if name in sys.modules:
            versions[name] = _version(name)
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    return {
        "device": describe_device(device),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "versions": versions,
        "settings": settings,
        **more,
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return str(getattr(sys.modules[name], "__version__", "unknown"))


def save(folder: Path, name: str, result: dict[str, Any], draw: Callable[[Any], None] | None = None) -> None:
    """NAME.json and, drawn on matplotlib's figure, NAME.png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(_finite(result), indent=1) + "\n", encoding="utf-8")
    print(f"saved: {folder / name}.json", flush=True)
    if draw is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(8, 4.5), layout="constrained")
    draw(figure)
    figure.savefig(folder / f"{name}.png", dpi=120)
    pyplot.close(figure)


def _finite(value: Any) -> Any:
    """JSON has no NaN: what was not measured is null."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value


def draw_bars(figure: Any, bars: Sequence[tuple[str, float]], title: str) -> None:
    """Times in milliseconds, the first on top; on a logarithmic axis where they are far apart."""
    shown = [(name, value) for name, value in bars if math.isfinite(value)][::-1]
    values = [value for _, value in shown]
    figure.set_size_inches(9, 1.5 + 0.28 * len(shown))
    axes = figure.subplots()
    drawn = axes.barh([name for name, _ in shown], values, color="tab:blue")
    axes.bar_label(drawn, [show(value, 3) for value in values], padding=3, fontsize=8)
    axes.margins(x=0.12)
    if values and max(values) > 20 * min(values):
        axes.set_xscale("log")
        axes.set_xlim(left=min(values) / 3)
    axes.set_xlabel("milliseconds a meta-step")
    figure.suptitle(title, fontsize=9)
    axes.tick_params(axis="y", labelsize=8)


def show(value: float | int | str | None, digits: int = 3) -> str:
    """A number with a few digits; what was not measured is a dash."""
    if isinstance(value, str | int):
        return str(value)
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0 or 1e-2 <= abs(value) < 10**6:
        return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value) or 1)))}f}"
    return f"{value:.1e}"


def print_table(headings: Sequence[str], rows: Sequence[Sequence[float | int | str | None]]) -> None:
    cells = [list(headings), *([show(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    for row in cells:
        first, *others = (
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *others]).rstrip(), flush=True)


def print_accuracies(
    what: str, rows: dict[str, list[Tensor]], other: str, base: list[Tensor], shots: Sequence[int]
) -> None:
    """A table of accuracies for each number of shots, with paired differences to `base`."""
    table = []
    for name, found in rows.items():
        row = [name]
        for mine, first in zip(found, base, strict=True):
            total, apart = over_tasks(ACCURACY, mine), over_tasks(ACCURACY, mine - first)
            row.append(f"{total.mean:.2f} ± {total.ci95:.2f}")
            row.append(f"{apart.mean:+.2f} ± {apart.ci95:.2f}" if found is not base else "")
        table.append(row)
    print_table([what, *(words for count in shots for words in (f"{count}-shot, %", f"to {other}"))], table)


def double_errors(variants: Sequence[Variant]) -> dict[str, float]:
    """How far those in double precision are from the first of them."""
    working = [variant for variant in variants if variant.found is not None]
    return {variant.name: relative_error(variant.found, working[0].found) for variant in working[1:]}


def print_double(errors: dict[str, float], first: str) -> None:
    for name, error in errors.items():
        print(f"in double precision, against {first}: {name}: {show(error)}")


def print_remarks(notes: Sequence[str], left_out: dict[str, str]) -> None:
    """What was said on the way, and what is missing in the table."""
    for note in notes:
        print(f"note: {note}")
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}")
