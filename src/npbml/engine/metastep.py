"""One meta-step (Algorithm 1), from drawn tasks to the optimiser's step.

    prepared, labels = make(inputs)                frozen work: stem features, scores        (learner/prepare.py)
    loss             = mean of learner.task_loss   J inner steps, then the query loss        (learner/learner.py)
    gradient         = d loss / d Phi              through all inner steps
    Phi              = optimizer(clip(gradient))

`eager_meta_step` is just that, for reading and for loops of one's own. `MetaStep` does the same as fast as it can:
it chooses between vmap and a loop by measuring, compiles an inner step, and records all of it in a CUDA graph.
"""

import math
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from npbml.engine.capture import Replay, first_line
from npbml.engine.device import set_tf32
from npbml.engine.distributed import gather, max_over_ranks, mean_over_ranks, world
from npbml.engine.execute import Executor
from npbml.engine.settings import EngineSettings, resolved
from npbml.engine.step import GradientStep, all_finite, apply_gradient
from npbml.errors import NotFiniteError
from npbml.learner.learner import Learner
from npbml.learner.prepare import Prepared
from npbml.rule.objective import Outer
from npbml.tasks import Task, stack_tasks

MARGIN = 1.2
COMBINED = 2_000_000  # meta-parameters: a network of more has kernels that are better left apart
# How far the meta-gradient of compiled code may be from that of plain code in float32, as a part of it: kinks of
# relu and pooling let it jump, and the more so the coarser the rounding. Where plain code of the same rounding is
# as far off, as with weights that are not trained yet, it may be this much farther.
TRUSTED = {"float32": 0.05, "tf32": 0.2, "bfloat16": 0.4}
FARTHER = 1.5
Ready = tuple[Prepared, Tensor]  # the frozen work of a batch of tasks, and their query labels


class Tasks(NamedTuple):
    """The tasks of a meta-step: what makes them ready from some tensors, and what it depends on beside these.

    Recorded in a CUDA graph, the making is part of the replay: `key` tells recordings apart.
    """

    make: Callable[..., Ready]
    inputs: tuple[Any, ...]
    key: Hashable


def eager_meta_step(
    learner: Learner,
    optimizer: torch.optim.Optimizer,
    tasks: Sequence[Task],
    progress: float = 1.0,
    clip: str = "none",
    clip_at: float = 10.0,
) -> float:
    """Take one meta-step on these tasks, in plain torch, and return the loss before it.

    Args:
        learner: Is changed.
        optimizer: Of the learner's parameters, or of some of them.
        tasks: Of one size.
        progress: How much of meta-training is done, in 0 to 1, where the objective changes in its course.
        clip: none, value or norm.
        clip_at: The bound of an element, or of the norm.
    """
    batch = stack_tasks(tasks)
    prepared = learner.prepare_batch(batch)  # frozen work, without gradients
    loss_of = partial(learner.task_loss, outer=learner.outer(progress))
    loss = torch.vmap(loss_of)(prepared, batch.query_labels).mean()  # = learner.meta_loss(tasks, progress)
    parameters = [parameter for part in optimizer.param_groups for parameter in part["params"]]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    if not all_finite(loss, gradients):
        raise NotFiniteError(diagnose(learner, parameters, list(gradients), prepared))
    apply_gradient(optimizer, parameters, list(gradients), clip, clip_at)
    return loss.item()


def diagnose(learner: Learner, parameters: list[nn.Parameter], gradients: list[Tensor], prepared: Prepared) -> str:
    """Which part made a meta-gradient that is not finite, in words."""
    bad = {parameter for parameter, g in zip(parameters, gradients, strict=True) if not g.isfinite().all()}
    groups = [letter for letter, part in learner.groups().items() if any(p in bad for p in part.values())]
    reached = f"in the meta-gradient of {', '.join(groups)}" if groups else "in the query loss"
    tasks = [tree_map(lambda x, i=index: x[i], prepared) for index in range(len(prepared.inner))]
    for index, found in enumerate(gather([_first_non_finite(learner, task) for task in tasks])):
        if found:
            return f"NaN or infinity {reached}; it comes from {found}, in task {index} of the batch"
    return f"NaN or infinity {reached}; it comes from the second derivative: every value before it is finite"


