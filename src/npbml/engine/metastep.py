"""One meta-step (Algorithm 1): the meta-gradient of a batch of tasks, checked, clipped and applied."""

import math
import os
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from npbml.data.store import cache_folder
from npbml.engine.capture import Replay, first_line
from npbml.engine.device import set_precision
from npbml.engine.distributed import gather, highest, mean_over_ranks, world
from npbml.engine.execute import Executor
from npbml.engine.settings import EngineSettings, resolved
from npbml.engine.step import GradientStep, all_finite
from npbml.errors import NotFiniteError
from npbml.learner import Learner, Prepared
from npbml.rule.objective import Outer

MARGIN = 1.2
COMBINED = 2_000_000  # meta-parameters: a network of more has kernels that are better left apart
# How far the meta-gradient of compiled code may be from that of plain code in float32, as a part of it: kinks of
# relu and pooling let it jump, and the more so the coarser the rounding. Where plain code of the same rounding is
# as far off, as with weights that are not trained yet, it may be this much farther.
TRUSTED = {"float32": 0.05, "tf32": 0.2, "bfloat16": 0.4}
FARTHER = 1.5
Work = Callable[..., tuple[Prepared, Tensor]]  # tensors -> the frozen work of tasks and their query labels


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
    names = {"inner": "the stem's features", "final": "the stem's features", "scores": "the relation scores"}
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
                for name, value in learner.inner_terms(theta, task, step).items():
                    if not value.isfinite():
                        return f"the {name} term of the inner loss at inner step {step}"
    return None


class MetaStep:
    """Meta-steps of a learner, executed as the settings say and the machine allows.

    A step is given what makes its tasks and the tensors this is made from: recorded in a CUDA graph, the making of
    the tasks is part of the replay. Where compiling or recording fails, the steps go on without, and it is said.
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
        self.settings = resolved(settings, self.parameters[0].device)
        set_precision(self.settings.precision)
        graph = self.settings.graph == "on"
        self.step = GradientStep(optimizer, "meta-step", graph, clip, clip_at, say=say)
        self.executor: Executor | None = None
        self.weights: dict[tuple[float, ...], Tensor] = {}  # of the points of a trajectory, on the device
        self.notes: dict[str, Any] = {}  # what was decided by measuring: a resumed run must not decide anew

    def __call__(self, work: Work, inputs: tuple[Tensor, ...], outer: Outer) -> float:
        """Change the learner by one meta-step and return the loss before it; refuse a step that is not finite."""
        if self.executor is None:
            self.executor = self._choose(work, inputs, outer)
        places = tuple(outer.weights)
        values = tuple(map(float, outer.weights.values()))
        if values not in self.weights:
            self.weights[values] = torch.tensor(values).to(self.parameters[0])
        weights = self.weights[values]

        def whole(weights: Tensor, *inputs: Tensor) -> tuple[Tensor, list[Tensor], Tensor, int]:
            assert self.executor is not None
            prepared, labels = self._laid_out(work(*inputs), self.executor)
            now = Outer(outer.order, dict(zip(places, weights, strict=True)))
            loss, gradients = self.executor.gradient(self.parameters, prepared, labels, now)
            return loss, gradients, all_finite(loss, gradients), len(labels)

        found = self.step.find(whole, (weights, *inputs), (outer.order, places))
        loss, gradients, finite, tasks = found
        if world()[1] > 1:
            loss, *gradients = mean_over_ranks([loss, *gradients], tasks)
            finite = all_finite(loss, gradients)
        value, good = torch.stack([loss, finite.to(loss)]).tolist()  # the one time that the host waits
        if not good:
            prepared, _ = work(*inputs)
            raise NotFiniteError(diagnose(self.learner, self.parameters, gradients, prepared))
        self.step.apply(gradients)
        return value

    def _choose(self, work: Work, inputs: tuple[Tensor, ...], outer: Outer) -> Executor:
        """An executor by the settings; whether tasks run together is measured where it is not said."""
        together = self.notes.get("together", self.settings.tasks == "together")
        if self.settings.tasks == "auto" and "together" not in self.notes:
            times = {}
            for way in (True, False):
                plain = Executor(self.learner, way, chunk=self.settings.chunk)
                laid_out = self._laid_out(work(*inputs), plain)
                took = self._time(partial(plain.gradient, self.parameters, *laid_out, outer))
                (times[way],) = highest(took)
            # With a margin, so that runs of equal settings decide alike.
            together = self.notes["together"] = times[True] < MARGIN * times[False]
            words = "together" if together else "each by itself"
            self.say(
                f"Tasks run {words}: {1000 * times[True]:.0f} ms a meta-step together, "
                f"{1000 * times[False]:.0f} ms each by itself."
            )
        settings = self.settings
        plain = Executor(self.learner, together, False, settings.remat, settings.chunk)
        if settings.compile == "off":
            return plain
        return self._compiled(plain, work, inputs, outer) or plain

    def _compiled(self, plain: Executor, work: Work, inputs: tuple[Tensor, ...], outer: Outer) -> Executor | None:
        """A compiled executor whose gradient is that of the plain one; None where there is none.

        On a GPU, compiled code has been seen to compute something else (torch 2.11: MAML's tasks together, NPBML's
        4-CONV with each by itself): it is checked, and the other way is tried.
        """
        settings, started, error = self.settings, time.monotonic(), math.nan
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))

        def gradient(executor: Executor, precision: str) -> Tensor:
            laid_out = self._laid_out(work(*inputs), executor, precision)
            return torch.cat([part.flatten() for part in executor.gradient(self.parameters, *laid_out, outer)[1]])

        def off(found: Tensor) -> float:
            (error,) = highest(((found - expected).norm() / expected.norm()).item())
            return error

        set_precision("float32")
        expected = gradient(plain, "float32")
        set_precision(settings.precision)
        trusted = max(TRUSTED[settings.precision], FARTHER * off(gradient(plain, settings.precision)))
        # Small kernels that do not wait for each other become one: of 4-CONV 1,148 launches in place of 1,819, and
        # 4.5 ms in place of 6.3; but of ResNet-12 133 ms in place of 46.
        options = {"combo_kernels": expected.is_cuda and expected.numel() < COMBINED}
        for together in (plain.together, not plain.together):
            made = Executor(self.learner, together, True, settings.remat, settings.chunk, options)
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
        replay = Replay("trial meta-step", self.settings.graph == "on", self.say)
        times = []
        for _ in range(4):
            started = time.perf_counter()
            replay(gradient, ())
            _wait(self.parameters[0].device)
            times.append(time.perf_counter() - started)
        return min(times[1:])

    def _laid_out(
        self, work: tuple[Prepared, Tensor], executor: Executor, precision: str | None = None
    ) -> tuple[Prepared, Tensor]:
        """Features in the precision asked for and with channels last, as convolutions like them best."""
        prepared, labels = work
        # Where vmap is not compiled away, it does not know channels that come last.
        channels_last = not executor.together or (labels.is_cuda and executor.compiled)

        def lay(x: Tensor) -> Tensor:
            if (precision or self.settings.precision) == "bfloat16":
                x = x.to(torch.bfloat16)
            return x.movedim(2, -1).contiguous().movedim(-1, 2) if channels_last else x.contiguous()

        return prepared._replace(inner=lay(prepared.inner), final=lay(prepared.final)), labels


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
