"""How a batch of tasks is computed: together or side by side; its meta-gradient compiled, or in less memory."""

import copy
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from npbml.learner import Acts, Learner, Prepared
from npbml.learner.batches import split
from npbml.nets.layers import Norm
from npbml.rule.descend import Parameters, State
from npbml.rule.objective import Outer
from npbml.threads import each_in_a_thread

T = TypeVar("T")


class Executor:
    """The meta-gradient of a learner, and its predictions, as the settings say.

    Tasks run together, in one vmap, or side by side: each by itself, on a core or a GPU stream of its own. Of
    `chunk` tasks at a time, if given.
    """

    def __init__(
        self,
        learner: Learner,
        together: bool = True,
        compiled: bool = False,
        remat: bool = False,
        chunk: int | None = None,
        options: dict[str, bool] | None = None,
        backend: str = "inductor",
    ) -> None:
        """`options` are the compiler's."""
        self.together, self.chunk = together, chunk
        self.on_gpu = next(learner.parameters()).is_cuda
        make = partial(torch.compile, dynamic=False, fullgraph=True, backend=backend, options=options)
        first = Lifted(learner if together else replica(learner), together, make if compiled else None, remat)
        self.compiled = first.compiled
        # Whoever computes a task has the learner to itself meanwhile.
        self.free: SimpleQueue[Lifted] = SimpleQueue()
        self.free.put(first)
        if not together and not self.on_gpu:
            for _ in range(1, torch.get_num_threads()):
                self.free.put(first.again())

    def gradient(
        self, parameters: list[nn.Parameter], prepared: Prepared, labels: Tensor, outer: Outer
    ) -> tuple[Tensor, list[Tensor]]:
        """The mean of the outer objective over tasks and its gradient in `parameters`; zero where none is."""
        tasks = len(labels)

        def found(lifted: Lifted, prepared: Prepared, labels: Tensor) -> list[Tensor]:
            loss = lifted.losses(prepared, labels, outer).sum() / tasks
            gradient = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
            return [loss.detach(), *gradient]

        total: list[Tensor] = []
        for first in range(0, tasks, self.chunk or tasks):
            some = tree_map(lambda x, a=first: x[a : a + (self.chunk or tasks)], (prepared, labels))
            for part in self._over(found, some):
                total = [a + b for a, b in zip(total, part, strict=True)] if total else part
        return total[0], total[1:]

    def logits(self, prepared: Prepared) -> Tensor:
        """Query logits of tasks after adaptation, [tasks, query, outputs]."""
        found = self._over(lambda lifted, prepared: lifted.logits(prepared), (prepared,))
        return found[0] if self.together else torch.stack(found)

    def _over(self, function: Callable[..., T], batched: tuple[Any, ...]) -> list[T]:
        """function(lifted, *batched) of all tasks at once, or of each."""

        def one(*task: Any) -> T:
            lifted = self.free.get()
            try:
                return function(lifted, *task)
            finally:
                self.free.put(lifted)

        if self.together:
            return [one(*batched)]
        return on_streams(one, split(batched)) if self.on_gpu else each_in_a_thread(one, split(batched))


def replica(learner: Learner) -> Learner:
    """The same parameters in modules of their own, for tasks one at a time.

    A functional call puts tensors into the modules for its time: two at once need two sets of modules.
    """
    tensors = [*learner.parameters(), *learner.buffers()]
    other = copy.deepcopy(learner, {id(tensor): tensor for tensor in tensors})
    other.together = False
    for part in other.modules():
        if isinstance(part, Norm):
            part.adapts = False  # that is about batches of tasks
    return other


def on_streams(function: Callable[..., T], tasks: list[tuple[Any, ...]]) -> list[T]:
    """function(*task) for every task, each on a stream of its own: a GPU then overlaps their small kernels."""
    main, results = torch.cuda.current_stream(), []
    streams = [torch.cuda.Stream() for _ in tasks]
    for stream, task in zip(streams, tasks, strict=True):
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            results.append(function(*task))
    for stream in streams:
        main.wait_stream(stream)
    return results


