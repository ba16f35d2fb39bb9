"""A run folder: one configuration, its stages in order, and what they leave behind.

    config.json, environment.json     what was asked for, and with which versions, seed and device
    pretrain/network.safetensors      the pre-trained encoder
    relation/relation.safetensors     what scores query items
    METHOD/learner.safetensors        a meta-trained learner; -2, -3, ... those beside it in an ensemble
    METHOD/recipe.json                what the method is, where it is one of the user's own
    results.json                      a record for each tested method
    pictures/                         curves, sample tasks, the learned loss

A stage that has not ended keeps `checkpoint.safetensors` in its folder.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import npbml
from npbml.config import Config, check_config, check_method, fingerprint, method_config
from npbml.data.sets import open_dataset
from npbml.data.sinusoid import Sinusoids
from npbml.data.store import Store
from npbml.data.tasks import ClassSet
from npbml.engine.capture import Replay
from npbml.engine.device import choose_device, describe_device, make_reproducible, set_precision
from npbml.engine.distributed import by_first
from npbml.engine.evaluate import ACCURACY, MEASURES, Accuracy, Measure, evaluate, learner_answers
from npbml.engine.settings import resolved
from npbml.engine.source import Features, SinusoidSource, Source, TaskSource
from npbml.environment import environment
from npbml.errors import RunError, SettingError
from npbml.files import load_tensors, read_json, write_json, write_whole
from npbml.learner import ImageSpec, Learner
from npbml.learner.settings import image_spec
from npbml.methods import RECIPES
from npbml.nets.network import Network, smallest_image
from npbml.records import Records
from npbml.run_folder import begun, keep_recipe, lock, read_config
from npbml.settings import from_dict, to_dict
from npbml.stages.loop import Loop, Observer, read_summary, run_loop
from npbml.stages.metatrain import MetaTrainer
from npbml.stages.pretrain import Pretrainer, pretrain_network, prototype_accuracies, use_norms
from npbml.stages.relation import relation_trainer, scorer_config, teacher
from npbml.stages.settings import PretrainSettings, RelationStageSettings, TrainSettings

# What each stage's outcome depends on; the relation network's episodes are augmented as in pre-training.
_COMMON = ("dataset", "seed", "image_size", "backbone", "ways", "queries", "init", "net", "pretrain")
_DEPENDS = {
    "pretrain": (*_COMMON, "warp"),
    "relation": (*_COMMON, "shots", "relation"),
}


class Run:
    """A run folder that is open for work or for reading."""

    def __init__(self, folder: Path, config: Config, observer: Observer | None = None) -> None:
        self.folder, self.config, self.observer = folder, config, observer or Observer()
        self.device = choose_device(config.device)
        self.records = Records(folder, config.dataset)
        self._features: Features = {}  # the stem's, of each split: most methods of a run have the same stem
        if config.engine.deterministic:
            make_reproducible(self.device)
        set_precision(resolved(config.engine, self.device).precision)

    @classmethod
    def open(cls, folder: Path | str, observer: Observer | None = None) -> "Run":
        """The run in an existing folder, with the configuration it was made with."""
        return cls(Path(folder), read_config(Path(folder)), observer)

    @classmethod
    def start(cls, folder: Path | str, config: Config, observer: Observer | None = None) -> "Run":
        """The run of `config` in `folder`, new or to be continued."""
        folder = Path(folder)
        check_config(config)
        for name in config.baselines:
            if name == "prototypes":
                continue
            if name not in RECIPES:
                known = ", ".join(["prototypes", *RECIPES])
                raise SettingError(f"There is no baseline {name!r}: choose from {known}.")
            check_method(config, name)
        run = cls(folder, config, observer)
        by_first(run._begin)
        return run

    def _begin(self) -> None:
        folder, config = self.folder, self.config
        if begun(folder, config):
            return
        # The data set is opened, and refused, before anything is written.
        self.check_sizes([config.method, *config.baselines])
        data = "" if self.sinusoids else self.store.checksum
        write_json(folder / "environment.json", environment(config, self.device, data))
        write_json(folder / "config.json", to_dict(config))
        for name in (config.method, *config.baselines):
            keep_recipe(folder, name)

    @property
    def sinusoids(self) -> Sinusoids | None:
        """The waves of a run on the sinusoid benchmark."""
        config = self.config
        return Sinusoids(config.shots, config.queries) if config.dataset == "sinusoid" else None

    @property
    def measure(self) -> Measure:
        """What validation and test measure."""
        return MEASURES[self.config.target]

    @cached_property
    def store(self) -> Store:
        store = open_dataset(self.config.dataset, size=self.config.image_size or 84)
        begun = self.folder / "environment.json"
        if (self.folder / "config.json").exists() and read_json(begun).get("data") != store.checksum:
            raise RunError(f"The images of {self.config.dataset} have changed since {self.folder} was begun.")
        return store

    @cached_property
    def splits(self) -> dict[str, ClassSet]:
        """train, val and test, on the device, each with enough classes and images for the run's tasks."""
        config, splits = self.config, {}
        for name in ("train", "val", "test"):
            classes = self.store.classes(name)
            if config.image_size:
                classes = classes.shown_as(self.store.channels, config.image_size)
            splits[name] = classes.to(self.device)
            splits[name].check(config.ways, config.shots, config.queries)
        splits["val"].check(config.ways, config.pretrain.validation_shots, config.queries)
        return splits

    @cached_property
    def images(self) -> ImageSpec:
        """What a learner of this run is shown; known without the data set once the encoder is trained."""
        path = self.folder / "pretrain" / "network.safetensors"
        if path.exists():
            return from_dict(ImageSpec, load_tensors(path)[1]["images"])
        return ImageSpec(1, 1, (0.0,), (1.0,)) if self.sinusoids else image_spec(self.splits["train"])

    def check_sizes(self, methods: Iterable[str]) -> None:
        """Refuse networks that pool more often than the images can be halved."""
        config = self.config
        size, of_scores = (self._smallest(crop) for crop in (config.pretrain.crop_size, config.relation.crop_size))
        least = smallest_image(config.backbone, config.net)
        if size < least:
            raise SettingError(
                f"{config.backbone} needs images of at least {least} pixels, {size} pixels are too few."
            )
        network, blocks = config.relation.kind == "network", len(config.relation.widths)
        halvings = 2 + min(config.relation.pools, blocks) if network else blocks
        if "relation" in self.needs(methods) and of_scores < 2**halvings:
            raise SettingError(
                f"The relation network halves an image {halvings} times, {of_scores} pixels are too few: "
                f"{'lower relation.pools' if network else 'give fewer relation.widths'}."
            )

    def _smallest(self, crop: int | None) -> int:
        """The smallest side of what a network sees: the images, or the crops that it learns from."""
        return min(self.images.size, crop or self.images.size)

    def pretrain(self) -> dict[str, Any]:
        """Pre-train the encoder, or go on, or do nothing where that is done."""

        def trainer() -> Pretrainer:
            known = None
            if self.config.pretrain.taught:
                known = teacher(self.config, self.splits["train"])
                self._take_relation(known.load_state_dict)
            return Pretrainer(self.config, *self._sets(), self.device, self.observer.said, teacher=known)

        return self._stage("pretrain", trainer)

    def relation(self) -> dict[str, Any]:
        """Train what scores query items, or go on, or do nothing where that is done."""
        if self.config.relation.kind == "prototypes":
            raise SettingError(
                "relation.kind=prototypes scores by the pre-trained encoder: nothing is to be trained."
            )
        say = self.observer.said
        return self._stage("relation", lambda: relation_trainer(self.config, *self._sets(), self.device, say))

    def train(self, method: str) -> dict[str, Any]:
        """Meta-train a method, or go on, or do nothing where that is done."""
        config = method_config(self.config, method)
        check_method(self.config, method)
        by_first(lambda: keep_recipe(self.folder, method))

        def trainer() -> MetaTrainer:
            learner = self._fresh_learner(config)
            train, val = self.source(learner, "train"), self.source(learner, "val")
            return MetaTrainer(config, learner, train, val, self.observer.said)

        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        summary = self._stage(method, trainer)
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) / 2**30
            self.observer.said(f"GPU memory in use at most: {peak:.2f} GiB.")
        return summary

    def needs(self, methods: Iterable[str]) -> list[str]:
        """The stages that must be done before these methods can be trained, or tested, in their order."""
        stages: set[str] = set()
        for method in methods:
            config = None if method == "prototypes" else method_config(self.config, method)
            if config is None or config.init.source == "pretrained":
                stages |= {"pretrain", "relation"} if self.config.pretrain.taught else {"pretrain"}
            if config is not None and config.loss.transductive and config.relation.kind != "prototypes":
                stages.add("relation")
        order = ("relation", "pretrain") if self.config.pretrain.taught else ("pretrain", "relation")
        return [stage for stage in order if stage in stages]  # what teaches is trained first

    def take_over(self, stage: str, folders: Iterable[Path]) -> None:
        """Copy a stage from the first of these run folders that has done it with the same settings and images."""
        by_first(lambda: self._take_over(self._loop(stage), folders))

    def _take_over(self, loop: Loop, folders: Iterable[Path]) -> None:
        for folder in folders if not loop.done else ():
            other = replace(loop, folder=folder / loop.stage)
            if (
                other.done
                and read_json(other.folder / "done.json").get("fingerprint") == loop.fingerprint
                and read_json(folder / "environment.json").get("data") == self.store.checksum
            ):
                for name in (loop.weights, "metrics.jsonl", "done.json"):  # the last one says that all are there
                    write_whole(loop.folder / name, (other.folder / name).read_bytes())
                (loop.folder / "checkpoint.safetensors").unlink(missing_ok=True)
                self.observer.said(f"{loop.stage}: taken over from {folder}")
                return

    def source(self, learner: Learner, split: str) -> Source:
        """Where the tasks of a split come from, for a learner."""
        if self.sinusoids:
            return SinusoidSource(learner, self.sinusoids, self.device)
        return self._task_source(learner, self.splits[split])

    def _task_source(self, learner: Learner, classes: ClassSet) -> TaskSource:
        config = self.config
        precision = resolved(config.engine, self.device).precision
        return TaskSource(
            learner, classes, config.shots, config.queries, precision, self._features, self.observer.said
        )

    def test(
        self, method: str, tick: Callable[[int], None] = lambda count: None, dataset: str | None = None
    ) -> dict[str, Any]:
        """Test a method on meta-test tasks and put its record into results.json.

        With another `dataset`, on the test classes of that one, shown as the run's own are.
        """
        config, started = self.config, time.monotonic()
        stages = self.needs([method]) + ([] if method == "prototypes" else [method])
        summaries = {stage: self._summary(stage) for stage in stages}
        seconds = {stage if stage in _DEPENDS else "train": summaries[stage]["seconds"] for stage in stages}
        classes = self._foreign(dataset) if dataset else None
        alone: Tensor | None = None  # what the scores reach that a learner is given
        if method == "prototypes":
            classes = classes or self.splits["test"]
            network = self.pretrained_network()
            replay = Replay("test", self.device.type == "cuda", self.observer.said)
            per_task = prototype_accuracies(
                network, config, classes, config.shots, config.test.tasks, "test", replay
            )
        else:
            learners = self.learners(method)
            source = self.source(learners[0], "test")
            if classes is not None:
                source = self._task_source(learners[0], classes)
            replay = Replay("test", self.device.type == "cuda" and source.on_device, self.observer.said)
            tested, scored = config.test, learners[0].relation is not None
            per_task = evaluate(
                learner_answers(learners, source, replay, scored, config.engine.tasks),
                source.draw,
                tested.tasks,
                tested.together,
                config.seed,
                "test",
                self.measure,
                tick,
                (2,) if scored else (),
            )
            if scored:
                per_task, alone = per_task
        seconds["test"] = round(time.monotonic() - started, 2)
        record = self._record(method, dataset or config.dataset, per_task, seconds)
        if alone is not None:
            record["scores"] = self._figures(alone)
        if method in summaries:
            own = summaries[method]
            record |= {name: own[name] for name in ("start", "validation", "best_step", "step_ms", "kept")}
        by_first(lambda: self.records.keep(record, per_task))
        return record

    def learner(self, method: str | None = None) -> Learner:
        """The meta-trained learner of a method, the run's own by default; of an ensemble, the best."""
        return self._read_learner(method or self.config.method, 0)

    def learners(self, method: str) -> list[Learner]:
        """The states of a method that were kept, the best on validation first."""
        return [self._read_learner(method, rank) for rank in range(self._summary(method)["kept"])]

    def _read_learner(self, method: str, rank: int) -> Learner:
        config = method_config(self.config, method)
        path = self._loop(method).file(rank)
        if not path.exists():
            raise RunError(
                f"{path} is not there: train it with `npbml train --run {self.folder} --method {method}`."
            )
        tensors, about = load_tensors(path)
        learner = Learner(config, from_dict(ImageSpec, about["images"]), config.seed)
        _load(learner.load_state_dict, tensors, path)
        return learner.to(self.device)

    def pretrained_network(self) -> Network:
        """The pre-trained encoder, normalising as in meta-learning."""
        path = self.folder / "pretrain" / "network.safetensors"
        tensors, _ = load_tensors(path)
        network = pretrain_network(self.config, self.images)
        _load(network.load_state_dict, tensors, path)
        use_norms(network, self.config)
        return network.to(self.device)

    def results(self) -> list[dict[str, Any]]:
        """The records of results.json."""
        return self.records.all()

    def paired_difference(self, method: str, other: str, dataset: str) -> Accuracy | None:
        """How much more accurate `method` is than `other`, over the test tasks that both were given."""
        return self.records.difference(self.measure, method, other, dataset)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second process, or a second run of several, out of the folder."""
        with by_first(lambda: lock(self.folder)) or nullcontext():
            yield

    def _sets(self) -> tuple[ClassSet, ClassSet]:
        return self.splits["train"], self.splits["val"]

    def _stage(self, stage: str, make: Callable[[], Any]) -> dict[str, Any]:
        loop = self._loop(stage)
        if loop.done:
            summary = read_summary(loop)
            self.observer.begin(stage, loop.steps, loop.steps)
            self.observer.end(f"done before: best {loop.measure.show(summary['validation'])} on validation")
            return summary
        return run_loop(loop, make(), self.observer, {"images": to_dict(self.images)})

    def _loop(self, stage: str) -> Loop:
        config = method_config(self.config, stage) if stage in RECIPES else self.config
        settings: PretrainSettings | RelationStageSettings | TrainSettings = config.train
        if stage in _DEPENDS:
            settings = config.pretrain if stage == "pretrain" else config.relation
        weights = {"pretrain": "network.safetensors", "relation": "relation.safetensors"}
        trained, names, mark = stage not in _DEPENDS, _DEPENDS.get(stage), ""
        if stage == "pretrain" and config.pretrain.taught:
            mark = "-" + self._loop("relation").fingerprint
        if stage == "relation" and config.relation.pretrains:  # pre-trained, whatever the learner's own is
            config, names = scorer_config(config), _DEPENDS["pretrain"]
        return Loop(
            stage,
            self.folder / stage,
            weights.get(stage, "learner.safetensors"),
            settings.steps,
            settings.validate_every,
            config.checkpoint_seconds,
            fingerprint(config, stage, names) + mark,
            self.measure if trained else ACCURACY,
            config.train.ensemble if trained else 1,
        )

    def _summary(self, stage: str) -> dict[str, Any]:
        loop = self._loop(stage)
        if not loop.done:
            command = stage if stage in _DEPENDS else f"train --method {stage}"
            raise RunError(f"{loop.folder} is not finished: run `npbml {command} --run {self.folder}` first.")
        return read_summary(loop)

    def _fresh_learner(self, config: Config) -> Learner:
        """A learner at the start of meta-training: pre-trained encoder, trained relation network, new rule."""
        learner = Learner(config, self.images, config.seed)
        if config.init.source == "pretrained":
            self._summary("pretrain")
            learner.take_pretrained(load_tensors(self.folder / "pretrain" / "network.safetensors")[0])
        if learner.relation is not None and config.relation.kind != "prototypes":
            self._take_relation(learner.take_relation)
        return learner.to(self.device)

    def _take_relation(self, take: Callable[[dict[str, Tensor]], object]) -> None:
        """Have something take what the relation stage has trained."""
        self._summary("relation")
        path = self.folder / "relation" / "relation.safetensors"
        _load(take, load_tensors(path)[0], path)

    def _record(self, method: str, dataset: str, per_task: Tensor, seconds: dict[str, float]) -> dict[str, Any]:
        config = self.config
        return {
            "method": method,
            "protocol": config.protocol,
            "dataset": dataset,
            "backbone": config.backbone,
            "ways": config.ways,
            "shots": config.shots,
            "seed": config.seed,
            "tasks": len(per_task),
            **self._figures(per_task),
            "seconds": seconds,
            "device": describe_device(self.device),
            "version": npbml.__version__,
        }

    def _figures(self, per_task: Tensor) -> dict[str, float]:
        result, places = self.measure.over(per_task), 3 if self.measure is ACCURACY else 6
        return {self.measure.name: round(result.mean, places), "ci95": round(result.ci95, places)}

    def _foreign(self, dataset: str) -> ClassSet:
        """The test classes of another data set, in the run's size, channels and normalisation."""
        images = self.images
        classes = open_dataset(dataset, size=images.size, channels=images.channels).classes("test")
        classes = replace(
            classes.shown_as(images.channels, images.size),
            mean=torch.tensor(images.mean),
            std=torch.tensor(images.std),
        )
        classes.check(self.config.ways, self.config.shots, self.config.queries)
        return classes.to(self.device)


def _load(take: Callable[[dict[str, Tensor]], object], tensors: dict[str, Tensor], path: Path) -> None:
    try:
        take(tensors)
    except RuntimeError as error:
        raise RunError(f"{path} does not fit this run's settings: {error}") from None
