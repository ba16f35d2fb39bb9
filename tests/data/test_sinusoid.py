"""The sinusoid benchmark: amplitudes, phases and places as published, values on the wave."""

import math

import torch

from npbml.data.sinusoid import Sinusoids
from npbml.randomness import generator


def test_waves_are_uniform_in_amplitude_phase_and_place() -> None:
    drawn = Sinusoids(5, 10).draw(4000, generator(0, "waves"))
    assert drawn.shape == (4000, 17)
    for column, (low, high) in ((0, (0.1, 5.0)), (1, (0.0, math.pi)), (2, (-5.0, 5.0)), (16, (-5.0, 5.0))):
        values = drawn[:, column]
        assert low <= values.min() < low + 0.02 * (high - low)
        assert high - 0.02 * (high - low) < values.max() <= high
        assert abs(values.mean() - (low + high) / 2) < 0.03 * (high - low)
    assert abs(torch.corrcoef(drawn.T)[0, 1:]).max() < 0.08


def test_a_task_has_its_wave_at_its_places() -> None:
    waves = Sinusoids(3, 4)
    drawn = waves.draw(2, generator(1, "waves"))
    task = waves.task(drawn)
    assert task.support_images.shape == (2, 3, 1, 1, 1) and task.query_images.shape == (2, 4, 1, 1, 1)
    for images, labels in ((task.support_images, task.support_labels), (task.query_images, task.query_labels)):
        for index in range(2):
            amplitude, phase = drawn[index, :2].tolist()
            for place, value in zip(images[index].flatten().tolist(), labels[index].tolist(), strict=True):
                assert abs(value - amplitude * math.sin(place - phase)) < 1e-5
    assert torch.equal(waves.draw(2, generator(1, "waves")), drawn)
