"""What each stage of a run can be told."""

from dataclasses import dataclass
from typing import Literal

from npbml.data.settings import AugmentSettings
from npbml.settings import group, setting


@dataclass(frozen=True)
class PretrainSettings:
    """Pre-training: the encoder classifies all training classes."""

    steps: int = setting(200_000, low=1, high=10**9)
    """Gradient steps."""
    batch_size: int = setting(128, low=2, high=10**6, was="batch")
    """Images in a batch."""
    lr: float = setting(0.01, above=0)
    """Learning rate; the peak of a onecycle schedule."""
    weight_decay: float = setting(5e-4, low=0)
    """Weight decay; the paper uses 0.01 for resnet12 on the smaller data sets (docs/method.md, item 31)."""
    schedule: Literal["multistep", "onecycle"] = setting("multistep")
    """multistep: a tenth after 1/2, 3/4, 7/8 and 19/20 of the steps; onecycle: up, then down to zero."""
    validate_every: int = setting(500, low=1, high=10**9)
    """Steps between validations by prototypes (item 30)."""
    validation_tasks: int = setting(600, low=2, high=10**6)
    """Meta-validation tasks in a validation."""
    validation_shots: int = setting(5, low=1, high=10_000)
    """Shots of the validation tasks."""
    prototype_batch: Literal["separate", "joint"] = setting("separate")
    """Encode support and query apart or as one batch: by batch norm, items see each other (item 30)."""
    warp: bool = setting(True)
    """Have the untrained warp unit in the forward pass (item 35)."""
    distill: bool = setting(False, was="taught")
    """Learn from the encoder that scores (scorer.kind=encoder), which is trained first, as well."""
    rotations: bool = setting(False, was="turns")
    """Rotate images by 0, 90, 180 or 270 degrees, and have each rotation of a class be a class of its own."""
    crop_size: int | None = setting(None, low=16, high=10_000)
    """Side of the crops that the encoder learns from; that of the images if not given."""
    augment: AugmentSettings = group(AugmentSettings)


@dataclass(frozen=True)
class ScorerTrainingSettings:
    """The training of what scores query items (docs/method.md)."""

    steps: int = setting(100_000, low=1, high=10**9)
    """Steps: of one episode each, or of pre-training where an encoder is pre-trained to score."""
    lr: float = setting(1e-3, above=0)
    """Learning rate of Adam, for a network that learns from episodes."""
    validate_every: int = setting(500, low=1, high=10**9)
    """Steps between validations."""
    validation_tasks: int = setting(600, low=2, high=10**6)
    """Meta-validation tasks in a validation."""
    augment: bool = setting(True)
    """Augment the episodes as in pre-training."""
    crop_size: int | None = setting(None, low=16, high=10_000)
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

    steps: int = setting(30_000, low=1, high=10**9)
    """Meta-gradient steps (docs/method.md, item 27)."""
    meta_batch: int | None = setting(None, low=1, high=10**6)
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
    max_skipped: int = setting(0, low=0, high=10**9, was="skips")
    """Meta-steps of a run that may be left out because a task diverged: their meta-gradient is not finite."""
    validate_every: int = setting(500, low=1, high=10**9)
    """Steps between validations (item 29)."""
    validation_tasks: int = setting(600, low=2, high=10**6)
    """Meta-validation tasks in a validation."""
    ensemble: int = setting(1, low=1, high=1000)
    """States that are kept, the best on validation; at test their logits are averaged."""
    augment: bool = setting(False)
    """Augment the tasks as in pre-training (item 34)."""
    rotations: bool = setting(False)
    """Tasks have classes of rotated images too, by 90, 180 and 270 degrees: four times as many to learn from."""
    mix: bool = setting(False)
    """Mix the features of each class of a task with those of another class, which makes new classes of both: their
    weights are drawn from 1/2 to 1. A rule that learns from few classes then fits them less closely."""
    prefetch: bool = setting(False, was="ahead")
    """On a CPU: make the next tasks ready on a second core, while one core takes the meta-step."""
    temperature: Literal["one", "validation"] = setting("one")
    """validation: head.temperature of the learner is the one with the least log loss on meta-validation tasks."""

    def tasks_at(self, shots: int) -> int:
        """Tasks in a meta-step, B."""
        return self.meta_batch or (4 if shots == 1 else 2)


@dataclass(frozen=True)
class TestSettings:
    """Meta-testing."""

    __test__ = False  # not a test case, whatever a collector thinks of the name

    tasks: int = setting(600, low=2, high=10**6)
    """Meta-test tasks; the same ones for every method."""
    batch_size: int = setting(10, low=1, high=10**6, was="together")
    """Tasks evaluated at once."""
    shapes: tuple[str, ...] = setting(())
    """Shapes of tasks that are tested beside the benchmark's, such as 5x1 10x1+150 (docs/running.md); usual stands
    for a list of 19 by which methods are compared."""
    shape_tasks: int = setting(300, low=2, high=10**6)
    """Tasks of each of these shapes."""
