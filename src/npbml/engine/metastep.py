"""One meta-step (Algorithm 1): the meta-gradient of a batch of tasks, checked, clipped and applied."""

import os
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from npbml.data.store import cache_folder
from npbml.engine.capture import Captured, shapes
from npbml.engine.device import set_precision
from npbml.engine.distributed import gather, highest, mean_over_ranks, world
from npbml.engine.execute import Executor
from npbml.engine.settings import EngineSettings
from npbml.errors import RunError
from npbml.learner import Learner, Prepared
from npbml.rule.objective import Outer

MARGIN = 1.2
Work = Callable[..., tuple[Prepared, Tensor]]  # tensors -> the frozen work of tasks and their query labels


def all_finite(loss: Tensor, gradients: list[Tensor]) -> Tensor:
    """Whether all of it is finite, as a tensor: nothing waits for the answer."""
    return torch.cat([loss.view(1), *(g.flatten() for g in gradients)]).isfinite().all()


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


def apply_gradient(
    optimizer: torch.optim.Optimizer,
    parameters: list[nn.Parameter],
    gradients: list[Tensor],
    clip: str,
    clip_at: float,
) -> None:
    """Clip the meta-gradient by value, by norm or not at all, and step."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    if clip == "value":
        nn.utils.clip_grad_value_(parameters, clip_at)
    elif clip == "norm":
        nn.utils.clip_grad_norm_(parameters, clip_at)
    optimizer.step()


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
        self.learner, self.optimizer, self.clip, self.clip_at, self.say = learner, optimizer, clip, clip_at, say
        self.parameters = [parameter for part in optimizer.param_groups for parameter in part["params"]]
        self.settings = resolved(settings, self.parameters[0].device)
        set_precision(self.settings.precision)
        self.executor: Executor | None = None
        self.recorded: dict[Any, Captured] = {}
        self.update: Captured | None = None
        self.notes: dict[str, Any] = {}  # what was decided by measuring: a resumed run must not decide anew

    def __call__(self, work: Work, inputs: tuple[Tensor, ...], outer: Outer) -> float:
        """Change the learner by one meta-step and return the loss before it; refuse a step that is not finite."""
        loss, gradients, finite, tasks = self._gradient(work, inputs, outer)
        if world()[1] > 1:
            loss, *gradients = mean_over_ranks([loss, *gradients], tasks)
            finite = all_finite(loss, gradients)
        if not bool(finite):
            prepared, _ = work(*inputs)
            raise RunError(diagnose(self.learner, self.parameters, gradients, prepared))
        self._apply(gradients)
        return loss.item()

    def _apply(self, gradients: list[Tensor]) -> None:
        def apply(*gradients: Tensor) -> None:
            apply_gradient(self.optimizer, self.parameters, list(gradients), self.clip, self.clip_at)

        if self.settings.graph == "on" and self.update is None:
            self.update = recorded_update(apply, gradients, self.parameters, self.optimizer)
        (self.update or apply)(*gradients)

    def _gradient(
        self, work: Work, inputs: tuple[Tensor, ...], outer: Outer
    ) -> tuple[Tensor, list[Tensor], Tensor, int]:
        if self.executor is None:
            self.executor = self._choose(work, inputs, outer)
        places = tuple(outer.weights)
        weights = torch.tensor([outer.weights[place] for place in places])

        def whole(weights: Tensor, *inputs: Tensor) -> tuple[Tensor, list[Tensor], Tensor, int]:
            assert self.executor is not None
            prepared, labels = self._laid_out(work(*inputs))
            now = Outer(outer.order, dict(zip(places, weights, strict=True)))
            loss, gradients = self.executor.gradient(self.parameters, prepared, labels, now)
            return loss, gradients, all_finite(loss, gradients), len(labels)

        given = (weights.to(self.parameters[0]), *inputs)
        if self.settings.graph == "on":
            key = (outer.order, places, shapes(inputs))
            try:
                if key not in self.recorded:
                    self.recorded[key] = Captured(whole, given)
                return self.recorded[key](*given)
            except (RuntimeError, torch.AcceleratorError) as error:
                self.say(
                    f"The meta-step cannot be recorded in a CUDA graph, and goes on without: {first_line(error)}"
                )
                self.settings = replace(self.settings, graph="off")
        return whole(*given)

    def _choose(self, work: Work, inputs: tuple[Tensor, ...], outer: Outer) -> Executor:
        """An executor by the settings; whether tasks run together is measured where it is not said."""
        prepared, labels = self._laid_out(work(*inputs))
        together = self.notes.get("together", self.settings.tasks == "together")
        if self.settings.tasks == "auto" and "together" not in self.notes:
            times = {}
            for way in (True, False):
                plain = Executor(self.learner, way, chunk=self.settings.chunk)
                took = self._time(partial(plain.gradient, self.parameters, prepared, labels, outer))
                (times[way],) = highest(took)
            # With a margin, so that runs of equal settings decide alike.
            together = self.notes["together"] = times[True] < MARGIN * times[False]
            words = "together" if together else "one after another"
            self.say(
                f"Tasks run {words}: {1000 * times[True]:.0f} ms a meta-step together, "
                f"{1000 * times[False]:.0f} ms one after another."
            )
        settings = self.settings
        plain = Executor(self.learner, together, False, settings.remat, settings.chunk)
        if settings.compile != "on":
            return plain
        self.executor = Executor(self.learner, together, True, settings.remat, settings.chunk)
        started = time.monotonic()
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the compiler's, on its own doings
                self.executor.gradient(self.parameters, *self._laid_out(work(*inputs)), outer)
        except Exception as error:
            self.say(f"The inner step cannot be compiled, and runs without: {first_line(error)}")
            return plain
        if self.executor.compiled:
            self.say(f"The inner step was compiled in {time.monotonic() - started:.0f} s.")
        return self.executor

    def _time(self, gradient: Callable[[], object]) -> float:
        """Seconds of a call; on a GPU, of its replay, since launches take longer than the work."""
        run: Callable[[], object] = gradient
        if self.settings.graph == "on":
            run = Captured(gradient, ())
        times = []
        for _ in range(4):
            started = time.perf_counter()
            run()
            _wait(self.parameters[0].device)
            times.append(time.perf_counter() - started)
        return min(times[1:])

    def _laid_out(self, work: tuple[Prepared, Tensor]) -> tuple[Prepared, Tensor]:
        """Features in the precision asked for and, on a GPU, with channels last, as its convolutions take them."""
        prepared, labels = work

        def lay(x: Tensor) -> Tensor:
            if self.settings.precision == "bfloat16":
                x = x.to(torch.bfloat16)
            return x.movedim(2, -1).contiguous().movedim(-1, 2) if channels_last else x

        # Where vmap is not compiled away, it does not know channels that come last.
        channels_last = labels.is_cuda and self.executor is not None and self.executor.compiled
        return prepared._replace(inner=lay(prepared.inner), final=lay(prepared.final)), labels


def recorded_update(
    apply: Callable[..., None],
    gradients: list[Tensor],
    parameters: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> Captured:
    """The optimiser's step as a recording. Its rehearsals are steps too, and are undone."""
    fresh = not optimizer.state
    before = [parameter.detach().clone() for parameter in parameters]
    states = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in parameters if p in optimizer.state]
    update = Captured(apply, gradients)
    with torch.no_grad():
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)
        for index, parameter in enumerate(parameters):
            for name, tensor in optimizer.state[parameter].items():
                if fresh:
                    tensor.zero_()
                else:
                    tensor.copy_(states[index][name])
    return update


def resolved(settings: EngineSettings, device: torch.device) -> EngineSettings:
    """The settings with every `auto` but that of the tasks decided."""
    usual = EngineSettings(compile="on", graph="on", precision="tf32")
    if device.type != "cuda":
        usual = EngineSettings(compile="off", graph="off", precision="float32")
        settings = replace(settings, graph="off")
    names = ("compile", "graph", "precision")
    return replace(settings, **{n: getattr(usual, n) for n in names if getattr(settings, n) == "auto"})


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
