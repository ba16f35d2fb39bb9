"""The stages of a run: for each, its file, what its outcome depends on, and what comes before it.

One list, `STAGES`, drives the pipeline, fingerprints, skipping, resuming and the command line.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from npbml.lab.identity import fingerprint
from npbml.lab.schema import Config, method_config
from npbml.learner.settings import scoring_encoder
from npbml.measures import ACCURACY, MEASURES
from npbml.methods import trains
from npbml.parts import METHODS
from npbml.stages.stage import Stage

# Groups of settings, by their names in version 0.1, of which fingerprints are made.
_COMMON = ("dataset", "seed", "image_size", "backbone", "ways", "queries", "init", "net", "pretrain")


@dataclass(frozen=True)
class StageSpec:
    """A kind of stage, before it is known for which run."""

    name: str  # of its folder, and in fingerprints; that of meta-training is the method's
    record: str  # under which results say how long it took
    weights: str  # the file that it leaves
    reads: tuple[str, ...] | None  # groups of settings that its outcome depends on; None: all of them
    settings: Callable[[Config], Any]  # its own, with steps and validate_every
    command: str  # that runs it


PRETRAIN = StageSpec(
    "pretrain", "pretrain", "network.safetensors", (*_COMMON, "warp"), lambda config: config.pretrain, "pretrain"
)
# A relation network's episodes are augmented as in pre-training.
SCORER = StageSpec(
    "relation",
    "relation",
    "relation.safetensors",
    (*_COMMON, "shots", "relation"),
    lambda config: config.scorer_training,
    "scorer",
)
METATRAIN = StageSpec("", "train", "learner.safetensors", None, lambda config: config.train, "train --method {}")
STAGES = (PRETRAIN, SCORER, METATRAIN)


def spec_of(name: str) -> StageSpec:
    """The kind of a stage: a shared one by its name, or the meta-training of the method of that name."""
    shared = {spec.name: spec for spec in (PRETRAIN, SCORER)}
    if name not in shared:
        METHODS.part(name)  # or an error that lists the methods
    return shared.get(name, METATRAIN)


def before(config: Config, name: str) -> tuple[str, ...]:
    """The stages that must be done right before this one, or before the test of a method that trains nothing."""
    if name == PRETRAIN.name:
        return (SCORER.name,) if config.pretrain.distill else ()  # the teacher is trained first
    if name == SCORER.name:
        return ()
    learner = method_config(config, name).learner
    encoder = not trains(name) or learner.init.source == "pretrained"
    scores = trains(name) and learner.loss.has("needs_scores") and learner.scorer.trains
    return (PRETRAIN.name,) * encoder + (SCORER.name,) * scores


def needed(config: Config, names: Iterable[str]) -> list[str]:
    """All stages that must be done before these, in their order."""
    found: list[str] = []

    def visit(name: str) -> None:
        for earlier in before(config, name):
            if earlier not in found:
                visit(earlier)
                found.append(earlier)

    for name in names:
        visit(name)
    return found


def stage_config(config: Config, name: str) -> Config:
    """The configuration of a stage within a run."""
    if name == SCORER.name and config.learner.scorer.pretrains:
        return scorer_config(config)
    return config if name in (PRETRAIN.name, SCORER.name) else method_config(config, name)


def scorer_config(config: Config) -> Config:
    """The configuration by which an encoder that only scores is pre-trained."""
    names = ("steps", "validate_every", "validation_tasks", "crop_size")
    own = {name: getattr(config.scorer_training, name) for name in names}
    pretrain = replace(config.pretrain, warp=False, distill=False, **own)
    return replace(config, learner=scoring_encoder(config.learner), pretrain=pretrain)


def stage_fingerprint(config: Config, name: str) -> str:
    """What the outcome of a stage depends on, in a word."""
    spec = spec_of(name)
    if spec is SCORER and config.learner.scorer.pretrains:  # pre-trained, whatever the learner's own encoder is
        spec = PRETRAIN
    found = fingerprint(stage_config(config, name), name, spec.reads)
    distilled = name == PRETRAIN.name and config.pretrain.distill
    return f"{found}-{stage_fingerprint(config, SCORER.name)}" if distilled else found


def stage_value(config: Config, name: str, make_trainer: Callable[[], Any] | None = None) -> Stage:
    """A stage of a run as a value. Without what makes its trainer it can be looked at, and not run."""
    spec, own = spec_of(name), stage_config(config, name)
    settings, meta = spec.settings(config), spec is METATRAIN

    def none() -> Any:
        raise RuntimeError(f"the stage {name} was made to be looked at: it has no trainer")

    return Stage(
        name=name,
        weights=spec.weights,
        fingerprint=stage_fingerprint(config, name),
        after=before(config, name),
        command=spec.command.format(name),
        steps=settings.steps,
        validate_every=settings.validate_every,
        make_trainer=make_trainer or none,
        measure=MEASURES[config.learner.target] if meta else ACCURACY,
        keep=own.train.ensemble if meta else 1,
    )
