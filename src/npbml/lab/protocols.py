"""Protocols: where the defaults of a run come from, for a data set, a backbone, a method and a number of shots."""

from typing import Any

from npbml.errors import SettingError
from npbml.lab.schema import Config
from npbml.methods import Cell, find_recipe
from npbml.parts import BACKBONES, DATASETS
from npbml.registry import located
from npbml.settings import from_dict, merged

# A task that diverges has a meta-gradient of any size, which spoils hundreds of steps; that of others is 1 to 2.
CLIPPED: dict[str, Any] = {"clip": "norm", "clip_at": 3.0}
# Minutes on two cores: a small network whose stem's features are computed once for all.
QUICK: dict[str, Any] = {
    "net": {"filters": 32, "stem_norm": "running"},
    "loss": {"averaged": True},
    "pretrain": {
        "steps": 600,
        "lr": 0.1,
        "schedule": "onecycle",
        "validate_every": 200,
        "validation_tasks": 100,
        "validation_shots": 1,
        "prototype_batch": "joint",
        "augment": {"crop_scale_low": 0.5},
    },
    "scorer": {"widths": [8, 16]},
    "scorer_training": {"steps": 500, "lr": 3e-3, "validate_every": 250, "validation_tasks": 50, "augment": False},
    "train": {
        "steps": 400,
        "lr": {"theta": 1e-3, "omega": 1e-3, "phi": 1e-2, "psi": 1e-3},
        "schedule": "cosine",
        **CLIPPED,
        "validate_every": 200,
        "validation_tasks": 100,
        "prefetch": True,
    },
    "test": {"tasks": 1000},
}
# Less than a fifth of the images of the published pre-training, in larger batches at ten times the rate.
FAST: dict[str, Any] = {
    "pretrain": {
        "steps": 9000,
        "batch_size": 512,
        "lr": 0.1,
        "schedule": "onecycle",
        "validate_every": 2000,
        "prototype_batch": "joint",
    }
}
# What did best on meta-validation (results/README.md): each part of the rule learns at a rate of its own.
BEST: dict[str, Any] = {
    "net": {"stem_norm": "running"},
    "inner": {"final_batch": "joint"},
    "loss": {"averaged": True, "target": "soft", "score_weight": 0.5},
    "warp": {"norm": False},
    "scorer": {
        "kind": "encoder",
        "enlarge": 1.2,
        "rotations": True,
        "centre": True,
        "whiten": True,
        "rounds": 10,
    },
    "scorer_training": {"steps": 5000, "validate_every": 1000},
    "pretrain": {"steps": 12_000, "warp": False, "rotations": True, "augment": {"crop_scale_low": 0.5}},
    "train": {
        "steps": 3000,
        "meta_batch": 4,
        "lr": {"theta": 1e-5, "omega": 1e-4, "phi": 1e-3, "psi": 1e-4},
        "schedule": "cosine",
        **CLIPPED,
        "max_skipped": 30,
        "validate_every": 500,
    },
    "test": {"tasks": 1000},
}
# By network, since the time of a step differs by a factor of twenty. ResNet-12 is distilled, its last block keeps
# the statistics of pre-training, and it knows as much as what scores: it scores as well. It solves its
# meta-training tasks from the start, so that there is little to learn, and only at small rates.
BEST_OF: dict[str, dict[str, Any]] = {
    "resnet12": {
        "net": {"tail_norm": "running"},
        "head": {"centred": True},
        "loss": {"score_weight": 2.0},
        "scorer": {"kind": "both"},
        "pretrain": {"steps": 5000, "validate_every": 1000, "distill": True},
        "train": {
            "steps": 450,
            "lr": {"theta": 1e-6, "omega": 1e-5, "phi": 3e-4, "psi": 1e-5},
            "validate_every": 150,
        },
    },
}
# What scores is as wide as what learns.
BEST_OF["resnet12-wide"] = merged(
    BEST_OF["resnet12"], {"scorer": {"widths": list(BACKBONES.fact("resnet12-wide", "widths"))}}
)
# At 84x84, where a step takes six times as long. The wide ResNet-12, which takes longer still, learns from crops
# of 64x64: compared to these the images are large already, and need not be enlarged to be scored.
LARGE_SCORES: dict[str, Any] = {"scorer_training": {"steps": 10_000, "validate_every": 2000}}
BEST_LARGE: dict[str, dict[str, Any]] = {
    "conv4": {"pretrain": {"steps": 8000}, **LARGE_SCORES},
    "resnet12": LARGE_SCORES,
    "resnet12-wide": {
        "pretrain": {"steps": 4000, "validate_every": 2000, "crop_size": 64},
        "scorer": {"enlarge": 1.0, "flip": True},
        "scorer_training": {"steps": 4000, "validate_every": 2000, "crop_size": 64},
    },
}
# The scores of `best` are nearly all that a learner reaches with them, and need all query images of a task. With
# cosines of its own embeddings as they are in their place, the rule shows what it is worth by itself.
PLAIN: dict[str, Any] = {
    "scorer": {
        "kind": "prototypes",
        "enlarge": 1.0,
        "flip": False,
        "rotations": False,
        "centre": False,
        "whiten": False,
        "rounds": 0,
    },
    "loss": {"score_weight": 0.0},
    "pretrain": {"distill": False},
}
PROTOCOLS: dict[str, dict[str, Any]] = {
    "published": {},
    "fast": FAST,
    "best": merged(FAST, BEST),
    "plain": merged(FAST, BEST),
    "quick": QUICK,
    # A head with a row for each class, since some methods do not adapt it. The batch norm that follows NPBML's
    # warp belongs to the network here: all have it, and every method starts from the same function of the images.
    "common": merged(
        QUICK,
        {
            "baselines": ["prototypes"],
            "net": {"final_norm": True},
            "head": {"kind": "linear"},
            "warp": {"norm": False},
            "inner": {"lr": 0.1, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0},
            "pretrain": {"warp": False},
            "train": {"steps": 300, "validate_every": 150, "validation_tasks": 200},
        },
    ),
}

