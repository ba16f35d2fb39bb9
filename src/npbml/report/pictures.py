"""Pictures of a run: learning curves, sample tasks, the learned loss."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from npbml.data.sinusoid import REACH, Sinusoids
from npbml.data.tasks import ClassSet
from npbml.engine.evaluate import DRAWN_AT_ONCE
from npbml.lab.pipeline import Pipeline
from npbml.learner.learner import Learner
from npbml.methods import trains
from npbml.randomness import generator
from npbml.report.drawing import ACCENT, INK, QUIET, new_figure, plain, save
from npbml.report.words import heading
from npbml.rule.loss import NetworkTerm, cross_entropy, target_of
from npbml.stages.journal import NAME, read_journal
from npbml.tasks import Task


def draw_pictures(run: Pipeline) -> Path:
    """Draw what there is to draw into the run's folder `pictures` and return it."""
    folder, config = run.folder / "pictures", run.config
    stages = ["pretrain", "relation", *filter(trains, (config.method, *config.baselines))]
    journals: dict[str, list[dict[str, Any]]] = {}
    for stage in dict.fromkeys(stages):
        lines, damaged = read_journal(run.folder / stage)
        if damaged:
            run.observer.said(f"{damaged} bytes of {run.folder / stage / NAME} are damaged: its curve has a gap.")
        if lines:
            journals[stage] = lines
    if journals:
        save(draw_curves(journals, heading(run.measure)), folder / "curves.png")
    trained = (run.folder / config.method / "learner.safetensors").exists()
    learner = run.learner().cpu() if trained else None
    if not isinstance(run.data, Sinusoids):
        classes = (
            run.splits["test"] if run.encoder is None else run.data.classes("test")
        )  # of images, not features
        save(draw_tasks(classes, config.learner.ways, config.shots, config.seed), folder / "tasks.png")
    elif learner is not None:
        save(draw_waves(learner, run.data, config.seed), folder / "waves.png")
    if learner is not None and config.learner.target == "classes" and _learns_loss(learner):
        save(draw_loss(learner), folder / "loss.png")
    return folder


def draw_curves(journals: dict[str, list[dict[str, Any]]], measured: str = "accuracy, %") -> Figure:
    """Loss and validation of each stage against its steps."""
    figure = new_figure((3.2 * len(journals), 5))
    axes = figure.subplots(2, len(journals), squeeze=False)
    for column, (stage, lines) in zip(axes.T, journals.items(), strict=True):
        for axis, key, colour in zip(column, ("loss", "validation"), (INK, ACCENT), strict=True):
            points = np.array([(line["step"], line[key]) for line in lines if key in line])
            if len(points):
                noisy = key == "loss" and len(points) > 60
                axis.plot(
                    *points.T,
                    color=QUIET if noisy else colour,
                    lw=0.6 if noisy else 1.6,
                    marker=None if noisy else ".",
                )
                if noisy:
                    axis.plot(*_smooth(points).T, color=colour, lw=1.6)
            plain(axis)
        column[0].set_title(stage)
        column[1].set_xlabel("step")
    axes[0, 0].set_ylabel("loss")
    axes[1, 0].set_ylabel(f"validation {measured}")
    figure.tight_layout()
    return figure


