"""The outer objective: at which points of the inner trajectory the query loss is taken, and with what weight."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from npbml.settings import setting

FLOOR = 0.03  # of MAML++: what is left, in shares of 1/J, of the weight of each step but the last


@dataclass(frozen=True)
class OuterSettings:
    """What meta-training minimises."""

    objective: Literal["final", "multi_step", "pre_post", "trajectory"] = setting("final")
    """Query loss after the last step, each step (MAML++), the critic (SCA), or a step ahead of each (WarpGrad)."""
    items: Literal["query", "all"] = setting("query")
    """Whose loss: the query items', or the support items' as well (MeTAL); all needs inner.final_batch=joint."""
    order: Literal[1, 2] = setting(2)
    """Order of the meta-gradient; 1 stops the gradient at every inner step, so that no loss can be learned."""
    first_order_epochs: int = setting(0, low=0)
    """Epochs of order 1 before those of order 2 (derivative-order annealing)."""
    second_order_steps: int | None = setting(None, low=1)
    """Inner steps, the last ones, whose gradient carries gradient (a truncated unroll); all if not given."""
    epochs: int = setting(100, low=1)
    """Epochs into which the meta-steps are divided; what is annealed changes from one to the next."""
    multi_step_epochs: int = setting(15, low=1)
    """Epochs until multi_step has become final."""
    hessian_free: bool = setting(False)
    """In trajectory: no gradient through the step ahead."""
    start_weight: float = setting(1.0, low=0)
    """In trajectory: the weight of the query loss after the last step, from which the initialisation learns."""


class Outer(NamedTuple):
    """The objective at one moment of meta-training."""

    order: int
    weights: dict[int, float]  # by the place in the trajectory: 0 is theta_0, -1 the last


def outer_at(settings: OuterSettings, steps: int, progress: float) -> Outer:
    """The objective when `progress`, in 0..1, of the meta-steps are done; `steps` inner steps."""
    epoch = min(int(progress * settings.epochs), settings.epochs - 1)
    order = 1 if epoch < settings.first_order_epochs else settings.order
    if settings.objective == "multi_step" and epoch < settings.multi_step_epochs:
        weights = multi_step_weights(steps, epoch, settings.multi_step_epochs)
        return Outer(order, dict(enumerate(weights, 1)))
    if settings.objective == "pre_post":
        after = 0.5 + (epoch + 1) / (2 * settings.epochs)
        return Outer(order, {steps: 1 - after, -1: after})
    return Outer(order, {-1: 1.0})


def multi_step_weights(steps: int, epoch: int, epochs: int) -> list[float]:
    """v_j: uniform in the first epoch, then moving to the last step; they sum to 1 always."""
    share = epoch / epochs
    each = max(1 - share, FLOOR) / steps
    return [each] * (steps - 1) + [1 - (steps - 1) * each]
