"""Which stages a run has, in which order, and which settings the outcome of each depends on."""

from pathlib import Path
from typing import Any

import pytest

from npbml.errors import SettingError
from npbml.lab.pipeline import Pipeline
from npbml.lab.protocols import preset
from npbml.lab.schema import Config, method_config, override
from npbml.lab.stages import (
    METATRAIN,
    PRETRAIN,
    SCORER,
    STAGES,
    before,
    needed,
    scorer_config,
    spec_of,
    stage_config,
    stage_fingerprint,
)


def fingerprints(config: Config, changes: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """The fingerprint of every stage without and with some changes."""
    both = (config, override(config, changes))
    stages = ("pretrain", "relation", "npbml", "maml")
    return {stage: tuple(stage_fingerprint(one, stage) for one in both) for stage in stages}  # type: ignore[misc]


DEPENDS: list[tuple[dict[str, Any], set[str]]] = [
    ({"train": {"steps": 9}}, {"npbml", "maml"}),
    ({"train": {"lr": {"phi": 0.5}}}, {"npbml", "maml"}),
    ({"inner": {"lr": 0.5}}, {"npbml", "maml"}),
    ({"loss": {"hidden": 7}}, {"npbml", "maml"}),
    ({"loss": {"inductive": False}}, {"npbml"}),
    ({"film": {"enabled": False}}, {"npbml"}),
    ({"pretrain": {"lr": 0.5}}, {"pretrain", "npbml", "maml"}),
    ({"scorer_training": {"lr": 0.5}}, {"relation", "npbml", "maml"}),
    ({"scorer": {"combine": "mean"}}, {"relation", "npbml", "maml"}),
    ({"shots": 2}, {"relation", "npbml", "maml"}),
    ({"warp": {"kernel": 1}}, {"pretrain", "npbml", "maml"}),
    ({"net": {"filters": 5}}, {"pretrain", "relation", "npbml", "maml"}),
    ({"seed": 5}, {"pretrain", "relation", "npbml", "maml"}),
    ({"dataset": "elsewhere"}, {"pretrain", "relation", "npbml", "maml"}),
    ({"pretrain": {"augment": {"crop_scale_low": 0.1}}}, {"pretrain", "relation", "npbml", "maml"}),
    ({"test": {"tasks": 99}}, set()),
    ({"device": "auto"}, set()),
    ({"baselines": []}, set()),
    ({"checkpoint_seconds": 0.0}, set()),
    ({"train": {"max_skipped": 3}}, set()),
    ({"engine": {"remat": True}}, set()),
    ({"method": "maml"}, set()),
]


@pytest.mark.parametrize(("changes", "stages"), DEPENDS, ids=[str(changes) for changes, _ in DEPENDS])
def test_a_change_of_settings_is_a_change_of_the_stages_that_depend_on_them(
    config: Config, changes: dict[str, Any], stages: set[str]
) -> None:
    """A stage may be refused too often, but it must not be taken for one that it is not."""
    found = fingerprints(config, changes)
    assert {stage for stage, (before, after) in found.items() if before != after} >= stages
    if "train" in changes or "inner" in changes or not stages:
        assert {stage for stage, (before, after) in found.items() if before != after} == stages


def test_every_stage_has_a_fingerprint_of_its_own(config: Config) -> None:
    found = fingerprints(config, {})
    assert len({before for before, _ in found.values()}) == 4


def test_an_encoder_that_scores_does_not_depend_on_the_learners_own(config: Config) -> None:
    scored = override(config, {"scorer": {"kind": "encoder"}})
    for changes in ({"net": {"filters": 5}}, {"backbone": "resnet12"}, {"shots": 2}, {"pretrain": {"steps": 9}}):
        one, other = fingerprints(scored, changes)["relation"]
        assert one == other, changes
    for changes in ({"scorer": {"widths": [4]}}, {"scorer_training": {"steps": 9}}, {"pretrain": {"lr": 0.5}}):
        one, other = fingerprints(scored, changes)["relation"]
        assert one != other, changes


def test_a_taught_encoder_depends_on_what_teaches_it(config: Config) -> None:
    taught = override(config, {"scorer": {"kind": "encoder"}, "pretrain": {"distill": True}})
    found = fingerprints(taught, {"scorer_training": {"steps": 9}})
    assert found["pretrain"][0].endswith(found["relation"][0]) and found["pretrain"][0] != found["pretrain"][1]


def test_a_stage_is_the_runs_own(config: Config) -> None:
    run = Pipeline(Path("somewhere"), config)
    stages = [run.stage(name) for name in ("pretrain", "relation", "maml")]
    found = [(stage.file(Path("somewhere")), stage.steps, stage.validate_every) for stage in stages]
    assert found == [
        (Path("somewhere/pretrain/network.safetensors"), 3, 3),
        (Path("somewhere/relation/relation.safetensors"), 2, 2),
        (Path("somewhere/maml/learner.safetensors"), 2, 2),
    ]
    assert [stage.fingerprint for stage in stages] == [stage_fingerprint(config, stage.name) for stage in stages]
    assert [stage.command for stage in stages] == ["pretrain", "scorer", "train --method maml"]
    assert [stage.after for stage in stages] == [(), (), ("pretrain",)]
    members = run.stage("npbml")
    assert members.file(Path("run"), 2) == Path("run/npbml/learner-3.safetensors")


def test_stages_are_known_by_name() -> None:
    assert STAGES == (PRETRAIN, SCORER, METATRAIN)
    assert [spec_of(name) for name in ("pretrain", "relation", "npbml", "gap")] == [*STAGES, METATRAIN]
    with pytest.raises(SettingError, match="no method 'relations'"):
        spec_of("relations")


SCRATCH = {"init": {"source": "scratch"}, "net": {"frozen_blocks": 0, "affine": "meta"}}
ORDERS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({}, ["npbml"], ["pretrain", "relation"]),
    ({}, ["maml"], ["pretrain"]),
    ({}, ["maml", "npbml", "prototypes"], ["pretrain", "relation"]),
    ({}, ["prototypes"], ["pretrain"]),
    ({}, [], []),
    ({"scorer": {"kind": "prototypes"}}, ["npbml"], ["pretrain"]),
    ({"scorer": {"kind": "both"}}, ["npbml"], ["pretrain", "relation"]),
    ({"scorer": {"kind": "encoder"}, "pretrain": {"distill": True}}, ["maml"], ["relation", "pretrain"]),
    ({"scorer": {"kind": "encoder"}, "pretrain": {"distill": True}}, ["npbml"], ["relation", "pretrain"]),
    ({"scorer": {"kind": "encoder"}, "pretrain": {"distill": True}}, ["prototypes"], ["relation", "pretrain"]),
    ({"scorer": {"kind": "encoder"}, "pretrain": {"distill": True}}, ["pretrain"], ["relation"]),
    (SCRATCH, ["maml"], []),
    (SCRATCH, ["npbml"], ["relation"]),
    (SCRATCH, ["maml", "prototypes"], ["pretrain"]),
]


