"""The whole configuration of a run, and the presets that it starts from."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from npbml.errors import SettingError
from npbml.learner import LearnerSettings, check_learner
from npbml.settings import check, describe, from_dict, group, setting, to_dict
from npbml.stages.settings import PretrainSettings, RelationStageSettings, TestSettings, TrainSettings

Protocol = Literal["published", "quick"]


@dataclass(frozen=True)
class Config(LearnerSettings):
    """Every setting of a run."""

    dataset: str = setting("glyphs")
    """glyphs, mini-imagenet, tiered-imagenet, cifar-fs, fc100, omniglot, or a folder of class folders."""
    method: str = setting("npbml")
    """The method that is trained."""
    protocol: Protocol = setting("quick")
    """Where the defaults come from: published (the paper's) or quick (minutes on a CPU)."""
    baselines: tuple[str, ...] = setting(("maml", "prototypes"))
    """What `npbml run` sets beside the method."""
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

    @property
    def meta_batch(self) -> int:
        """Tasks in a meta-step, B."""
        return self.train.meta_batch or (4 if self.shots == 1 else 2)


# Settings that may differ from those a run folder was made with: they change no trained weight.
FREE = ("baselines", "checkpoint_seconds", "device", "method", "test.")

PROTOCOLS: dict[str, dict[str, Any]] = {
    "published": {},
    "quick": {
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
            "validate_every": 200,
            "validation_tasks": 100,
            "ahead": True,
        },
        "test": {"tasks": 1000},
    },
}

# Mirroring an image of these makes it one of another class.
MIRRORED = ("glyphs", "omniglot")
SMALL = ("mini-imagenet", "cifar-fs", "fc100")


def preset(protocol: str, dataset: str = "glyphs", backbone: str = "conv4") -> Config:
    """The defaults of a protocol for a data set and a backbone."""
    if protocol not in PROTOCOLS:
        raise SettingError(f"protocol takes one of {', '.join(PROTOCOLS)}, not {protocol!r}.")
    start = from_dict(Config, {"protocol": protocol, "dataset": dataset, "backbone": backbone}, Config())
    config = from_dict(Config, PROTOCOLS[protocol], start)
    if dataset in MIRRORED:
        config = override(config, {"pretrain": {"augment": {"flip": False}}})
    if protocol == "published" and backbone == "resnet12" and dataset in SMALL:
        config = override(config, {"pretrain": {"weight_decay": 0.01}})
    return config


def override(config: Config, settings: Mapping[str, Any]) -> Config:
    """`config` with some settings changed, given as nested tables."""
    return from_dict(Config, settings, config)


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
    check_learner(config)
    if config.dataset in MIRRORED and config.pretrain.augment.flip:
        raise SettingError(f"pretrain.augment.flip mirrors images, which changes the class of {config.dataset}.")
    if not any(to_dict(config.train.lr).values()):
        raise SettingError("train.lr leaves nothing to meta-learn: set a rate above 0.")


def differences(mine: Config, other: Config) -> list[str]:
    """The names of the settings, free ones aside, in which two configurations differ."""
    values = {name: value for name, _, value in describe(Config, other)}
    return [
        name for name, _, value in describe(Config, mine) if value != values[name] and not name.startswith(FREE)
    ]


def with_device(config: Config, device: str) -> Config:
    """The same configuration on another device."""
    return replace(config, device=device)
