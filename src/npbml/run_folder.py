"""The folder of a run: whose it is, what it was made with, and who is at work in it."""

import fcntl
import json
from pathlib import Path
from typing import IO

from npbml.config import Config, differences, saved_config
from npbml.errors import RunError, SettingError
from npbml.files import read_json, write_json
from npbml.methods import BUILT_IN, RECIPES, Recipe, register


def read_config(folder: Path) -> Config:
    """The configuration that a run folder was made with."""
    path = folder / "config.json"
    if not path.exists():
        raise RunError(f"{folder} is not a run folder: it has no config.json.")
    _register_recipes(folder)
    data = read_json(path)
    try:
        return saved_config(data)
    except (TypeError, SettingError) as error:
        raise RunError(f"{path} is damaged or of another version of npbml: {error}") from None


def _register_recipes(folder: Path) -> None:
    """Know the methods of the user's own that a run was made with."""
    for path in folder.glob("*/recipe.json"):
        name, known = path.parent.name, read_json(path)
        if name in RECIPES and json.loads(json.dumps(RECIPES[name].rule)) != known["rule"]:
            raise RunError(f"{path} is another recipe than the {name} given now: give yours another name.")
        register(name, Recipe(known["summary"], known["rule"]))


def _taken(folder: Path) -> bool:
    """Whether a folder has more in it than a start that was killed leaves behind."""
    left = {"environment.json", ".environment.json.part", ".config.json.part"}
    return any(path.name not in left for path in folder.iterdir())


def begun(folder: Path, config: Config) -> bool:
    """Whether the run of `config` has been begun in the folder; refused where that is anything else's."""
    if (folder / "config.json").exists():
        changed = differences(config, read_config(folder))
        if changed:
            raise RunError(
                f"{folder} is a run with another {', '.join(changed[:4])}"
                f"{' and more' if len(changed) > 4 else ''}: choose another folder with --run."
            )
        return True
    if folder.exists() and (not folder.is_dir() or _taken(folder)):
        raise RunError(f"{folder} is there, but it is not a run folder: choose another with --run.")
    return False


def lock(folder: Path) -> IO[str]:
    """Keep other processes out until the file that is returned is closed."""
    try:
        file = open(folder / ".lock", "w")  # noqa: SIM115
    except OSError as error:
        raise RunError(f"{folder} cannot be written to: {error.strerror}.") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise RunError(f"Another process is at work in {folder}: wait for it, or stop it.") from None
    return file


def keep_recipe(folder: Path, method: str) -> None:
    """A method of the user's own is known again wherever the folder goes."""
    if method not in BUILT_IN and method != "prototypes":
        recipe = RECIPES[method]
        write_json(folder / method / "recipe.json", {"summary": recipe.summary, "rule": recipe.rule})
