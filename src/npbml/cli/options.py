"""What the arguments of a command ask for: settings, methods and run folders."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from npbml.cli.arguments import Arguments
from npbml.cli.screen import Command, note
from npbml.errors import SettingError
from npbml.lab.protocols import preset
from npbml.lab.run_folder import read_config
from npbml.lab.schema import Config, check_config, override, read_file, read_recipe, refuse_contradiction
from npbml.methods import REMOVED
from npbml.parts import MethodName
from npbml.registry import PartName
from npbml.settings import flat, from_old_names, leaves, setting

T = TypeVar("T")
NAMES = ConstructorRegistry()


@NAMES.primitive_rule
def _part_name(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[str] | None:
    """A setting that takes the name of a part lists the names there are, those of plugins too."""
    if not (isinstance(info.type, type) and issubclass(info.type, PartName)):
        return None
    kind, registry = info.type, info.type.registry

    def read(words: list[str]) -> str:
        if not kind.other and words[0] not in registry:
            raise ValueError(registry.unknown(words[0]))
        return words[0]

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="{" + ",".join(registry) + "}" + (f"|{kind.other}" if kind.other else ""),
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda value: [str(value)],
    )


@dataclass(frozen=True)
class Options:
    """Where a run is kept and its settings."""

    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)
    run: str | None = setting(None)
    """The run folder, new or to be continued. A name made of the settings, below runs/, if not given."""
    config: str | None = setting(None)
    """A TOML or JSON file of settings; what the command line says goes before it."""
    shown: ClassVar[type[Config]] = Config  # the same fields, of which a command may hide some


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


def parse(kind: type[T], name: str, command: Command, arguments: list[str]) -> T:
    """The options of a command that has few."""
    return tyro.cli(kind, prog=f"npbml {name}", description=command.__doc__, args=arguments, registry=NAMES)


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
    given = by_todays_names(Arguments(arguments))
    place = folder or (Path(run) if (run := given.get("run")) else None)
    file = read_settings_file(Path(path)) if (path := given.get("config")) else {}
    config = read_config(place, note) if place and (place / "config.json").exists() else None
    if config is None:
        config = _defaults(given, {"protocol": protocol, **file}, method)
    config = override(config, file)
    options = tyro.cli(
        kind,
        prog=f"npbml {command.__name__}",
        description=command.__doc__,
        default=kind(settings=kind.shown(**vars(config))),
        args=[_spelt(word) for word in given.words],
        config=(tyro.conf.FlagConversionOff,),
        registry=NAMES,
    )
    baselines = [name for names in options.settings.baselines for name in names.split(",") if name]
    config = replace(
        Config(**vars(options.settings)),
        method=MethodName(method or method_name(options.settings.method)),
        baselines=tuple(map(method_name, baselines)),
    )
    named = {leaf.name: leaf.value for leaf in leaves(config) if leaf.name in given.names}
    return Asked(config, place or Path("runs") / run_name(config), {**flat(file), **named})


def read_settings_file(path: Path) -> dict[str, Any]:
    """The settings of a file, by today's names."""
    told: list[str] = []
    tables = from_old_names(Config, read_file(path), REMOVED, told.append)
    for words in told:
        note(f"{path}: {words}")
    return tables


def by_todays_names(given: Arguments) -> Arguments:
    """Options that version 0.1 had, under their names of today; the user is told."""
    known = list(leaves(Config()))
    today = {leaf.name for leaf in known}
    names = {leaf.old_name: leaf.name for leaf in known if leaf.old_name not in today}
    for name in given.names & names.keys():
        note(f"The setting {name} is called {names[name]} now.")
    for name in given.names & REMOVED.keys():
        words = [*given.all(name.replace("_", "-")), *given.all(name)]
        if not all(_says(word, REMOVED[name]) for word in words):
            raise SettingError(f"The setting {name} is gone: it is always {REMOVED[name]}.")
        note(f"The setting {name} is gone: it is always {REMOVED[name]}.")
        given = given.without(name).without(name.replace("_", "-"))
    return given.renamed(names, {leaf.name: leaf.metadata["values"] for leaf in known})


def _says(word: str, value: Any) -> bool:
    """Whether a word of the command line says this value, however it is spelt."""
    try:
        return _spelt(word) == str(value) or float(word) == value
    except ValueError:
        return False


def read_configuration(command: Command, arguments: list[str]) -> Asked:
    """The settings and the run folder that the arguments ask for, checked."""
    asked = read_settings(command, arguments)
    asked.check()
    return asked


def method_name(text: str) -> str:
    """The name of a method that is given as a name, or as the file of a recipe, which is then known by it."""
    return read_recipe(Path(text)) if text.endswith((".toml", ".json")) else text


def _defaults(given: Arguments, names: dict[str, Any], method: str | None) -> Config:
    """The preset that the names of a protocol, a data set, a backbone, a method and a number of shots choose."""
    usual = Config()
    keys = {"protocol": usual.protocol, "dataset": usual.dataset, "backbone": usual.learner.backbone}
    words = {key: str(given.get(key) or names.get(key, default)) for key, default in keys.items()}
    chosen = method or method_name(str(given.get("method") or names.get("method", usual.method)))
    shots = str(given.get("shots") or names.get("shots", usual.shots))
    return preset(**words, method=chosen, shots=int(shots) if shots.isdigit() else usual.shots)


def run_name(config: Config) -> str:
    """The run folder's name where none is given."""
    learner = config.learner
    task = f"{learner.ways}way-{config.shots}shot" if learner.target == "classes" else f"{config.shots}shot"
    data = Path(config.dataset).name or "pictures"
    return f"{data}-{learner.backbone}-{task}-{config.protocol}-seed{config.seed}"


def _spelt(word: str) -> str:
    """true and false as Python spells them: a file, and the list of settings, spell them in lower case."""
    option, equals, value = word.rpartition("=")
    return f"{option}{equals}{value.capitalize()}" if value in ("true", "false") else word
