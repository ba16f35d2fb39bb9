"""What makes a result what it is: fingerprints, and the files of earlier versions.

Fingerprints are made of the names that version 0.1 had for settings, so that what was trained with it goes on.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from npbml.errors import SettingError
from npbml.lab.schema import Config
from npbml.methods import REMOVED
from npbml.settings import from_dict, from_old_names, leaves, to_dict
from npbml.version import __version__

# Settings that may differ from those a run folder was made with: they change no trained weight.
MAY_DIFFER = ("baselines", "checkpoint_seconds", "device", "engine.", "method", "test.", "train.max_skipped")
# Settings, by their names in version 0.1, that no trained weight depends on, whatever the method.
NOT_IN_FINGERPRINT = ("baselines", "checkpoint_seconds", "device", "engine.", "protocol", "test.", "train.skips")
# Defaults of earlier versions that are others now, by today's names: a file that lacks a setting has that of the
# version that wrote it.
OLD_DEFAULTS: dict[str, dict[str, Any]] = {"0.1": {}}


def differences(mine: Config, other: Config) -> list[str]:
    """The names of the settings, those that may differ aside, in which two configurations differ."""
    values = {leaf.name: leaf.value for leaf in leaves(other)}
    return [
        leaf.name
        for leaf in leaves(mine)
        if leaf.value != values[leaf.name] and not leaf.name.startswith(MAY_DIFFER)
    ]


def to_file(config: Config) -> dict[str, Any]:
    """A configuration as a file has it, with the version that wrote it."""
    return {"npbml": __version__, **to_dict(config)}


def from_file(data: Mapping[str, Any], note: Callable[[str], None] = lambda words: None) -> Config:
    """The configuration that a file of any version holds. `note` is told what settings are called now.

    A setting that the file does not have came later, and has the default of the version that wrote the file.
    """
    if not isinstance(data, Mapping):
        raise SettingError(f"it must be a table of settings, not {data!r}")
    data = dict(data)
    version = str(data.pop("npbml", "0.1"))
    if version == "0.1":
        data = from_old_names(Config, data, REMOVED, note)
    for name in ("protocol", "dataset", "backbone", "method", "shots"):
        if name not in data:
            raise SettingError(f"there is no {name} in it")
    default = from_dict(Config, OLD_DEFAULTS.get(version, {}), Config())
    return from_dict(Config, data, default)


def fingerprint(config: Config, stage: str, names: Collection[str] | None = None) -> str:
    """What a stage's outcome depends on, in a word: all settings, or those of some groups.

    Settings at their defaults leave no trace, so that a later one does not disown what was trained before.
    """
    usual = {leaf.old_name: leaf.value for leaf in leaves(Config())}
    settings = {
        leaf.old_name: leaf.old_value
        for leaf in leaves(config)
        if leaf.value != usual[leaf.old_name]
        and not leaf.old_name.startswith(NOT_IN_FINGERPRINT)
        and (names is None or leaf.old_name.partition(".")[0] in names)
    }
    return hashlib.sha256(json.dumps([stage, settings], sort_keys=True).encode()).hexdigest()[:16]
