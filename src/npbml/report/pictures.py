"""Pictures of a run: learning curves, sample tasks, the learned loss."""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from npbml.data.tasks import ClassSet
from npbml.learner import Learner
from npbml.randomness import generator
from npbml.rule.loss import cross_entropy
from npbml.runs import Run

INK, ACCENT, QUIET = "#1b3a4b", "#d1495b", "#8d99ae"


def draw_pictures(run: Run) -> Path:
    """Draw what there is to draw into the run's folder `pictures` and return it."""
    folder = run.folder / "pictures"
    folder.mkdir(exist_ok=True)
    config = run.config
    stages = ["pretrain", "relation", config.method, *(b for b in config.baselines if b != "prototypes")]
    journals = {stage: _journal(run.folder / stage) for stage in dict.fromkeys(stages)}
    journals = {stage: journal for stage, journal in journals.items() if journal}
    if journals:
        _save(draw_curves(journals), folder / "curves.png")
    classes = run.splits["test"]
    _save(draw_tasks(classes, config.ways, config.shots, config.seed), folder / "tasks.png")
    if (run.folder / config.method / "learner.safetensors").exists():
        learner = run.learner().cpu()
        if learner.loss.inductive is not None or learner.loss.transductive is not None:
            _save(draw_loss(learner), folder / "loss.png")
    return folder


def draw_curves(journals: dict[str, list[dict[str, Any]]]) -> Figure:
    """Loss and validation accuracy of each stage against its steps."""
    figure, axes = plt.subplots(2, len(journals), figsize=(3.2 * len(journals), 5), squeeze=False)
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
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
        column[0].set_title(stage)
        column[1].set_xlabel("step")
    axes[0, 0].set_ylabel("loss")
    axes[1, 0].set_ylabel("validation accuracy, %")
    figure.tight_layout()
    return figure


def draw_tasks(classes: ClassSet, ways: int, shots: int, seed: int, tasks: int = 3) -> Figure:
    """Sample tasks: a row for each class, its support images and some of its queries."""
    queries = min(8, int(classes.counts.min()) - shots)
    shown = min(shots, 5)
    drawn = classes.draw(tasks, ways, shots, queries, generator(seed, "picture"))
    images = classes.images.cpu()
    figure, axes = plt.subplots(1, tasks, figsize=(1.2 + 0.36 * (shown + queries + 1) * tasks, 0.42 * ways + 0.7))
    for number, (axis, task) in enumerate(zip(np.atleast_1d(axes), drawn, strict=True)):
        support, query = (_grid(images[part]) for part in (task[:, :shown], task[:, shots:]))
        gap = np.full((support.shape[0], images.shape[-1] // 2, support.shape[2]), 255, dtype=np.uint8)
        axis.imshow(np.concatenate([support, gap, query], 1).squeeze(), cmap="gray", vmin=0, vmax=255)
        axis.set_title(f"task {number + 1}: {shots} support | queries", fontsize=9)
        axis.axis("off")
    figure.tight_layout()
    return figure


@torch.no_grad()
def draw_loss(learner: Learner) -> Figure:
    """The learned loss of one item beside cross-entropy: as a curve in the true class's logit, and as a
    surface in that logit and a rival's. What is shown is base + inductive for a support item, and the
    transductive term for a query item that the relation network is sure of."""
    reach = torch.linspace(-6, 6, 81)
    base, support = _item_losses(learner, reach, torch.zeros_like(reach))
    figure = plt.figure(figsize=(12, 3.6))
    curve = figure.add_subplot(1, 3, 1)
    curve.plot(reach, base, color=QUIET, lw=2, label="cross-entropy")
    for name, values, colour in (("support", support, ACCENT), ("query", None, INK)):
        if name == "query":
            values = _query_losses(learner, reach)
        if values is not None:
            curve.plot(
                reach, values - values.mean() + base.mean(), color=colour, lw=2, label=f"learned, {name} item"
            )
    curve.set_xlabel("logit of the true class (others 0)")
    curve.set_ylabel("loss (learned ones shifted to the same mean)")
    curve.legend(frameon=False, fontsize=8)
    curve.spines[["top", "right"]].set_visible(False)
    true, rival = torch.meshgrid(reach, reach, indexing="xy")
    base, support = _item_losses(learner, true.flatten(), rival.flatten())
    for place, (title, values) in enumerate((("cross-entropy", base), ("learned, support item", support)), 2):
        surface = figure.add_subplot(1, 3, place, projection="3d")
        surface.plot_surface(true, rival, values.view_as(true), cmap="viridis", lw=0, rcount=40, ccount=40)
        surface.set_title(title, fontsize=10)
        surface.set_xlabel("true logit", fontsize=8)
        surface.set_ylabel("rival logit", fontsize=8)
        surface.tick_params(labelsize=7)
        surface.view_init(28, -60)
    figure.tight_layout()
    return figure


def _item_losses(learner: Learner, true: Tensor, rival: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy and base + inductive of single support items with these two logits, the others 0."""
    logits = torch.zeros(len(true), learner.settings.ways)
    logits[:, 0], logits[:, 1] = true, rival
    labels = torch.zeros_like(logits)
    labels[:, 0] = 1
    base = cross_entropy(logits, labels)
    if learner.loss.inductive is None:
        return base, base
    items = learner.loss.items(logits, labels, base)
    return base, base + torch.stack([learner.loss.inductive(item.unsqueeze(0)) for item in items])


def _query_losses(learner: Learner, true: Tensor) -> Tensor | None:
    """The transductive term of single query items of whose class the relation network is sure."""
    if learner.loss.transductive is None:
        return None
    logits = torch.zeros(len(true), learner.settings.ways)
    logits[:, 0] = true
    scores = torch.full_like(logits, 0.05)
    scores[:, 0] = 0.95
    items = learner.loss.items(logits, scores, cross_entropy(logits, learner.loss.target(scores)))
    return torch.stack([learner.loss.transductive(item.unsqueeze(0)) for item in items])


def _grid(images: Tensor) -> np.ndarray:
    """[rows, columns, channels, height, width] -> [rows * height, columns * width, channels]"""
    rows, columns, channels, height, width = images.shape
    return images.permute(0, 3, 1, 4, 2).reshape(rows * height, columns * width, channels).numpy()


def _smooth(points: np.ndarray) -> np.ndarray:
    width = max(1, len(points) // 30)
    kernel = np.ones(width) / width
    return np.stack([np.convolve(column, kernel, "valid") for column in points.T], 1)


def _journal(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=130)
    plt.close(figure)