class Lifted:
    """The outer objective of a learner for a batch of tasks, or for one.

    The mathematics is the learner's: `advance` and `query_loss` of one task. Here they are lifted by vmap,
    compiled, and recomputed in the backward pass instead of kept. Compiled code is made for one inner step and
    used for all: five unrolled ones take minutes to compile and gain nothing.
    """

    def __init__(self, learner: Learner, together: bool, make: Callable[..., Any] | None, remat: bool) -> None:
        self.learner, self.together, self.remat = learner, together, remat
        self.names = [name for name, _ in learner.named_parameters()]
        self.shapes = [parameter.shape for parameter in learner.parameters()]
        self.stepwise = (make is not None or remat) and steps_can_be_lifted(learner)
        self.compiled = make is not None and self.stepwise
        self.advance, self.score = self._advance, self._score
        if make is not None and self.stepwise:
            self.advance, self.score = make(self._advance), make(self._score)

    def again(self) -> "Lifted":
        """The same for another thread. Compiled code does not touch the modules, and is shared."""
        other = copy.copy(self)
        other.learner = replica(self.learner)
        if not self.compiled:
            other.advance, other.score = other._advance, other._score
        return other

    def losses(self, prepared: Prepared, labels: Tensor, outer: Outer) -> Tensor:
        """The outer objective of each task, [tasks], or of the one task, []."""
        if not self.stepwise:
            loss = partial(self.learner.task_loss, outer=outer)
            return (torch.vmap(loss) if self.together else loss)(prepared, labels)
        flat = torch.cat([parameter.flatten() for parameter in self.learner.parameters()])
        acts = self._acts(flat, len(labels) if self.together else None)
        return self.learner.unrolled(prepared, labels, outer, acts)

    def logits(self, prepared: Prepared) -> Tensor:
        """Query logits of each task after adaptation, or of the one task."""
        return (torch.vmap(self.learner.logits) if self.together else self.learner.logits)(prepared)

    def _acts(self, flat: Tensor, tasks: int | None) -> Acts:
        """The acts of `tasks` tasks together, or of one.

        The meta-parameters come as one tensor, so that the gradients of the steps are summed in one operation.
        """

        def start(prepared: Prepared) -> State:
            own = functional_call(self.learner, self._parameters(flat), (self._one(prepared),), {"call": "begin"})
            return own if tasks is None else tree_map(lambda x: x.expand(tasks, *x.shape).contiguous(), own)

        def advance(
            state: State, prepared: Prepared, step: int, order: int, norm_step: int | None = None
        ) -> State:
            number = step if self.learner.depends_on_step else 0
            act = partial(self.advance, step=number, order=order, norm_step=norm_step)
            return rematerialised(act, flat, state, prepared) if self.remat else act(flat, state, prepared)

        def score(theta: Parameters, prepared: Prepared, labels: Tensor, step: int) -> Tensor:
            return self.score(flat, theta, prepared, labels, step=step if self.learner.depends_on_step else 0)

        return Acts(start, advance, score)

    def _one(self, prepared: Prepared) -> Prepared:
        return Prepared(*(part[0] for part in prepared)) if self.together else prepared

    def _advance(self, flat: Tensor, state: State, prepared: Prepared, **how: Any) -> State:
        def one(state: State, prepared: Prepared) -> State:
            values = self._parameters(flat)
            return functional_call(self.learner, values, (state, prepared), {"call": "advance", **how})

        return (torch.vmap(one) if self.together else one)(state, prepared)

    def _score(self, flat: Tensor, theta: Parameters, prepared: Prepared, labels: Tensor, step: int) -> Tensor:
        def one(theta: Parameters, prepared: Prepared, labels: Tensor) -> Tensor:
            values = self._parameters(flat)
            return functional_call(self.learner, values, (theta, prepared, labels, step), {"call": "query_loss"})

        return (torch.vmap(one) if self.together else one)(theta, prepared, labels)

    def _parameters(self, flat: Tensor) -> Parameters:
        pieces = flat.split([shape.numel() for shape in self.shapes])
        return {n: piece.view(shape) for n, piece, shape in zip(self.names, pieces, self.shapes, strict=True)}


def steps_can_be_lifted(learner: Learner) -> bool:
    """Whether a learner's steps can be compiled and recomputed one by one."""
    kept_modulations = learner.settings.film.enabled and learner.settings.film.refresh == "task"
    return learner.settings.outer.objective != "trajectory" and not kept_modulations


def rematerialised(act: Callable[..., State], flat: Tensor, state: State, prepared: Prepared) -> State:
    """act(flat, state, prepared), of which nothing is kept but the inputs: the backward pass computes it again."""
    inputs, form = tree_flatten((flat, state))
    outputs: list[Any] = []

    def of(*tensors: Tensor) -> tuple[Tensor, ...]:
        values, outputs_form = tree_flatten(act(*tree_unflatten(list(tensors), form), prepared))
        outputs[:] = [outputs_form]
        return tuple(values)

    found = _Again.apply(of, *inputs)
    return tree_unflatten(list(found), outputs[0])


class _Again(torch.autograd.Function):
    # torch.utils.checkpoint works by hooks on saved tensors, which torch.func.grad does not admit.

    @staticmethod
    def forward(ctx: Any, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        with torch.no_grad():
            return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            outputs = ctx.function(*inputs)
            found = torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)
        return None, *found
