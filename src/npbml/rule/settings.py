"""The settings of the rule: head, loss, preconditioner, modulation, inner loop, outer objective."""

import math
from dataclasses import dataclass
from typing import Literal

from npbml.errors import SettingError
from npbml.nets.settings import WarpPosition
from npbml.parts import LOSS_TERMS, PRECONDITIONERS, HeadName, LossTermName, PreconditionerName
from npbml.settings import leaves, setting

LARGEST_CHANGE = 3.0  # of the log of a temperature, by the shape of a task
USUAL_WAYS, USUAL_POOL = 5, 75  # of the benchmarks: shapes are told as differences to these


def shape_sizes(ways: int, support: int, pool: int) -> tuple[float, float, float]:
    """The shape of a task in three numbers: log(ways / 5), log(shots), |U| / (|U| + 75) - 1 / 2.

    They are 0 for 5x1+75. The last one is bounded: a pool may be far larger than those of meta-training.
    """
    return math.log(ways / USUAL_WAYS), math.log(support / ways), pool / (pool + USUAL_POOL) - 0.5


@dataclass(frozen=True)
class HeadSettings:
    """The classification head."""

    kind: HeadName = setting(HeadName("unicorn"))
    """unicorn: one vector copied to every class; linear: a row of its own for each class slot."""
    copy: Literal["expand", "value"] = setting("expand")
    """expand: the copy carries gradient to the vector; value: it does not (docs/method.md, item 13)."""
    centred: bool = setting(False)
    """The head sees embeddings less the mean of their batch. What all images have in common tells no class from
    another, but bounds the step that the inner loop can take."""
    normalised: bool = setting(False)
    """The head sees embeddings of one length, the root of their width: logits are of cosines."""
    temperature: float = setting(1.0, above=0)
    """Divide the logits of predictions by this; the outer objective does not see it. See train.temperature."""
    temperature_by_shape: tuple[float, ...] = setting(())
    """How the log of the temperature changes with log(ways / 5), log(shots) and the size of the pool, as
    `shape_sizes` has them; three numbers, or none."""

    def temperature_of(self, ways: int, support: int, pool: int) -> float:
        """The temperature for a task of this shape."""
        if not self.temperature_by_shape:
            return self.temperature
        sizes = shape_sizes(ways, support, pool)
        change = sum(slope * size for slope, size in zip(self.temperature_by_shape, sizes, strict=True))
        return self.temperature * math.exp(min(max(change, -LARGEST_CHANGE), LARGEST_CHANGE))


@dataclass(frozen=True)
class InnerSettings:
    """The inner loop."""

    steps: int = setting(5, low=1, high=10**6)
    """Inner gradient steps J."""
    test_steps: int | None = setting(None, low=1, high=10**6)
    """Inner steps on validation and test tasks; as many as in training if not given."""
    lr: float = setting(0.01, above=0)
    """Inner learning rate alpha; the start of it where it is learned."""
    momentum: float = setting(0.9, low=0, high=1)
    """Momentum of the inner SGD, differentiated through."""
    nesterov: bool = setting(True)
    """Nesterov's form of momentum."""
    weight_decay: float = setting(5e-4, low=0)
    """Coupled weight decay on every adapted tensor."""
    layers: Literal["all", "body", "head"] = setting("all")
    """What adapts of the tail and the head: both, the tail alone, the head alone."""
    last_blocks: int | None = setting(None, low=1)
    """Of the tail, only this many blocks adapt, counted from the last; all of them if not given."""
    batch: Literal["joint", "support"] = setting("joint")
    """Images in the inner loop's batch: support and query, or support alone (docs/method.md, item 2)."""
    final_batch: Literal["query", "joint"] = setting("query")
    """Images in the batch of the scored prediction (item 3)."""
    max_step: float | None = setting(None, above=0)
    """The longest step, by the norm of all that adapts: a longer one is shortened to it, so that no inner loop
    diverges. Any length if not given."""


