"""The frozen work of tasks: what networks that no loop changes make of the images, once for a task.

No gradient flows through it. What is made of an image whatever its task is (`cacheable_features`) can be computed
once for a whole data set and given to `prepare` as `known`.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from npbml.nets.layers import channels_last
from npbml.tasks import restack
from npbml.threads import each_in_a_thread

if TYPE_CHECKING:
    from npbml.learner.learner import Learner

Ranges = tuple[tuple[int, int], ...]  # of items: from the first to before the last, one after another
Known = Mapping[str, Tensor]  # what `cacheable_features` has made of the items of a task, or of tasks, by name


class Prepared(NamedTuple):
    """The frozen work of a task, done once: stem features, targets, scores, random numbers."""

    inner: Tensor  # [items of the inner batch, filters, h, w], support first
    final: Tensor  # [items of the final batch, filters, h, w], query last
    labels: Tensor  # [support, outputs]: one-hot, or values
    scores: Tensor  # [unlabelled, ways], or [unlabelled, 0] where no loss asks for them; see `Learner.scored`
    noise: Tensor  # uniform in (0, 1), as many as the preconditioner asks for
    queries: Tensor  # [query, 0]: no numbers, but as many rows as there are query items


class Counts(NamedTuple):
    """How many items of a task are support, pool and queries, in this order.

    The queries are the last items. Where they overlap the pool, its items are predicted too: in the paper's
    setting the queries are the pool.
    """

    items: int
    support: int
    pool: int
    queries: int

    @classmethod
    def of_queries(cls, support: int, queries: int) -> "Counts":
        """Those of the paper's setting, where the queries are the pool."""
        return cls(support + queries, support, queries, queries)

    def ranges(self, inner_batch: str, final_batch: str) -> tuple[Ranges, Ranges]:
        """The items of the inner and of the final batch."""
        support, query, every = (0, self.support), (self.items - self.queries, self.items), (0, self.items)
        inner = (0, self.support + self.pool) if inner_batch == "joint" else support
        if final_batch == "query":
            return (inner,), (query,)
        return (inner,), (every,) if query[0] == self.support else (support, query)


class Cacheable(NamedTuple):
    """A function of images that nothing changes, the networks it is made of, and what else it depends on."""

    of: Callable[[Tensor], Tensor]
    networks: tuple[nn.Module, ...]
    settings: tuple[float, ...] = ()


def normalised(learner: "Learner", images: Tensor) -> Tensor:
    """Images, bytes or floats in 0 to 1, as the networks take them: (x - mean) / std.

    What has more channels than an image is features of an encoder (engine/encoding.py), and stays as it is.
    """
    if images.shape[-3] > len(learner.mean):
        return images.to(learner.mean.dtype)
    values = images.to(learner.mean.dtype)
    return ((values if images.is_floating_point() else values / 255) - learner.mean) / learner.deviation


def stem_features(learner: "Learner", images: Tensor) -> Tensor:
    """What the frozen blocks make of normalised images."""
    # Where vmap is not compiled away, it does not know channels that come last.
    features = learner.network.stem(channels_last(images))
    return features.to(learner.mean.dtype, memory_format=torch.contiguous_format)


def embeddings(learner: "Learner", images: Tensor, features: Tensor | None = None) -> Tensor:
    """The embeddings by which normalised images are scored; `features` are the stem's, where they are known."""
    assert learner.scorer is not None
    seen = channels_last(images)

    def stem(view: Tensor) -> Tensor:
        return features if view is seen and features is not None else stem_features(learner, view)

    return learner.scorer.embed(seen, stem).to(learner.mean.dtype)


def cacheable_features(learner: "Learner") -> dict[str, Cacheable]:
    """What frozen networks make of an image, bytes, whatever its task is, by name."""
    found: dict[str, Cacheable] = {}
    stem, scorer = learner.network.stem, learner.scorer
    if learner.settings.net.stem_norm == "running":
        found["features"] = Cacheable(lambda x: stem_features(learner, normalised(learner, x)), (stem,))
    if scorer is not None and scorer.embeds:
        asked = scorer.tail is not None
        if found or not asked:
            networks = (stem, scorer) if asked else (scorer,)
            embed = Cacheable(
                lambda x: embeddings(learner, normalised(learner, x)), networks, scorer.view_settings
            )
            found["embeddings"] = embed
    return found


def needs_images(learner: "Learner", known: Known) -> bool:
    """Whether the frozen work of tasks takes more than what is known of their images."""
    scorer = learner.scorer
    scored = scorer is None or scorer.learned or (scorer.embeds and "embeddings" in known)
    return "features" not in known or not scored


