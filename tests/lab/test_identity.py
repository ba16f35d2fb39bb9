"""Files of version 0.1 are read by today's names, and fingerprints are those that it made."""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npbml.catalogue import LEARNERS, load, shipped
from npbml.errors import SettingError
from npbml.lab import identity
from npbml.lab.identity import MAY_DIFFER, differences, fingerprint, from_file, to_file
from npbml.lab.protocols import PROTOCOLS, preset
from npbml.lab.reproduce import read_results
from npbml.lab.schema import Config, check_config, override
from npbml.lab.stages import stage_fingerprint
from npbml.learner.settings import LearnerSettings, check_learner
from npbml.methods import REMOVED
from npbml.parts import BACKBONES
from npbml.settings import flat, from_dict, from_old_names, leaves, nested, to_dict
from npbml.tensor_files import load_tensors
from npbml.version import __version__

CHANGES: list[tuple[str, Any]] = [
    ("ways", 7),
    ("shots", 5),
    ("dataset", "omniglot"),
    ("image_size", 32),
    ("net.filters", 9),
    ("net.widths", (1, 2)),
    ("inner.lr", 0.5),
    ("train.lr.phi", 0.0),
    ("train.meta_batch", 3),
    ("pretrain.augment.crop_scale_low", 0.5),
    ("scorer.combine", "mean"),
    ("scorer_training.lr", 0.5),
    ("loss.share", True),
]
FREED: list[tuple[str, Any]] = [
    ("baselines", ()),
    ("checkpoint_seconds", 1.0),
    ("device", "cpu"),
    ("engine.compile", "off"),
    ("method", "maml"),
    ("test.tasks", 5),
    ("test.batch_size", 3),
    ("train.max_skipped", 3),
]


@given(st.sets(st.sampled_from(range(len(CHANGES)))), st.sets(st.sampled_from(range(len(FREED)))))
def test_differences_are_the_settings_that_changed_and_are_not_free(bound: set[int], free: set[int]) -> None:
    config = Config()
    for name, value in [*(CHANGES[i] for i in bound), *(FREED[i] for i in free)]:
        config = override(config, nested({name: value}))
    assert set(differences(config, Config())) == {CHANGES[i][0] for i in bound}
    assert set(differences(Config(), config)) == {CHANGES[i][0] for i in bound}


def test_what_may_differ_is_a_setting_or_a_group_of_them() -> None:
    names = [leaf.name for leaf in leaves(Config())]
    for free in MAY_DIFFER:
        assert (
            [name for name in names if name.startswith(free)]
            == [name for name in names if name == free or (free.endswith(".") and name.startswith(free))]
            != []
        )


def test_a_file_says_which_version_wrote_it() -> None:
    for protocol in PROTOCOLS:
        for backbone in BACKBONES:
            config = preset(protocol, "sinusoid" if backbone == "mlp" else "cifar-fs", backbone)
            written = json.loads(json.dumps(to_file(config)))
            assert written["npbml"] == __version__ and from_file(written, pytest.fail) == config