def draw_tasks(classes: ClassSet, ways: int, shots: int, seed: int, tasks: int = 3) -> Figure:
    """Sample tasks: a row for each class, its support images and some of its queries."""
    queries = min(8, int(classes.counts.min()) - shots)
    shown = min(shots, 5)
    drawn = classes.draw(tasks, ways, shots, queries, generator(seed, "picture")).cpu()
    images = classes.images.cpu()
    figure = new_figure((1.2 + 0.36 * (shown + queries + 1) * tasks, 0.42 * ways + 0.7))
    axes = figure.subplots(1, tasks)
    for number, (axis, task) in enumerate(zip(np.atleast_1d(axes), drawn, strict=True)):
        support, query = (_grid(images[part]) for part in (task[:, :shown], task[:, shots:]))
        gap = np.full((support.shape[0], images.shape[-1] // 2, support.shape[2]), 255, dtype=np.uint8)
        axis.imshow(np.concatenate([support, gap, query], 1).squeeze(), cmap="gray", vmin=0, vmax=255)
        axis.set_title(f"task {number + 1}: {shots} support | queries", fontsize=9)
        axis.axis("off")
    figure.tight_layout()
    return figure


@torch.no_grad()
def draw_waves(learner: Learner, waves: Sinusoids, seed: int, tasks: int = 3) -> Figure:
    """Test waves: what is known of each, and the learner's answer before and after it has adapted to that."""
    drawn = waves.draw(DRAWN_AT_ONCE, generator(seed, "test", 0))[:tasks]
    places = torch.linspace(*REACH, 201)
    figure = new_figure((3.4 * tasks, 3.2), layout="constrained")
    axes = figure.subplots(1, tasks, sharex=True, sharey=True)
    for number, (axis, wave) in enumerate(zip(np.atleast_1d(axes), drawn, strict=True)):
        known = waves.task(wave.unsqueeze(0))
        every = torch.cat([wave[:2], known.support_images.flatten(), places])
        task = waves.task(every.unsqueeze(0))
        task = task.map(lambda part: part[0])
        axis.plot(places, task.query_labels, color=QUIET, lw=3, alpha=0.5, label="wave")
        for name, values in before_and_after(learner, task).items():
            styles = {"before": {"color": INK, "ls": "--", "lw": 1.2}, "after": {"color": ACCENT, "lw": 1.8}}
            axis.plot(places, values, label=f"{name} adaptation", **styles[name])
        axis.plot(task.support_images.flatten(), task.support_labels, "o", color="black", ms=4, label="support")
        error = (values - task.query_labels).square().mean()
        axis.set_title(f"wave {number + 1}: squared error {error:.3f}", fontsize=9)
        axis.set_xlabel("x")
        plain(axis)
    np.atleast_1d(axes)[0].set_ylabel("y")
    handles, labels = np.atleast_1d(axes)[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return figure


def before_and_after(learner: Learner, task: Task) -> dict[str, Tensor]:
    """The values that the learner gives for the query items at theta_0 and at theta_J: [queries] each"""
    prepared = learner.prepare(task)
    fixed, last = learner.modulations(prepared), learner.test_steps - 1
    trajectory = learner.trajectory(prepared, fixed)
    ends = {"before": (trajectory[0], 0), "after": (trajectory[-1], last)}
    return {name: learner.query_logits(theta, prepared, fixed, step)[:, 0] for name, (theta, step) in ends.items()}


@torch.no_grad()
def draw_loss(learner: Learner) -> Figure:
    """The learned loss of one item beside cross-entropy: as a curve in the logit of its class, and as surfaces
    in that logit and a rival's.

    Of a support item it is base + inductive; of a query item, of whose class the relation network is sure, it
    is the transductive term.
    """
    reach = torch.linspace(-6, 6, 61)
    true, rival = torch.meshgrid(reach, reach, indexing="xy")
    names = {"base": "cross-entropy", "support": "learned, support item", "query": "learned, query item"}
    colours = {"base": QUIET, "support": ACCENT, "query": INK}
    curves = item_losses(learner, reach, torch.zeros_like(reach))
    surfaces = item_losses(learner, true.flatten(), rival.flatten())
    figure = new_figure((3.7 * (1 + len(curves)), 3.6), layout="constrained")
    axis = figure.add_subplot(1, 1 + len(curves), 1)
    for kind, values in curves.items():
        shifted = values - values.mean() + curves["base"].mean()
        axis.plot(reach, shifted, color=colours[kind], lw=2, label=names[kind])
    axis.set_xlabel("logit of the item's class (others 0)")
    axis.set_ylabel("loss, shifted to one mean")
    axis.legend(frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    for place, (kind, values) in enumerate(surfaces.items(), 2):
        surface = figure.add_subplot(1, 1 + len(curves), place, projection="3d")
        surface.plot_surface(true, rival, values.view_as(true), cmap="viridis", lw=0, rcount=40, ccount=40)
        surface.set_title(names[kind], fontsize=10)
        surface.set_xlabel("its class's logit", fontsize=8)
        surface.set_ylabel("a rival's logit", fontsize=8)
        surface.tick_params(labelsize=7)
        surface.view_init(28, -60)
    return figure


def item_losses(learner: Learner, true: Tensor, rival: Tensor) -> dict[str, Tensor]:
    """The losses of single items with these two logits and the others 0: cross-entropy and the learned ones."""
    logits = torch.zeros(len(true), learner.settings.ways)
    logits[:, 0], logits[:, 1] = true, rival
    labels = torch.zeros_like(logits)
    labels[:, 0] = 1
    loss, base = learner.loss, cross_entropy(logits, labels)
    losses = {"base": base}
    inductive, transductive = loss.term("inductive"), loss.term("transductive")
    if isinstance(inductive, NetworkTerm) and loss.settings.inductive:
        items = inductive.inputs(logits, labels, base)
        losses["support"] = _each(inductive, items) + loss.settings.base * base
    if isinstance(transductive, NetworkTerm):
        scores = 0.05 + 0.9 * labels
        apart = cross_entropy(logits, target_of(scores, loss.settings.target))
        losses["query"] = _each(transductive, transductive.inputs(logits, scores, apart))
    return losses


def _learns_loss(learner: Learner) -> bool:
    return any(learner.loss.term(name) is not None for name in ("inductive", "transductive"))


def _each(network: NetworkTerm, items: Tensor) -> Tensor:
    """The network's loss of each item by itself."""
    return torch.vmap(lambda item: network.mean_loss(item.unsqueeze(0)))(items)


def _grid(images: Tensor) -> np.ndarray:
    """[rows, columns, channels, height, width] -> [rows * height, columns * width, channels]"""
    rows, columns, channels, height, width = images.shape
    return images.permute(0, 3, 1, 4, 2).reshape(rows * height, columns * width, channels).numpy()


def _smooth(points: np.ndarray) -> np.ndarray:
    width = max(1, len(points) // 30)
    kernel = np.ones(width) / width
    return np.stack([np.convolve(column, kernel, "valid") for column in points.T], 1)
