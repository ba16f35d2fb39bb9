"""The sinusoid benchmark: regression on y = A sin(x - p), which needs no data."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from npbml.data.request import Request
from npbml.learner.settings import ImageSpec
from npbml.tasks import Task

AMPLITUDE, PHASE, REACH = (0.1, 5.0), (0.0, math.pi), (-5.0, 5.0)


@dataclass(frozen=True)
class Sinusoids:
    """Waves of uniform amplitude and phase, known at a few uniform places."""

    shots: int
    queries: int

    checksum: ClassVar[str] = ""  # there is no file
    spec: ClassVar[ImageSpec] = ImageSpec(1, 1, (0.0,), (1.0,))  # places are images of one pixel

    def draw(self, tasks: int, generator: torch.Generator) -> Tensor:
        """Amplitude, phase and places of each task: [tasks, 2 + shots + queries]"""
        uniform = torch.rand(tasks, 2 + self.shots + self.queries, generator=generator)
        ranges = torch.tensor([AMPLITUDE, PHASE, *[REACH] * (self.shots + self.queries)])
        return ranges[:, 0] + (ranges[:, 1] - ranges[:, 0]) * uniform

    def task(self, drawn: Tensor) -> Task:
        """The batch of tasks with these waves: places are images of one pixel, labels are values."""
        amplitude, phase, places = drawn[:, :1], drawn[:, 1:2], drawn[:, 2:]
        values = amplitude * torch.sin(places - phase)
        images = places[..., None, None, None]
        support, query = slice(self.shots), slice(self.shots, None)
        return Task(images[:, support], values[:, support], images[:, query], values[:, query])


def open_sinusoid(request: Request) -> Sinusoids:
    """The sinusoid benchmark as a data set of the registry."""
    return Sinusoids(request.shots, request.queries)
