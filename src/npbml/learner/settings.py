"""What makes a learner what it is, and which combinations make sense."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from npbml.errors import SettingError
from npbml.nets.settings import NetworkSettings, block_count, frozen_blocks
from npbml.parts import BACKBONES, HEADS, LOSS_TERMS, PRECONDITIONERS, BackboneName
from npbml.rule.settings import (
    FilmSettings,
    HeadSettings,
    InnerSettings,
    LossSettings,
    OuterSettings,
    PreconditionSettings,
    WarpSettings,
    check_precondition,
)
from npbml.scorers.settings import ScorerSettings
from npbml.settings import group, setting
from npbml.shapes import read_shapes

LARGEST_IMAGE = 4096
"""Pixels a side, and channels: a file that says more was made to harm."""


@dataclass(frozen=True)
class ImageSpec:
    """The pictures a learner takes: their channels, size and normalisation.

    Raises:
        SettingError: No picture can be like that, or be normalised so.
    """

    channels: int
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        for name, number in (("channels", self.channels), ("size", self.size)):
            if not 1 <= number <= LARGEST_IMAGE:
                raise SettingError(f"images.{name} must be at least 1, at most {LARGEST_IMAGE}, not {number!r}.")
        for name, numbers in (("mean", self.mean), ("std", self.std)):
            if len(numbers) != self.channels or not all(map(math.isfinite, numbers)):
                raise SettingError(
                    f"images.{name} takes a finite number for each of {self.channels} channels, not {numbers!r}."
                )
        if min(self.std) <= 0:
            raise SettingError(f"images.std must be above 0, not {self.std!r}: images are divided by it.")


@dataclass(frozen=True)
class InitSettings:
    """How what is learned starts (docs/method.md, items 32 and 33)."""

    source: Literal["pretrained", "scratch"] = setting("pretrained")
    """Where meta-training starts: from the pre-trained encoder, or from a random one."""
    weights: Literal["normal", "xavier"] = setting("normal")
    """The weights of a random encoder, and of the head: N(0, std^2), or uniform by Xavier's rule."""
    std: float = setting(0.01, low=0)
    """Standard deviation of the normal start of every weight: the paper's N(0, 1e-2)."""
    uniform_bias: bool = setting(False)
    """Start biases from torch's uniform default instead of zero."""


@dataclass(frozen=True)
class LearnerSettings:
    """Everything that makes a learner what it is."""

    backbone: BackboneName = setting(BackboneName("conv4"))
    """The network, by name; mlp is for numbers in place of images."""
    target: Literal["classes", "values"] = setting("classes")
    """What is learned: classes, by cross-entropy, or a value, by squared error."""
    ways: int = setting(5, low=2, high=10_000)
    """Classes in a task, N."""
    shapes: tuple[str, ...] = setting(())
    """Shapes of the tasks that it is trained and validated on, such as 5x1 5x1+75 10x~3+~50 (docs/method.md); one
    is drawn at each meta-step. If none is given: tasks of `ways`, and of the shots and queries of the run."""
    symmetric: bool = setting(False)
    """Parts with a slot for each class have their class-symmetric form: for any number of classes."""
    net: NetworkSettings = group(NetworkSettings)
    head: HeadSettings = group(HeadSettings)
    precondition: PreconditionSettings = group(PreconditionSettings)
    warp: WarpSettings = group(WarpSettings)
    film: FilmSettings = group(FilmSettings)
    loss: LossSettings = group(LossSettings)
    inner: InnerSettings = group(InnerSettings)
    outer: OuterSettings = group(OuterSettings)
    init: InitSettings = group(InitSettings)
    scorer: ScorerSettings = group(ScorerSettings, was="relation")

    @property
    def independent(self) -> bool:
        """Whether each query is answered by itself: by the adapted parameters and statistics of pre-training."""
        running = self.net.stem_norm == self.net.tail_norm == "running"
        by_item = not self.film.enabled or self.film.conditioning == "item" or self.film.refresh == "task"
        return running and by_item and not self.head.centred

    @property
    def needs_no_pool(self) -> bool:
        """Whether it was made for tasks without unlabelled items too."""
        looks = self.loss.has("needs_query") or self.loss.critic_steps > 0
        return self.independent and (bool(self.shapes) or not looks)

    @property
    def outputs(self) -> int:
        """Numbers that the head gives for an item."""
        return self.ways if self.target == "classes" else 1