# What version 0.1 wrote, as JSON, for settings of which some are not the defaults.
OLD: dict[str, Any] = {
    "backbone": "conv4",
    "target": "classes",
    "ways": 5,
    "net": {
        "filters": 128,
        "widths": None,
        "group_blocks": 4,
        "frozen_blocks": None,
        "bias": False,
        "activation": "auto",
        "embedding": "mean",
        "final_norm": False,
        "stem_norm": "batch",
        "tail_norm": "batch",
        "affine": "pretrained",
        "per_step_norm": False,
    },
    "head": {"kind": "unicorn", "copy": "expand", "centred": False},
    "precondition": {
        "chain": [],
        "uniform": False,
        "decay": 0.0005,
        "context": 300,
        "passes": 2,
        "mixture": 5,
    },
    "warp": {
        "kind": "learned",
        "blocks": "last",
        "head": False,
        "position": "auto",
        "kernel": 3,
        "bias": False,
        "norm_in": False,
        "activation": "none",
        "residual": False,
        "norm": True,
    },
    "film": {"enabled": True, "conditioning": "item", "refresh": "pass", "shortcut": False, "adapt": False},
    "loss": {
        "base": True,
        "inductive": True,
        "transductive": True,
        "regulariser": True,
        "adaptive_support": False,
        "adaptive_query": False,
        "critic_steps": 0,
        "hidden": 40,
        "film": True,
        "inputs": "logits",
        "target": "argmax",
        "trust": 0.5,
        "activation": "identity",
        "share": False,
        "statistics": "exact",
        "averaged": False,
    },
    "inner": {
        "steps": 5,
        "test_steps": None,
        "lr": 0.01,
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 0.0005,
        "layers": "all",
        "last_blocks": None,
        "batch": "joint",
        "final_batch": "query",
    },
    "outer": {
        "objective": "final",
        "items": "query",
        "order": 2,
        "first_order_epochs": 0,
        "second_order_steps": None,
        "epochs": 100,
        "multi_step_epochs": 15,
        "hessian_free": False,
        "start_weight": 1.0,
    },
    "init": {"source": "pretrained", "weights": "normal", "std": 0.01, "uniform_bias": False},
    "relation": {
        "kind": "encoder",
        "temperature": 8.0,
        "enlarged": 1.25,
        "turns": True,
        "mirrored": True,
        "centred": True,
        "evened": True,
        "rounds": 3,
        "widths": [8, 16],
        "pools": 1,
        "combine": "mean",
        "steps": 70,
        "lr": 0.002,
        "clip_norm": 0.0,
        "validate_every": 35,
        "validation_tasks": 40,
        "augment": False,
        "crop_size": 24,
    },
    "dataset": "cifar-fs",
    "method": "npbml",
    "protocol": "quick",
    "baselines": ["maml", "prototypes"],
    "shots": 5,
    "queries": 15,
    "seed": 0,
    "image_size": None,
    "device": "auto",
    "checkpoint_seconds": 20.0,
    "pretrain": {
        "steps": 200000,
        "batch": 64,
        "lr": 0.01,
        "momentum": 0.9,
        "weight_decay": 0.0005,
        "schedule": "multistep",
        "validate_every": 500,
        "validation_tasks": 600,
        "validation_shots": 5,
        "prototype_batch": "separate",
        "warp": True,
        "taught": True,
        "turns": True,
        "crop_size": None,
        "augment": {"crop_scale_low": 0.08, "jitter": 0.4, "flip": True},
    },
    "train": {
        "steps": 30000,
        "meta_batch": None,
        "lr": {"theta": 1e-05, "omega": 1e-05, "phi": 1e-05, "psi": 1e-05},
        "optimizer": "adam",
        "weight_decay": 0.0,
        "schedule": "constant",
        "clip": "none",
        "clip_at": 10.0,
        "skips": 7,
        "validate_every": 500,
        "validation_tasks": 600,
        "ensemble": 1,
        "augment": False,
        "crop_scale_low": None,
        "coverage": "random",
        "ahead": True,
    },
    "test": {"tasks": 600, "together": 4},
    "engine": {
        "tasks": "together",
        "chunk": None,
        "compile": "auto",
        "graph": "off",
        "precision": "auto",
        "remat": False,
        "deterministic": True,
    },
}
# What is not at its default there, by today's names.
TODAY: dict[str, Any] = {
    "dataset": "cifar-fs",
    "shots": 5,
    "loss": {"score_weight": 0.5},
    "scorer": {
        "kind": "encoder",
        "temperature": 8.0,
        "enlarge": 1.25,
        "rotations": True,
        "flip": True,
        "centre": True,
        "whiten": True,
        "rounds": 3,
        "widths": [8, 16],
        "pools": 1,
        "combine": "mean",
    },
    "scorer_training": {
        "steps": 70,
        "lr": 0.002,
        "validate_every": 35,
        "validation_tasks": 40,
        "augment": False,
        "crop_size": 24,
    },
    "pretrain": {"batch_size": 64, "distill": True, "rotations": True},
    "train": {"max_skipped": 7, "prefetch": True},
    "test": {"batch_size": 4},
    "engine": {"tasks": "vmap", "cuda_graph": "off"},
}
RENAMED = {
    "loss.trust": "loss.score_weight",
    **{
        f"relation.{name}": f"scorer.{name}"
        for name in ("kind", "temperature", "rounds", "widths", "pools", "combine")
    },
    "relation.enlarged": "scorer.enlarge",
    "relation.turns": "scorer.rotations",
    "relation.mirrored": "scorer.flip",
    "relation.centred": "scorer.centre",
    "relation.evened": "scorer.whiten",
    **{f"relation.{name}": f"scorer_training.{name}" for name in TODAY["scorer_training"]},
    "pretrain.batch": "pretrain.batch_size",
    "pretrain.taught": "pretrain.distill",
    "pretrain.turns": "pretrain.rotations",
    "train.skips": "train.max_skipped",
    "train.ahead": "train.prefetch",
    "test.together": "test.batch_size",
    "engine.graph": "engine.cuda_graph",
}


