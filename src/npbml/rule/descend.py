"""The inner loop (Algorithm 2): descend on the learned loss from theta_0, differentiably."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import npbml.torch_compiler  # noqa: F401
from npbml.rule.settings import InnerSettings

Parameters = dict[str, Tensor]
LARGEST, TINY = 1e12, 1e-30  # of an element of a step; added to its squared length, where the root has no slope
StepLoss = Callable[[Parameters, int], Tensor]  # theta, and the number of the step -> M


class Point(NamedTuple):
    """Where an inner step is taken."""

    theta: Parameters
    step: int
    loss: Callable[[Parameters], Tensor]  # the inner loss of this step
    noise: Tensor  # uniform in (0, 1); of a task, the same in all its steps


Precondition = Callable[[Parameters, Point], Parameters]


class State(NamedTuple):
    """Where the inner loop is: the adapted tensors and, with momentum, their buffers."""

    theta: Parameters
    buffer: Parameters


def begin(theta: Parameters, settings: InnerSettings) -> State:
    """The state before the first step."""
    return State(theta, {name: torch.zeros_like(t) for name, t in theta.items()} if settings.momentum else {})


def inner_step(
    loss: StepLoss,
    state: State,
    settings: InnerSettings,
    precondition: Precondition,
    noise: Tensor,
    step: int,
    order: int = 2,
) -> State:
    """One step of SGD on `loss(theta, step)`.

        theta_{j+1} = theta_j - P(v_j),   v = the gradient, after weight decay, momentum and Nesterov's combination

    The direction v is what torch.optim.SGD computes, but gradients, buffers and parameters stay in the graph.
    `precondition` gives P, which contains the learning rate. Of order 1, the gradient carries no gradient. A step
    that is longer than max_step, by the norm of all tensors, is shortened to it.
    """
    theta, buffer = state
    momentum, decay = settings.momentum, settings.weight_decay

    def here(theta: Parameters) -> Tensor:
        return loss(theta, step)

    gradient = torch.func.grad(here)(theta)
    if order == 1:
        gradient = {name: g.detach() for name, g in gradient.items()}
    direction = {name: g + decay * theta[name] if decay else g for name, g in gradient.items()}
    if momentum:
        buffer = {name: momentum * buffer[name] + d for name, d in direction.items()}
        if settings.nesterov:
            direction = {name: d + momentum * buffer[name] for name, d in direction.items()}
        else:
            direction = buffer
    change = precondition(direction, Point(theta, step, here, noise))
    if settings.max_step is not None:
        change = shortened(change, settings.max_step)
    return State({name: theta[name] - change[name] for name in theta}, buffer)


def shortened(change: Parameters, longest: float) -> Parameters:
    """A step of at most a certain length, by the norm of all its tensors; a shorter one is left as it is, exactly.

    The factor is longest / max(length, longest), which is 1 up to there and has a gradient everywhere. Where a
    gradient has overflowed, what is not finite counts as 0: the parameters stay finite whatever the task.
    """
    finite = {name: part.nan_to_num(0.0, 0.0, 0.0).clamp(-LARGEST, LARGEST) for name, part in change.items()}
    squares = [part.square().sum() for part in finite.values()]
    factor = longest / (torch.stack(squares).sum() + TINY).sqrt().clamp(min=longest)
    return {name: factor * part for name, part in finite.items()}