def scoring_encoder(settings: LearnerSettings) -> LearnerSettings:
    """The settings of an encoder that only scores (scorer.kind=encoder): a ResNet-12 of running statistics."""
    net = NetworkSettings(widths=settings.scorer.widths, stem_norm="running", tail_norm="running")
    return replace(settings, backbone=BackboneName("resnet12"), net=net)


def check_learner(settings: LearnerSettings) -> None:
    """Refuse combinations of settings that make no sense."""
    _check_network(settings)
    for check in (_check_symmetric, _check_adapted, _check_rule, _check_loss, _check_outer, _check_shapes):
        check(settings)


def _check_network(settings: LearnerSettings) -> None:
    net, backbone = settings.net, settings.backbone
    for name, widths in (("net.widths", net.widths), ("scorer.widths", settings.scorer.widths)):
        if widths is not None and not widths:
            raise SettingError(f"{name} takes the filters of at least one block.")
    position, allowed = settings.warp.position, BACKBONES.fact(backbone, "warp_positions")
    if position != "auto" and position not in allowed:
        raise SettingError(f"warp.position={position} does not exist in {backbone}: {' or '.join(allowed)}.")
    blocks, frozen = block_count(backbone, net), frozen_blocks(backbone, net)
    if frozen > blocks:
        raise SettingError(f"net.frozen_blocks is {frozen}, but {backbone} has {blocks} blocks.")
    if frozen == blocks and (settings.warp.kind == "learned" or settings.film.enabled):
        raise SettingError(
            f"net.frozen_blocks={frozen} leaves no block to warp or to modulate: set warp.kind=fixed or none, and "
            "film.enabled=false."
        )
    if settings.init.source == "scratch" and frozen:
        raise SettingError(
            f"init.source=scratch with {frozen} frozen blocks would keep random blocks for ever: set "
            "net.frozen_blocks=0 or init.source=pretrained."
        )
    if (
        settings.init.source == "scratch"
        and net.affine == "pretrained"
        and BACKBONES.fact(backbone, "target") == "classes"
    ):
        raise SettingError(
            "net.affine=pretrained needs a pre-trained encoder: set net.affine=meta, inner or identity."
        )
    if BACKBONES.fact(backbone, "pretrained"):
        _check_encoder(settings)
    elif net.task_mean is not None:
        raise SettingError(f"net.task_mean is about the features of an encoder, and {backbone} is none.")
    if net.per_step_norm and net.affine != "meta":
        raise SettingError("net.per_step_norm learns batch norm's scale and shift: it needs net.affine=meta.")


def _check_encoder(settings: LearnerSettings) -> None:
    """Refuse what would look at other views of an image than the one whose features are kept."""
    scorer, frozen = settings.scorer, frozen_blocks(settings.backbone, settings.net)
    if frozen != 1:
        raise SettingError(f"{settings.backbone} is an encoder, which stays frozen: leave net.frozen_blocks at 1.")
    if settings.loss.has("needs_scores") and (
        scorer.trains or scorer.rotations or scorer.flip or scorer.enlarge > 1
    ):
        raise SettingError(
            f"{settings.backbone} is an encoder whose features of an image are kept: query items are scored by "
            "these alone. Set scorer.kind=prototypes or soft-kmeans, and no scorer.rotations, flip or enlarge."
        )