@dataclass(frozen=True)
class LossSettings:
    """The meta-learned loss."""

    base: bool = setting(True)
    """Cross-entropy on the support set, or squared error for values."""
    class_weights: Literal["items", "classes"] = setting("items")
    """What counts alike in the cross-entropy on the support set: its items, or its classes, however many items
    each of them has."""
    inductive: bool = setting(True)
    """The inductive network L^S, on the support set."""
    transductive: bool = setting(True)
    """The transductive network L^Q, on the query images and their scores."""
    regulariser: bool = setting(True)
    """The regulariser R, on statistics of the adapted tensors."""
    adaptive_support: bool = setting(False)
    """A network for each inner step on the support set, adapted to the task (MeTAL)."""
    adaptive_query: bool = setting(False)
    """A network for each inner step on the query images, adapted to the task (MeTAL)."""
    symmetric_support: bool = setting(False)
    """L^S by a network that looks at each pair of an item and a class: for any number of classes."""
    symmetric_query: bool = setting(False)
    """L^Q by a network that looks at each pair of an item and a class: for any number of classes."""
    balanced: bool = setting(False)
    """Tell the symmetric networks the share that a class has of the predictions: where batches are balanced."""
    context: bool = setting(False)
    """Tell the symmetric networks the shape of the task: the share that a class has of the predictions and of the
    targets, the number of classes, of labelled items of the class, and of unlabelled items."""
    critic_steps: int = setting(0, low=0, high=1000)
    """Steps on the critic of the query predictions, after those on the other terms (SCA); 0: no critic."""
    terms: tuple[LossTermName, ...] = setting(())
    """Terms beside those above, by name: a user's own."""
    hidden: int = setting(40, low=1, high=10**6)
    """Width of the two hidden layers."""
    film: bool = setting(True)
    """Modulate the loss networks (docs/method.md, item 19)."""
    inputs: Literal["logits", "softmax"] = setting("logits")
    """Predictions as the networks see them: raw logits or probabilities (item 16)."""
    target: Literal["argmax", "soft"] = setting("argmax")
    """The query items' target: the class of the highest score, or the normalised scores (item 21)."""
    score_weight: float = setting(0.0, low=0, was="trust")
    """Add the query items' cross-entropy to their target to L^Q, by a weight that begins here and is learned."""
    activation: Literal["identity", "smooth_leaky"] = setting("identity")
    """Output activation; smooth_leaky is x/4 + 3/4 softplus_5(x) (item 17)."""
    share: bool = setting(False)
    """Let L^Q use the network of L^S, as the reference code does (item 20)."""
    statistics: Literal["exact", "reference"] = setting("exact")
    """R's inputs; reference: mean and deviation carry no gradient and L1 is L2 (item 15)."""
    averaged: bool = setting(False)
    """Divide L1 by the number of entries and L2 by its root: over a whole layer the sums run into thousands."""

    @property
    def active(self) -> tuple[str, ...]:
        """The names of the terms that are on, in the order in which they are added up."""
        switches = {leaf.name for leaf in leaves(self)}
        return (*(name for name in LOSS_TERMS if name in switches and getattr(self, name)), *self.terms)

    def has(self, fact: str) -> bool:
        """Whether a term that is on has this fact, such as needs_query."""
        return any(LOSS_TERMS.fact(name, fact) for name in self.active)

    @property
    def fixes_ways(self) -> bool:
        """Whether a network's input has a slot for each class, so that it takes one number of ways only."""
        return self.critic_steps > 0 or self.has("fixes_ways")


@dataclass(frozen=True)
class PreconditionSettings:
    """What is done to the gradient before it is subtracted."""

    chain: tuple[PreconditionerName, ...] = setting(())
    """Parts, in the order in which they are applied to the gradient; none: the plain gradient times inner.lr."""
    uniform: bool = setting(False)
    """Start the diagonal from U[0.005, 0.1] instead of inner.lr everywhere (Meta-SGD)."""


