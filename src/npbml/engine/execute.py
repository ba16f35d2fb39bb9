"""How a batch of tasks is computed: batched by vmap or one by one; its meta-gradient compiled, or in less memory.

The mathematics is the learner's, written for one task: `task_loss`, which is made of `advance` and `query_loss`.
Here it becomes a function of many tasks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from npbml.learner.learner import Adaptation, Learner
from npbml.learner.prepare import Prepared
from npbml.nets.functional import call_with
from npbml.rule.descend import Parameters, State
from npbml.rule.objective import Outer
from npbml.tasks import unstack
from npbml.threads import each_in_a_thread

T = TypeVar("T")


class Executor:
    """The meta-gradient of a learner, and its predictions, as the settings say.

    Args:
        learner: Whose tasks are computed.
        vmap: All tasks of a batch at once; else each by itself, on a core or a GPU stream of its own.
        compiled: Compile one inner step, with its second-order backward, and use it for all: five unrolled ones
            take minutes to compile and gain nothing.
        remat: Keep only the state between inner steps, and compute the rest again in the backward pass.
        chunk: Tasks that are unrolled at a time; all of them if not given.
        options: The compiler's.
        backend: The compiler.
    """

    def __init__(
        self,
        learner: Learner,
        vmap: bool = True,
        compiled: bool = False,
        remat: bool = False,
        chunk: int | None = None,
        options: dict[str, bool] | None = None,
        backend: str = "inductor",
    ) -> None:
        self.learner = learner if vmap else learner.for_single_tasks()
        self.vmap, self.remat, self.chunk = vmap, remat, chunk
        self.on_gpu = next(learner.parameters()).is_cuda
        self.names = [name for name, _ in learner.named_parameters()]
        self.shapes = [parameter.shape for parameter in learner.parameters()]
        self.stepwise = (compiled or remat) and can_run_stepwise(learner)
        self.compiled = compiled and self.stepwise
        self.advance, self.query_loss = self._advance, self._query_loss
        if self.compiled:
            make = partial(torch.compile, dynamic=False, fullgraph=True, backend=backend, options=options)
            self.advance, self.query_loss = make(self._advance), make(self._query_loss)

    def gradient(
        self, parameters: list[nn.Parameter], prepared: Prepared, labels: Tensor, outer: Outer
    ) -> tuple[Tensor, list[Tensor]]:
        """The mean of the outer objective over tasks and its gradient in `parameters`; zero where none is."""
        tasks = len(labels)

        def found(prepared: Prepared, labels: Tensor) -> list[Tensor]:
            loss = self.losses(prepared, labels, outer).sum() / tasks
            gradient = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
            return [loss.detach(), *gradient]

        total: list[Tensor] = []
        for first in range(0, tasks, self.chunk or tasks):
            some = tree_map(lambda x, a=first: x[a : a + (self.chunk or tasks)], (prepared, labels))
            for part in self._over_tasks(found, some):
                total = [a + b for a, b in zip(total, part, strict=True)] if total else part
        return total[0], total[1:]

    def logits(self, prepared: Prepared) -> Tensor:
        """Query logits of tasks after adaptation, [tasks, query, outputs]."""
        found = self._over_tasks(self._batched(self.learner.logits), (prepared,))
        return found[0] if self.vmap else torch.stack(found)

    def scores(self, prepared: Prepared) -> Tensor:
        """The scores of the tasks' pools, [tasks, unlabelled, ways]."""
        return torch.vmap(self.learner.scored)(prepared).scores

    def losses(self, prepared: Prepared, labels: Tensor, outer: Outer) -> Tensor:
        """The outer objective of each task, [tasks], or of the one task, []."""
        if not self.stepwise:
            return self._batched(partial(self.learner.task_loss, outer=outer))(prepared, labels)
        # The meta-parameters as one tensor: the gradients of the steps are then summed in one operation.
        flat = torch.cat([parameter.flatten() for parameter in self.learner.parameters()])
        adaptation = self._adaptation(flat, len(labels) if self.vmap else None)

        def scored(prepared: Prepared) -> Prepared:
            return call_with(self.learner, self._parameters(flat), prepared, call="scored")

        return self.learner.unrolled_loss(self._batched(scored)(prepared), labels, outer, adaptation)

    def _over_tasks(self, function: Callable[..., T], batch: tuple[Any, ...]) -> list[T]:
        """function(*batch), or function(*task) of each task of the batch."""
        if self.vmap:
            return [function(*batch)]
        return on_streams(function, unstack(batch)) if self.on_gpu else each_in_a_thread(function, unstack(batch))

    def _batched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.vmap(function) if self.vmap else function

    def _adaptation(self, flat: Tensor, tasks: int | None) -> Adaptation:
        """The adaptation of `tasks` tasks at once, or of one, step by step."""

        def begin(prepared: Prepared) -> State:
            one = Prepared(*(part[0] for part in prepared)) if self.vmap else prepared
            own = call_with(self.learner, self._parameters(flat), one, call="begin")
            return own if tasks is None else tree_map(lambda x: x.expand(tasks, *x.shape).contiguous(), own)

        def step(state: State, prepared: Prepared, step: int, order: int, norm_step: int | None = None) -> State:
            number = step if self.learner.depends_on_step else 0
            advance = partial(self.advance, step=number, order=order, norm_step=norm_step)
            return rematerialised(advance, flat, state, prepared) if self.remat else advance(flat, state, prepared)

        def query_loss(theta: Parameters, prepared: Prepared, labels: Tensor, step: int) -> Tensor:
            number = step if self.learner.depends_on_step else 0
            return self.query_loss(flat, theta, prepared, labels, step=number)

        return Adaptation(begin, step, query_loss)

    def _advance(self, flat: Tensor, state: State, prepared: Prepared, **how: Any) -> State:
        def one(state: State, prepared: Prepared) -> State:
            return call_with(self.learner, self._parameters(flat), state, prepared, call="advance", **how)

        return self._batched(one)(state, prepared)

    def _query_loss(
        self, flat: Tensor, theta: Parameters, prepared: Prepared, labels: Tensor, step: int
    ) -> Tensor:
        def one(theta: Parameters, prepared: Prepared, labels: Tensor) -> Tensor:
            values = self._parameters(flat)
            return call_with(self.learner, values, theta, prepared, labels, step, call="query_loss")

        return self._batched(one)(theta, prepared, labels)

    def _parameters(self, flat: Tensor) -> Parameters:
        pieces = flat.split([shape.numel() for shape in self.shapes])
        return {n: piece.view(shape) for n, piece, shape in zip(self.names, pieces, self.shapes, strict=True)}


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


def can_run_stepwise(learner: Learner) -> bool:
    """Whether a learner's steps can be compiled and recomputed one by one."""
    kept_modulations = learner.settings.film.enabled and learner.settings.film.refresh == "task"
    return learner.settings.outer.objective != "trajectory" and not kept_modulations


def rematerialised(advance: Callable[..., State], flat: Tensor, state: State, prepared: Prepared) -> State:
    """advance(flat, state, prepared), of which the inputs alone are kept: the backward pass computes it again."""
    inputs, form = tree_flatten((flat, state, prepared.scores))
    outputs: list[Any] = []

    def of(*tensors: Tensor) -> tuple[Tensor, ...]:
        flat, state, scores = tree_unflatten(list(tensors), form)
        values, outputs_form = tree_flatten(advance(flat, state, prepared._replace(scores=scores)))
        outputs[:] = [outputs_form]
        return tuple(values)

    found = _Recomputed.apply(of, *inputs)
    return tree_unflatten(list(found), outputs[0])


class _Recomputed(torch.autograd.Function):
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
