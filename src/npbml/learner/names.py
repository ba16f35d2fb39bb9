"""What the tensors of a learner are called in files: by the names of version 0.1, where today's differ."""

from collections.abc import Mapping
from typing import Any

from torch import nn

FILE_NAMES = {
    "scorer.": "relation.",
    "loss.score_weight": "loss.trust",
    "loss.adaptive_support.": "loss.adaptive.support.",
    "loss.adaptive_query.": "loss.adaptive.query.",
}


def to_file_names(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Rename the entries of a state that is about to be saved."""
    _rename(state, prefix, FILE_NAMES)


def from_file_names(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename the entries of a state that is about to be loaded."""
    _rename(state, prefix, {theirs: ours for ours, theirs in FILE_NAMES.items()})


def _rename(state: dict[str, Any], prefix: str, names: Mapping[str, str]) -> None:
    """Names that begin as one of `names` does begin as that one says; the order stays."""
    for key in list(state):
        name = key.removeprefix(prefix)
        begins = next((start for start in names if name.startswith(start)), None)
        value = state.pop(key)
        state[key if begins is None else prefix + names[begins] + name.removeprefix(begins)] = value