def _check_symmetric(settings: LearnerSettings) -> None:
    """Refuse what has a slot for each class and no class-symmetric form."""
    if not settings.symmetric:
        return
    if settings.target == "values":
        raise SettingError("symmetric is about classes, and target=values has none: set symmetric=false.")
    inner, chain = settings.inner, settings.precondition.chain
    if HEADS.fact(settings.head.kind, "fixes_ways"):
        remedy = "set head.kind=unicorn"
        if inner.layers == "body":
            remedy = "and inner.layers=body needs one, as its head does not adapt: set symmetric=false"
        raise SettingError(
            f"head.kind={settings.head.kind} has a row for each class, which has no symmetric form: {remedy}."
        )
    for name in settings.loss.active:
        if LOSS_TERMS.fact(name, "fixes_ways") and LOSS_TERMS.fact(name, "symmetric") is None:
            other = {"inductive": "symmetric_support", "transductive": "symmetric_query"}.get(name)
            raise SettingError(
                f"loss.{name} has a slot for each class, and symmetric=true is for any number of them: set "
                f"loss.{name}=false" + (f" and loss.{other}=true." if other else ".")
            )
    for kind in chain:
        fact = PRECONDITIONERS.part(kind).facts
        if inner.layers != "body" and fact["fits_shapes"] and fact["symmetric"] is None:
            raise SettingError(
                f"precondition.chain has {kind}, which counts the head's rows and has no symmetric form: leave it "
                "out, or set symmetric=false."
            )
        if fact["masks_units"] and (inner.layers == "head" or _tail(settings) == 0):
            raise SettingError(
                f"precondition.chain has {kind}, whose symmetric form masks no unit of the head, and nothing else "
                "adapts: leave it out."
            )


def _check_adapted(settings: LearnerSettings) -> None:
    inner, tail = settings.inner, _tail(settings)
    if inner.layers == "body" and tail == 0:
        raise SettingError("inner.layers=body leaves nothing to adapt: every block is frozen.")
    if settings.head.temperature != 1.0 and settings.target == "values":
        raise SettingError("head.temperature is about probabilities of classes; target=values has none.")
    if len(settings.head.temperature_by_shape) not in (0, 3):
        raise SettingError(
            f"head.temperature_by_shape has {len(settings.head.temperature_by_shape)} numbers: give three or none."
        )
    alike = HEADS.fact(settings.head.kind, "alike") and settings.target == "classes"
    if inner.layers == "body" and alike:
        raise SettingError(
            f"inner.layers=body keeps the head, and head.kind={settings.head.kind} gives every class the same: "
            "no class could be told from another. Set head.kind=linear."
        )
    check_centred(settings, inner.final_batch)
    if inner.layers == "head" and settings.warp.kind == "learned":
        raise SettingError(
            "warp.kind=learned preconditions the layers before it, and inner.layers=head adapts none of them: set "
            "warp.kind=none."
        )
    if inner.layers == "head" and inner.last_blocks is not None:
        raise SettingError("inner.last_blocks says which blocks adapt; with inner.layers=head none does.")
    if inner.last_blocks is not None and inner.last_blocks > tail:
        raise SettingError(f"inner.last_blocks is {inner.last_blocks}, but only {tail} blocks are not frozen.")
    if inner.nesterov and inner.momentum == 0:
        raise SettingError("inner.nesterov needs inner.momentum above 0.")


def check_centred(settings: LearnerSettings, final_batch: str) -> None:
    """Refuse to centre a batch of queries alone: of a single one nothing would be left."""
    if settings.head.centred and final_batch == "query":
        raise SettingError(
            "head.centred takes the mean of support and query images: it needs inner.final_batch=joint."
        )


def _check_rule(settings: LearnerSettings) -> None:
    check_precondition(settings.precondition)
    inner, chain = settings.inner, settings.precondition.chain
    for kind in chain:
        if PRECONDITIONERS.fact(kind, "of_kernels") and (inner.layers == "head" or _tail(settings) == 0):
            raise SettingError(
                f"precondition.chain has {kind}, which acts on convolutions, and none of them adapts."
            )
    by_step: list[str] = [kind for kind in chain if PRECONDITIONERS.fact(kind, "per_step")]
    by_step += ["net.per_step_norm"] * settings.net.per_step_norm
    by_step += [f"loss.{name}" for name in settings.loss.active if LOSS_TERMS.fact(name, "per_step")]
    if by_step and inner.test_steps is not None and inner.test_steps > inner.steps:
        raise SettingError(
            f"{by_step[0]} is learned for each of inner.steps={inner.steps} steps: inner.test_steps="
            f"{inner.test_steps} would need more."
        )
    if settings.film.refresh == "task" and settings.film.conditioning != "batch":
        raise SettingError(
            "film.refresh=task keeps one modulation for batches of any size: it needs film.conditioning=batch."
        )