def changed(name: str, value: Any) -> dict[str, Any]:
    """OLD with one setting changed, by its full name."""
    tables = copy.deepcopy(OLD)
    *groups, last = name.split(".")
    table = tables
    for group in groups:
        table = table[group]
    table[last] = value
    return tables


def test_a_configuration_of_version_one_is_read_by_todays_names_and_each_is_told() -> None:
    told: list[str] = []
    config = from_file(OLD, told.append)
    assert config == override(Config(), TODAY)
    check_config(config)
    renamed = [words for words in told if "called" in words]
    assert sorted(renamed) == sorted(f"The setting {old} is called {new} now." for old, new in RENAMED.items())
    gone = [words for words in told if words not in renamed]
    assert len(gone) == len(REMOVED)
    assert all(any(f"{name} is gone" in words for words in gone) for name in REMOVED)


def test_a_relation_network_of_version_one_is_called_so_now() -> None:
    assert from_file(changed("relation.kind", "network")).learner.scorer.kind == "relation-network"
    assert from_file(changed("engine.tasks", "loop")).engine.tasks == "loop"


def test_every_setting_of_version_one_has_its_place() -> None:
    today = {leaf.old_name for leaf in leaves(Config())}
    later = {"loss.terms", "loss.symmetric_support", "loss.symmetric_query", "loss.balanced", "symmetric"}
    later |= {"head.temperature", "head.temperature_by_shape", "head.normalised", "inner.max_step", "loss.context"}
    later |= {"shapes", "train.temperature", "train.rotations", "train.mix", "test.shapes", "test.shape_tasks"}
    later |= {"net.task_mean", "loss.class_weights"}
    assert set(flat(OLD)) == (today - later) | set(REMOVED)


@pytest.mark.parametrize("name", REMOVED)
def test_a_setting_that_is_gone_is_accepted_at_its_constant_and_refused_at_another(name: str) -> None:
    constant = flat(OLD)[name]
    assert constant == REMOVED[name]
    assert from_file(changed(name, constant)) == from_file(OLD)
    others = {"random": "balanced", None: 0.5, False: True}
    other = others[constant] if constant in others and not isinstance(constant, float) else constant + 1
    with pytest.raises(SettingError, match=rf"{name}={other} is from an earlier version.* {constant}"):
        from_file(changed(name, other))


def test_todays_names_are_not_those_of_version_one() -> None:
    """A file that says it is of this version is read as it is."""
    for name, value in (("relation", {"kind": "encoder"}), ("net", {"group_blocks": 4})):
        with pytest.raises(SettingError, match=f"no setting '{name}"):
            from_file({**to_file(Config()), name: value})


