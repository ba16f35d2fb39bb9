"""The inner loop (Algorithm 2): descend on the learned loss from theta_0, differentiably."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from npbml.settings import setting

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class InnerSettings:
    """The inner loop."""

    steps: int = setting(5, low=1)
    """Inner gradient steps J."""
    lr: float = setting(0.01, above=0)
    """Inner learning rate alpha."""
    momentum: float = setting(0.9, low=0, high=1)
    """Momentum of the inner SGD, differentiated through."""
    nesterov: bool = setting(True)
    """Nesterov's form of momentum."""
    weight_decay: float = setting(5e-4, low=0)
    """Coupled weight decay on every adapted tensor."""
    order: Literal[1, 2] = setting(2)
    """Order of the meta-gradient; 1 stops the gradient at every inner step, so phi learns nothing."""
    batch: Literal["joint", "support"] = setting("joint")
    """Images in the inner loop's batch: support and query, or support alone (docs/method.md, item 2)."""
    final_batch: Literal["query", "joint"] = setting("query")
    """Images in the batch of the scored prediction (item 3)."""


def descend(loss: Callable[[Parameters], Tensor], theta: Parameters, settings: InnerSettings) -> Parameters:
    """theta_J: `settings.steps` steps of SGD on `loss` from `theta`.

    Each step computes what torch.optim.SGD computes (decay, then momentum, then Nesterov), but leaves
    gradients, buffers and parameters in the graph.
    """
    rate, momentum, decay = settings.lr, settings.momentum, settings.weight_decay
    buffer: Parameters = {}
    for _ in range(settings.steps):
        gradient = torch.func.grad(loss)(theta)
        if settings.order == 1:
            gradient = {name: g.detach() for name, g in gradient.items()}
        direction = {name: g + decay * theta[name] for name, g in gradient.items()}
        if momentum:
            buffer = {name: momentum * buffer[name] + d if buffer else d for name, d in direction.items()}
            if settings.nesterov:
                direction = {name: d + momentum * buffer[name] for name, d in direction.items()}
            else:
                direction = buffer
        theta = {name: theta[name] - rate * direction[name] for name in theta}
    return theta
