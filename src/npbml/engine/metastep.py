"""One meta-step (Algorithm 1): the meta-gradient of a batch of tasks, checked, clipped and applied."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from npbml.errors import RunError
from npbml.learner import Learner, Prepared
from npbml.rule.objective import Outer


def meta_gradient(
    learner: Learner,
    parameters: list[nn.Parameter],
    prepared: Prepared,
    query_labels: Tensor,
    outer: Outer | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """The mean of the outer objective over tasks and its gradient in `parameters` (zero where there is none)."""
    loss = learner.over_tasks(partial(learner.task_loss, outer=outer))(prepared, query_labels).mean()
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return loss.detach(), list(gradients)


def all_finite(loss: Tensor, gradients: list[Tensor]) -> bool:
    return bool(torch.stack([loss.isfinite(), *(g.isfinite().all() for g in gradients)]).all())


def diagnose(learner: Learner, parameters: list[nn.Parameter], gradients: list[Tensor], prepared: Prepared) -> str:
    """Which part made a meta-gradient that is not finite, in words."""
    bad = {parameter for parameter, g in zip(parameters, gradients, strict=True) if not g.isfinite().all()}
    groups = [letter for letter, part in learner.groups().items() if any(p in bad for p in part.values())]
    reached = f"in the meta-gradient of {', '.join(groups)}" if groups else "in the query loss"
    for index in range(len(prepared.inner)):
        found = _first_non_finite(learner, tree_map(lambda x, i=index: x[i], prepared))
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


def meta_step(
    learner: Learner,
    optimizer: torch.optim.Optimizer,
    prepared: Prepared,
    query_labels: Tensor,
    clip: str = "none",
    clip_at: float = 10.0,
    outer: Outer | None = None,
) -> float:
    """Change the learner by one meta-step and return the loss before it; refuse a step that is not finite."""
    parameters = [parameter for part in optimizer.param_groups for parameter in part["params"]]
    loss, gradients = meta_gradient(learner, parameters, prepared, query_labels, outer)
    if not all_finite(loss, gradients):
        raise RunError(diagnose(learner, parameters, gradients, prepared))
    apply_gradient(optimizer, parameters, gradients, clip, clip_at)
    return loss.item()
