"""CUDA graphs: a function of tensors is recorded once and replayed as one launch."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

# Calls before a recording: in the first ones libraries are loaded, choose algorithms and allocate workspaces.
# Where another shape was recorded before, one is enough.
WARM_UP, WARM_UP_AGAIN = 3, 1


class Captured:
    """`function(*inputs)`, recorded. Inputs are tensors, or trees of them, and keep their shapes; the outputs are
    overwritten by the next call.

    Recording takes some rehearsals. What these change of `state` is put back. Recordings with one `pool` share the
    memory of what is neither input nor output; two of them must not be replayed at the same time.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Any],
        state: Sequence[Tensor] = (),
        pool: Any = None,
        warm_up: int = WARM_UP,
    ) -> None:
        tensors, form = tree_flatten(list(inputs))
        self.tensors: list[Tensor] = [tensor.clone() for tensor in tensors]
        arguments = tree_unflatten(self.tensors, form)
        before = [tensor.detach().clone() for tensor in state]
        # On a side stream throughout: whatever an earlier stream still held would be drawn into the recording.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(warm_up):
                function(*arguments)
        torch.cuda.synchronize()
        with torch.no_grad():
            for tensor, value in zip(state, before, strict=True):
                tensor.copy_(value)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.outputs = function(*arguments)

    def __call__(self, *inputs: Any) -> Any:
        if self.tensors:
            torch._foreach_copy_(self.tensors, tree_leaves(list(inputs)))  # one launch for all
        self.graph.replay()
        return self.outputs


class Replay:
    """Functions that are recorded where that is `on`; where it fails, they go on without, and it is said."""

    def __init__(
        self, what: str, on: bool, say: Callable[[str], None] = lambda words: None, state: Sequence[Tensor] = ()
    ) -> None:
        self.what, self.on, self.say, self.state = what, on, say, state
        self.recorded: dict[Hashable, Captured] = {}
        self.pool = torch.cuda.graph_pool_handle() if on and torch.cuda.is_available() else None

    def __call__(self, function: Callable[..., Any], inputs: Sequence[Any], key: Hashable) -> Any:
        """function(*inputs), from the recording for `key` and the shapes and types of the inputs.

        `key` says what the function computes beyond its inputs: how many tasks, of what size, in which way.
        """
        if not self.on:
            return function(*inputs)
        key = (key, tuple((tuple(tensor.shape), tensor.dtype) for tensor in tree_leaves(list(inputs))))
        try:
            if key not in self.recorded:
                warm_up = WARM_UP_AGAIN if self.recorded else WARM_UP
                self.recorded[key] = Captured(function, inputs, self.state, self.pool, warm_up)
            return self.recorded[key](*inputs)
        except (RuntimeError, torch.AcceleratorError) as error:
            reason = first_line(error)
            self.say(f"The {self.what} cannot be recorded in a CUDA graph, and goes on without: {reason}")
            self.on = False
            return function(*inputs)


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