@torch.no_grad()
def prepare_tasks(
    learner: "Learner",
    images: Tensor | None,
    support_labels: Tensor,
    counts: Counts,
    outputs: int,
    known: Known | None = None,
    final_batch: str | None = None,
) -> Prepared:
    """The frozen work of a batch of tasks.

    Args:
        learner: Whose networks do it.
        images: [tasks, items, channels, height, width]: support, pool, queries; None where all that is made of
            them is known.
        support_labels: [tasks, support].
        counts: How many of the items are support, pool and queries.
        outputs: Of the head, the number of classes.
        known: What `cacheable_features` has made of the images, [tasks, items, ...].
        final_batch: In the place of inner.final_batch.
    """
    known, tasks, inner = known or {}, len(support_labels), learner.settings.inner
    dtype, scorer = learner.mean.dtype, learner.scorer
    scored = scorer is not None and not scorer.learned and counts.pool > 0
    batches = counts.ranges(inner.batch, final_batch or inner.final_batch)
    wanted = tuple(dict.fromkeys(batches))  # once, where both batches are the same
    features, seen_by_rule = known.get("features"), counts.support + counts.pool

    def one(task: int) -> tuple[Tensor, ...]:
        """The stem's features of a task's batches, where they are not known, and its scores."""
        seen = None if images is None else normalised(learner, images[task])
        made: dict[Ranges, Tensor] = {}
        if features is None:
            assert seen is not None
            made = {ranges: stem_features(learner, taken(seen, ranges)) for ranges in wanted}
        if not scored:
            return tuple(made.values())
        every = made.get(((0, seen_by_rule),)) if features is None else features[task, :seen_by_rule].to(dtype)
        own = {name: values[task, :seen_by_rule] for name, values in known.items()}
        seen = None if seen is None else seen[:seen_by_rule]
        return *made.values(), _scores(learner, seen, every, support_labels[task], outputs, own)

    found: tuple[Tensor, ...] = ()
    if features is None or scored:
        # vmap would only add copies to convolutions that need no gradient, and take memory for all tasks at once.
        every, on_cpu = [(task,) for task in range(tasks)], support_labels.device.type == "cpu"
        found = restack(each_in_a_thread(one, every, on_cpu))
    if features is not None:
        made = {ranges: taken(features, ranges, 1).to(dtype).contiguous() for ranges in wanted}
    else:
        made = dict(zip(wanted, found, strict=False))
    labels = learner.target(support_labels, outputs, dtype)
    if learner.settings.net.task_mean is not None:
        shift = task_shift(learner, made[batches[0]][:, : counts.support], labels).unsqueeze(1)
        made = {ranges: part - shift for ranges, part in made.items()}
    scores = learner.mean.new_zeros(tasks, counts.pool, outputs if scorer is not None else 0)
    return Prepared(
        inner=made[batches[0]],
        final=made[batches[1]],
        labels=labels,
        scores=found[-1] if scored else scores,
        # Without a draw the middle of the range: of random masks, the likelier value.
        noise=learner.mean.new_full((tasks, learner.precondition.noise), 0.5),
        queries=learner.mean.new_zeros(tasks, counts.queries, 0),
    )


def task_shift(learner: "Learner", support: Tensor, labels: Tensor) -> Tensor:
    """By what the features of a task are shifted: [..., width, 1, 1].

    Args:
        learner: Whose stem is an encoder, with net.task_mean.
        support: Features of the labelled items, [..., items, width, h, w].
        labels: One-hot, [..., items, ways].
    """
    weight = learner.settings.net.task_mean
    assert weight is not None
    ways, stem = labels.shape[-1], learner.network.stem.blocks[0]
    each = (labels / labels.sum(-2, keepdim=True)).sum(-1) / ways  # every class counts alike
    mean = (each[..., None] * support.mean((-2, -1))).sum(-2)[..., None, None]
    return ways / (ways + weight) * (mean - stem.centre.to(support.dtype))  # type: ignore[operator]


def taken(items: Tensor, ranges: Ranges, dimension: int = 0) -> Tensor:
    """Ranges of items, one after another."""
    parts = [items.narrow(dimension, first, end - first) for first, end in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dimension)


def _scores(
    learner: "Learner", seen: Tensor | None, joint: Tensor | None, labels: Tensor, outputs: int, known: Known
) -> Tensor:
    """The scores of a task's pool; `joint` are the stem's features of support and pool, where they are known."""
    assert learner.scorer is not None
    if not learner.scorer.embeds:
        assert seen is not None
        items = seen
    elif "embeddings" in known:
        items = known["embeddings"].to(learner.mean.dtype)
    else:
        assert seen is not None
        items = embeddings(learner, seen, joint)
    support, query = items.tensor_split([len(labels)])
    return learner.scorer(support, labels, query, outputs).to(learner.mean.dtype)
