"""How the meta-gradient of a batch of tasks is computed: together or in a loop, compiled, in less memory."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from npbml.learner import Acts, Learner, Prepared
from npbml.learner.batches import one_by_one
from npbml.rule.descend import Parameters, State
from npbml.rule.objective import Outer

# Small kernels that do not wait for each other become one: on an H200 1,148 launches of a meta-step in place of
# 1,819, and 4.5 ms in place of 6.3.
GPU_OPTIONS = {"combo_kernels": True}


class Executor:
    """The meta-gradient of a learner, as the settings say.

    The mathematics is the learner's: `advance` and `score` of one task. Here they are lifted to a batch of tasks
    (vmap, or a loop outside), compiled, and recomputed in the backward pass instead of kept. Compiled code is made
    for one inner step and used for all: five unrolled ones take minutes to compile and gain nothing.
    """

    def __init__(
        self,
        learner: Learner,
        together: bool = True,
        compiled: bool = False,
        remat: bool = False,
        chunk: int | None = None,
        backend: str = "inductor",
    ) -> None:
        self.learner, self.together, self.chunk = learner, together, chunk
        self.names = [name for name, _ in learner.named_parameters()]
        self.shapes = [parameter.shape for parameter in learner.parameters()]
        self.stepwise = (compiled or remat) and steps_can_be_lifted(learner)
        self.compiled = compiled and self.stepwise
        self.remat = remat
        self.advance, self.score = self._advance, self._score
        if self.compiled:
            gpu = next(learner.parameters()).is_cuda
            options: dict[str, Any] = {"options": GPU_OPTIONS} if gpu else {}
            make = partial(torch.compile, dynamic=False, fullgraph=True, backend=backend, **options)
            self.advance, self.score = make(self._advance), make(self._score)

    def gradient(
        self, parameters: list[nn.Parameter], prepared: Prepared, labels: Tensor, outer: Outer
    ) -> tuple[Tensor, list[Tensor]]:
        """The mean of the outer objective over tasks and its gradient in `parameters`; zero where none is."""
        tasks = len(labels)
        size = self.chunk or tasks
        total: Tensor | None = None
        gradients: list[Tensor] = []
        for first in range(0, tasks, size):
            some, theirs = tree_map(lambda x, a=first: x[a : a + size], (prepared, labels))
            loss = self.losses(some, theirs, outer).sum() / tasks
            found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
            loss = loss.detach()
            total = loss if total is None else total + loss
            gradients = [a + b for a, b in zip(gradients, found, strict=True)] if gradients else list(found)
        assert total is not None
        return total, gradients

    def losses(self, prepared: Prepared, labels: Tensor, outer: Outer) -> Tensor:
        """The outer objective of each task, [tasks]"""
        if not self.stepwise:
            loss = partial(self.learner.task_loss, outer=outer)
            return torch.vmap(loss)(prepared, labels) if self.together else one_by_one(loss, prepared, labels)
        flat = torch.cat([parameter.flatten() for parameter in self.learner.parameters()])
        if self.together:
            return self.learner.unrolled(prepared, labels, outer, self._acts(flat, len(labels)))
        acts = self._acts(flat, None)
        return one_by_one(lambda p, y: self.learner.unrolled(p, y, outer, acts), prepared, labels)

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
