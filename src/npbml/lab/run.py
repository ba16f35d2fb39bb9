"""A run: its folder, its configuration, the device it computes on and its data."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from npbml.data.draws import fitting_shapes
from npbml.data.image_data import ImageData, shown_to
from npbml.data.request import Request
from npbml.data.sets import open_data
from npbml.data.tasks import ClassSet
from npbml.engine.device import choose_device, computing
from npbml.engine.distributed import on_rank_zero
from npbml.engine.encoding import encoded
from npbml.engine.settings import resolved
from npbml.engine.source import Cache, SinusoidSource, Source, TaskSource
from npbml.errors import RunError, SettingError
from npbml.lab.environment import environment
from npbml.lab.memory import Images, check_memory
from npbml.lab.records import Records
from npbml.lab.run_folder import RunFolder
from npbml.lab.schema import Config, check_config
from npbml.lab.stages import PRETRAIN, SCORER, needed
from npbml.learner.file import read_images
from npbml.learner.learner import Learner
from npbml.learner.settings import ImageSpec
from npbml.measures import MEASURES, Measure
from npbml.nets.encoder import Encoder
from npbml.nets.settings import smallest_image
from npbml.parts import BACKBONES, DATASETS, SCORERS
from npbml.shapes import Shape, benchmark_shape, read_shapes
from npbml.stages.observer import Observer
from npbml.stages.setup import Setup
from npbml.tensor_files import load_tensors


class Run:
    """What the stages and tests of a run work with."""

    def __init__(self, folder: Path | str, config: Config, observer: Observer | None = None) -> None:
        self.folder, self.config, self.observer = RunFolder(folder), config, observer or Observer()
        self.device = choose_device(config.device)
        self.records = Records(self.folder.path, config.dataset)
        self._cache: Cache = {}  # features of each split: most methods of a run have the same stem

    @classmethod
    def open(cls, folder: Path | str, observer: Observer | None = None) -> Self:
        """The run in an existing folder, with the configuration it was made with."""
        return cls(folder, RunFolder(folder).config(), observer)

    @classmethod
    def start(cls, folder: Path | str, config: Config, observer: Observer | None = None) -> Self:
        """The run of `config` in `folder`, new or to be continued."""
        check_config(config)
        run = cls(folder, config, observer)
        on_rank_zero(run._begin)
        return run

    def _begin(self) -> None:
        config = self.config
        if not self.folder.begun(config):
            # The data set is opened, and refused, before anything is written; and its images are read, and
            # networks made, only where there is room for them.
            check_memory(config, self._stored(), self.device)
            self.check_sizes([config.method, *config.baselines])
            self.folder.begin(config, environment(config, self.device, self.data.checksum))

    def _stored(self) -> Images:
        """How many images there are, and of what size, without reading them."""
        if not isinstance(self.data, ImageData):
            return Images(0, self.data.spec.channels, self.data.spec.size)
        store = self.data.store
        return Images(len(store.images), store.channels, self.data.request.size or store.size)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Keep other processes out of the folder, and have torch compute as the run asks for."""
        engine = resolved(self.config.engine, self.device.type)
        with (
            computing(self.device, engine.precision, engine.deterministic),
            on_rank_zero(self.folder.lock) or nullcontext(),
        ):
            yield

    @property
    def measure(self) -> Measure:
        """What validation and test measure."""
        return MEASURES[self.config.learner.target]

    @cached_property
    def data(self) -> Any:
        """The data set; one whose images have changed since the run was begun is refused."""
        config = self.config
        size = config.image_size
        if config.dataset not in DATASETS:  # pictures of one's own are kept as large as an encoder takes them
            size = size or BACKBONES.fact(config.learner.backbone, "size")
        data = open_data(Request(config.dataset, config.learner.ways, config.shots, config.queries, size))
        if self.folder.there and self.folder.checksum() != data.checksum:
            raise RunError(f"The images of {config.dataset} have changed since {self.folder.path} was begun.")
        return data

    @cached_property
    def splits(self) -> dict[str, ClassSet]:
        """train, val and test, on the device, each with enough classes and images for the run's tasks."""
        assert isinstance(self.data, ImageData)
        splits, config = self.data.splits(self.device), self.config
        if self.encoder is not None:
            splits = {name: self._encoded(classes, self.data.checksum) for name, classes in splits.items()}
        splits["val"].check(config.learner.ways, config.pretrain.validation_shots, config.queries)
        return splits

    @cached_property
    def images(self) -> ImageSpec:
        """What a learner of this run is shown; known without the data set once the encoder is trained."""
        if self.encoder is not None:
            return ImageSpec(len(self.encoder.mean), self.encoder.size, self.encoder.mean, self.encoder.std)
        path = self.folder / PRETRAIN.name / PRETRAIN.weights
        if path.exists():
            return read_images(path, load_tensors(path)[1])
        return self.splits["train"].spec if isinstance(self.data, ImageData) else self.data.spec

    @property
    def encoder(self) -> Encoder | None:
        """The encoder that is the stem of this run's networks, where the backbone is one."""
        backbone = self.config.learner.backbone
        return BACKBONES.get(backbone) if BACKBONES.fact(backbone, "pretrained") else None

    def _encoded(self, classes: ClassSet, checksum: str) -> ClassSet:
        assert self.encoder is not None
        return encoded(classes, self.encoder, checksum, self.observer.said)

    def check_sizes(self, methods: Iterable[str]) -> None:
        """Refuse networks that pool more often than the images can be halved."""
        learner, config = self.config.learner, self.config
        crops = config.pretrain.crop_size, config.scorer_training.crop_size
        size, of_scores = (min(self.images.size, crop or self.images.size) for crop in crops)
        least = smallest_image(learner.backbone, learner.net)
        if size < least:
            raise SettingError(
                f"{learner.backbone} needs images of at least {least} pixels, {size} pixels are too few."
            )
        episodic, blocks = SCORERS.fact(learner.scorer.kind, "episodic"), len(learner.scorer.widths)
        halvings = 2 + min(learner.scorer.pools, blocks) if episodic else blocks
        if SCORER.name in needed(self.config, methods) and of_scores < 2**halvings:
            raise SettingError(
                f"The scorer halves an image {halvings} times, {of_scores} pixels are too few: "
                f"{'lower scorer.pools' if episodic else 'give fewer scorer.widths'}."
            )

    def setup(self, config: Config | None = None) -> Setup:
        """What trainers are given: that of the run, or of another configuration."""
        config = config or self.config
        return Setup(
            config.learner,
            config.shots,
            config.queries,
            config.seed,
            config.engine,
            self.device,
            config.test.batch_size,
            self.observer.said,
        )

    @property
    def benchmark(self) -> Shape:
        """The shape of the run's tasks by its ways, shots and queries."""
        return benchmark_shape(self.config.learner.ways, self.config.shots, self.config.queries)

    def source(self, learner: Learner, split: str) -> Source:
        """Where the benchmark's tasks of a split come from, for a learner."""
        if not isinstance(self.data, ImageData):
            return SinusoidSource(learner, self.data, self.device)
        return self.task_source(learner, self._classes(split))

    def sources(self, learner: Learner, split: str) -> list[Source]:
        """Where the tasks come from that the learner is trained and validated on: one source for each shape.

        Shapes that the classes cannot fill are left out; where no other is left, there are the benchmark's tasks.
        """
        shapes, say = read_shapes(learner.settings.shapes), self.observer.said
        if not shapes:
            return [self.source(learner, split)]
        classes = self._classes(split)
        fitting = fitting_shapes(classes, shapes)
        if too_large := [str(shape) for shape in shapes if shape not in fitting]:
            say(f"The {split} classes are too few or too small for tasks of {', '.join(too_large)}: left out.")
        return [self.task_source(learner, classes, shape) for shape in fitting or [self.benchmark]]

    def _classes(self, split: str) -> ClassSet:
        """The classes of a split, as meta-training and its validation see them."""
        return self._rotated if split == "train" and self.config.train.rotations else self.splits[split]

    @cached_property
    def _rotated(self) -> ClassSet:
        return self.splits["train"].with_rotations()

    def task_source(self, learner: Learner, classes: ClassSet, shape: Shape | None = None) -> TaskSource:
        """Tasks from some classes: those of the benchmark, or of another shape."""
        precision = resolved(self.config.engine, self.device.type).precision
        return TaskSource(learner, classes, shape or self.benchmark, precision, self._cache, self.observer.said)

    def foreign_classes(self, dataset: str) -> ClassSet:
        """The test classes of another data set, in the run's size, channels and normalisation."""
        config = self.config
        tasks = config.learner.ways, config.shots, config.queries
        size = self.images.size if self.encoder is None or dataset not in DATASETS else None
        data = open_data(Request(dataset, *tasks, size=size, channels=self.images.channels))
        if not isinstance(data, ImageData):
            raise SettingError(f"{dataset} has no images: a learner of {config.dataset} cannot be tested on it.")
        classes = data.store.classes("test")
        classes.check(*tasks)
        if self.encoder is not None:
            return self._encoded(classes.to(self.device), data.checksum)
        return shown_to(classes, self.images).to(self.device)
