"""Every system as a recipe: what it changes in the settings of the full method (the paper's Tables 1 to 4).

A recipe has two tables. `rule` is what the method is: the parts that it is made of, under every protocol.
`published` is how its own authors trained it; the protocol of that name takes it from there.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from npbml.errors import SettingError
from npbml.learner.settings import LearnerSettings
from npbml.parts import METHODS
from npbml.settings import flat, from_dict, leaves, merged

Tables = dict[str, Any]


class Cell(NamedTuple):
    """Where a method was published: published settings differ from one to the next."""

    dataset: str = "mini-imagenet"
    backbone: str = "conv4"
    shots: int = 1


@dataclass(frozen=True)
class Recipe:
    """A method: what it is in a line, the parts that it is made of, and how it was published."""

    summary: str
    rule: Mapping[str, Any]
    published: Callable[[Cell], Tables] = lambda cell: {}


# What NPBML learns beside the initialisation, switched off.
NO_LOSS: Tables = {"loss": {"inductive": False, "transductive": False, "regulariser": False}}
NO_FILM: Tables = {"film": {"enabled": False}, "loss": {"film": False}}
NO_WARP: Tables = {"warp": {"kind": "fixed"}}
MAML = merged(NO_LOSS, NO_FILM, NO_WARP)


def terms(*names: str) -> Tables:
    """Of NPBML's loss, these terms."""
    return {"loss": {name: name in names for name in NO_LOSS["loss"]}}


def precondition(*chain: str, **settings: Any) -> Tables:
    return {"precondition": {"chain": list(chain), **settings}}


TNET: Tables = {
    "warp": {
        "kind": "learned",
        "kernel": 1,
        "norm": False,
        "position": "pre_norm",
        "blocks": "all",
        "head": True,
    }
}
WARP_LAYERS: Tables = {
    "warp": {
        "kind": "learned",
        "kernel": 3,
        "bias": True,
        "norm": False,
        "activation": "relu",
        "position": "auto",
        "blocks": "all",
    }
}
PER_STEP_NORM: Tables = {"net": {"affine": "meta", "per_step_norm": True}}
PLAIN_SGD: Tables = {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}

# How the line of MAML was trained: the whole of a random network adapts, on the support batch alone.
SCRATCH: Tables = {
    "baselines": [],
    "net": {"frozen_blocks": 0, "bias": True, "affine": "meta"},
    "head": {"kind": "linear"},
    "init": {"source": "scratch", "weights": "xavier"},
    "inner": {**PLAIN_SGD, "batch": "support"},
    "pretrain": {"warp": False},
}

# What a learner for any task is trained on: 2 to 16 classes, with and without a pool, balanced or not.
ANY_SHAPES = (
    *("5x1", "5x5", "2x~3", "10x1", "10x~3"),
    *("5x1+75", "5x5+75", "3x1+15", "3x5+45", "10x1+150", "16x1+240"),
    *("5x1+~75", "5x5+~75", "2x~3+~30", "10x~3+~50", "5x~2+~5"),
    *("16x5+240", "10x5+150", "3x1", "8x1", "5x~3", "16x5"),
)


def rates(rate: float, **others: float) -> Tables:
    """One meta learning rate for all groups, but for those named."""
    return {"lr": {letter: others.get(letter, rate) for letter in ("theta", "omega", "phi", "psi")}}


def from_scratch(filters: int, **tables: Any) -> Callable[[Cell], Tables]:
    """SCRATCH with Adam 1e-3 and `tables` on top; 4-CONV has `filters` filters and is flattened."""
    own = merged(SCRATCH, {"train": rates(1e-3)}, tables)

    def published(cell: Cell) -> Tables:
        conv4 = {"net": {"filters": filters, "embedding": "flatten"}} if cell.backbone == "conv4" else {}
        return merged(own, conv4)

    return published


# Finn et al.: the inner rate is 0.01 on the sum over 5 classes, which is 0.05 on the mean over items.
FINN: Tables = {
    "inner": {"lr": 0.05, "steps": 5, "test_steps": 10},
    "train": {"steps": 60_000, "clip": "value", "clip_at": 10.0},
}
# Baik et al., who built on Antoniou et al.'s code: 100 epochs of 500 meta-steps, the five best averaged.
BAIK: Tables = {
    "net": {"activation": "leaky_relu"},
    "inner": {"lr": 0.01, "steps": 5},
    "train": {"steps": 50_000, "ensemble": 5},
}
ANTONIOU = merged(BAIK, {"train": {"meta_batch": 2}})  # at one shot too


