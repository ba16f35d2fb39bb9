"""The presets are the paper's protocol and a quick one, and a configuration survives its file."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npbml.config import (
    PROTOCOLS,
    Config,
    check_config,
    check_method,
    differences,
    fingerprint,
    override,
    preset,
    read_file,
    saved_config,
    with_device,
)
from npbml.data.sets import NAMES
from npbml.errors import RunError, SettingError
from npbml.methods import RECIPES
from npbml.nets.network import WARP_POSITIONS, block_widths
from npbml.run_folder import read_config
from npbml.settings import describe, to_dict

BACKBONES = tuple(name for name in WARP_POSITIONS if name != "mlp")


def flat(config: Config) -> dict[str, Any]:
    """Every setting by its full name."""
    return {name: value for name, _, value in describe(Config, config)}


def test_published_is_the_papers_protocol() -> None:
    """The paper's section 4 and METHODS 18.7 to 18.10."""
    settings = flat(preset("published", "mini-imagenet"))
    expected = {
        "ways": 5,
        "queries": 15,
        "net.filters": 128,
        "inner.steps": 5,
        "inner.lr": 0.01,
        "inner.momentum": 0.9,
        "inner.nesterov": True,
        "inner.weight_decay": 5e-4,
        "outer.order": 2,
        "pretrain.steps": 200_000,
        "pretrain.batch": 128,
        "pretrain.lr": 0.01,
        "pretrain.momentum": 0.9,
        "pretrain.schedule": "multistep",
        "pretrain.augment.flip": True,
        "relation.steps": 100_000,
        "relation.lr": 1e-3,
        "train.steps": 30_000,
        "train.lr.theta": 1e-5,
        "train.lr.omega": 1e-5,
        "train.lr.phi": 1e-5,
        "train.lr.psi": 1e-5,
        "train.optimizer": "adam",
        "train.weight_decay": 0.0,
        "train.schedule": "constant",
        "train.clip": "none",
        "train.augment": False,
        "test.tasks": 600,
    }
    assert {name: settings[name] for name in expected} == expected


@pytest.mark.parametrize("protocol", ["quick", "common", "best", "plain"])
def test_our_own_protocols_clip_the_meta_gradient_but_for_regression(protocol: str) -> None:
    """Squared errors have gradients of any size from the start."""
    train = preset(protocol, "cifar-fs").train
    assert (train.clip, train.clip_at) == ("norm", 3.0)
    assert preset(protocol, "sinusoid").train.clip == "none"


@pytest.mark.parametrize(("shots", "tasks"), [(1, 4), (2, 2), (5, 2), (20, 2)])
def test_a_meta_batch_is_four_tasks_of_one_shot_or_two_of_more(shots: int, tasks: int) -> None:
    config = override(preset("published"), {"shots": shots})
    assert config.meta_batch == tasks
    assert override(config, {"train": {"meta_batch": 7}}).meta_batch == 7


@pytest.mark.parametrize("dataset", NAMES)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_the_decay_of_pretraining_is_the_papers(dataset: str, backbone: str) -> None:
    small = backbone.startswith("resnet12") and dataset in ("mini-imagenet", "cifar-fs", "fc100")
    assert preset("published", dataset, backbone).pretrain.weight_decay == (0.01 if small else 5e-4)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dataset", [*NAMES, "/my/pictures"])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_every_preset_is_admissible_and_what_it_says_it_is(protocol: str, dataset: str, backbone: str) -> None:
    config = preset(protocol, dataset, backbone)
    check_config(config)
    assert (config.protocol, config.dataset, config.backbone) == (protocol, dataset, backbone)
    assert config.pretrain.augment.flip is (dataset not in ("glyphs", "omniglot"))


def test_a_plain_run_is_the_quick_protocol_on_glyphs() -> None:
    assert (Config().protocol, Config().dataset, Config().backbone) == ("quick", "glyphs", "conv4")
    quick, published = preset("quick"), preset("published")
    assert quick.train.steps < published.train.steps and quick.pretrain.steps < published.pretrain.steps
    assert quick.inner == published.inner and quick.warp == published.warp and quick.film == published.film


