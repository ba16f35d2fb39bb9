"""A gradient step: the gradient is computed, checked, clipped and applied. On a GPU both halves are recorded."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from npbml.engine.capture import Captured, Replay


class GradientStep:
    """Steps of an optimiser on gradients that `find` computes.

    `state` is what a computation of the gradient changes besides, such as running averages.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        what: str,
        graph: bool,
        clip: str = "none",
        clip_at: float = 10.0,
        state: Iterable[Tensor] = (),
        say: Callable[[str], None] = lambda words: None,
    ) -> None:
        self.optimizer, self.clip, self.clip_at = optimizer, clip, clip_at
        self.parameters = [parameter for part in optimizer.param_groups for parameter in part["params"]]
        self.replay = Replay(what, graph, say, list(state))
        self.update: Captured | None = None
        if graph:
            make_capturable(optimizer, self.parameters[0].device)

    def find(self, gradient: Callable[..., Any], inputs: Sequence[Any], key: Hashable) -> Any:
        """gradient(*inputs); the next call overwrites what is returned."""
        return self.replay(gradient, inputs, key)

    def apply(self, gradients: Sequence[Tensor]) -> None:
        """Clip these gradients and take the step."""

        def apply(*gradients: Tensor) -> None:
            apply_gradient(self.optimizer, self.parameters, list(gradients), self.clip, self.clip_at)

        if self.replay.on and self.update is None:
            self.update = recorded_update(apply, gradients, self.parameters, self.optimizer)
        (self.update or apply)(*gradients)

    def set_rate(self, rate: Callable[[dict[str, Any]], float]) -> None:
        """Set the learning rate of each group of parameters."""
        for part in self.optimizer.param_groups:
            if isinstance(part["lr"], Tensor):
                part["lr"].fill_(rate(part))
            else:
                part["lr"] = rate(part)


def all_finite(loss: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """Whether all of it is finite, as a tensor: nothing waits for the answer."""
    return torch.cat([loss.view(1), *(g.flatten() for g in gradients)]).isfinite().all()


def apply_gradient(
    optimizer: torch.optim.Optimizer,
    parameters: list[nn.Parameter],
    gradients: list[Tensor],
    clip: str,
    clip_at: float,
) -> None:
    """Clip the gradient by value, by norm or not at all, and step."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        # Fused optimisers want a gradient laid out as its parameter is.
        same = gradient.stride() == parameter.stride()
        parameter.grad = gradient if same else torch.empty_like(parameter).copy_(gradient)
    if clip == "value":
        nn.utils.clip_grad_value_(parameters, clip_at)
    elif clip == "norm":
        nn.utils.clip_grad_norm_(parameters, clip_at)
    optimizer.step()


def make_capturable(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Have an optimiser keep on the device all that a recording of its step must find changed there."""
    for part in optimizer.param_groups:
        part["lr"] = torch.tensor(part["lr"], device=device)
        part["fused"], part["foreach"] = True, False  # one launch for all parameters
        if "capturable" in part:
            part["capturable"] = True


def recorded_update(
    apply: Callable[..., None],
    gradients: Sequence[Tensor],
    parameters: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> Captured:
    """The optimiser's step as a recording. Its rehearsals are steps too, and are undone."""

    def state() -> list[Tensor]:
        values = (value for parameter in parameters for value in optimizer.state[parameter].values())
        return [value for value in values if isinstance(value, Tensor)]

    known = state()
    update = Captured(apply, gradients, [*parameters, *known])
    if not known:  # the rehearsals have begun it
        for value in state():
            value.zero_()
    return update