@pytest.mark.parametrize(("changes", "names", "stages"), ORDERS, ids=[str(order[:2]) for order in ORDERS])
def test_what_a_method_needs_comes_before_it_in_order(
    changes: dict[str, Any], names: list[str], stages: list[str]
) -> None:
    config = override(preset("quick"), changes)
    assert needed(config, names) == stages
    for name in names:
        assert set(before(config, name)) <= set(stages)


def test_every_stage_has_its_configuration() -> None:
    config = preset("best", "mini-imagenet", "resnet12-wide")
    assert stage_config(config, "pretrain") == config
    assert stage_config(config, "gap") == method_config(config, "gap")
    assert stage_config(preset("quick"), "relation") == preset("quick")
    scoring = stage_config(config, "relation")
    assert scoring == scorer_config(config)
    assert (scoring.learner.backbone, scoring.learner.net.widths) == ("resnet12", (64, 160, 320, 640))
    assert scoring.learner.net.stem_norm == scoring.learner.net.tail_norm == "running"
    own, pretrain = config.scorer_training, scoring.pretrain
    assert (pretrain.steps, pretrain.validate_every, pretrain.crop_size) == (own.steps, own.validate_every, 64)
    assert not pretrain.distill and not pretrain.warp and pretrain.lr == config.pretrain.lr
