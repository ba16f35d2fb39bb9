"""Log loss and calibration error against their definitions, and a temperature that is found again."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from npbml.engine.calibration import (
    BINS,
    TEMPERATURES,
    best_temperature,
    confidence_bins,
    expected_calibration_error,
    log_loss,
    score_logits,
    temperature_by_shape,
)
from npbml.errors import NotFiniteError
from npbml.randomness import generator
from npbml.rule.settings import HeadSettings, shape_sizes


def drawn(*shape: int, scale: float = 3.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(shape, generator=generator(seed, "logits"), dtype=torch.float64)


def labels_of(logits: Tensor, seed: int = 0) -> Tensor:
    """Labels that are drawn from the softmax of logits [..., ways]."""
    flat = logits.flatten(0, -2).softmax(-1)
    return torch.multinomial(flat, 1, generator=generator(seed, "labels")).view(logits.shape[:-1])


def probabilities(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def defined_error(logits: np.ndarray, labels: np.ndarray) -> float:
    """Over bins (low, high] of the highest probability: |share right - mean probability|, by share of queries."""
    found, total = probabilities(logits).reshape(-1, logits.shape[-1]), 0.0
    confidence, right = found.max(1), found.argmax(1) == labels.reshape(-1)
    for place in range(15):
        inside = (confidence > place / 15) & (confidence <= (place + 1) / 15)
        if inside.any():
            total += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return 100 * total


@given(st.integers(0, 10_000), st.integers(2, 7), st.floats(0.01, 20))
def test_both_are_what_their_definitions_say(seed: int, ways: int, scale: float) -> None:
    logits = drawn(4, 9, ways, scale=scale, seed=seed)
    labels = torch.randint(ways, (4, 9), generator=generator(seed, "random labels"))
    bins = confidence_bins(logits, labels)
    assert bins.shape == (4, BINS, 3)
    error = expected_calibration_error(bins.sum(0)).item()
    assert error == pytest.approx(defined_error(logits.numpy(), labels.numpy()), abs=1e-10)
    chosen = np.take_along_axis(probabilities(logits.numpy()), labels.numpy()[..., None], -1)[..., 0]
    np.testing.assert_allclose(log_loss(logits, labels).numpy(), -np.log(chosen).mean(-1), rtol=1e-12)


def test_a_case_by_hand() -> None:
    """Four queries of two classes, with 0.6, 0.6, 0.9 and 1 for the first class: two bins and the last one."""
    first = torch.tensor([0.6, 0.6, 0.9, 1.0], dtype=torch.float64)
    logits = torch.stack([first, 1 - first], -1).log().clamp_min(-1000)
    labels = torch.tensor([0, 1, 1, 0])
    bins = confidence_bins(logits, labels)
    assert bins[8].tolist() == pytest.approx([2, 1.2, 1])  # 0.6 is the upper edge of (8/15, 9/15]
    assert bins[13].tolist() == pytest.approx([1, 0.9, 0]) and bins[14].tolist() == [1, 1, 1]
    assert bins.sum(0).tolist() == pytest.approx([4, 3.1, 2])
    assert expected_calibration_error(bins).item() == pytest.approx(100 * (0.2 + 0.9 + 0) / 4)
    expected = -(np.log(0.6) + np.log(0.4) + np.log(0.1)) / 4
    assert log_loss(logits, labels).item() == pytest.approx(expected)


def test_labels_drawn_from_the_probabilities_are_calibrated() -> None:
    logits = drawn(400, 75, 5)
    right, wrong = (
        expected_calibration_error(confidence_bins(logits * factor, labels_of(logits)).sum(0)) for factor in (1, 3)
    )
    assert right < 1 < 5 < wrong  # of 30,000 queries, where chance alone makes some 0.5


def test_bins_add_up_and_kinds_stand_apart() -> None:
    logits, labels = drawn(2, 6, 9, 4), torch.arange(54).view(6, 9) % 4
    bins, lost = confidence_bins(logits, labels), log_loss(logits, labels)
    assert bins.shape == (2, 6, BINS, 3) and lost.shape == (2, 6)
    for kind in (0, 1):
        assert torch.equal(bins[kind], confidence_bins(logits[kind], labels))
        assert torch.equal(lost[kind], log_loss(logits[kind], labels))
    whole = confidence_bins(logits[0].flatten(0, 1), labels.flatten())
    torch.testing.assert_close(bins[0].sum(0), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(confidence_bins(logits.float(), labels), bins, rtol=0, atol=1e-5)


def test_a_shift_of_the_logits_and_large_ones_change_nothing() -> None:
    logits, labels = drawn(3, 8, 4), torch.arange(24).view(3, 8) % 4
    torch.testing.assert_close(log_loss(logits + 1e4, labels), log_loss(logits, labels), rtol=0, atol=1e-9)
    assert log_loss(1e6 * logits, labels).isfinite().all()


def test_what_is_not_finite_stays_so() -> None:
    logits = torch.full((1, 2, 3), float("nan"))
    labels = torch.zeros(1, 2, dtype=torch.long)
    assert log_loss(logits, labels).isnan().all()
    assert expected_calibration_error(confidence_bins(logits, labels)).isnan().all()
    with pytest.raises(NotFiniteError, match="not finite"):
        best_temperature(logits, labels)


def test_the_softmax_of_scores_logits_is_the_normalised_scores() -> None:
    scores = torch.tensor([[0.2, 0.6, 0.2], [0.0, 0.0, 0.5], [0.9, 0.9, 0.9], [0.0, 0.0, 0.0]])
    expected = torch.tensor([[0.2, 0.6, 0.2], [0.0, 0.0, 1.0], [1, 1, 1], [1, 1, 1]]).double()
    expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(score_logits(scores).softmax(-1), expected, rtol=0, atol=1e-7)
    assert log_loss(score_logits(scores), torch.zeros(4, dtype=torch.long)).isfinite()


@pytest.mark.parametrize("temperature", [0.02, 0.3, 1.0, 7.0, 2500.0])
def test_a_known_temperature_is_found_again(temperature: float) -> None:
    logits = drawn(400, 75, 5)
    found = best_temperature(temperature * logits, labels_of(logits))
    assert found == pytest.approx(temperature, rel=0.02)
    assert found == pytest.approx(temperature * best_temperature(logits, labels_of(logits)), rel=1e-3)


def test_the_best_temperature_has_the_least_log_loss() -> None:
    logits, labels = drawn(20, 30, 4), torch.arange(600).view(20, 30) % 4
    logits = logits + 2 * torch.nn.functional.one_hot(labels)
    best = best_temperature(logits, labels)

    def loss(temperature: float) -> float:
        return log_loss(logits / temperature, labels).mean().item()

    assert all(loss(best) < loss(factor * best) for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2))


def test_a_temperature_by_hand() -> None:
    """Where three of four are right, the best probability is 3/4: 8 / T = log 3."""
    assert best_temperature(torch.tensor([[8.0, 0.0]] * 4), torch.tensor([0, 0, 0, 1])) == 7.282


def test_a_temperature_stays_within_its_bounds() -> None:
    logits = torch.tensor([[2.0, 0.0], [1.0, 0.0]])
    right, wrong = torch.tensor([0, 0]), torch.tensor([1, 1])
    assert (best_temperature(logits, right), best_temperature(logits, wrong)) == TEMPERATURES
    assert best_temperature(torch.ones(4, 3), torch.tensor([0, 1, 2, 0])) == 1.0


def test_shapes_of_tasks_count_alike() -> None:
    few, many = drawn(3, 10, 3), drawn(50, 25, 5)
    given = [few, 4 * many], [labels_of(few), labels_of(many, 1)]
    best = best_temperature(*given)

    def loss(temperature: float) -> float:
        parts = zip(*given, strict=True)
        return sum(log_loss(logits / temperature, labels).mean().item() for logits, labels in parts)

    assert all(loss(best) < loss(factor * best) for factor in (0.9, 0.99, 1.01, 1.1))
    assert best_temperature([many], [labels_of(many)]) == best_temperature(many, labels_of(many))


def test_the_temperature_of_each_shape_is_found_again() -> None:
    shapes = [(5, 5, 0), (5, 25, 75), (2, 6, 30), (10, 10, 150), (16, 16, 240), (3, 3, 15)]
    head = HeadSettings(temperature=1.7, temperature_by_shape=(0.3, -0.2, 0.5))
    temperatures = [head.temperature_of(*shape) for shape in shapes]
    found, slopes = temperature_by_shape(temperatures, [shape_sizes(*shape) for shape in shapes])
    assert found == pytest.approx(1.7, rel=1e-3) and slopes == pytest.approx((0.3, -0.2, 0.5), abs=1e-3)


def test_a_temperature_is_bounded_whatever_the_shape() -> None:
    head = HeadSettings(temperature=2.0, temperature_by_shape=(50.0, -50.0, 50.0))
    assert head.temperature_of(1000, 1000, 10**6) == pytest.approx(2 * math.exp(3))
    assert HeadSettings(temperature=2.0).temperature_of(1000, 1000, 10**6) == 2.0
    assert shape_sizes(5, 5, 75) == (0.0, 0.0, 0.0)
