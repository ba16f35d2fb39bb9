"""Every system as a recipe: what it changes in the settings of the full method (the paper's Tables 1 to 4)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from npbml.config import Config, override
from npbml.errors import SettingError
from npbml.settings import describe


@dataclass(frozen=True)
class Recipe:
    """A method: what it is in a line, and the settings that make it so."""

    summary: str
    settings: dict[str, Any] = field(default_factory=dict)


RECIPES: dict[str, Recipe] = {
    "npbml": Recipe("initialisation, warp preconditioner and loss meta-learned together, modulated by FiLM"),
    "maml": Recipe(
        "the initialisation alone is meta-learned; SGD on cross-entropy",
        {
            "warp": {"kind": "fixed"},
            "film": {"enabled": False},
            "loss": {"inductive": False, "transductive": False, "regulariser": False},
        },
    ),
    "npbml-quirks": Recipe(
        "npbml with the defects of the reference code in place",
        {
            "head": {"copy": "value"},
            "loss": {"statistics": "reference", "activation": "smooth_leaky", "share": True},
            "init": {"uniform_bias": True},
        },
    ),
}


def refuse_contradiction(config: Config, asked: Mapping[str, Any]) -> None:
    """Refuse settings that were asked for, by full name, where the run's method has others."""
    used = {name: value for name, _, value in describe(Config, method_config(config, config.method))}
    for name in flat(RECIPES[config.method].settings):
        if name in asked and asked[name] != used[name]:
            raise SettingError(
                f"The method {config.method} sets {name}={used[name]}, but {asked[name]} was asked for."
            )


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables of settings as one, by full name."""
    rows: dict[str, Any] = {}
    for name, value in tables.items():
        rows |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return rows


def method_config(config: Config, method: str) -> Config:
    """The settings of `method` within a run: the run's own, with the recipe on top.

    Everything that the recipe does not name is the run's, so that methods differ in the rule alone.
    """
    if method not in RECIPES:
        raise SettingError(f"There is no method {method!r}: choose from {', '.join(RECIPES)}.")
    changed = override(config, {**RECIPES[method].settings, "method": method})
    # A network that was pre-trained without a warp unit stays without one.
    return override(changed, {"warp": {"kind": "none"}}) if config.warp.kind == "none" else changed
