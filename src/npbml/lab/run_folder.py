"""The folder of a run: whose it is, what it was made with, and who is at work in it."""

import fcntl
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from npbml.errors import RunError, SettingError
from npbml.json_files import PART, make_folder, read_json, remove_parts, saving, write_json
from npbml.lab.identity import differences, from_file, to_file
from npbml.lab.schema import Config
from npbml.learner.settings import LearnerSettings
from npbml.methods import REMOVED, Recipe, find_recipe, register
from npbml.parts import METHODS
from npbml.registry import LOADED
from npbml.settings import from_old_names

LOCK = ".lock"


def read_config(folder: Path, note: Callable[[str], None] = lambda words: None) -> Config:
    """The configuration that a run folder was made with; `note` is told which settings have other names now."""
    path = folder / "config.json"
    if not path.exists():
        raise RunError(f"{folder} is not a run folder: it has no config.json.")
    _register_recipes(folder)
    data, told = read_json(path), list[str]()
    try:
        config = from_file(data, told.append)
    except (TypeError, SettingError) as error:
        raise _unreadable(folder, path, error) from None
    renamed = [words for words in told if "called" in words]
    if renamed:
        count = len(renamed)
        note(f"{path} is of version 0.1: {count} of its settings have other names now. {renamed[0]}")
    return config


def _register_recipes(folder: Path) -> None:
    """Know the methods of the user's own that a run was made with."""
    for path in folder.glob("*/recipe.json"):
        name, known = path.parent.name, read_json(path)
        try:
            rule = from_old_names(LearnerSettings, known["rule"], REMOVED, lambda note: None)
            if name in METHODS and json.loads(json.dumps(find_recipe(name).rule)) != json.loads(json.dumps(rule)):
                raise RunError(f"{path} is another recipe than the {name} given now: give yours another name.")
            register(name, Recipe(known["summary"], rule))
        except (AttributeError, KeyError, TypeError, SettingError) as error:
            raise _unreadable(folder, path, error) from None


def _unreadable(folder: Path, path: Path, error: Exception) -> RunError:
    """What to say of a file that names what is not known: perhaps a plugin is missing."""
    environment = folder / "environment.json"
    made_with = read_json(environment).get("plugins", []) if environment.exists() else []
    missing = [plugin for plugin in made_with if plugin not in LOADED]
    if missing:
        return RunError(
            f"{folder} was made with a plugin: give it with --plugin {' --plugin '.join(missing)}. {error}"
        )
    return RunError(f"{path} is damaged or of another version of npbml: {error}")


def _taken(folder: Path) -> bool:
    """Whether a folder has more in it than a start that was killed leaves behind."""
    return any(path.name not in (LOCK, "environment.json") and path.suffix != PART for path in folder.iterdir())


class RunFolder:
    """The folder of a run: its paths, its lock, its configuration and its records.

        config.json, environment.json     what was asked for, and with which versions, seed and device
        pretrain/network.safetensors      the pre-trained encoder
        relation/relation.safetensors     what scores query items
        METHOD/learner.safetensors        a meta-trained learner; -2, -3, ... those beside it in an ensemble
        METHOD/recipe.json                what the method is, where it is one of the user's own
        results.json                      a record for each tested method
        pictures/                         curves, sample tasks, the learned loss

    A stage that has not ended keeps `checkpoint.safetensors` in its folder.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def there(self) -> bool:
        """Whether a run has been begun in it."""
        return (self / "config.json").exists()

    def config(self) -> Config:
        """The configuration that it was made with."""
        return read_config(self.path)

    def checksum(self) -> str | None:
        """That of the images which the run was begun with."""
        return read_json(self / "environment.json").get("data")

    def begun(self, config: Config) -> bool:
        """Whether the run of `config` has been begun in it; refused where that is anything else's."""
        if self.there:
            changed = differences(config, self.config())
            if changed:
                raise RunError(
                    f"{self.path} is a run with another {', '.join(changed[:4])}"
                    f"{' and more' if len(changed) > 4 else ''}: choose another folder with --run."
                )
            return True
        if self.path.exists() and (not self.path.is_dir() or _taken(self.path)):
            raise RunError(f"{self.path} is there, but it is not a run folder: choose another with --run.")
        return False

    def begin(self, config: Config, environment: Mapping[str, Any]) -> None:
        """Write what the run is; the configuration, by which it is known, comes last.

        Of two processes that begin a run at once, the second is refused, or finds it begun with its own settings.
        """
        with saving(self.path):
            make_folder(self.path)
        with self.lock():
            if not self.begun(config):
                write_json(self / "environment.json", environment)
                write_json(self / "config.json", to_file(config))
            for method in (config.method, *config.baselines):
                self.keep_recipe(method)

    def keep_recipe(self, method: str) -> None:
        """A method of the user's own is known again wherever the folder goes."""
        if not METHODS.part(method).built_in:
            recipe = find_recipe(method)
            write_json(self / method / "recipe.json", {"summary": recipe.summary, "rule": recipe.rule})

    def lock(self) -> IO[str]:
        """Keep other processes out until the file that is returned is closed; clear up after killed ones."""
        try:
            file = open(self / LOCK, "w")  # noqa: SIM115
        except OSError as error:
            raise RunError(f"{self.path} cannot be written to: {error.strerror}.") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise RunError(f"Another process is at work in {self.path}: wait for it, or stop it.") from None
        remove_parts(self.path)
        return file
