"""Whether predicted probabilities can be believed: log loss, calibration error, the best temperature."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from npbml.errors import NotFiniteError

BINS = 15  # of equal width in (0, 1], as Guo et al. (2017) have it
TEMPERATURES = (1e-3, 1e6)  # in which the best is looked for: minus squared distances may be large


def log_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The negative log-likelihood of each task, in nats: the mean over its queries, in float64.

    Args:
        logits: [..., queries, ways].
        labels: [..., queries]; leading dimensions that it lacks, such as that of kinds of predictions, are
            broadcast.

    Returns:
        [...]
    """
    logits = logits.double()
    chosen = labels.expand(logits.shape[:-1]).unsqueeze(-1)
    return -F.log_softmax(logits, -1).gather(-1, chosen).squeeze(-1).mean(-1)


def confidence_bins(logits: Tensor, labels: Tensor) -> Tensor:
    """The queries of each task, by the probability of the class that is predicted: 15 equal bins in (0, 1].

    Of each bin the number of queries, the sum of that probability and the number of right predictions, in float64.
    Bins of several tasks, batches or ranks are added up.

    Args:
        logits: [..., queries, ways].
        labels: [..., queries], broadcast as by `log_loss`.

    Returns:
        [..., 15, 3]
    """
    confidence, predicted = logits.double().softmax(-1).max(-1)
    edges = torch.arange(1, BINS, dtype=torch.float64, device=logits.device) / BINS
    members = F.one_hot(torch.bucketize(confidence, edges), BINS).double()  # a bin has its upper edge
    values = torch.stack([torch.ones_like(confidence), confidence, (predicted == labels).double()], -1)
    return (members.unsqueeze(-1) * values.unsqueeze(-2)).sum(-3)


def expected_calibration_error(bins: Tensor) -> Tensor:
    """The expected calibration error in percent, of the sums that `confidence_bins` finds: [..., 15, 3] -> [...]

    How far the share of right predictions is from the mean confidence, over bins by their share of queries.
    """
    count, confidence, right = bins.unbind(-1)
    return 100 * (right - confidence).abs().sum(-1) / count.sum(-1)


def score_logits(scores: Tensor) -> Tensor:
    """Logits of which the softmax is the scores, normalised to sum to one: [..., ways], none negative.

    Where all scores are zero, every class is as likely.
    """
    least = torch.finfo(torch.float32).tiny
    scores = scores.double()
    return (scores / scores.sum(-1, keepdim=True).clamp_min(least)).clamp_min(least).log()


def best_temperature(logits: Tensor | Sequence[Tensor], labels: Tensor | Sequence[Tensor]) -> float:
    """The number by which logits are to be divided for the lowest negative log-likelihood, to four digits.

    The log-likelihood is concave in the inverse temperature, so that its slope has one zero: it is found by
    bisection. Where there is none, the end of `TEMPERATURES` that is better is returned: the lower where every
    prediction is right, the upper where predictions are no better than chance.

    Args:
        logits: [..., queries, ways]; or a sequence of these, one for each shape of tasks, which all count alike.
        labels: [..., queries], or a sequence of these.

    Raises:
        NotFiniteError: The logits are not finite.

    Example:
        >>> best_temperature(torch.tensor([[8.0, 0.0]] * 4), torch.tensor([0, 0, 0, 1]))  # 8 / log 3
        7.282
    """
    logits, labels = ([part] if isinstance(part, Tensor) else part for part in (logits, labels))
    if not all(part.isfinite().all() for part in logits):
        raise NotFiniteError("The logits of validation tasks are not finite: no temperature fits them.")
    below = [part.double() - part.double().amax(-1, keepdim=True) for part in logits]
    if not any(part.any() for part in below):
        return 1.0  # all are equal, and so is every temperature
    targets = [part.gather(-1, of.unsqueeze(-1)).mean() for part, of in zip(below, labels, strict=True)]

    def falls(log_temperature: float) -> bool:
        """Whether the negative log-likelihood falls with the temperature here."""
        temperature = math.exp(log_temperature)
        expected = [((part / temperature).softmax(-1) * part).sum(-1).mean() for part in below]
        return bool(sum(expected) > sum(targets))

    low, high = map(math.log, TEMPERATURES)
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if falls(middle) else (low, middle)
    return float(f"{math.exp((low + high) / 2):.4g}")


def temperature_by_shape(
    temperatures: Sequence[float], sizes: Sequence[Sequence[float]]
) -> tuple[float, tuple[float, ...]]:
    """The temperature at sizes 0 and the slopes of its logarithm, by least squares over shapes.

    Args:
        temperatures: The best one of each shape.
        sizes: What each shape says, as `shape_sizes` has it.

    Returns:
        The temperature and a slope for each size, to four digits.
    """
    targets = torch.tensor(temperatures, dtype=torch.float64).log()
    rows = torch.tensor([[1.0, *row] for row in sizes], dtype=torch.float64)
    first, *slopes = torch.linalg.lstsq(rows, targets.unsqueeze(-1), driver="gelsd").solution.flatten().tolist()
    return float(f"{math.exp(first):.4g}"), tuple(float(f"{slope:.4g}") for slope in slopes)