def published_maml(cell: Cell) -> Tables:
    """Mini-ImageNet with 4-CONV as in the original; every other row was trained by Baik et al."""
    if cell.dataset == "mini-imagenet" and cell.backbone == "conv4":
        return from_scratch(32, **FINN)(cell)
    return from_scratch(48, **BAIK)(cell)


def published_sca(cell: Cell) -> Tables:
    train = {"steps": 75_000, "meta_batch": 2 if cell.shots == 1 else 1, "weight_decay": 1e-4, "clip": "value"}
    return from_scratch(48, **merged(ANTONIOU, {"train": train, "outer": {"epochs": 150}}))(cell)


def published_gap(cell: Cell) -> Tables:
    steps = (130_000 if cell.shots == 1 else 200_000) if cell.dataset == "tiered-imagenet" else 80_000
    lr = rates(1e-4, omega=3e-3 if cell.shots == 1 else 1e-4)
    inner = {"lr": 0.01, "steps": 5, "test_steps": 10}
    return from_scratch(128, inner=inner, train={"steps": steps, **lr}, net={"affine": "inner"})(cell)


def published_boil(cell: Cell) -> Tables:
    conv4 = cell.backbone == "conv4"
    inner = {"lr": 0.5 if conv4 else 0.3, "steps": 1}
    train = {"steps": 30_000, "meta_batch": 4, **rates(1e-3 if conv4 else 6e-4)}
    return from_scratch(64, inner=inner, train=train, test={"tasks": 1000})(cell)


def published_unicorn(cell: Cell) -> Tables:
    tiered, many = cell.dataset == "tiered-imagenet", cell.shots > 1
    lr = (0.05 if many else 0.02) if tiered else 0.1
    steps = 20 if many else (10 if tiered else 5)
    return {
        "baselines": ["prototypes"],
        "net": {"frozen_blocks": 0, "affine": "inner"},
        "inner": {**PLAIN_SGD, "lr": lr, "steps": steps, "batch": "support"},
        "pretrain": {"warp": False},
        "train": {
            "optimizer": "sgd",
            **rates(1e-3),
            "weight_decay": 5e-4,
            "schedule": "fifths",
            "steps": 10_000,
            "meta_batch": 1,
        },
        "test": {"tasks": 10_000},
    }