def _check_loss(settings: LearnerSettings) -> None:
    loss, inner = settings.loss, settings.inner
    for name in loss.active:
        if LOSS_TERMS.fact(name, "needs_classes") and settings.target == "values":
            raise SettingError(f"loss.{name} speaks of the classes of query items; target=values has none.")
        if LOSS_TERMS.fact(name, "needs_query") and inner.batch == "support":
            raise SettingError(
                f"inner.batch=support leaves the query images out of the inner loop, where loss.{name} needs "
                f"them: set inner.batch=joint or loss.{name}=false."
            )
    if loss.class_weights == "classes" and settings.target == "values":
        raise SettingError("loss.class_weights=classes is about classes; target=values has none.")
    for name in loss.terms:
        if LOSS_TERMS.part(name).built_in or loss.terms.count(name) > 1:
            raise SettingError(
                f"loss.terms has {name}, which is built in or there twice: it takes terms of plugins, each once. "
                "A built-in term has a switch of its own, such as loss.inductive."
            )
    if not loss.active:
        raise SettingError("loss has every term switched off: switch on loss.base or another.")
    scorer = settings.scorer
    if loss.has("needs_scores") and scorer.asks_learner:
        if settings.init.source == "scratch":
            raise SettingError(
                f"scorer.kind={scorer.kind} scores by the pre-trained encoder, and init.source=scratch has "
                "none: set scorer.kind=relation-network or loss.transductive=false."
            )
        if scorer.enlarge > 1 and settings.net.embedding == "flatten":
            raise SettingError(
                f"scorer.enlarge={scorer.enlarge:g} makes an image's maps larger, and net.embedding=flatten "
                "depends on their size: set net.embedding=mean or scorer.enlarge=1."
            )
    of_pairs = loss.symmetric_support or loss.symmetric_query
    of_pairs |= settings.symmetric and (loss.has("symmetric") or loss.critic_steps > 0)
    if loss.balanced and not of_pairs:
        raise SettingError("loss.balanced is an input of the symmetric networks: set loss.symmetric_query=true.")
    if loss.share and not (loss.inductive and loss.transductive):
        raise SettingError("loss.share needs both loss.inductive and loss.transductive.")


def _check_outer(settings: LearnerSettings) -> None:
    outer, loss = settings.outer, settings.loss
    if outer.objective == "pre_post" and not loss.critic_steps:
        raise SettingError("outer.objective=pre_post is about before and after the critic: set loss.critic_steps.")
    if outer.objective == "multi_step" and loss.critic_steps:
        raise SettingError(
            "outer.objective=multi_step does not know of the critic's steps: use pre_post or final."
        )
    if outer.objective == "trajectory":
        if loss.critic_steps:
            raise SettingError(
                "outer.objective=trajectory looks one step ahead, the critic another way: choose one."
            )
        if settings.warp.kind != "learned" and not settings.precondition.chain:
            raise SettingError("outer.objective=trajectory teaches a preconditioner, and there is none: add one.")
        if settings.inner.momentum:
            raise SettingError("outer.objective=trajectory takes its steps one by one: set inner.momentum=0.")
    if outer.items == "all" and settings.inner.final_batch != "joint":
        raise SettingError("outer.items=all scores the support items too: it needs inner.final_batch=joint.")
    if outer.order == 1 and (loss.has("learned") or loss.critic_steps):
        raise SettingError(
            "outer.order=1 stops the gradient at every inner step, so that a learned loss learns nothing: set "
            "outer.order=2 or switch its terms off."
        )


def _check_shapes(settings: LearnerSettings) -> None:
    if not read_shapes(settings.shapes):
        return
    if settings.target == "values":
        raise SettingError("shapes are those of tasks with classes; target=values has none.")
    if not settings.independent:
        raise SettingError(
            "With shapes, each query is answered by itself: set net.stem_norm=running, net.tail_norm=running and "
            "head.centred=false, and film.conditioning=item or film.refresh=task."
        )
    if settings.loss.critic_steps and settings.inner.batch != "joint":
        raise SettingError("With shapes, the critic judges unlabelled items: set inner.batch=joint.")


def _tail(settings: LearnerSettings) -> int:
    """How many blocks are not frozen."""
    return block_count(settings.backbone, settings.net) - frozen_blocks(settings.backbone, settings.net)
