"""Task-adaptive modulation: FiLM_psi(x) = (gamma_psi + 1) x + beta_psi (the paper's section 3.4)."""

from typing import Any, Literal

import torch
from torch import Tensor, nn


class FiLM(nn.Module):
    """gamma, beta = A p + c, where p is the spatial mean of the activation u that enters the layer."""

    def __init__(self, inputs: int, outputs: int, conditioning: Literal["item", "batch"] = "item") -> None:
        super().__init__()
        self.generator = nn.Linear(inputs, 2 * outputs)
        self.conditioning = conditioning
        self.place = object()  # what its modulation is kept under: the same in every copy that holds other tensors

    def generate(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """u [n, inputs, ...] -> gamma and beta, [n or 1, outputs]"""
        pooled = u.flatten(2).mean(2) if u.dim() > 2 else u
        if self.conditioning == "batch":
            pooled = pooled.mean(0, keepdim=True)
        made = self.generator(pooled) if u.dim() > 2 else small_linear(pooled, self.generator)
        gamma, beta = made.chunk(2, dim=-1)
        return gamma, beta

    def forward(self, u: Tensor, y: Tensor, fixed: dict[Any, Any] | None = None) -> Tensor:
        """Modulate y [n, outputs, ...], the layer's output for the input u.

        With a dictionary `fixed`, the modulation is generated at the first pass, kept there and used again.
        """
        if fixed is None:
            gamma, beta = self.generate(u)
        else:
            if self.place not in fixed:
                fixed[self.place] = self.generate(u)
            gamma, beta = fixed[self.place]
        space = (1,) * (y.dim() - 2)
        return (1 + gamma).view(*gamma.shape, *space) * y + beta.view(*beta.shape, *space)


def small_linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """layer(x), of tens of inputs and outputs"""
    if not torch.compiler.is_compiling():
        return layer(x)
    # A product this small is a launch of its own; as a sum it is compiled into one with what surrounds it.
    return (x.unsqueeze(-2) * layer.weight).sum(-1) + layer.bias