@pytest.mark.parametrize("backbone", ["conv4", "resnet12", "resnet12-wide"])
def test_plain_is_best_but_for_its_scores(backbone: str) -> None:
    best, plain = (preset(protocol, "mini-imagenet", backbone) for protocol in ("best", "plain"))
    scores = {f"relation.{name}" for name in ("kind", "enlarged", "turns", "centred", "evened", "rounds")}
    if backbone == "resnet12-wide":  # its images are larger than the crops that it learns from as they are
        scores = scores - {"relation.enlarged"} | {"relation.mirrored"}
    taught = set() if backbone == "conv4" else {"pretrain.taught"}
    assert set(differences(best, plain)) == {"protocol", "loss.trust", *scores, *taught}
    for method in RECIPES:
        check_method(best, method)
        check_method(plain, method)


def test_what_scores_for_the_wide_network_is_as_wide() -> None:
    narrow, wide = (preset("best", "cifar-fs", backbone) for backbone in ("resnet12", "resnet12-wide"))
    assert differences(narrow, wide) == ["backbone", "relation.widths"]
    assert wide.relation.widths == block_widths("resnet12-wide", wide.net)


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(
        SettingError, match="protocol takes one of published, fast, best, plain, quick, common, not 'slow'"
    ):
        preset("slow")


def test_an_unknown_backbone_is_refused() -> None:
    with pytest.raises(SettingError, match="conv4, resnet12, resnet12-wide, wrn28-10, mlp, not 'vgg'"):
        preset("quick", "glyphs", "vgg")


def nested(name: str, value: Any) -> dict[str, Any]:
    """`a.b.c` and a value as tables."""
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


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
    ("pretrain.augment.jitter", 0.0),
    ("relation.combine", "mean"),
    ("loss.share", True),
]
FREED: list[tuple[str, Any]] = [
    ("baselines", ()),
    ("checkpoint_seconds", 1.0),
    ("device", "cpu"),
    ("method", "maml"),
    ("test.tasks", 5),
    ("test.together", 3),
]


@pytest.mark.parametrize(("name", "value"), [*CHANGES, *FREED], ids=[name for name, _ in (*CHANGES, *FREED)])
def test_an_override_changes_one_setting_and_no_other(name: str, value: Any) -> None:
    before, after = flat(Config()), flat(override(Config(), nested(name, value)))
    assert {key for key in before if before[key] != after[key]} == {name}
    assert after[name] == value


@given(st.sets(st.sampled_from(range(len(CHANGES)))), st.sets(st.sampled_from(range(len(FREED)))))
def test_differences_are_the_settings_that_changed_and_are_not_free(bound: set[int], free: set[int]) -> None:
    config = Config()
    for name, value in [*(CHANGES[i] for i in bound), *(FREED[i] for i in free)]:
        config = override(config, nested(name, value))
    assert set(differences(config, Config())) == {CHANGES[i][0] for i in bound}
    assert set(differences(Config(), config)) == {CHANGES[i][0] for i in bound}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_configuration_survives_the_run_folder(tmp_path: Path, protocol: str, backbone: str) -> None:
    config = preset(protocol, "cifar-fs", backbone)
    for name, value in (*CHANGES[:2], *CHANGES[3:], *FREED):
        config = override(config, nested(name, value))
    (tmp_path / "config.json").write_text(json.dumps(to_dict(config)))
    assert read_config(tmp_path) == config


def test_a_configuration_that_is_not_there_or_not_one_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is not a run folder: it has no config\.json"):
        read_config(tmp_path)
    whole = to_dict(Config())
    for content in (
        "",
        "{",
        "[]",
        "3",
        "{}",
        json.dumps({**whole, "wayz": 3}),
        json.dumps({**whole, "ways": 1}),
        json.dumps({**whole, "protocol": ["quick"]}),
        json.dumps({**whole, "dataset": None}),
        json.dumps({**whole, "inner": 3}),
    ):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(RunError, match=r"config\.json (cannot be read|is damaged or of another version)"):
            read_config(tmp_path)


def test_toml_and_json_say_the_same(tmp_path: Path) -> None:
    tables = {"ways": 3, "net": {"widths": [3, 4], "stem_norm": "running"}, "train": {"lr": {"phi": 0.001}}}
    (tmp_path / "a.json").write_text(json.dumps(tables))
    (tmp_path / "a.toml").write_text(
        'ways = 3\nnet = {widths = [3, 4], stem_norm = "running"}\n[train.lr]\nphi = 1e-3\n'
    )
    assert read_file(tmp_path / "a.toml") == read_file(tmp_path / "a.json") == tables


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", b"ways = \n[", r"a\.toml is not TOML"),
        ("a.json", b"{ways: 3}", r"a\.json is not JSON"),
        ("a.toml", b"\xff\xfe", r"a\.toml is not TOML"),
        ("a.json", b"[1, 2]", r"table of settings"),
        ("a.json", b"3", r"table of settings"),
    ],
)
def test_files_that_are_no_settings_are_refused_by_name(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SettingError, match=message):
        read_file(tmp_path / name)