@dataclass(frozen=True)
class WarpSettings:
    """The warp preconditioner."""

    kind: Literal["learned", "fixed", "none"] = setting("learned")
    """Meta-learn omega, keep it at its Dirac start (the same network, P = I), or leave the unit out."""
    blocks: Literal["last", "all"] = setting("last")
    """Warp the last block, or every block of the tail (T-Net, WarpGrad)."""
    head: bool = setting(False)
    """A matrix on the logits as well (T-Net)."""
    position: Literal["auto", WarpPosition] = setting("auto")
    """Where it stands; auto: after_pool in conv4 and mlp, before_addition in the residual ones (items 7 and 8).
    pre_norm is T-Net's: between every convolution and its batch norm."""
    kernel: Literal[1, 3] = setting(3)
    """Size of the warp's kernel (docs/method.md, item 9)."""
    bias: bool = setting(False)
    """A bias behind the kernel."""
    activation: Literal["none", "relu"] = setting("none")
    """Non-linearity behind the kernel: with one, the preconditioner depends on the data (WarpGrad)."""
    norm: bool = setting(True)
    """Batch normalisation after the warp (item 9)."""


@dataclass(frozen=True)
class FilmSettings:
    """Modulation of the encoder's last block and of its warp."""

    enabled: bool = setting(True)
    """Modulate the encoder and the warp."""
    conditioning: Literal["item", "batch"] = setting("item")
    """Each item by its own pooled activations, or all by the batch's mean (docs/method.md, item 4)."""
    refresh: Literal["pass", "task"] = setting("pass")
    """Generate anew in every pass, or once for a task at theta_0; task needs conditioning batch (item 5)."""
    shortcut: bool = setting(False)
    """Modulate the shortcut of a residual block as well (item 6)."""
    adapt: bool = setting(False)
    """Let the inner loop adapt the encoder's generators too (item 10)."""


@dataclass(frozen=True)
class OuterSettings:
    """What meta-training minimises."""

    objective: Literal["final", "multi_step", "pre_post", "trajectory"] = setting("final")
    """Query loss after the last step, each step (MAML++), the critic (SCA), or a step ahead of each (WarpGrad)."""
    items: Literal["query", "all"] = setting("query")
    """Whose loss: the query items', or the support items' as well (MeTAL); all needs inner.final_batch=joint."""
    order: Literal[1, 2] = setting(2)
    """Order of the meta-gradient; 1 stops the gradient at every inner step, so that no loss can be learned."""
    second_order_steps: int | None = setting(None, low=1)
    """Inner steps, the last ones, whose gradient carries gradient (a truncated unroll); all if not given."""
    epochs: int = setting(100, low=1, high=10**9)
    """Epochs into which the meta-steps are divided; what is annealed changes from one to the next."""
    hessian_free: bool = setting(False)
    """In trajectory: no gradient through the step ahead."""


def check_precondition(settings: PreconditionSettings) -> None:
    """Refuse chains that make no sense."""
    chain, fact = settings.chain, PRECONDITIONERS.fact
    twice = [kind for kind in chain if chain.count(kind) > 1]
    if twice:
        raise SettingError(f"precondition.chain has {twice[0]} more than once: a part stands in it once.")
    rates = [kind for kind in chain if fact(kind, "sets_rate")]
    if len(rates) > 1:
        raise SettingError(
            f"precondition.chain has {' and '.join(rates)}, and each sets the learning rate: keep one of them."
        )
    for kind in chain:
        for other in fact(kind, "excludes"):
            if other in chain:
                raise SettingError(
                    f"precondition.chain has {kind} and {other}, one the approximation of the other: keep one."
                )
    masked = [place for place, kind in enumerate(chain) if fact(kind, "masks_units")]
    after = [kind for kind in chain[masked[0] :] if fact(kind, "of_kernels")] if masked else []
    if after:
        raise SettingError(
            f"precondition.chain masks units before {after[0]}, which would see gradients with empty rows, whose "
            f"singular vectors are arbitrary: put {after[0]} before {chain[masked[0]]}."
        )
