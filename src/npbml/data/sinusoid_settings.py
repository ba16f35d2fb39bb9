"""The settings that runs on the sinusoid benchmark begin with; torch is not needed for them."""

from typing import Any

# Finn et al.'s regression: two layers of 40 units, one inner step of 0.01, all from scratch.
SINUSOID: dict[str, Any] = {
    "target": "values",
    "baselines": [],
    "shots": 10,
    "queries": 10,
    "net": {"filters": 40, "frozen_blocks": 0},
    "head": {"kind": "linear"},
    "warp": {"kernel": 1, "norm": False},
    "loss": {"transductive": False},
    "init": {"source": "scratch", "weights": "xavier"},
    "pretrain": {"warp": False},
    "inner": {"steps": 1, "lr": 0.01, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0, "batch": "support"},
    "train": {"meta_batch": 25, "lr": {"theta": 1e-3, "omega": 1e-3, "phi": 1e-3, "psi": 1e-3}, "clip": "none"},
}


def settings(protocol: str) -> dict[str, Any]:
    """The settings of a run under a protocol, on top of that protocol's."""
    steps = 70_000 if protocol == "published" else 5000
    return {**SINUSOID, "train": {**SINUSOID["train"], "steps": steps, "validate_every": steps // 5}}
