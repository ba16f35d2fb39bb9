"""Parts by name: backbones, heads, loss terms, preconditioners, scorers, data sets and methods.

A built-in part is a name and the place of its code, "module:object", which is imported when the part is first
used: names can be listed, and wrong ones refused, without importing torch. A user's part is registered by one
call or decorator and is then known by its name everywhere:

    @npbml.PRECONDITIONERS("sign", summary="the sign of the gradient")
    class Sign(npbml.Preconditioner): ...
"""

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from npbml.errors import SettingError

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """A registered part: its code, or the place of it, and what is known of it without importing that."""

    code: Any
    summary: str = ""
    built_in: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)


class Registry:
    """Parts of one kind, by name, in the order in which they were registered."""

    def __init__(self, kind: str, defaults: Mapping[str, Any] | None = None) -> None:
        """`defaults` are the facts that a part of this kind has where it states no others."""
        self.kind, self.defaults = kind, dict(defaults or {})
        self.parts: dict[str, Part] = {}

    def __contains__(self, name: object) -> bool:
        return name in self.parts

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def built_in(self, name: str, code: Any, summary: str = "", **facts: Any) -> None:
        """Add a part of npbml itself; `code` is its place, or the part where that needs no import."""
        self.parts[name] = Part(code, summary, True, {**self.defaults, **facts})

    def register(self, name: str, code: Any, summary: str = "", **facts: Any) -> None:
        """Add a user's part; facts that are not given are read from attributes of `code` of the same names.

        A name of a built-in part, or one that cannot be the name of a folder, is refused.
        """
        known = self.parts.get(name)
        if known is not None and known.built_in:
            raise SettingError(f"{name!r} cannot be the name of a new {self.kind}: it is taken.")
        if not name.strip(". ") or "/" in name or "\\" in name or "," in name:
            raise SettingError(f"{name!r} cannot be the name of a {self.kind}: use letters, digits and dashes.")
        for fact in facts:
            if fact not in self.defaults:
                allowed = ", ".join(self.defaults) or "none"
                raise SettingError(f"A {self.kind} has no property {fact!r}; its properties are: {allowed}.")
        own = {fact: getattr(code, fact, default) for fact, default in self.defaults.items()}
        self.parts[name] = Part(code, summary or _first_line(code), False, {**own, **facts})

    def __call__(self, name: str, summary: str = "", **facts: Any) -> Callable[[T], T]:
        """A decorator that registers what it decorates."""

        def add(code: T) -> T:
            self.register(name, code, summary, **facts)
            return code

        return add

    def part(self, name: str) -> Part:
        """The part called `name`, or an error that lists the names there are."""
        if name not in self.parts:
            raise SettingError(self.unknown(name))
        return self.parts[name]

    def unknown(self, name: str) -> str:
        """What to say of a name that is not here."""
        close = difflib.get_close_matches(name, self.parts, 1)
        meant = f" Did you mean {close[0]!r}?" if close else ""
        return f"There is no {self.kind} {name!r}.{meant} Choose from {', '.join(self.parts)}."

    def get(self, name: str, symmetric: bool = False) -> Any:
        """The code of the part called `name`, imported where it has not been yet.

        With `symmetric`, that of its class-symmetric form, where it has one.
        """
        part = self.part(name)
        code = (symmetric and part.facts.get("symmetric")) or part.code
        return located(code) if isinstance(code, str) else code

    def fact(self, name: str, fact: str) -> Any:
        """A fact about a part, such as whether a preconditioner sets the learning rate; imports nothing."""
        return self.part(name).facts[fact]


def located(place: str) -> Any:
    """The object at "module:object"."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _first_line(code: Any) -> str:
    return (getattr(code, "__doc__", None) or "").strip().partition("\n")[0]


class PartName(str):
    """The type of a setting whose value is the name of a registered part."""

    registry: ClassVar[Registry]
    other: ClassVar[str] = ""  # what it takes beside names, such as a folder


LOADED: list[str] = []  # the plugins of this process, as they were given


def load_plugin(path: str | Path) -> None:
    """Run a user's Python file, which registers parts. The same file is run once."""
    file = Path(path).expanduser().resolve()
    name = f"npbml_plugin_{file.stem}_{abs(hash(str(file))):x}"
    if name in sys.modules:
        return
    if not file.is_file():
        raise SettingError(f"There is no plugin {path}: --plugin takes a Python file that registers parts.")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise SettingError(f"The plugin {path} is not a Python file: its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SettingError:
        del sys.modules[name]
        raise
    except Exception as error:
        del sys.modules[name]
        raise SettingError(f"The plugin {path} failed with {type(error).__name__}: {error}") from error
    LOADED.append(str(path))


def load_entry_points() -> None:
    """Import the modules that installed packages name in the entry point group `npbml.plugins`."""
    for point in entry_points(group="npbml.plugins"):
        try:
            point.load()
        except Exception as error:
            raise SettingError(
                f"The plugin {point.name} ({point.value}) failed with {type(error).__name__}: {error}"
            ) from error
