"""A user's own pictures: how their classes are split, and tasks that are small enough for them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npbml.data.folder import folder_classes, is_split
from npbml.data.store import SPLITS, Store, data_root
from npbml.errors import DataError
from npbml.lab.schema import Config, override
from npbml.parts import DATASETS

LISTED = 6  # class names of a split that are shown
WAYS = 2  # classes of the smallest task
ANY_CLASSES = {"method": "npbml-any", "baselines": ["maml-any", "prototypes"]}
"""What a run of a folder of pictures trains where no method is named: what can label any number of classes."""


@dataclass(frozen=True)
class OwnPictures:
    """The user's own pictures.

    Attributes:
        place: The folder, or the name of the prepared data set.
        splits: The number of images of each class, by split and class.
        dealt: Whether the classes were dealt to the splits here, and not by the user.
        prepared: Whether it was prepared under a name.
    """

    place: str
    splits: Mapping[str, Mapping[str, int]]
    dealt: bool = False
    prepared: bool = False


def own_pictures(dataset: str) -> OwnPictures | None:
    """Return what is known of the user's own data set, without reading its pictures; None for other data sets.

    Raises:
        DataError: The folder cannot be used.
    """
    path = Path(dataset).expanduser()
    if dataset in DATASETS:
        return None
    for folder in (data_root() / dataset, path):
        if (folder / "store.json").is_file():
            counts: dict[str, dict[str, int]] = {split: {} for split in SPLITS}
            for entry in Store.open(folder).entries:
                counts[entry.split][entry.name] = entry.count
            return OwnPictures(dataset, counts, prepared=True)
    if not path.is_dir():
        return None
    counts = {split: {} for split in SPLITS}
    for name, split, count in folder_classes(path.resolve()):
        counts[split][name] = count
    return OwnPictures(dataset, counts, not is_split(path))


def split_words(pictures: OwnPictures) -> list[str]:
    """Return how the classes are split, and how that can be changed, in lines of text."""
    total = sum(map(len, pictures.splits.values()))
    lines = [f"{pictures.place}: {total} classes{', split at random' if pictures.dealt else ''}"]
    for split, use in zip(SPLITS, ("to learn from", "to choose by", "to test on"), strict=True):
        names = sorted(pictures.splits[split])
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        lines.append(f"  {split + ',':6} {use + ':':14} {len(names)} ({', '.join(names[:LISTED])}{more})")
    if pictures.dealt:
        lines.append(
            "To split them yourself, put the class folders into train/, val/ and test/; for other shares, "
            f"`npbml data prepare NAME --source {pictures.place} --fractions 0.5 0.25 0.25 --seed 1` and "
            "--dataset NAME."
        )
    return lines


def fit_tasks(config: Config, named: Mapping[str, Any], pictures: OwnPictures) -> tuple[Config, list[str]]:
    """Return the settings with tasks that the pictures can fill, and what was changed, in lines of text.

    Settings that the user has named are left as they are.

    Args:
        config: The settings of the run.
        named: Those that the user has given, by full name.
        pictures: The user's own pictures.

    Raises:
        DataError: A split has a single class.
    """
    few = min(SPLITS, key=lambda split: len(pictures.splits[split]))
    classes = len(pictures.splits[few])
    if classes < WAYS:
        raise DataError(
            f"{pictures.place} has {sum(map(len, pictures.splits.values()))} classes, {classes} for {few}. "
            "A task has 2 classes or more, so that train, val and test need 2 each: 6 in all. With fewer, use a "
            "learner that comes with npbml: `npbml classify FEW MANY`."
        )
    smallest, images = min(
        ((name, count) for split in pictures.splits.values() for name, count in split.items()),
        key=lambda one: one[1],
    )
    changes: dict[str, Any] = {}
    said: list[str] = []
    if config.protocol == "quick" and not pictures.prepared and not named.keys() & ANY_CLASSES.keys():
        changes |= ANY_CLASSES
        said.append(
            "The methods are those that take any number of classes: npbml-any, beside maml-any (--method)."
        )
    ways, shots, queries = config.learner.ways, config.shots, config.queries
    if ways > classes and "ways" not in named:
        changes["ways"] = classes
        said.append(f"Tasks have {classes} classes and not {ways}: {few} has no more (--ways).")
    if shots + queries > images > shots and "queries" not in named:
        queries = images - shots
        changes["queries"] = queries
        said.append(
            f"Tasks have {queries} query pictures of each class and not {config.queries}: {smallest} has {images} "
            "pictures (--queries)."
        )
    validation = config.pretrain.validation_shots
    if validation + queries > images > queries and "pretrain.validation_shots" not in named:
        changes["pretrain"] = {"validation_shots": images - queries}
        said.append(f"Pre-training is validated with {images - queries} shots and not {validation}.")
    return (override(config, changes) if changes else config), said
