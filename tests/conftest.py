"""A tiny learner and random tasks, in double precision, for the laws in docs/laws.md."""

from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import pytest
import torch
from torch import Tensor

from npbml.data.tasks import ClassSet
from npbml.learner.learner import Learner
from npbml.learner.settings import ImageSpec, LearnerSettings
from npbml.randomness import generator
from npbml.settings import from_dict
from npbml.tasks import Task

hypothesis.settings.register_profile("npbml", deadline=None, derandomize=True)
hypothesis.settings.load_profile("npbml")
torch.set_num_threads(1)  # tensors this small gain nothing from threads, and lose much on a busy machine

CHANNELS, SIZE, WAYS = 2, 32, 3

TINY: dict[str, Any] = {
    "ways": WAYS,
    "net": {"filters": 4, "widths": [3, 3, 3, 4]},
    "loss": {"hidden": 5},
    "inner": {"steps": 2, "lr": 0.05},
    "scorer": {"widths": [2, 3], "pools": 1},
}

Changes = dict[str, Any]


def merged(base: Changes, changes: Changes) -> Changes:
    """`base` with `changes` on top, table by table."""
    result = dict(base)
    for name, value in changes.items():
        result[name] = merged(base.get(name, {}), value) if isinstance(value, dict) else value
    return result


def shake(learner: Learner, seed: int = 0, scale: float = 0.3) -> Learner:
    """Move every tensor away from its start, by noise that its name alone decides.

    Learners with different settings then share the values of all the tensors that they share.
    """
    with torch.no_grad():
        for name, tensor in learner.state_dict().items():
            noise = scale * torch.randn(tensor.shape, generator=generator(seed, name), dtype=tensor.dtype)
            if "loss.regulariser" in name:
                noise = noise / 6  # its inputs are sums over whole tensors: with more, the inner loop diverges
            tensor.copy_(noise.exp() if name.endswith("running_var") else tensor + noise)
    return learner


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What torch draws by itself, such as the start of a bare layer, is the same in every run."""
    torch.manual_seed(0)


@pytest.fixture
def make_learner() -> Callable[..., Learner]:
    """make_learner(seed=..., size=..., channels=..., shaken=..., **changes) -> a tiny learner, float64

    `changes` are settings: make_learner(loss={"base": False}).
    """

    def make(
        seed: int = 0, size: int = SIZE, channels: int = CHANNELS, shaken: bool = True, **changes: Any
    ) -> Learner:
        settings = from_dict(LearnerSettings, merged(TINY, changes))
        images = ImageSpec(channels, size, (0.5,) * channels, (0.25,) * channels)
        learner = Learner(settings, images, seed).double()
        return shake(learner, seed) if shaken else learner

    return make


@pytest.fixture
def ce_only() -> Changes:
    """The settings of a learner whose loss is the cross-entropy alone."""
    return {"inductive": False, "transductive": False, "regulariser": False}


@pytest.fixture
def make_task() -> Callable[..., Task]:
    """make_task(seed=..., ways=..., shots=..., queries=..., size=...) -> random images in classes

    They are float64, in 0 to 1.
    """

    def make(seed: int = 0, ways: int = WAYS, shots: int = 2, queries: int = 2, size: int = SIZE) -> Task:
        random = generator(seed, "task")
        centres = torch.randn(ways, CHANNELS, size, size, generator=random, dtype=torch.float64)
        parts: list[Tensor] = []
        for count in (shots, queries):
            labels = torch.arange(ways).repeat_interleave(count)
            noise = torch.randn(len(labels), CHANNELS, size, size, generator=random, dtype=torch.float64)
            parts += [torch.sigmoid(centres[labels] + noise), labels]
        return Task(*parts)

    return make


@pytest.fixture
def meta_gradient() -> Callable[[Learner, Task | Sequence[Task]], dict[str, Tensor]]:
    """The gradient of the meta-loss in every meta-parameter, by name."""

    def gradient(learner: Learner, tasks: Task | Sequence[Task]) -> dict[str, Tensor]:
        names, parameters = zip(*learner.named_parameters(), strict=True)
        loss = learner.meta_loss(tasks)
        return dict(
            zip(
                names,
                torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True),
                strict=True,
            )
        )

    return gradient


class DoubleSet(ClassSet):
    """Classes whose images are floats in 0 to 1, in double precision, as a learner takes them."""

    def batch(self, indices: Tensor) -> Tensor:
        return self.pixels(indices).double() / 255


@pytest.fixture
def classes() -> ClassSet:
    """Five classes of six random pictures, which a float64 learner can take."""
    images = torch.randint(0, 256, (30, CHANNELS, SIZE, SIZE), generator=generator(0, "classes"))
    counts = torch.full((5,), 6)
    names = tuple(f"class {number}" for number in range(5))
    mean = torch.tensor([0.4, 0.6])
    return DoubleSet(images.to(torch.uint8), counts.cumsum(0) - counts, counts, names, mean, mean / 2)