BUILT_IN: dict[str, Recipe] = {
    "npbml": Recipe("initialisation, warp preconditioner and loss learned together, modulated by FiLM", {}),
    "maml": Recipe("the initialisation alone is learned; SGD on cross-entropy", MAML, published_maml),
    "fomaml": Recipe("maml without second derivatives", merged(MAML, {"outer": {"order": 1}}), published_maml),
    "anil": Recipe(
        "maml whose head alone adapts",
        merged(MAML, {"inner": {"layers": "head"}}),
        from_scratch(32, **FINN),
    ),
    "boil": Recipe(
        "maml whose body alone adapts",
        # A head that no inner step changes has to begin large enough for gradients to pass through it.
        merged(
            MAML,
            {
                "inner": {"layers": "body"},
                "head": {"kind": "linear"},
                "net": {"affine": "inner"},
                "init": {"weights": "xavier"},
            },
        ),
        published_boil,
    ),
    "metasgd": Recipe(
        "a learning rate for each single weight",
        merged(MAML, precondition("diagonal")),
        from_scratch(
            32, **merged(FINN, {"inner": {"steps": 1, "test_steps": 1}}, precondition("diagonal", uniform=True))
        ),
    ),
    "tnet": Recipe(
        "a linear map after each layer, fixed inside a task", merged(MAML, TNET), from_scratch(32, **FINN)
    ),
    "mtnet": Recipe(
        "tnet with a learned choice of the units that adapt",
        merged(MAML, TNET, precondition("unit_mask")),
        from_scratch(32, **FINN),
    ),
    "maml++": Recipe(
        "rates for each tensor and step, batch norm for each step, a loss after each step",
        merged(MAML, PER_STEP_NORM, precondition("rates"), {"outer": {"objective": "multi_step"}}),
        from_scratch(48, **merged(ANTONIOU, {"inner": {"lr": 0.1}, "train": {"clip": "value"}})),
    ),
    "sca": Recipe(
        "maml++ with a last step on a learned critic of the query predictions",
        merged(
            MAML,
            PER_STEP_NORM,
            precondition("rates"),
            {"loss": {"critic_steps": 1}, "outer": {"objective": "pre_post"}},
        ),
        published_sca,
    ),
    "meta-curvature": Recipe(
        "gradients multiplied by a learned matrix in each of their modes",
        merged(MAML, precondition("kronecker")),
        from_scratch(32, **FINN),
    ),
    "warpgrad": Recipe(
        "non-linear warp layers, learned one step ahead of every point visited",
        merged(MAML, WARP_LAYERS, {"outer": {"objective": "trajectory"}, "inner": PLAIN_SGD}),
        from_scratch(128, inner={"lr": 0.1}, train={"steps": 60_000, "meta_batch": 1}),
    ),
    "modgrad": Recipe(
        "gradients masked by what a context vector, itself adapted, generates",
        merged(MAML, precondition("context_mask"), {"inner": {"layers": "body"}, "head": {"kind": "linear"}}),
        from_scratch(
            64,
            inner={"lr": 0.1, "steps": 1, "last_blocks": 2},
            train={"steps": 16_667, "meta_batch": 3, "schedule": "halving"},
            test={"tasks": 1000},
        ),
    ),
    "metal": Recipe(
        "loss networks for each step, on support and query, adapted to the task",
        merged(
            MAML,
            {
                "loss": {"adaptive_support": True, "adaptive_query": True},
                "inner": {"batch": "joint", "final_batch": "joint"},
                "outer": {"items": "all"},
            },
        ),
        from_scratch(48, **BAIK),
    ),
    "alfa": Recipe(
        "rates and decay generated from the means of weights and gradients",
        merged(MAML, precondition("generated")),
        from_scratch(48, **BAIK),
    ),
    "gap": Recipe(
        "a learned spectrum in the singular vectors of each gradient",
        merged(MAML, precondition("svd")),
        published_gap,
    ),
    "gap-approx": Recipe(
        "gap without the singular vectors", merged(MAML, precondition("svd_approx")), published_gap
    ),
    "unicorn-maml": Recipe(
        "first-order maml whose classes all start from one learned vector",
        merged(MAML, {"head": {"kind": "unicorn"}, "outer": {"order": 1}}),
        published_unicorn,
    ),
    "npbml-1": Recipe("ablation: nothing but the initialisation", MAML),
    "npbml-2": Recipe("ablation: warp", merged(NO_LOSS, NO_FILM)),
    "npbml-3": Recipe("ablation: loss", merged(NO_WARP, NO_FILM)),
    "npbml-4": Recipe("ablation: warp and loss", NO_FILM),
    "npbml-5": Recipe("ablation: warp, loss and FiLM, the full method", {}),
    "npbml-6": Recipe("ablation: no term of the loss, as npbml-1", MAML),
    "npbml-7": Recipe("ablation: the inductive loss alone", merged(NO_WARP, NO_FILM, terms("inductive"))),
    "npbml-8": Recipe("ablation: the transductive loss alone", merged(NO_WARP, NO_FILM, terms("transductive"))),
    "npbml-9": Recipe("ablation: the regulariser alone", merged(NO_WARP, NO_FILM, terms("regulariser"))),
    "npbml-10": Recipe("ablation: all three losses, as npbml-3", merged(NO_WARP, NO_FILM)),
    "npbml-sym": Recipe(
        "npbml with class-symmetric losses, of each pair of an item and a class: for any number of classes",
        {
            "loss": {
                "inductive": False,
                "transductive": False,
                "symmetric_support": True,
                "symmetric_query": True,
            }
        },
    ),
    "npbml-any": Recipe(
        "npbml for tasks of any shape: symmetric losses that know it, each query answered by itself",
        {
            "shapes": list(ANY_SHAPES),
            "net": {"stem_norm": "running", "tail_norm": "running"},
            "head": {"kind": "unicorn", "normalised": True, "centred": False},
            "warp": {"norm": False, "bias": True},
            "loss": {
                "inductive": False,
                "transductive": False,
                "symmetric_support": True,
                "symmetric_query": True,
                "context": True,
                "averaged": True,
                "target": "soft",
                "score_weight": 1.0,
            },
            "scorer": {"kind": "soft-kmeans", "temperature": 10.0, "rounds": 6, "whiten": False},
            "inner": {"batch": "joint", "final_batch": "query", "max_step": 3.0},
        },
    ),
    "maml-any": Recipe(
        "maml over the shapes of npbml-any, with its head; each query answered by itself",
        merged(
            MAML,
            {
                "shapes": list(ANY_SHAPES),
                "net": {"stem_norm": "running", "tail_norm": "running"},
                "head": {"kind": "unicorn", "normalised": True, "centred": False},
                "inner": {"batch": "support", "final_batch": "query", "max_step": 3.0, "lr": 0.06},
            },
        ),
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
for _name, _recipe in BUILT_IN.items():
    METHODS.built_in(_name, _recipe, _recipe.summary)
METHODS.built_in(
    "prototypes",
    Recipe("nearest class means of the pre-trained encoder's embeddings; nothing is meta-learned", {}),
    "nearest class means of the pre-trained encoder's embeddings; nothing is meta-learned",
    trains=False,
)
RESERVED = ("pretrain", "relation", "pictures")  # folders of a run


def trained_methods() -> list[str]:
    """The names of the methods that meta-learn something."""
    return [name for name in METHODS if METHODS.fact(name, "trains")]


def trains(method: str) -> bool:
    """Whether there is anything of this method to be meta-learned."""
    return METHODS.fact(method, "trains")


def find_recipe(method: str) -> Recipe:
    """The recipe of a method, or an error that lists the methods there are."""
    return METHODS.get(method)


def register(name: str, recipe: Recipe) -> None:
    """Give a recipe of one's own a name, by which every command and function then knows it."""
    check_recipe(recipe)
    if name in RESERVED:
        raise SettingError(f"{name!r} cannot be the name of a new method: it is taken.")
    METHODS.register(name, recipe, recipe.summary)


def check_recipe(recipe: Recipe) -> None:
    """Refuse a recipe that names settings which do not exist or are not a learner's."""
    names = {leaf.name for leaf in leaves(LearnerSettings())}
    for name in flat(recipe.rule):
        if name not in names:
            close = difflib.get_close_matches(name, names, 1, 0.8)
            meant = f" Did you mean {close[0]!r}?" if close else ""
            raise SettingError(
                f"A recipe changes the rule, and {name!r} is no setting of it: see `npbml settings`.{meant}"
            )
    from_dict(LearnerSettings, recipe.rule, LearnerSettings())


def compose(summary: str, *bases: str, **tables: Any) -> Recipe:
    """A recipe from those of other methods, on top of each other, and settings on top of these.

    npbml.compose("GAP's preconditioner with NPBML's loss", "npbml", precondition={"chain": ["svd"]})
    """
    return Recipe(summary, merged(*(find_recipe(base).rule for base in bases), tables))


def with_rule(settings: LearnerSettings, rule: Mapping[str, Any], warp_pretrained: bool) -> LearnerSettings:
    """The settings of a method within a run: the run's own, with the method's rule on top.

    Everything that the rule does not name is the run's, so that methods differ in the rule alone. A warp that is
    fixed stands for the one that the encoder was pre-trained with (`warp_pretrained`), or there is none.
    """
    changed = from_dict(LearnerSettings, rule, settings)
    there = warp_pretrained and settings.init.source == "pretrained" and settings.warp.kind != "none"
    if settings.warp.kind == "none" or (changed.warp.kind == "fixed" and not there):
        changed = replace(changed, warp=replace(changed.warp, kind="none"))
    return changed


# Settings of version 0.1 that are constants now, by their names there.
REMOVED: dict[str, Any] = {
    "net.group_blocks": 4,
    "precondition.decay": 5e-4,
    "precondition.context": 300,
    "precondition.passes": 2,
    "precondition.mixture": 5,
    "warp.norm_in": False,
    "warp.residual": False,
    "outer.first_order_epochs": 0,
    "outer.multi_step_epochs": 15,
    "outer.start_weight": 1.0,
    "relation.clip_norm": 0.0,
    "pretrain.momentum": 0.9,
    "pretrain.augment.jitter": 0.4,
    "train.coverage": "random",
    "train.crop_scale_low": None,
}
