"""A method is the run's settings with a recipe on top, and nothing else."""

from typing import Any

import pytest
import torch

from npbml.config import Config, override, preset
from npbml.data.tasks import Task
from npbml.errors import SettingError
from npbml.learner import ImageSpec, Learner
from npbml.methods import RECIPES, method_config, refuse_contradiction
from npbml.settings import describe

SMALL: dict[str, Any] = {
    "ways": 3,
    "net": {"filters": 3, "widths": [2, 2, 2, 3]},
    "loss": {"hidden": 4},
    "relation": {"widths": [2], "pools": 1},
}
IMAGES = ImageSpec(1, 16, (0.5,), (0.25,))


def changed(config: Config, other: Config) -> dict[str, Any]:
    """What `other` has in place of `config`'s settings, where they differ."""
    rows = zip(describe(Config, config), describe(Config, other), strict=True)
    return {name: theirs for (name, _, mine), (_, _, theirs) in rows if mine != theirs}


def flat(tables: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name, value in tables.items():
        rows |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return rows


def test_maml_switches_off_the_learned_rule_and_nothing_else() -> None:
    config = override(preset("quick"), {"ways": 7, "inner": {"steps": 3}, "train": {"lr": {"theta": 0.5}}})
    assert changed(config, method_config(config, "maml")) == {
        "method": "maml",
        "warp.kind": "fixed",
        "film.enabled": False,
        "loss.inductive": False,
        "loss.transductive": False,
        "loss.regulariser": False,
    }


@pytest.mark.parametrize("method", RECIPES)
@pytest.mark.parametrize("protocol", ["published", "quick"])
def test_a_method_is_the_runs_settings_with_its_recipe(method: str, protocol: str) -> None:
    config = override(preset(protocol, "fc100", "resnet12"), {"shots": 5, "seed": 3, "method": "maml"})
    expected = flat(RECIPES[method].settings) | ({} if method == "maml" else {"method": method})
    assert changed(config, method_config(config, method)) == expected
    assert method_config(method_config(config, method), method) == method_config(config, method)


def test_npbml_is_the_full_method() -> None:
    assert method_config(Config(), "npbml") == Config()
    assert RECIPES["npbml"].settings == {}


@pytest.mark.parametrize("method", RECIPES)
@pytest.mark.parametrize("backbone", ["conv4", "resnet12"])
def test_every_recipe_makes_a_learner_that_learns(method: str, backbone: str) -> None:
    config = override(preset("quick", "fc100", backbone), SMALL)
    learner = Learner(method_config(config, method), IMAGES)
    groups = learner.groups()
    rule = {letter for letter in ("omega", "phi", "psi") if groups[letter]}
    assert groups["theta"] and rule == (set() if method == "maml" else {"omega", "phi", "psi"})
    assert (learner.relation is None) is (method == "maml")
    sets = [torch.randn(1, count, 1, 16, 16) for count in (3, 6)]
    labels = [torch.arange(3).repeat_interleave(count).unsqueeze(0) for count in (1, 2)]
    loss = learner.meta_loss(Task(sets[0], labels[0], sets[1], labels[1]))
    loss.backward()
    assert loss.isfinite() and any(p.grad is not None and p.grad.any() for p in groups["theta"].values())


def test_an_unknown_method_is_answered_with_the_names() -> None:
    with pytest.raises(SettingError) as error:
        method_config(Config(), "mamml")
    assert "no method 'mamml'" in str(error.value)
    assert all(name in str(error.value) for name in RECIPES)


@pytest.mark.parametrize(
    ("method", "changes"),
    [("npbml-quirks", {"ways": 7, "loss": {"statistics": "exact"}}), ("maml", {"inner": {"steps": 1}})],
)
def test_a_method_changes_what_its_recipe_names(method: str, changes: dict[str, Any]) -> None:
    config = override(preset("quick"), {"method": method, **changes})
    assert changed(config, method_config(config, method)) == flat(RECIPES[method].settings)


def test_what_was_asked_for_and_contradicts_the_method_is_refused() -> None:
    config = override(preset("quick"), {"method": "maml"})
    refuse_contradiction(config, {"loss.inductive": False, "inner.steps": 3})
    with pytest.raises(SettingError, match=r"method maml sets loss\.inductive=False, but True was asked for"):
        refuse_contradiction(config, {"loss.inductive": True})


def test_a_network_without_a_warp_stays_without_one() -> None:
    config = override(preset("quick"), {"warp": {"kind": "none"}})
    assert method_config(config, "npbml").warp.kind == "none"
    assert method_config(config, "maml").warp.kind == "none"


@pytest.mark.parametrize("method", RECIPES)
def test_a_method_is_told_in_a_line(method: str) -> None:
    summary = RECIPES[method].summary
    assert 10 < len(summary) < 100 and "\n" not in summary
