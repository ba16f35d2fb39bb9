"""Gradient steps and what is recorded of them; without a GPU nothing is, and a failure to record is survived."""

import pytest
import torch
from torch import Tensor

import npbml.engine.capture as capture
from npbml.engine.capture import Replay
from npbml.engine.step import GradientStep, apply_gradient


def test_without_recording_a_function_is_called_as_it_is() -> None:
    replay = Replay("step", on=False)
    assert replay(lambda x: x + 1, (torch.tensor(2.0),), "key").item() == 3
    assert not replay.recorded


class Recording:
    """Stands for a CUDA graph: counts how often it is made, and answers what was recorded."""

    made = 0

    def __init__(
        self, function: object, inputs: object, state: object, pool: object = None, warm_up: int = 0
    ) -> None:
        Recording.made += 1
        self.function = function

    def __call__(self, *inputs: Tensor) -> object:
        return self.function(*inputs)  # type: ignore[operator]


def test_a_recording_is_made_for_each_key_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "Captured", Recording)
    Recording.made, replay = 0, Replay("step", on=True)
    for key, size in (("a", 2), ("a", 2), ("b", 2), ("a", 3), ("b", 2)):
        assert replay(torch.sum, (torch.ones(size),), key).item() == size
    assert Recording.made == 3


def test_shapes_and_types_are_those_of_every_tensor_in_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "Captured", Recording)
    Recording.made, replay = 0, Replay("step", on=True)

    def total(tree: dict[str, list[Tensor]]) -> Tensor:
        return sum(tree["x"], torch.zeros(()))

    for second in (torch.ones(()), torch.ones(()), torch.ones(1), torch.ones((), dtype=torch.float64)):
        assert replay(total, ({"x": [torch.ones(()), second]},), "key").item() == 2
    assert Recording.made == 3


def test_what_cannot_be_recorded_goes_on_without_and_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("capture failed\nand more")

    monkeypatch.setattr(capture, "Captured", fail)
    said: list[str] = []
    replay = Replay("pre-training step", on=True, say=said.append)
    for _ in range(2):
        assert replay(torch.sum, (torch.ones(4),), "key").item() == 4
    assert said == [
        "The pre-training step cannot be recorded in a CUDA graph, and goes on without: capture failed"
    ]


def test_steps_follow_the_rate_that_is_set_for_each_group() -> None:
    one, two = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    sgd = torch.optim.SGD([{"params": [one], "name": "one"}, {"params": [two], "name": "two"}], lr=1.0)
    step = GradientStep(sgd, "step", graph=False)
    step.set_rate(lambda part: {"one": 0.5, "two": 0.25}[part["name"]])
    step.apply([torch.ones(1), torch.ones(1)])
    assert one.item() == -0.5 and two.item() == -0.25


def test_a_gradient_takes_the_layout_of_its_parameter() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3, 4, 4))
    gradient = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    assert gradient.stride() != parameter.stride()
    apply_gradient(torch.optim.SGD([parameter], lr=1.0), [parameter], [gradient], "none", 1.0)
    assert parameter.grad is not None and parameter.grad.stride() == parameter.stride()
    assert torch.equal(parameter.detach(), -gradient)