# An encoder that is there already: the tail starts from the main directions of its features, found in one step.
# FiLM sees over a thousand numbers, so that its start is smaller.
ENCODER: dict[str, Any] = {
    "net": {"filters": 256, "stem_norm": "running", "tail_norm": "running", "task_mean": 5.0},
    "warp": {"kernel": 1, "norm": False, "bias": True},
    "init": {"std": 1e-3},
    "scorer": {"kind": "prototypes", "enlarge": 1.0, "flip": False, "rotations": False},
    "pretrain": {"steps": 1, "validate_every": 1, "rotations": False, "distill": False},
    "train": {"lr": {"theta": 1e-4, "omega": 1e-4, "phi": 3e-3, "psi": 3e-5}},
}

RESNETS = ("resnet12", "resnet12-wide")  # the paper's, and the one that most others compare with
SMALL, LARGE_SIDE = 60_000, 84  # images of a data set; their side


def preset(
    protocol: str, dataset: str = "glyphs", backbone: str = "conv4", method: str = "npbml", shots: int = 1
) -> Config:
    """The defaults of a protocol for a data set, a backbone, a method and a number of shots."""
    if protocol not in PROTOCOLS:
        raise SettingError(f"protocol takes one of {', '.join(PROTOCOLS)}, not {protocol!r}.")
    names = {"protocol": protocol, "dataset": dataset, "backbone": backbone, "method": method, "shots": shots}
    tables = [PROTOCOLS[protocol]]
    facts = DATASETS.part(dataset).facts if dataset in DATASETS else DATASETS.defaults
    if protocol == "published" and backbone in RESNETS and facts["images"] == SMALL:
        tables.append({"pretrain": {"weight_decay": 0.01}})
    if protocol in ("best", "plain"):
        tables.append(BEST_OF.get(backbone, {}))
        if facts["side"] == LARGE_SIDE:
            tables.append(BEST_LARGE.get(backbone, {}))
    if protocol == "plain":
        tables.append(PLAIN)
    if protocol in ("published", "fast"):
        tables.append(find_recipe(method).published(Cell(dataset, backbone, shots)))
    backbone = names["backbone"] = facts["backbone"] or backbone
    if backbone in BACKBONES and BACKBONES.fact(backbone, "pretrained"):
        tables.append(ENCODER)
    if not facts["mirrors"]:
        tables.append({"pretrain": {"augment": {"flip": False}}})
    if facts["settings"] is not None:
        tables.append(located(facts["settings"])(protocol))
    return from_dict(Config, merged(*tables), from_dict(Config, names, Config()))