def test_what_a_file_does_not_have_is_as_it_was_in_the_version_that_wrote_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    partial = copy.deepcopy(OLD)
    del partial["inner"]["lr"], partial["relation"]["rounds"], partial["engine"]
    assert from_file(partial).learner.inner.lr == 0.01
    old = {"inner": {"lr": 0.7}, "scorer": {"rounds": 9}, "engine": {"remat": True}}
    monkeypatch.setitem(identity.OLD_DEFAULTS, "0.1", old)
    config = from_file(partial)
    assert (config.learner.inner.lr, config.learner.scorer.rounds, config.engine.remat) == (0.7, 9, True)
    assert config.engine.tasks == Config().engine.tasks
    assert from_file(OLD).learner.inner.lr == 0.01, "what the file says goes before"
    today = to_file(override(Config(), TODAY))
    del today["inner"]
    assert from_file(today).learner.inner.lr == 0.01, "another version has other defaults"
    monkeypatch.setitem(identity.OLD_DEFAULTS, __version__, {"inner": {"lr": 0.2}})
    assert from_file(today).learner.inner.lr == 0.2


def test_settings_that_came_later_are_as_if_they_were_not_there() -> None:
    """A file of an earlier version lacks them: they are at their defaults, whatever the protocol says now."""
    written = to_dict(preset("best", "cifar-fs"))
    assert from_file(written) == preset("best", "cifar-fs")
    del written["pretrain"]["rotations"], written["engine"]
    read = from_file(written)
    assert read.pretrain.rotations is False and read.pretrain.batch_size == 512
    with pytest.raises(SettingError, match="there is no dataset"):
        from_file({"protocol": "best"})


@pytest.mark.parametrize("data", [[], [1], [[1]], "quick", ["ab"], 3, None, {}])
def test_what_is_no_table_is_refused(data: Any) -> None:
    with pytest.raises(SettingError):
        from_file(data)


def test_defaults_leave_no_trace_in_a_fingerprint() -> None:
    bare, method = Config(), "npbml"
    known = fingerprint(bare, method)
    assert known == hashlib.sha256(b'["npbml", {}]').hexdigest()[:16]
    assert fingerprint(override(bare, {"engine": {"compile": "off"}, "test": {"tasks": 7}}), method) == known
    other = override(bare, {"net": {"filters": 3}, "seed": 1})
    assert fingerprint(other, method, ("seed",)) == fingerprint(override(bare, {"seed": 1}), method, ("seed",))
    assert len({fingerprint(other, method), fingerprint(other, method, ("seed",)), known}) == 3
    assert fingerprint(bare, "pretrain") != known


def test_a_fingerprint_is_made_of_the_names_of_version_one() -> None:
    config = override(Config(), {"scorer": {"kind": "encoder", "whiten": True}, "pretrain": {"batch_size": 64}})
    text = b'["npbml", {"pretrain.batch": 64, "relation.evened": true, "relation.kind": "encoder"}]'
    assert fingerprint(config, "npbml") == hashlib.sha256(text).hexdigest()[:16]


