"""Settings are frozen dataclasses with a default, a range and one line on each field.

They are read once, at the door (command line, file, run folder), into typed data and checked there.
"""

import dataclasses
import difflib
import math
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from npbml.errors import SettingError
from npbml.registry import PartName

T = TypeVar("T")


def setting(
    default: Any,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    was: str | None = None,
    values: Mapping[str, Any] | None = None,
) -> Any:
    """A field with a default and a range: `low` and `high` are included, `above` is not.

    `was` is the name that version 0.1 had for it, and `values` the values that have other names there.
    """
    metadata = {"low": low, "high": high, "above": above, "was": was, "values": dict(values or {})}
    return dataclasses.field(default=default, metadata=metadata)


def group(kind: type[T], was: str | None = None, inline: bool = False) -> T:
    """A field that holds another dataclass of settings, with that class's defaults.

    `inline` settings have no name of the group before their own. `was` is the group's name in version 0.1.
    """
    return dataclasses.field(default_factory=kind, metadata={"was": was, "inline": inline})


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One setting: its full name, what it takes and its value; and what version 0.1 called both."""

    name: str
    hint: Any
    metadata: Mapping[str, Any]
    value: Any
    old_name: str

    @property
    def takes(self) -> str:
        """What it takes, in words."""
        return _takes(self.hint) + _range(self.metadata)

    @property
    def old_value(self) -> Any:
        """The value as version 0.1 wrote it."""
        return next((old for old, new in self.metadata["values"].items() if new == self.value), self.value)


def leaves(settings: Any, prefix: str = "", old_prefix: str = "") -> Iterator[Leaf]:
    """Every setting below a dataclass of settings, depth first."""
    hints = get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        value, was = getattr(settings, field.name), field.metadata.get("was")
        name, old = prefix + field.name, old_prefix + (was or field.name)
        if dataclasses.is_dataclass(value):
            inline = field.metadata.get("inline")
            yield from leaves(value, prefix if inline else name + ".", old_prefix if inline else old + ".")
        else:
            yield Leaf(name, hints[field.name], field.metadata, value, old)


def check(settings: Any) -> None:
    """Raise a SettingError that names the first setting whose value its type or range does not admit."""
    for leaf in leaves(settings):
        _read(leaf.hint, leaf.value, leaf.name)
        _check_range(leaf.metadata, leaf.value, leaf.name)


def to_dict(settings: Any) -> dict[str, Any]:
    """Plain data that `from_dict` reads back, for files."""
    return nested({leaf.name: leaf.value for leaf in leaves(settings)})


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables of settings as one, by full name."""
    rows: dict[str, Any] = {}
    for name, value in tables.items():
        rows |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return rows