def test_a_missing_settings_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"gone\.toml cannot be read: No such file"):
        read_file(tmp_path / "gone.toml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inner": {"batch": "support"}}, "inner.batch=support.*loss.transductive"),
        ({"film": {"refresh": "task"}}, "film.refresh=task.*film.conditioning=batch"),
        ({"inner": {"momentum": 0.0}}, "inner.nesterov needs inner.momentum above 0"),
        ({"warp": {"position": "before_addition"}}, "warp.position=before_addition does not exist in conv4"),
        ({"net": {"frozen_blocks": 4}}, "net.frozen_blocks=4 leaves no block"),
        (
            {"loss": {"base": False, "inductive": False, "transductive": False, "regulariser": False}},
            "loss has every term switched off",
        ),
        ({"pretrain": {"augment": {"flip": True}}}, "pretrain.augment.flip mirrors images.*glyphs"),
        ({"relation": {"mirrored": True}}, "relation.mirrored mirrors images.*glyphs"),
        ({"pretrain": {"crop_size": 24}, "net": {"embedding": "flatten"}}, "pretrain.crop_size.*embedding=mean"),
        ({"train": {"crop_scale_low": 0.2}}, "train.crop_scale_low is about augmented tasks"),
        ({"pretrain": {"taught": True}}, "pretrain.taught.*there is none: set relation.kind=encoder"),
        *(
            (
                {"relation": {"kind": kind, "enlarged": 1.2}, "net": {"embedding": "flatten"}},
                "relation.enlarged=1.2.*set net.embedding=mean",
            )
            for kind in ("prototypes", "both")
        ),
        (
            {
                "init": {"source": "scratch"},
                "net": {"frozen_blocks": 0, "affine": "meta"},
                "pretrain": {"warp": False},
                "relation": {"kind": "both"},
            },
            "relation.kind=both scores by the pre-trained encoder, and init.source=scratch has none",
        ),
        ({"loss": {"share": True, "transductive": False}}, "loss.share needs both"),
        ({"relation": {"widths": []}}, "relation.widths"),
        ({"backbone": "resnet12", "net": {"widths": []}}, "net.widths"),
        ({"backbone": "resnet12", "net": {"widths": [3, 3], "frozen_blocks": 3}}, "net.frozen_blocks"),
        (
            {"train": {"lr": {"theta": 0.0, "omega": 0.0, "phi": 0.0, "psi": 0.0}}},
            "train.lr leaves nothing to meta-learn",
        ),
    ],
)
def test_settings_at_odds_are_refused_at_the_door(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        check_config(override(preset("quick"), changes))


@pytest.mark.parametrize("name", ["inner.lr", "train.lr.theta", "pretrain.weight_decay", "checkpoint_seconds"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_number_that_is_not_finite_is_refused(name: str, value: float) -> None:
    with pytest.raises(SettingError, match=f"{name} "):
        override(Config(), nested(name, value))


def test_a_device_is_changed_and_nothing_else() -> None:
    changed = with_device(Config(), "cpu")
    assert changed.device == "cpu" and dataclasses.replace(changed, device="auto") == Config()


def test_settings_that_came_later_are_as_if_they_were_not_there() -> None:
    """A file of an earlier version lacks them: they are at their defaults, whatever the protocol says now."""
    written = to_dict(preset("best", "cifar-fs"))
    assert saved_config(written) == preset("best", "cifar-fs")
    del written["pretrain"]["turns"], written["engine"]
    read = saved_config(written)
    assert read.pretrain.turns is False and read.pretrain.batch == 512
    with pytest.raises(SettingError, match="there is no dataset"):
        saved_config({"protocol": "best"})


def test_defaults_leave_no_trace_in_a_fingerprint() -> None:
    bare, method = Config(), "npbml"
    known = fingerprint(bare, method)
    assert known == hashlib.sha256(b'["npbml", {}]').hexdigest()[:16]
    assert fingerprint(override(bare, {"engine": {"compile": "off"}, "test": {"tasks": 7}}), method) == known
    other = override(bare, {"net": {"filters": 3}, "seed": 1})
    assert fingerprint(other, method, ("seed",)) == fingerprint(override(bare, {"seed": 1}), method, ("seed",))
    assert len({fingerprint(other, method), fingerprint(other, method, ("seed",)), known}) == 3
    assert fingerprint(bare, "pretrain") != known