# A pre-trained scorer that teaches, and all else that has another name now, by the names of version 0.1.
TAUGHT: dict[str, Any] = {
    "relation": {"kind": "encoder", "widths": [8, 16], "evened": True, "crop_size": 24},
    "pretrain": {"taught": True, "batch": 64},
    "train": {"skips": 9, "ahead": False},
    "test": {"together": 3},
    "engine": {"graph": "off", "tasks": "together"},
    "loss": {"trust": 0.5},
}
# Presets with changes, and the fingerprints that version 0.1 made of their stages.
FINGERPRINTS: list[tuple[tuple[str, str, str, str, int], dict[str, Any], dict[str, str]]] = [
    (
        ("quick", "glyphs", "conv4", "npbml", 1),
        {},
        {
            "pretrain": "a27ff43d3141fafb",
            "relation": "d9a42f49440fc2d2",
            "npbml": "950ada7547dfec38",
            "maml": "5e9b608261f9b1b5",
            "gap": "78615e05b768d47d",
        },
    ),
    (
        ("published", "mini-imagenet", "resnet12", "npbml", 5),
        {},
        {
            "pretrain": "9f65272ca155d107",
            "relation": "e805453ba4a3bd7c",
            "npbml": "d1f9aae0dfb7770e",
            "npbml-quirks": "1267daf4d5f13ea5",
        },
    ),
    (("published", "cifar-fs", "conv4", "sca", 1), {}, {"sca": "02ba40b3ebc609e6"}),
    (("published", "tiered-imagenet", "conv4", "gap", 5), {"seed": 2}, {"gap": "11dbbc95cbb087cb"}),
    (
        ("fast", "fc100", "wrn28-10", "unicorn-maml", 5),
        {},
        {"pretrain": "5d50257e481d70ba", "unicorn-maml": "84a2f201f7db3313"},
    ),
    (
        ("common", "omniglot", "conv4", "npbml", 1),
        {"ways": 20},
        {
            "pretrain": "0a1c155dc0bbde3f",
            "relation": "efd4ad4d752ad214",
            "metal": "1a33f24bd5ef227f",
            "warpgrad": "fc2af86843106b37",
            "maml++": "7d57ddcef431d68c",
        },
    ),
    (
        ("best", "cifar-fs", "conv4", "npbml", 1),
        {},
        {"pretrain": "bbe5ce0d99a344e5", "relation": "23d4e5714df9db9e", "npbml": "94004a7845ab3875"},
    ),
    (
        ("best", "mini-imagenet", "resnet12-wide", "npbml", 5),
        {},
        {
            "pretrain": "20adc045b7669a7f-7ca76f94ad346a62",
            "relation": "7ca76f94ad346a62",
            "npbml": "4e9ec5a57c2e7fa2",
            "maml": "59308a55f3197d2d",
        },
    ),
    (
        ("plain", "cifar-fs", "resnet12", "npbml", 1),
        {},
        {"pretrain": "16522e0dc3de4674", "npbml": "fe5c91d07fda2126"},
    ),
    (
        ("quick", "sinusoid", "conv4", "npbml", 10),
        {},
        {"npbml": "a21b53296bdc0882", "metasgd": "241afdd6454a2bb2"},
    ),
    (
        ("quick", "glyphs", "conv4", "npbml", 1),
        TAUGHT,
        {
            "pretrain": "589edd1383b53ccb-1e81dadb521e89a2",
            "relation": "1e81dadb521e89a2",
            "npbml": "b82bc2c53fe059cf",
            "maml": "d5acf21043389acb",
        },
    ),
]


@pytest.mark.parametrize(
    ("chosen", "changes", "expected"),
    FINGERPRINTS,
    ids=["-".join(map(str, chosen)) for chosen, _, _ in FINGERPRINTS],
)
def test_fingerprints_are_those_of_version_one(
    chosen: tuple[str, str, str, str, int], changes: dict[str, Any], expected: dict[str, str]
) -> None:
    today = from_old_names(Config, changes, REMOVED, lambda words: None)
    config = override(preset(*chosen), today)
    assert {stage: stage_fingerprint(config, stage) for stage in expected} == expected


def test_every_result_of_the_repository_can_be_read() -> None:
    folder = Path(__file__).parents[2] / "results"
    files = sorted(folder.glob("*.json"))
    assert files, "there are results"
    for file, result in zip(files, read_results(folder), strict=True):
        data = json.loads(file.read_text())
        assert (result.accuracy, result.method) == (data["accuracy"], data["method"])
        config = from_file(data["config"])
        assert (config.method, config.seed, config.shots) == (result.method, result.seed, result.shots)
        check_config(config)


@pytest.mark.parametrize("name", shipped())
def test_the_settings_of_every_learner_that_comes_along_can_be_read(name: str) -> None:
    _, about = load_tensors(LEARNERS / f"{name}.safetensors")
    settings = from_dict(LearnerSettings, about["settings"], LearnerSettings())
    check_learner(settings)
    assert load(name, device="cpu").settings == settings


def test_a_learner_comes_along() -> None:
    assert "cifar-fs-conv4" in shipped()
