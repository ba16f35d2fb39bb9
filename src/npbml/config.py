"""The whole configuration of a run, and the presets that it starts from."""

import hashlib
import json
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from npbml.engine.settings import EngineSettings
from npbml.errors import SettingError
from npbml.learner import LearnerSettings, check_learner
from npbml.methods import Cell, Recipe, compose, find_recipe, merged, register
from npbml.nets.network import RESNETS, WIDTHS
from npbml.settings import check, describe, from_dict, group, setting, to_dict
from npbml.stages.settings import PretrainSettings, RelationStageSettings, TestSettings, TrainSettings

Protocol = Literal["published", "fast", "best", "plain", "quick", "common"]


@dataclass(frozen=True)
class Config(LearnerSettings):
    """Every setting of a run."""

    dataset: str = setting("glyphs")
    """glyphs, mini-imagenet, tiered-imagenet, cifar-fs, fc100, omniglot, a folder of class folders, sinusoid."""
    method: str = setting("npbml")
    """The method that is trained: a name, or the file of a recipe of your own."""
    protocol: Protocol = setting("quick")
    """Where the defaults come from: published (its authors), fast (the same, pre-trained in larger batches),
    best (what did best on meta-validation), plain (the same, query images scored by the learner's own encoder),
    quick (minutes on two cores) or common (docs/methods.md)."""
    baselines: tuple[str, ...] = setting(("maml", "prototypes"))
    """What `npbml run` sets beside the method; with spaces or commas between."""
    shots: int = setting(1, low=1)
    """Labelled examples of each class, K."""
    queries: int = setting(15, low=1)
    """Query images of each class in a task."""
    seed: int = setting(0, low=0)
    """Fixes every random draw of the run."""
    image_size: int | None = setting(None, low=16)
    """Side to which the images are resized; the data set's own if not given, 84 for a folder of pictures."""
    device: str = setting("auto")
    """auto (a GPU where there is one), cpu, cuda, or cuda:N."""
    checkpoint_seconds: float = setting(20.0, low=0)
    """Time between checkpoints; 0 writes one at every step."""
    pretrain: PretrainSettings = group(PretrainSettings)
    relation: RelationStageSettings = group(RelationStageSettings)
    train: TrainSettings = group(TrainSettings)
    test: TestSettings = group(TestSettings)
    engine: EngineSettings = group(EngineSettings)

    @property
    def meta_batch(self) -> int:
        """Tasks in a meta-step, B."""
        return self.train.meta_batch or (4 if self.shots == 1 else 2)


# Settings that may differ from those a run folder was made with: they change no trained weight.
FREE = ("baselines", "checkpoint_seconds", "device", "engine.", "method", "test.", "train.skips")
# Settings that no trained weight depends on, whatever the method.
UNTRACED = ("baselines", "checkpoint_seconds", "device", "engine.", "protocol", "test.", "train.skips")