def nested(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by full name as nested tables."""
    tables: dict[str, Any] = {}
    for name, value in rows.items():
        *groups, last = name.split(".")
        table = tables
        for part in groups:
            table = table.setdefault(part, {})
        table[last] = value
    return tables


def merged(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """Tables of settings on top of each other; what a later one says goes before."""
    result: dict[str, Any] = {}
    for table in tables:
        for name, value in table.items():
            if isinstance(value, Mapping):
                before = result.get(name)
                result[name] = merged(before if isinstance(before, Mapping) else {}, value)
            else:
                result[name] = value
    return result


def from_dict(kind: type[T], data: Mapping[str, Any], default: T | None = None, prefix: str = "") -> T:
    """Read `kind` from plain data, strictly; what `data` leaves out is taken from `default`."""
    if not isinstance(data, Mapping):
        raise SettingError(f"{prefix.rstrip('.') or 'the settings'} must be a table of settings, not {data!r}.")
    hints, fields = get_type_hints(kind), dataclasses.fields(kind)  # type: ignore[arg-type]
    inline = {field.name: _names(hints[field.name]) for field in fields if field.metadata.get("inline")}
    names = [field.name for field in fields if field.name not in inline] + [
        name for own in inline.values() for name in own
    ]
    for key in data:
        if key not in names:
            raise SettingError(f"There is no setting {prefix + key!r}.{_suggest(key, names, prefix)}")
    values = {}
    for field in fields:
        hint, name = hints[field.name], prefix + field.name
        fallback = getattr(default, field.name) if default is not None else None
        if field.name in inline:
            own = {key: data[key] for key in inline[field.name] if key in data}
            values[field.name] = from_dict(hint, own, fallback, prefix)
        elif field.name not in data:
            if default is not None:
                values[field.name] = fallback
        elif dataclasses.is_dataclass(hint):
            values[field.name] = from_dict(hint, data[field.name], fallback, name + ".")  # type: ignore[arg-type]
        else:
            values[field.name] = _read(hint, data[field.name], name)
            _check_range(field.metadata, values[field.name], name)
    return kind(**values)


def _names(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def describe(kind: type, default: Any | None = None) -> list[tuple[str, str, Any]]:
    """(name, what it takes, default) of every setting below `kind`, depth first."""
    return [(leaf.name, leaf.takes, leaf.value) for leaf in leaves(kind() if default is None else default)]


def from_old_names(
    kind: type, data: Mapping[str, Any], removed: Mapping[str, Any], note: Callable[[str], None]
) -> dict[str, Any]:
    """Nested tables with the names and values of version 0.1 in those of today.

    `removed` has the settings that are constants now, by their old full names, with the constant: another value
    is refused. `note` is told what things are called now. Names that are of today already stay as they are.
    """
    known = {leaf.old_name: leaf for leaf in leaves(kind())}
    today = {leaf.name for leaf in leaves(kind())}
    rows: dict[str, Any] = {}
    for name, value in flat(data).items():
        plain = tuple(value) if isinstance(value, list) else value
        leaf = known.get(name)
        if name in removed:
            if plain != removed[name]:
                raise SettingError(f"{name}={value} is from an earlier version: it is always {removed[name]} now.")
            note(f"The setting {name} is gone: it is always {removed[name]}.")
            continue
        if leaf is not None and (name not in today or leaf.metadata["values"]):
            value = leaf.metadata["values"].get(value, value) if isinstance(value, str) else value
            if leaf.name != name:
                note(f"The setting {name} is called {leaf.name} now.")
            name = leaf.name
        rows[name] = value
    return nested(rows)


def _read(hint: Any, value: Any, name: str) -> Any:
    """`value` as the type `hint`, without any silent change of meaning."""
    origin, options = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in options:
            return None
        hint = next(option for option in options if option is not type(None))
        return _read(hint, value, name)
    if origin is Literal and any(value == option and type(value) is type(option) for option in options):
        return value
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_read(options[0], item, name) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and issubclass(hint, PartName) and isinstance(value, str):
        if not hint.other and value not in hint.registry:
            raise SettingError(f"{name}: {hint.registry.unknown(value)}")
        return hint(value)
    if isinstance(hint, type) and type(value) is hint:
        return value
    raise SettingError(f"{name} takes {_takes(hint)}, not {value!r}.")


def _check_range(metadata: Mapping[str, Any], value: Any, name: str) -> None:
    admits: dict[str, Callable[[Any, Any], bool]] = {"low": operator.ge, "high": operator.le, "above": operator.gt}
    bounds = {key: metadata[key] for key in admits if metadata.get(key) is not None}
    for item in value if isinstance(value, tuple) else (value,):
        if not isinstance(item, (int, float)):
            continue
        broken = {key: bound for key, bound in bounds.items() if not admits[key](item, bound)}
        if broken:
            raise SettingError(f"{name} must be{_range(broken)}, not {item!r}.")
        if isinstance(item, float) and not math.isfinite(item):
            raise SettingError(f"{name} must be finite, not {item!r}.")


def _range(metadata: Mapping[str, Any]) -> str:
    words = {"low": " at least {}", "above": " above {}", "high": " at most {}"}
    return ",".join(text.format(metadata[key]) for key, text in words.items() if metadata.get(key) is not None)


def _takes(hint: Any) -> str:
    origin, options = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(str, options))
    if origin is tuple:
        return f"a list of: {_takes(options[0])}"
    if origin in (Union, types.UnionType):
        return " or ".join(_takes(option) for option in options)
    if isinstance(hint, type) and issubclass(hint, PartName):
        return "one of " + ", ".join([*hint.registry, *([f"a {hint.other.lower()}"] if hint.other else [])])
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "nothing",
    }
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def _suggest(key: str, names: list[str], prefix: str) -> str:
    close = difflib.get_close_matches(key, names, 1)
    if close:
        return f" Did you mean {prefix + close[0]!r}?"
    return f" {prefix.rstrip('.') or 'The top level'} takes: {', '.join(names)}."
