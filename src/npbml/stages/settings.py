"""What each stage of a run can be told."""

from dataclasses import dataclass
from typing import Literal

from npbml.data.augment import AugmentSettings
from npbml.nets.relation import RelationSettings
from npbml.settings import group, setting


@dataclass(frozen=True)
class PretrainSettings:
    """Pre-training: the encoder classifies all training classes."""

    steps: int = setting(200_000, low=1)
    """Gradient steps."""
    batch: int = setting(128, low=2)
    """Images in a batch."""
    lr: float = setting(0.01, above=0)
    """Learning rate; the peak of a onecycle schedule."""
    momentum: float = setting(0.9, low=0, high=1)
    """Nesterov momentum of SGD."""
    weight_decay: float = setting(5e-4, low=0)
    """Weight decay; the paper uses 0.01 for resnet12 on the smaller data sets (docs/method.md, item 31)."""
    schedule: Literal["multistep", "onecycle"] = setting("multistep")
    """multistep: a tenth after 1/2, 3/4, 7/8 and 19/20 of the steps; onecycle: up, then down to zero."""
    validate_every: int = setting(500, low=1)
    """Steps between validations by prototypes (item 30)."""
    validation_tasks: int = setting(600, low=2)
    """Meta-validation tasks in a validation."""
    validation_shots: int = setting(5, low=1)
    """Shots of the validation tasks."""
    prototype_batch: Literal["separate", "joint"] = setting("separate")
    """Encode support and query apart or as one batch: by batch norm, items see each other (item 30)."""
    warp: bool = setting(True)
    """Have the untrained warp unit in the forward pass (item 35)."""
    taught: bool = setting(False)
    """Learn from the encoder that scores (relation.kind=encoder), which is trained first, as well."""
    turns: bool = setting(False)
    """Turn images by quarters, and have each turn of a class be a class of its own."""
    crop_size: int | None = setting(None, low=16)
    """Side of the crops that the encoder learns from; that of the images if not given."""
    augment: AugmentSettings = group(AugmentSettings)


@dataclass(frozen=True)
class RelationStageSettings(RelationSettings):
    """The relation network and its training (docs/method.md)."""

    steps: int = setting(100_000, low=1)
    """Episodes, one a step."""
    lr: float = setting(1e-3, above=0)
    """Learning rate of Adam."""
    clip_norm: float = setting(0.0, low=0)
    """Clip the gradient to this norm; 0 does not clip."""
    validate_every: int = setting(500, low=1)
    """Steps between validations."""
    validation_tasks: int = setting(600, low=2)
    """Meta-validation tasks in a validation."""
    augment: bool = setting(True)
    """Augment the episodes as in pre-training."""
    crop_size: int | None = setting(None, low=16)
    """Side of the crops that an encoder that scores learns from; that of the images if not given."""


@dataclass(frozen=True)
class RateSettings:
    """A meta learning rate for each group of meta-parameters; 0 keeps the group as it is (item 12)."""

    theta: float = setting(1e-5, low=0)
    """The initialisation: what adapts, and what starts a task."""
    omega: float = setting(1e-5, low=0)
    """The preconditioner: warps, rates, matrices, generators of these."""
    phi: float = setting(1e-5, low=0)
    """The loss networks and the critic."""
    psi: float = setting(1e-5, low=0)
    """The FiLM generators."""


@dataclass(frozen=True)
class TrainSettings:
    """Meta-training, the outer loop (Algorithm 1)."""

    steps: int = setting(30_000, low=1)
    """Meta-gradient steps (docs/method.md, item 27)."""
    meta_batch: int | None = setting(None, low=1)
    """Tasks in a meta-step; by default the paper's 4 at one shot and 2 at more."""
    lr: RateSettings = group(RateSettings)
    optimizer: Literal["adam", "adamw", "sgd"] = setting("adam")
    """The outer optimiser (item 26); sgd has Nesterov momentum 0.9."""
    weight_decay: float = setting(0.0, low=0)
    """Weight decay of the outer optimiser."""
    schedule: Literal["constant", "cosine", "halving", "fifths"] = setting("constant")
    """Of the meta rates (item 26): cosine to a tenth; halved after 2/5 and 4/5; a tenth after each fifth."""
    clip: Literal["none", "value", "norm"] = setting("none")
    """Clip the meta-gradient by element or by norm (item 28)."""
    clip_at: float = setting(10.0, above=0)
    """Where it is clipped."""
    skips: int = setting(0, low=0)
    """Meta-steps of a run that may be left out because a task ran away: their meta-gradient is not finite."""
    validate_every: int = setting(500, low=1)
    """Steps between validations (item 29)."""
    validation_tasks: int = setting(600, low=2)
    """Meta-validation tasks in a validation."""
    ensemble: int = setting(1, low=1)
    """States that are kept, the best on validation; at test their logits are averaged."""
    augment: bool = setting(False)
    """Augment the tasks as in pre-training (item 34)."""
    crop_scale_low: float | None = setting(None, above=0, high=1)
    """Of augmented tasks, the smallest crop, as a part of the image's area; as in pre-training if not given."""
    coverage: Literal["random", "balanced"] = setting("random")
    """Classes of the tasks: drawn anew for each task, or dealt so that all come up equally often."""
    ahead: bool = setting(False)
    """On a CPU: make the next tasks ready on a second core, while one core takes the meta-step."""


@dataclass(frozen=True)
class TestSettings:
    """Meta-testing."""

    __test__ = False  # not a test case, whatever a collector thinks of the name

    tasks: int = setting(600, low=2)
    """Meta-test tasks; the same ones for every method."""
    together: int = setting(10, low=1)
    """Tasks evaluated together."""
