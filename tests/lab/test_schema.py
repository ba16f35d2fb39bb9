"""Which settings a run has, how they are changed and read, and which of them make no sense together."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from npbml.errors import SettingError
from npbml.lab.protocols import preset
from npbml.lab.schema import (
    Config,
    check_config,
    check_method,
    method_config,
    override,
    read_file,
    refuse_contradiction,
)
from npbml.methods import trained_methods
from npbml.settings import flat, leaves, nested

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
    ("baselines", ()),
    ("checkpoint_seconds", 1.0),
    ("device", "cpu"),
    ("method", "maml"),
    ("test.tasks", 5),
    ("test.batch_size", 3),
]


def values(config: Config) -> dict[str, Any]:
    """Every setting by its full name."""
    return {leaf.name: leaf.value for leaf in leaves(config)}


@pytest.mark.parametrize(("name", "value"), CHANGES, ids=[name for name, _ in CHANGES])
def test_an_override_changes_one_setting_and_no_other(name: str, value: Any) -> None:
    before, after = values(Config()), values(override(Config(), nested({name: value})))
    assert {key for key in before if before[key] != after[key]} == {name}
    assert after[name] == value


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
        ({"scorer": {"flip": True}}, "scorer.flip mirrors images.*glyphs"),
        ({"pretrain": {"crop_size": 24}, "net": {"embedding": "flatten"}}, "pretrain.crop_size.*embedding=mean"),
        ({"pretrain": {"distill": True}}, "pretrain.distill.*there is none: set scorer.kind=encoder"),
        *(
            (
                {"scorer": {"kind": kind, "enlarge": 1.2}, "net": {"embedding": "flatten"}},
                "scorer.enlarge=1.2.*set net.embedding=mean",
            )
            for kind in ("prototypes", "both")
        ),
        (
            {
                "init": {"source": "scratch"},
                "net": {"frozen_blocks": 0, "affine": "meta"},
                "pretrain": {"warp": False},
                "scorer": {"kind": "both"},
            },
            "scorer.kind=both scores by the pre-trained encoder, and init.source=scratch has none",
        ),
        ({"loss": {"share": True, "transductive": False}}, "loss.share needs both"),
        ({"scorer": {"widths": []}}, "scorer.widths"),
        ({"backbone": "resnet12", "net": {"widths": []}}, "net.widths"),
        ({"backbone": "resnet12", "net": {"widths": [3, 3], "frozen_blocks": 3}}, "net.frozen_blocks"),
        (
            {"train": {"lr": {"theta": 0.0, "omega": 0.0, "phi": 0.0, "psi": 0.0}}},
            "train.lr leaves nothing to meta-learn",
        ),
        ({"method": "mamml"}, "no method 'mamml'"),
    ],
)
def test_settings_at_odds_are_refused_at_the_door(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        check_config(override(preset("quick"), changes))


@pytest.mark.parametrize(
    ("dataset", "changes"),
    [
        ("sinusoid", {"backbone": "conv4"}),
        ("sinusoid", {"target": "classes"}),
        ("glyphs", {"backbone": "mlp"}),
        ("glyphs", {"target": "values"}),
        ("/my/pictures", {"backbone": "mlp", "target": "values"}),
        ("sinusoid", {"backbone": "conv4", "target": "classes"}),
    ],
)
def test_waves_their_network_and_values_belong_together(dataset: str, changes: dict[str, Any]) -> None:
    target, backbone = ("values", "mlp") if dataset == "sinusoid" else ("classes", "conv4, .*efficientnet-lite0")
    with pytest.raises(
        SettingError, match=f"{dataset} .*needs target={target} and backbone={backbone}, not target="
    ):
        check_config(override(preset("quick", dataset), changes))


def test_waves_have_no_images_to_augment_and_no_prototypes() -> None:
    waves = preset("quick", "sinusoid")
    with pytest.raises(SettingError, match=r"train\.augment is about images of classes"):
        check_config(override(waves, {"train": {"augment": True}}))
    with pytest.raises(SettingError, match="prototypes stands for classes, and sinusoid has none"):
        check_config(override(waves, {"method": "prototypes"}))
    check_method(preset("quick"), "prototypes")


@pytest.mark.parametrize("name", ["inner.lr", "train.lr.theta", "pretrain.weight_decay", "checkpoint_seconds"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_number_that_is_not_finite_is_refused(name: str, value: float) -> None:
    with pytest.raises(SettingError, match=f"{name} "):
        override(Config(), nested({name: value}))


def test_a_device_is_changed_and_nothing_else() -> None:
    changed = override(Config(), {"device": "cpu"})
    assert changed.device == "cpu" and dataclasses.replace(changed, device="auto") == Config()


def test_a_method_changes_its_rule_and_leaves_the_run_as_it_is() -> None:
    config = override(preset("quick"), {"inner": {"lr": 0.3}})
    for method in trained_methods():
        own = method_config(config, method)
        assert own.method == method
        assert dataclasses.replace(own, learner=config.learner, method=config.method) == config
    assert method_config(config, "npbml") == config and method_config(config, "gap").learner.inner.lr == 0.3


@pytest.mark.parametrize(
    ("method", "asked", "message"),
    [
        ("maml", {"loss.inductive": True}, "The method maml sets loss.inductive=False, but True was asked for"),
        ("gap", {"precondition.chain": ["svd", "rates"]}, "The method gap sets precondition.chain="),
        ("boil", {"head.kind": "unicorn"}, "The method boil sets head.kind=linear, but unicorn was asked for"),
        ("maml", {"loss.inductive": False, "inner.lr": 3.0}, None),
        ("gap", {"precondition.chain": ["svd"]}, None),
        ("npbml", {"loss.inductive": False}, None),
    ],
)
def test_what_a_method_sets_cannot_be_asked_for_otherwise(
    method: str, asked: dict[str, Any], message: str | None
) -> None:
    config = override(preset("quick", method=method), {"method": method, **nested(asked)})
    if message is None:
        refuse_contradiction(config, flat(nested(asked)))
        return
    with pytest.raises(SettingError, match=message):
        refuse_contradiction(config, asked)
