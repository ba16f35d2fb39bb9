"""What needs no meta-training, on tasks of any shape: nearest class means and soft k-means, by angle.

Both look at embeddings of the encoder as it was pre-trained. No statistic comes from queries outside the pool.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from npbml.data.draws import task_items
from npbml.engine.calibration import best_temperature
from npbml.engine.evaluate import Answer, all_answers
from npbml.engine.source import TaskSource
from npbml.errors import DataError
from npbml.rule.loss import one_hot
from npbml.scorers.whiten import whitened_cosines

EPS = 1e-12
MOST_WHITENED = 400  # items of a task: the root of their matrix takes seconds from there on


class FixedMeans(NamedTuple):
    """The numbers of soft k-means; with no rounds, nearest class means."""

    temperature: float = 10.0
    rounds: int = 0
    angles: str = "plain"  # or centred: without the mean of support and pool; or whitened too
    weight: float = 1.0  # of the labelled items beside those of the pool

    def words(self) -> str:
        """As tables show it."""
        return f"{self.angles}, {self.rounds} rounds, temperature {self.temperature:g}, weight {self.weight:g}"


PROTOTYPES = FixedMeans()
# Of these, the best on meta-validation tasks of a shape stands for soft k-means.
GRID = tuple(
    FixedMeans(temperature, rounds, angles, weight)
    for angles in ("plain", "centred", "whitened")
    for temperature in (5.0, 10.0, 20.0)
    for rounds in (3, 10)
    for weight in (1.0, 5.0)
)


def item_angles(items: Tensor, seen: int, kind: str) -> Tensor:
    """The cosines of items [n, width] with each other, [n, n]; statistics are of the first `seen`, S and U."""
    if kind == "plain":
        unit = F.normalize(items, dim=1)
        return unit @ unit.T
    unit = F.normalize(items - items[:seen].mean(0), dim=1)
    if kind == "centred":
        return unit @ unit.T
    if seen < len(items):
        raise DataError("Whitened angles are those of support and pool: there are queries beside the pool.")
    return whitened_cosines(unit)


def mean_logits(angles: Tensor, members: Tensor, pool: int, how: FixedMeans) -> Tensor:
    """angles [n, n] of support, pool and queries, one-hot labels [s, ways] -> logits of pool and queries."""
    labelled = len(members)
    beside = members.new_zeros(len(angles) - labelled - pool, members.shape[1])

    def logits(scores: Tensor, weight: float) -> Tensor:
        sums = torch.cat([weight * members, scores, beside])
        products = angles @ sums
        lengths = (sums * products).sum(0).clamp_min(EPS).sqrt()
        return how.temperature * products[labelled:] / lengths

    found = logits(members.new_zeros(pool, members.shape[1]), 1.0)
    for _ in range(how.rounds if pool else 0):
        found = logits(found[:pool].softmax(-1), how.weight)
    return found


def mean_answers(source: TaskSource, *choices: FixedMeans) -> Answer:
    """The logits of soft k-means for tasks of a source whose learner's encoder scores, [tasks, queries, ways].

    Of several choices, all of the same angles, which are found once: [tasks, choices, queries, ways].
    """
    shape, embeddings = source.shape, source.known.get("embeddings")
    if embeddings is None:
        raise DataError("There is no room for the embeddings of all images, by which class means are found.")
    seen = shape.support + shape.pool

    def one(items: Tensor, labels: Tensor) -> Tensor:
        members = one_hot(labels, shape.ways, items.dtype)
        angles = item_angles(items, seen, choices[0].angles)
        return torch.stack([mean_logits(angles, members, shape.pool, how) for how in choices])

    def answer(indices: Tensor) -> tuple[Tensor, Tensor]:
        support, labels, query, query_labels = task_items(shape, indices)
        items = torch.cat([support, query], 1).to(embeddings.device)
        found = torch.vmap(one)(embeddings[items].float(), labels.to(embeddings.device))
        return found if len(choices) > 1 else found[:, 0], query_labels

    return answer


def best_means(source: TaskSource, tasks: int, batch_size: int, seed: int) -> FixedMeans:
    """Soft k-means with the numbers that are most accurate on validation tasks; prototypes without a pool."""
    shape = source.shape
    if not shape.pool:
        return PROTOTYPES
    found: dict[FixedMeans, float] = {}
    for kind in ("plain", "centred", "whitened"):
        if kind == "whitened" and (shape.queries or shape.support + shape.pool > MOST_WHITENED):
            continue
        choices = [how for how in GRID if how.angles == kind]
        answer = mean_answers(source, *choices)
        logits, labels = all_answers(answer, source.draw, tasks, batch_size, seed, "validation")
        right = (logits.argmax(-1) == labels.unsqueeze(1)).double().mean((0, 2))
        found |= dict(zip(choices, right.tolist(), strict=True))
    return max(found, key=lambda how: found[how])


def mean_temperature(source: TaskSource, how: FixedMeans, tasks: int, batch_size: int, seed: int) -> float:
    """By what the logits are to be divided, by validation tasks."""
    return best_temperature(
        *all_answers(mean_answers(source, how), source.draw, tasks, batch_size, seed, "validation")
    )
