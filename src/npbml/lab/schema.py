"""The whole configuration of a run, and which settings make sense together."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from npbml.engine.settings import EngineSettings
from npbml.errors import SettingError
from npbml.json_files import parse_json
from npbml.learner.settings import LARGEST_IMAGE, LearnerSettings, check_learner
from npbml.methods import REMOVED, compose, find_recipe, register, trains, with_rule
from npbml.parts import BACKBONES, DATASETS, DatasetName, MethodName
from npbml.settings import check, flat, from_dict, from_old_names, group, leaves, setting, to_dict
from npbml.stages.settings import PretrainSettings, ScorerTrainingSettings, TestSettings, TrainSettings

Protocol = Literal["published", "fast", "best", "plain", "quick", "common"]


@dataclass(frozen=True)
class Config:
    """Every setting of a run."""

    learner: Annotated[LearnerSettings, tyro.conf.arg(name="")] = group(LearnerSettings, inline=True)
    dataset: DatasetName = setting("glyphs")
    """What is learned from: a data set by its name, or a folder of class folders."""
    method: MethodName = setting("npbml")
    """The method that is trained: a name, or the file of a recipe of your own."""
    protocol: Protocol = setting("quick")
    """Where the defaults come from: published (its authors), fast (the same, pre-trained in larger batches),
    best (what did best on meta-validation), plain (the same, query images scored by the learner's own encoder),
    quick (minutes on two cores) or common (docs/methods.md)."""
    baselines: tuple[str, ...] = setting(("maml", "prototypes"))
    """What `npbml run` sets beside the method; with spaces or commas between."""
    shots: int = setting(1, low=1, high=10_000)
    """Labelled examples of each class, K."""
    queries: int = setting(15, low=1, high=10_000)
    """Query images of each class in a task."""
    seed: int = setting(0, low=0, high=2**63 - 1)
    """Fixes every random draw of the run."""
    image_size: int | None = setting(None, low=16, high=LARGEST_IMAGE)
    """Side to which the images are resized; the data set's own if not given, 84 for a folder of pictures."""
    device: str = setting("auto")
    """auto (a GPU where there is one), cpu, cuda, or cuda:N."""
    checkpoint_seconds: float = setting(20.0, low=0)
    """Time between checkpoints; 0 writes one at every step."""
    pretrain: PretrainSettings = group(PretrainSettings)
    scorer_training: ScorerTrainingSettings = group(ScorerTrainingSettings, was="relation")
    train: TrainSettings = group(TrainSettings)
    test: TestSettings = group(TestSettings)
    engine: EngineSettings = group(EngineSettings)

    @property
    def meta_batch(self) -> int:
        """Tasks in a meta-step, B."""
        return self.train.tasks_at(self.shots)


def override(config: Config, settings: Mapping[str, Any]) -> Config:
    """`config` with some settings changed, given as nested tables."""
    return from_dict(Config, settings, config)


def method_config(config: Config, method: str) -> Config:
    """The settings of `method` within a run: the run's own, with the recipe on top."""
    learner = with_rule(config.learner, find_recipe(method).rule, config.pretrain.warp)
    return replace(config, learner=learner, method=MethodName(method))


def refuse_contradiction(config: Config, asked: Mapping[str, Any]) -> None:
    """Refuse settings that were asked for, by full name, where the run's method has others."""
    used = {leaf.name: leaf.value for leaf in leaves(method_config(config, config.method))}
    for name in flat(find_recipe(config.method).rule):
        wanted = tuple(asked[name]) if isinstance(asked.get(name), list) else asked.get(name)
        if name in asked and wanted != used[name]:
            raise SettingError(
                f"The method {config.method} sets {name}={used[name]}, but {asked[name]} was asked for."
            )


def read_recipe(path: Path) -> str:
    """Register the recipe of a TOML or JSON file under the file's name, which is returned.

    summary = "GAP's preconditioner with NPBML's loss and FiLM"
    base = "npbml"
    [precondition]
    chain = ["svd"]
    """
    tables = read_file(path)
    bases, summary = tables.pop("base", []), tables.pop("summary", f"the recipe of {path.name}")
    rule = from_old_names(LearnerSettings, tables, REMOVED, lambda note: None)
    register(path.stem, compose(str(summary), *([bases] if isinstance(bases, str) else bases), **rule))
    return path.stem


def read_file(path: Path) -> dict[str, Any]:
    """The settings of a TOML or JSON file."""
    try:
        text = path.read_text(encoding="utf-8")
        data = parse_json(text) if path.suffix == ".json" else tomllib.loads(text)
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
    facts = DATASETS.part(config.dataset).facts if config.dataset in DATASETS else DATASETS.defaults
    mirrors = {
        "pretrain.augment.flip": config.pretrain.augment.flip,
        "scorer.flip": config.learner.scorer.flip,
    }
    for name, mirrored in mirrors.items():
        if mirrored and not facts["mirrors"]:
            raise SettingError(f"{name} mirrors images, which changes the class of {config.dataset}.")
    target, backbone = facts["target"], config.learner.backbone
    if not config.learner.target == target == BACKBONES.fact(backbone, "target"):
        fitting = ", ".join(name for name in BACKBONES if BACKBONES.fact(name, "target") == target)
        raise SettingError(
            f"dataset={config.dataset} is about {target}: it needs target={target} and backbone={fitting}, not "
            f"target={config.learner.target} and backbone={backbone}."
        )
    if target == "values" and config.train.augment:
        raise SettingError(f"train.augment is about images of classes: {config.dataset} has none.")
    if target == "values" and config.train.temperature != "one":
        raise SettingError(f"train.temperature is about probabilities of classes: {config.dataset} has none.")
    if config.pretrain.crop_size is not None and config.learner.net.embedding == "flatten":
        raise SettingError(
            "pretrain.crop_size has crops of another size than the images, and net.embedding=flatten depends on "
            "their size: set net.embedding=mean."
        )
    if BACKBONES.fact(backbone, "pretrained"):
        for name, on in {"augment": config.train.augment, "rotations": config.train.rotations}.items():
            if on:
                raise SettingError(
                    f"train.{name} shows images in other ways, and of {backbone}, an encoder, the features of "
                    f"each image are computed once: set train.{name}=false."
                )
    if config.pretrain.distill and not config.learner.scorer.pretrains:
        raise SettingError(
            "pretrain.distill learns from the encoder that scores, and there is none: set scorer.kind=encoder."
        )
    for name in (config.method, *config.baselines):
        check_method(config, name)


def check_method(config: Config, method: str) -> None:
    """Refuse a method that makes no sense within the settings of a run."""
    if not trains(method):
        if config.learner.target == "values":
            raise SettingError(f"{method} stands for classes, and {config.dataset} has none: leave it out.")
        return
    own = method_config(config, method)
    check(own)
    check_learner(own.learner)
    if not any(to_dict(own.train.lr).values()):
        raise SettingError("train.lr leaves nothing to meta-learn: set a rate above 0.")
