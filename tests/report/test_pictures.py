"""Pictures of a run have the axes, the curves and the images that they should."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from PIL import Image

from npbml.data.sinusoid import Sinusoids
from npbml.data.tasks import ClassSet
from npbml.engine.evaluate import DRAWN_AT_ONCE
from npbml.lab.protocols import preset
from npbml.lab.schema import method_config, override
from npbml.learner.learner import Learner
from npbml.learner.settings import ImageSpec, LearnerSettings
from npbml.randomness import generator
from npbml.report import pictures
from npbml.report.pictures import before_and_after, draw_curves, draw_loss, draw_tasks, draw_waves, item_losses
from npbml.settings import from_dict
from npbml.stages.journal import read_journal


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    plt.close("all")


def lines(steps: int, loss: bool = True, validation: int = 0) -> list[dict[str, Any]]:
    """A journal of so many steps, validated every `validation` steps."""
    rows: list[dict[str, Any]] = [{"step": 0, "validation": 20.0}] if validation else []
    for step in range(1, steps + 1):
        if loss:
            rows.append({"step": step, "loss": 1 / step})
        if validation and step % validation == 0:
            rows.append({"step": step, "validation": 20.0 + step})
    return rows


def test_curves_have_a_column_for_each_stage_and_its_own_points() -> None:
    journals = {"pretrain": lines(20, validation=10), "npbml": lines(4, validation=2)}
    figure = draw_curves(journals)
    axes = np.array(figure.axes).reshape(2, 2)
    assert [axis.get_title() for axis in axes[0]] == ["pretrain", "npbml"]
    assert [axis.get_ylabel() for axis in axes[:, 0]] == ["loss", "validation accuracy, %"]
    assert [axis.get_xlabel() for axis in axes[1]] == ["step", "step"]
    for column, steps, every in zip(axes.T, (20, 4), (10, 2), strict=True):
        (loss,), (validation,) = (axis.get_lines() for axis in column)
        assert np.array_equal(loss.get_xydata(), [(step, 1 / step) for step in range(1, steps + 1)])
        expected = [(0, 20.0), *((step, 20.0 + step) for step in range(every, steps + 1, every))]
        assert np.array_equal(validation.get_xydata(), expected)


def test_a_long_curve_is_smoothed_within_its_range() -> None:
    figure = draw_curves({"npbml": lines(300, validation=100)})
    raw, smooth = figure.axes[0].get_lines()
    assert len(raw.get_xydata()) == 300
    assert len(smooth.get_xydata()) == 300 - 10 + 1
    assert smooth.get_ydata()[0] == pytest.approx(np.mean([1 / step for step in range(1, 11)]), rel=1e-9)
    assert smooth.get_xdata()[0] == pytest.approx(5.5)


@pytest.mark.parametrize("journal", [lines(1), lines(3, validation=1), lines(2, loss=False, validation=1)])
def test_a_stage_that_has_hardly_begun_is_drawn(journal: list[dict[str, Any]]) -> None:
    figure = draw_curves({"npbml": journal})
    counts = [len(axis.get_lines()) for axis in figure.axes]
    assert counts == [int(any(key in line for line in journal)) for key in ("loss", "validation")]
    figure.canvas.draw()


def make_classes(channels: int, count: int = 6) -> ClassSet:
    """Four classes whose images are of one colour, which tells the class and the image."""
    shades = 40 * torch.arange(4).repeat_interleave(count) + torch.arange(count).repeat(4)
    images = shades.view(-1, 1, 1, 1).expand(-1, channels, 16, 16).to(torch.uint8)
    counts = torch.full((4,), count)
    half = torch.full((channels,), 0.5)
    return ClassSet(images.clone(), counts.cumsum(0) - counts, counts, ("a", "b", "c", "d"), half, half)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("shots", "queries"), [(1, 5), (5, 1)])
def test_a_sheet_has_a_row_for_each_class_with_its_support_and_queries(
    channels: int, shots: int, queries: int
) -> None:
    classes = make_classes(channels)
    figure = draw_tasks(classes, ways=3, shots=shots, seed=0)
    drawn = classes.draw(3, 3, shots, queries, generator(0, "picture"))
    assert len(figure.axes) == 3
    for number, (axis, task) in enumerate(zip(figure.axes, drawn, strict=True)):
        assert axis.get_title() == f"task {number + 1}: {shots} support | queries"
        picture = np.asarray(axis.get_images()[0].get_array())
        assert picture.shape == (48, 16 * 6 + 8, *([3] if channels == 3 else []))
        for row in range(3):
            for place in range(6):
                left = 16 * place + (8 if place >= shots else 0)
                tile = picture[16 * row : 16 * row + 16, left : left + 16]
                assert (tile == int(classes.images[task[row, place]].max())).all()
        assert (picture[:, 16 * shots : 16 * shots + 8] == 255).all()
    figure.canvas.draw()


def test_many_shots_are_cut_to_five_and_the_title_says_how_many_there_are() -> None:
    figure = draw_tasks(make_classes(1, count=12), ways=2, shots=10, seed=0, tasks=1)
    picture = np.asarray(figure.axes[0].get_images()[0].get_array())
    assert picture.shape == (32, 16 * (5 + 2) + 8)
    assert figure.axes[0].get_title() == "task 1: 10 support | queries"


def test_a_sheet_is_fixed_by_the_seed() -> None:
    first, again, other = (
        np.asarray(draw_tasks(make_classes(1), 3, 1, seed).axes[0].get_images()[0].get_array())
        for seed in (0, 0, 1)
    )
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def learner_with(**loss: Any) -> Learner:
    """A learner whose loss networks are far from their start."""
    settings = from_dict(
        LearnerSettings,
        {"ways": 3, "net": {"filters": 3}, "loss": {"hidden": 4, **loss}, "init": {"std": 0.5}},
    )
    return Learner(settings, ImageSpec(1, 16, (0.5,), (0.25,)))


LOSSES: list[tuple[dict[str, Any], list[str]]] = [
    ({}, ["cross-entropy", "learned, support item", "learned, query item"]),
    ({"transductive": False}, ["cross-entropy", "learned, support item"]),
    ({"inductive": False}, ["cross-entropy", "learned, query item"]),
    (
        {"share": True, "activation": "smooth_leaky", "inputs": "softmax", "target": "soft"},
        ["cross-entropy", "learned, support item", "learned, query item"],
    ),
]


@pytest.mark.parametrize(("loss", "names"), LOSSES)
def test_a_loss_is_drawn_as_a_curve_and_as_surfaces_beside_cross_entropy(
    loss: dict[str, Any], names: list[str]
) -> None:
    figure = draw_loss(learner_with(**loss))
    curve, *surfaces = figure.axes
    assert [line.get_label() for line in curve.get_lines()] == names
    assert [text.get_text() for text in curve.get_legend().get_texts()] == names
    assert [surface.get_title() for surface in surfaces] == names
    assert all(surface.name == "3d" for surface in surfaces)
    assert curve.get_xlabel() and curve.get_ylabel()
    means = [line.get_ydata().mean() for line in curve.get_lines()]  # type: ignore[union-attr]
    assert means == pytest.approx([means[0]] * len(means), abs=1e-4)
    figure.canvas.draw()


def test_item_losses_are_those_of_the_inner_loop() -> None:
    """One support item and one query item with given logits: base + inductive, and transductive, of M."""
    learner = learner_with()
    true, rival = torch.tensor([-2.0, 0.5, 3.0]), torch.tensor([1.0, 0.0, -4.0])
    with torch.no_grad():
        found = item_losses(learner, true, rival)
        for index in range(3):
            logits = torch.tensor([[true[index], rival[index], 0.0]])
            scores = torch.tensor([[0.95, 0.05, 0.05]])
            labels = torch.tensor([[1.0, 0.0, 0.0]])
            terms = learner.loss.terms(logits, labels, logits, scores, learner.start(3))
            assert found["base"][index].item() == pytest.approx(terms["base"].item(), abs=1e-6)
            support = terms["base"] + terms["inductive"]
            assert found["support"][index].item() == pytest.approx(support.item(), rel=1e-5, abs=1e-5)
            assert found["query"][index].item() == pytest.approx(terms["transductive"].item(), rel=1e-5, abs=1e-5)


def test_without_the_base_term_the_support_curve_is_the_inductive_one() -> None:
    learner = learner_with(base=False)
    logits = torch.tensor([0.3])
    with torch.no_grad():
        found = item_losses(learner, logits, torch.zeros(1))
        item = torch.tensor([[0.3, 0.0, 0.0]])
        labels = torch.tensor([[1.0, 0.0, 0.0]])
        terms = learner.loss.terms(item, labels, item, 0.05 + 0.9 * labels, learner.start(3))
    assert "base" not in terms
    assert found["support"].item() == pytest.approx(terms["inductive"].item(), rel=1e-5, abs=1e-5)


def wave_learner(**changes: Any) -> Learner:
    """A learner of waves that is not trained."""
    config = method_config(override(preset("quick", "sinusoid"), changes), "maml")
    return Learner(config.learner, ImageSpec(1, 1, (0.0,), (1.0,)))


def test_waves_are_drawn_with_what_is_known_of_them_and_both_answers() -> None:
    learner, waves = wave_learner(inner={"steps": 3}), Sinusoids(shots=5, queries=4)
    figure = draw_waves(learner, waves, seed=3, tasks=2)
    drawn = waves.draw(DRAWN_AT_ONCE, generator(3, "test", 0))
    assert len(figure.axes) == 2
    for axis, wave in zip(figure.axes, drawn, strict=False):
        lines = {line.get_label(): line.get_xydata() for line in axis.get_lines()}
        assert list(lines) == ["wave", "before adaptation", "after adaptation", "support"]
        amplitude, phase = wave[:2].tolist()
        for name in ("wave", "support"):
            x, y = lines[name].T
            assert y == pytest.approx(amplitude * np.sin(x - phase), abs=1e-5)
        assert lines["support"][:, 0] == pytest.approx(wave[2:7].numpy())
        assert not np.allclose(lines["before adaptation"], lines["after adaptation"])
    figure.canvas.draw()


def test_before_is_the_start_and_after_is_what_the_learner_predicts() -> None:
    learner, waves = wave_learner(inner={"steps": 2}), Sinusoids(shots=5, queries=4)
    task = waves.task(waves.draw(1, generator(0, "waves")))
    one = task.map(lambda part: part[0])
    answers = before_and_after(learner, one)
    assert torch.equal(answers["after"], learner.predict(one)[:, 0])
    still = wave_learner(inner={"steps": 2, "lr": 1e-12})
    still.load_state_dict(learner.state_dict())
    assert torch.allclose(answers["before"], still.predict(one)[:, 0], atol=1e-6)


def test_the_curve_of_another_measure_says_so() -> None:
    figure = draw_curves({"maml": lines(4, validation=2)}, "squared error")
    assert figure.axes[1].get_ylabel() == "validation squared error"


def test_a_journal_with_a_line_cut_short_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    """As kill -9 leaves it in a stage that has not been resumed."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert read_journal(tmp_path) == ([{"step": 1, "loss": 2.0}], 0)
    assert read_journal(tmp_path / "nowhere") == ([], 0)


def test_a_journal_with_zeros_in_it_is_read_without_them(tmp_path: Path) -> None:
    """As a power cut and a resumed run of an earlier version left it."""
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + bytes(9) + b'{"step": 2}\n{"step": 3}\n')
    assert read_journal(tmp_path) == ([{"step": 1}, {"step": 3}], 21)


@pytest.mark.parametrize(
    "make",
    [
        lambda: draw_curves({"pretrain": lines(80, validation=40)}),
        lambda: draw_tasks(make_classes(3), 4, 1, 0),
        lambda: draw_loss(learner_with()),
    ],
    ids=["curves", "tasks", "loss"],
)
def test_a_picture_is_saved_and_its_figure_closed(tmp_path: Path, make: Callable[[], Any]) -> None:
    pictures.save(make(), tmp_path / "picture.png")
    assert plt.get_fignums() == []
    with Image.open(tmp_path / "picture.png") as picture:
        assert picture.format == "PNG" and min(picture.size) > 100
