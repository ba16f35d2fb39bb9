"""What the arguments of a command ask for: settings, methods and run folders."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tyro

from npbml.cli.screen import Command
from npbml.config import (
    Config,
    check_config,
    flat,
    override,
    preset,
    read_file,
    read_recipe,
    refuse_contradiction,
)
from npbml.errors import SettingError
from npbml.run_folder import read_config
from npbml.settings import describe, setting

T = TypeVar("T")


@dataclass(frozen=True)
class Options(Config):
    """Where a run is kept and its settings."""

    run: str | None = setting(None)
    """The run folder, new or to be continued. A name made of the settings, below runs/, if not given."""
    config: str | None = setting(None)
    """A TOML or JSON file of settings; what the command line says goes before it."""


@dataclass(frozen=True)
class Nothing:
    """No options."""


class Asked(NamedTuple):
    """What the arguments ask for."""

    config: Config
    folder: Path
    named: dict[str, Any]  # the settings that the user has given, by full name

    def check(self) -> None:
        """Refuse settings that are out of range or at odds with each other or with the method."""
        check_config(self.config)
        refuse_contradiction(self.config, self.named)
        if self.config.dataset == "sinusoid" and "prototypes" in self.config.baselines:
            raise SettingError("Prototypes stand for classes, and sinusoid has none: leave them out of baselines.")


def parse(kind: type[T], name: str, command: Command, arguments: list[str]) -> T:
    """The options of a command that has few."""
    return tyro.cli(kind, prog=f"npbml {name}", description=command.__doc__, args=arguments)


def read_settings(
    command: Command,
    arguments: list[str],
    kind: type[Options] = Options,
    protocol: str = "quick",
    method: str | None = None,
    folder: Path | None = None,
) -> Asked:
    """The settings, not yet checked, and the run folder that the arguments ask for.

    A setting is looked for on the command line, then in the settings file, then in the run folder, then among
    the protocol's defaults; so the places it may come from are read first. `protocol` is that of a new run if
    none is asked for; a `method` and a `folder` stand in the place of those of the arguments.
    """
    first = peek(arguments, ("run", "config", "protocol", "dataset", "backbone", "method", "shots"))
    file = read_file(Path(first["config"])) if first.get("config") else {}
    names = {"protocol": protocol, **file, **first, **({"method": method} if method else {})}
    if "method" in names:
        names["method"] = method_name(str(names["method"]))
    place = folder or (Path(first["run"]) if first.get("run") else None)
    config = read_config(place) if place and (place / "config.json").exists() else _defaults(names)
    config = override(config, file)
    options = tyro.cli(
        kind,
        prog=f"npbml {command.__name__}",
        description=command.__doc__,
        default=kind(**{field.name: getattr(config, field.name) for field in dataclasses.fields(Config)}),
        args=[_spelt(argument) for argument in arguments],
        config=(tyro.conf.FlagConversionOff,),
    )
    config = Config(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Config)})
    config = replace(
        config,
        method=method or method_name(config.method),
        baselines=tuple(method_name(name) for names in config.baselines for name in names.split(",") if name),
    )
    words = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in arguments if word[:2] == "--"}
    named = {name: value for name, _, value in describe(Config, config) if name in words}
    return Asked(config, place or Path("runs") / run_name(config), {**flat(file), **named})


def read_configuration(command: Command, arguments: list[str]) -> Asked:
    """The settings and the run folder that the arguments ask for, checked."""
    asked = read_settings(command, arguments)
    asked.check()
    return asked


def method_name(text: str) -> str:
    """The name of a method that is given as a name, or as the file of a recipe, which is then known by it."""
    return read_recipe(Path(text)) if text.endswith((".toml", ".json")) else text


def _defaults(names: dict[str, Any]) -> Config:
    """The preset that the names of a protocol, a data set, a backbone, a method and a number of shots choose."""
    usual = Config()
    words = {
        key: str(names.get(key, getattr(usual, key))) for key in ("protocol", "dataset", "backbone", "method")
    }
    shots = str(names.get("shots", usual.shots))
    return preset(**words, shots=int(shots) if shots.isdigit() else usual.shots)


def run_name(config: Config) -> str:
    """The run folder's name where none is given."""
    task = f"{config.ways}way-{config.shots}shot" if config.target == "classes" else f"{config.shots}shot"
    data = Path(config.dataset).name or "pictures"
    return f"{data}-{config.backbone}-{task}-{config.protocol}-seed{config.seed}"


def peek(arguments: list[str], names: Iterable[str]) -> dict[str, str]:
    """The values of a few options, before the others can be read."""
    found: dict[str, str] = {}
    for place, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        name = option.removeprefix("--")
        if option.startswith("--") and name in names:
            if equals:
                found[name] = value
            elif place + 1 < len(arguments):
                found[name] = arguments[place + 1]
    return found


def without(arguments: list[str], name: str) -> list[str]:
    """The arguments less an option and its value."""
    if f"--{name}" in arguments:
        place = arguments.index(f"--{name}")
        return arguments[:place] + arguments[place + 2 :]
    return [argument for argument in arguments if not argument.startswith(f"--{name}=")]


def _spelt(argument: str) -> str:
    """true and false as Python spells them: a file, and the list of settings, spell them in lower case."""
    option, equals, value = argument.rpartition("=")
    return f"{option}{equals}{value.capitalize()}" if value in ("true", "false") else argument