def _first_non_finite(learner: Learner, task: Prepared) -> str | None:
    """The first value of a task's adaptation that is not finite."""
    names = {
        "inner": "the stem's features",
        "final": "the stem's features",
        "scores": "the scores of the query items",
    }
    with torch.no_grad():
        task = learner.scored(task)
    for name, words in names.items():
        if not getattr(task, name).isfinite().all():
            return words
    with torch.no_grad():
        trajectory = learner.trajectory(task, steps=learner.settings.inner.steps)
        for step, theta in enumerate(trajectory):
            for name, tensor in theta.items():
                if not tensor.isfinite().all():
                    return f"the adapted tensor {name} after {step} inner steps"
            if step < learner.settings.inner.steps:
                for name, value in learner.inner_terms(theta, task, learner.modulations(task), step).items():
                    if not value.isfinite():
                        return f"the {name} term of the inner loss at inner step {step}"
    return None


class MetaStep:
    """Meta-steps of a learner, executed as the settings say and the machine allows.

    Where compiling or recording fails, the steps go on without, and it is said.
    """

    def __init__(
        self,
        learner: Learner,
        optimizer: torch.optim.Optimizer,
        settings: EngineSettings,
        clip: str = "none",
        clip_at: float = 10.0,
        say: Callable[[str], None] = lambda words: None,
    ) -> None:
        self.learner, self.say = learner, say
        self.parameters = [parameter for part in optimizer.param_groups for parameter in part["params"]]
        self.settings = resolved(settings, self.parameters[0].device.type)
        graph = self.settings.cuda_graph == "on"
        self.step = GradientStep(optimizer, "meta-step", graph, clip, clip_at, say=say)
        self.executor: Executor | None = None
        self.weights: dict[tuple[float, ...], Tensor] = {}  # of the points of a trajectory, on the device
        self.notes: dict[str, Any] = {}  # what was decided by measuring: a resumed run must not decide anew

    def __call__(self, tasks: Tasks, outer: Outer) -> float:
        """Change the learner by one meta-step and return the loss before it; refuse a step that is not finite."""
        self.choose(tasks, outer)
        places = tuple(outer.weights)
        values = tuple(map(float, outer.weights.values()))
        if values not in self.weights:
            self.weights[values] = torch.tensor(values).to(self.parameters[0])

        def gradient(weights: Tensor, *inputs: Any) -> tuple[Tensor, list[Tensor], Tensor, int]:
            assert self.executor is not None
            prepared, labels = self._laid_out(tasks.make(*inputs), self.executor)
            now = Outer(outer.order, dict(zip(places, weights, strict=True)))
            loss, gradients = self.executor.gradient(self.parameters, prepared, labels, now)
            return loss, gradients, all_finite(loss, gradients), len(labels)

        key = (outer.order, places, tasks.key)
        loss, gradients, finite, count = self.step.find(gradient, (self.weights[values], *tasks.inputs), key)
        if world()[1] > 1:
            loss, *gradients = mean_over_ranks([loss, *gradients], count)
            finite = all_finite(loss, gradients)
        value, good = torch.stack([loss, finite.to(loss)]).tolist()  # the one time that the host waits
        if not good:
            prepared, _ = tasks.make(*tasks.inputs)
            raise NotFiniteError(diagnose(self.learner, self.parameters, gradients, prepared))
        self.step.apply(gradients)
        return value

    @property
    def undecided(self) -> bool:
        """Whether it is still to be measured how tasks are computed."""
        return self.settings.tasks == "auto" and "together" not in self.notes

    def choose(self, tasks: Tasks, outer: Outer) -> None:
        """Choose how tasks are computed, by those of the first step; `notes` say what was measured."""
        if self.executor is None:
            self.executor = self._choose(tasks, outer)

    def _choose(self, tasks: Tasks, outer: Outer) -> Executor:
        """An executor by the settings; whether tasks are batched is measured where it is not said."""
        # In checkpoints this note has the name that version 0.1 gave it.
        vmap = self.notes.get("together", self.settings.tasks == "vmap")
        if self.undecided:
            times = {}
            for way in (True, False):
                plain = Executor(self.learner, way, chunk=self.settings.chunk)
                laid_out = self._laid_out(tasks.make(*tasks.inputs), plain)
                took = self._time(partial(plain.gradient, self.parameters, *laid_out, outer))
                (times[way],) = max_over_ranks(took)
            # With a margin, so that runs of equal settings decide alike.
            vmap = self.notes["together"] = times[True] < MARGIN * times[False]
            words = "batched by vmap" if vmap else "one by one"
            self.say(
                f"Tasks run {words}: {1000 * times[True]:.0f} ms a meta-step by vmap, "
                f"{1000 * times[False]:.0f} ms one by one."
            )
        settings = self.settings
        plain = Executor(self.learner, vmap, False, settings.remat, settings.chunk)
        if settings.compile == "off":
            return plain
        return self._compiled(plain, tasks, outer) or plain

    def _compiled(self, plain: Executor, tasks: Tasks, outer: Outer) -> Executor | None:
        """A compiled executor whose gradient is that of the plain one; None where there is none.

        On a GPU, compiled code has been seen to compute something else (torch 2.11: MAML's tasks by vmap, NPBML's
        4-CONV one by one): it is checked, and the other way is tried.
        """
        settings, started, error = self.settings, time.monotonic(), math.nan

        def gradient(executor: Executor, precision: str) -> Tensor:
            laid_out = self._laid_out(tasks.make(*tasks.inputs), executor, precision)
            return torch.cat([part.flatten() for part in executor.gradient(self.parameters, *laid_out, outer)[1]])

        def off(found: Tensor) -> float:
            (error,) = max_over_ranks(((found - expected).norm() / expected.norm()).item())
            return error

        set_tf32(False)
        expected = gradient(plain, "float32")
        set_tf32(settings.precision != "float32")
        trusted = max(TRUSTED[settings.precision], FARTHER * off(gradient(plain, settings.precision)))
        # Small kernels that do not wait for each other become one: of 4-CONV 1,148 launches in place of 1,819, and
        # 4.5 ms in place of 6.3; but of ResNet-12 133 ms in place of 46.
        options = {"combo_kernels": expected.is_cuda and expected.numel() < COMBINED}
        for vmap in (plain.vmap, not plain.vmap):
            made = Executor(self.learner, vmap, True, settings.remat, settings.chunk, options)
            if not made.compiled:
                return None
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the compiler's, on its own doings
                    found = gradient(made, settings.precision)
            except Exception as failure:
                self.say(f"The inner step cannot be compiled, and runs without: {first_line(failure)}")
                return None
            error = off(found)
            if error <= trusted:
                self.say(f"The inner step was compiled in {time.monotonic() - started:.0f} s.")
                return made
        self.say(f"The compiled inner step is not used: its meta-gradient is off by {100 * error:.0f} %.")
        return None

    def _time(self, gradient: Callable[[], object]) -> float:
        """Seconds of a call; on a GPU, of its replay, since launches take longer than the work."""
        replay = Replay("trial meta-step", self.settings.cuda_graph == "on", self.say)
        times = []
        for _ in range(4):
            started = time.perf_counter()
            replay(gradient, (), "trial")
            _wait(self.parameters[0].device)
            times.append(time.perf_counter() - started)
        return min(times[1:])

    def _laid_out(self, ready: Ready, executor: Executor, precision: str | None = None) -> Ready:
        """Features in the precision asked for and with channels last, as convolutions like them best."""
        prepared, labels = ready
        # Where vmap is not compiled away, it does not know channels that come last.
        channels_last = not executor.vmap or (labels.is_cuda and executor.compiled)

        def lay(x: Tensor) -> Tensor:
            if (precision or self.settings.precision) == "bfloat16":
                x = x.to(torch.bfloat16)
            return x.movedim(2, -1).contiguous().movedim(-1, 2) if channels_last else x.contiguous()

        inner = lay(prepared.inner)
        final = inner if prepared.final is prepared.inner else lay(prepared.final)
        return prepared._replace(inner=inner, final=final), labels


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
