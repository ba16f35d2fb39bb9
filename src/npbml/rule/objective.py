"""The outer objective: at which points of the inner trajectory the query loss is taken, and with what weight."""

from typing import NamedTuple

from npbml.rule.settings import OuterSettings

MULTI_STEP_EPOCHS = 15  # of MAML++: until multi_step has become final
FLOOR = 0.03  # of MAML++: what is left, in shares of 1/J, of the weight of each step but the last


class Outer(NamedTuple):
    """The objective at one moment of meta-training."""

    order: int
    weights: dict[int, float]  # by the place in the trajectory: 0 is theta_0, -1 the last


def outer_at(settings: OuterSettings, steps: int, progress: float) -> Outer:
    """The objective when `progress`, in 0..1, of the meta-steps are done; `steps` inner steps."""
    epoch = min(int(progress * settings.epochs), settings.epochs - 1)
    if settings.objective == "multi_step" and epoch < MULTI_STEP_EPOCHS:
        weights = multi_step_weights(steps, epoch, MULTI_STEP_EPOCHS)
        return Outer(settings.order, dict(enumerate(weights, 1)))
    if settings.objective == "pre_post":
        after = 0.5 + (epoch + 1) / (2 * settings.epochs)
        return Outer(settings.order, {steps: 1 - after, -1: after})
    return Outer(settings.order, {-1: 1.0})


def multi_step_weights(steps: int, epoch: int, epochs: int) -> list[float]:
    """v_j: uniform in the first epoch, then moving to the last step; they sum to 1 always."""
    share = epoch / epochs
    each = max(1 - share, FLOOR) / steps
    return [each] * (steps - 1) + [1 - (steps - 1) * each]
