"""CUDA graphs: a function of tensors is recorded once and replayed as one launch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

WARM_UP = 3  # libraries choose their algorithms and allocate their workspaces in the first calls


class Captured:
    """`function(*inputs)`, recorded. Inputs keep their shapes; the outputs are overwritten by the next call."""

    def __init__(self, function: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
        self.inputs = [tensor.clone() for tensor in inputs]
        # On a side stream throughout: whatever an earlier stream still held would be drawn into the recording.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                function(*self.inputs)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = function(*self.inputs)

    def __call__(self, *inputs: Tensor) -> Any:
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given)
        self.graph.replay()
        return self.outputs


def shapes(inputs: Any) -> tuple[tuple[int, ...], ...]:
    """What must stay as it is for a recording to be used again."""
    return tuple(tuple(tensor.shape) for tensor in tree_leaves(inputs))
