"""Every system as a recipe: what it changes in the settings of the full method (the paper's Tables 1 to 4)."""

from dataclasses import dataclass, field
from typing import Any

from npbml.config import Config, override, preset
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


def method_config(config: Config, method: str) -> Config:
    """The settings of `method` within a run: the run's own, with the recipe on top.

    Everything that the recipe does not name is the run's, so that methods differ in the rule alone.
    """
    if method not in RECIPES:
        raise SettingError(f"There is no method {method!r}: choose from {', '.join(RECIPES)}.")
    recipe = RECIPES[method].settings
    changed = override(config, {**recipe, "method": method})
    if config.method == method:
        _refuse_contradiction(config, changed, method)
    return changed


def _refuse_contradiction(config: Config, changed: Config, method: str) -> None:
    default = preset(config.protocol, config.dataset, config.backbone)
    rows = zip(describe(Config, config), describe(Config, changed), describe(Config, default), strict=True)
    for (name, _, asked), (_, _, used), (_, _, usual) in rows:
        if asked != used and asked != usual:
            raise SettingError(f"The method {method} sets {name}={used}, but {asked} was asked for.")