# A task that runs away has a meta-gradient of any size, which spoils hundreds of steps; that of others is 1 to 2.
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
    "relation": {
        "widths": [8, 16],
        "steps": 500,
        "lr": 3e-3,
        "validate_every": 250,
        "validation_tasks": 50,
        "augment": False,
    },
    "train": {
        "steps": 400,
        "lr": {"theta": 1e-3, "omega": 1e-3, "phi": 1e-2, "psi": 1e-3},
        "schedule": "cosine",
        **CLIPPED,
        "validate_every": 200,
        "validation_tasks": 100,
        "ahead": True,
    },
    "test": {"tasks": 1000},
}
# Less than a fifth of the images of the published pre-training, in larger batches at ten times the rate.
FAST: dict[str, Any] = {
    "pretrain": {
        "steps": 9000,
        "batch": 512,
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
    "loss": {"averaged": True, "target": "soft", "trust": 0.5},
    "warp": {"norm": False},
    "relation": {
        "kind": "encoder",
        "enlarged": 1.2,
        "turns": True,
        "centred": True,
        "evened": True,
        "rounds": 10,
        "steps": 5000,
        "validate_every": 1000,
    },
    "pretrain": {"steps": 12_000, "warp": False, "turns": True, "augment": {"crop_scale_low": 0.5}},
    "train": {
        "steps": 3000,
        "meta_batch": 4,
        "lr": {"theta": 1e-5, "omega": 1e-4, "phi": 1e-3, "psi": 1e-4},
        "schedule": "cosine",
        **CLIPPED,
        "skips": 30,
        "validate_every": 500,
    },
    "test": {"tasks": 1000},
}
# By network, since the time of a step differs by a factor of twenty. ResNet-12 is taught, its last block keeps the
# statistics of pre-training, and it knows as much as what scores: it scores as well. It solves its meta-training
# tasks from the start, so that there is little to learn, and only at small rates.
BEST_OF: dict[str, dict[str, Any]] = {
    "resnet12": {
        "net": {"tail_norm": "running"},
        "head": {"centred": True},
        "loss": {"trust": 2.0},
        "relation": {"kind": "both"},
        "pretrain": {"steps": 5000, "validate_every": 1000, "taught": True},
        "train": {
            "steps": 450,
            "lr": {"theta": 1e-6, "omega": 1e-5, "phi": 3e-4, "psi": 1e-5},
            "validate_every": 150,
        },
    },
}
# What scores is as wide as what learns.
BEST_OF["resnet12-wide"] = merged(BEST_OF["resnet12"], {"relation": {"widths": list(WIDTHS["resnet12-wide"])}})
# At 84x84, where a step takes six times as long. The wide ResNet-12, which takes longer still, learns from crops
# of 64x64: compared to these the images are large already, and need not be enlarged to be scored.
LARGE_SCORES: dict[str, Any] = {"relation": {"steps": 10_000, "validate_every": 2000}}
BEST_LARGE: dict[str, dict[str, Any]] = {
    "conv4": {"pretrain": {"steps": 8000}, **LARGE_SCORES},
    "resnet12": LARGE_SCORES,
    "resnet12-wide": {
        "pretrain": {"steps": 4000, "validate_every": 2000, "crop_size": 64},
        "relation": {"steps": 4000, "validate_every": 2000, "crop_size": 64, "enlarged": 1.0, "mirrored": True},
    },
}
# The scores of `best` are nearly all that a learner reaches with them, and need all query images of a task. With
# cosines of its own embeddings as they are in their place, the rule shows what it is worth by itself.
PLAIN: dict[str, Any] = {
    "relation": {
        "kind": "prototypes",
        "enlarged": 1.0,
        "mirrored": False,
        "turns": False,
        "centred": False,
        "evened": False,
        "rounds": 0,
    },
    "loss": {"trust": 0.0},
    "pretrain": {"taught": False},
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

# Mirroring an image of these makes it one of another class.
MIRRORED = ("glyphs", "omniglot")
SMALL = ("mini-imagenet", "cifar-fs", "fc100")  # data sets of 60,000 images
LARGE = ("mini-imagenet", "tiered-imagenet")  # images of 84x84


def preset(
    protocol: str, dataset: str = "glyphs", backbone: str = "conv4", method: str = "npbml", shots: int = 1
) -> Config:
    """The defaults of a protocol for a data set, a backbone, a method and a number of shots."""
    if protocol not in PROTOCOLS:
        raise SettingError(f"protocol takes one of {', '.join(PROTOCOLS)}, not {protocol!r}.")
    names = {"protocol": protocol, "dataset": dataset, "backbone": backbone, "method": method, "shots": shots}
    tables = [PROTOCOLS[protocol]]
    if protocol == "published" and backbone in RESNETS and dataset in SMALL:
        tables.append({"pretrain": {"weight_decay": 0.01}})
    if protocol in ("best", "plain"):
        tables.append(BEST_OF.get(backbone, {}))
        if dataset in LARGE:
            tables.append(BEST_LARGE.get(backbone, {}))
    if protocol == "plain":
        tables.append(PLAIN)
    if protocol in ("published", "fast"):
        tables.append(find_recipe(method).published(Cell(dataset, backbone, shots)))
    if dataset in MIRRORED:
        tables.append({"pretrain": {"augment": {"flip": False}}})
    if dataset == "sinusoid":
        steps = 70_000 if protocol == "published" else 5000
        tables.append(merged(SINUSOID, {"train": {"steps": steps, "validate_every": steps // 5}}))
        names["backbone"] = "mlp"
    return from_dict(Config, merged(*tables), from_dict(Config, names, Config()))


def override(config: Config, settings: Mapping[str, Any]) -> Config:
    """`config` with some settings changed, given as nested tables."""
    return from_dict(Config, settings, config)


def method_config(config: Config, method: str) -> Config:
    """The settings of `method` within a run: the run's own, with the recipe on top.

    Everything that the recipe does not name is the run's, so that methods differ in the rule alone.
    """
    changed = override(config, {**find_recipe(method).rule, "method": method})
    # A warp that is fixed stands for the one that the encoder was pre-trained with: without that, there is none.
    there = config.pretrain.warp and config.init.source == "pretrained" and config.warp.kind != "none"
    if config.warp.kind == "none" or (changed.warp.kind == "fixed" and not there):
        changed = override(changed, {"warp": {"kind": "none"}})
    return changed


def refuse_contradiction(config: Config, asked: Mapping[str, Any]) -> None:
    """Refuse settings that were asked for, by full name, where the run's method has others."""
    used = {name: value for name, _, value in describe(Config, method_config(config, config.method))}
    for name in flat(find_recipe(config.method).rule):
        wanted = tuple(asked[name]) if isinstance(asked.get(name), list) else asked.get(name)
        if name in asked and wanted != used[name]:
            raise SettingError(
                f"The method {config.method} sets {name}={used[name]}, but {asked[name]} was asked for."
            )


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables of settings as one, by full name."""
    rows: dict[str, Any] = {}
    for name, value in tables.items():
        rows |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return rows


def read_recipe(path: Path) -> str:
    """Register the recipe of a TOML or JSON file under the file's name, which is returned.

    summary = "GAP's preconditioner with NPBML's loss and FiLM"
    base = "npbml"
    [precondition]
    chain = ["svd"]
    """
    tables = read_file(path)
    bases, summary = tables.pop("base", []), tables.pop("summary", f"the recipe of {path.name}")
    recipe = compose(str(summary), *([bases] if isinstance(bases, str) else bases), **tables)
    check_recipe(recipe)
    register(path.stem, recipe)
    return path.stem


def check_recipe(recipe: Recipe) -> None:
    """Refuse a recipe that names settings which do not exist or are not a learner's."""
    override(Config(), recipe.rule)
    names = {name for name, _, _ in describe(LearnerSettings)}
    for name in flat(recipe.rule):
        if name not in names:
            raise SettingError(
                f"A recipe changes the rule, and {name!r} is no setting of it: see `npbml settings`."
            )
    override(Config(), recipe.rule)


def read_file(path: Path) -> dict[str, Any]:
    """The settings of a TOML or JSON file."""
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise SettingError(f"The settings file {path} cannot be read: {error.strerror}.") from None
    except (ValueError, UnicodeDecodeError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise SettingError(f"The settings file {path} is not {kind}: {error}.") from None
    if not isinstance(data, dict):
        raise SettingError(f"The settings file {path} must hold a table of settings, not {data!r}.")
    return data


def check_config(config: Config) -> None:
    """Refuse settings that are out of range or at odds with each other."""
    check(config)
    mirrors = {
        "pretrain.augment.flip": config.pretrain.augment.flip,
        "relation.mirrored": config.relation.mirrored,
    }
    for name, mirrored in mirrors.items():
        if config.dataset in MIRRORED and mirrored:
            raise SettingError(f"{name} mirrors images, which changes the class of {config.dataset}.")
    values = {
        "sinusoid": config.dataset == "sinusoid",
        "mlp": config.backbone == "mlp",
        "values": config.target == "values",
    }
    if len(set(values.values())) > 1:
        raise SettingError(
            f"dataset=sinusoid, backbone=mlp and target=values belong together; here is dataset={config.dataset}, "
            f"backbone={config.backbone}, target={config.target}."
        )
    if config.target == "values" and (config.train.augment or config.train.coverage == "balanced"):
        raise SettingError(
            "train.augment and train.coverage=balanced are about images of classes: sinusoid has none."
        )
    if config.train.crop_scale_low is not None and not config.train.augment:
        raise SettingError("train.crop_scale_low is about augmented tasks: set train.augment=true.")
    if config.pretrain.crop_size is not None and config.net.embedding == "flatten":
        raise SettingError(
            "pretrain.crop_size has crops of another size than the images, and net.embedding=flatten depends on "
            "their size: set net.embedding=mean."
        )
    if config.pretrain.taught and not config.relation.pretrains:
        raise SettingError(
            "pretrain.taught learns from the encoder that scores, and there is none: set relation.kind=encoder."
        )
    check_method(config, config.method)


def check_method(config: Config, method: str) -> None:
    """Refuse a method that makes no sense within the settings of a run."""
    own = method_config(config, method)
    check(own)
    check_learner(own)
    if not any(to_dict(own.train.lr).values()):
        raise SettingError("train.lr leaves nothing to meta-learn: set a rate above 0.")


def differences(mine: Config, other: Config) -> list[str]:
    """The names of the settings, free ones aside, in which two configurations differ."""
    values = {name: value for name, _, value in describe(Config, other)}
    return [
        name for name, _, value in describe(Config, mine) if value != values[name] and not name.startswith(FREE)
    ]


def saved_config(data: Mapping[str, Any]) -> Config:
    """The configuration that a file holds. A setting that it does not have came later: it is at its default."""
    for name in ("protocol", "dataset", "backbone", "method", "shots"):
        if name not in data:
            raise SettingError(f"there is no {name} in it")
    return from_dict(Config, data)


def fingerprint(config: Config, stage: str, names: Collection[str] | None = None) -> str:
    """What a stage's outcome depends on, in a word: all settings, or those of some names and groups.

    Those at their defaults leave no trace, so that one that comes later does not disown what was trained before.
    """
    usual = {name: value for name, _, value in describe(Config, Config())}
    settings = {
        name: value
        for name, _, value in describe(Config, config)
        if value != usual[name]
        and not name.startswith(UNTRACED)
        and (names is None or name.partition(".")[0] in names)
    }
    return hashlib.sha256(json.dumps([stage, settings], sort_keys=True).encode()).hexdigest()[:16]


def with_device(config: Config, device: str) -> Config:
    """The same configuration on another device."""
    return replace(config, device=device)
