"""Settings are frozen dataclasses with a default, a range and one line on each field.

They are read once, at the door (command line, file, run folder), into typed data and checked there.
"""

import dataclasses
import difflib
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from npbml.errors import SettingError

T = TypeVar("T")


def setting(
    default: Any, *, low: float | None = None, high: float | None = None, above: float | None = None
) -> Any:
    """A field with a default and a range: `low` and `high` are included, `above` is not."""
    return dataclasses.field(default=default, metadata={"low": low, "high": high, "above": above})


def group(kind: type[T]) -> T:
    """A field that holds another dataclass of settings, with that class's defaults."""
    return dataclasses.field(default_factory=kind)


def check(settings: Any, prefix: str = "") -> None:
    """Raise a SettingError that names the first setting whose value its type or range does not admit."""
    hints = get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        name, value = prefix + field.name, getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            check(value, name + ".")
        else:
            _read(hints[field.name], value, name)
            _check_range(field.metadata, value, name)


def to_dict(settings: Any) -> dict[str, Any]:
    """Plain data that `from_dict` reads back, for files."""
    return dataclasses.asdict(settings)


def from_dict(kind: type[T], data: Mapping[str, Any], default: T | None = None, prefix: str = "") -> T:
    """Read `kind` from plain data, strictly; what `data` leaves out is taken from `default`."""
    if not isinstance(data, Mapping):
        raise SettingError(f"{prefix.rstrip('.') or 'the settings'} must be a table of settings, not {data!r}.")
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for key in data:
        if key not in names:
            raise SettingError(f"There is no setting {prefix + key!r}.{_suggest(key, names, prefix)}")
    values = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        hint, name = hints[field.name], prefix + field.name
        fallback = getattr(default, field.name) if default is not None else None
        if field.name not in data:
            if default is not None:
                values[field.name] = fallback
        elif dataclasses.is_dataclass(hint):
            values[field.name] = from_dict(hint, data[field.name], fallback, name + ".")  # type: ignore[arg-type]
        else:
            values[field.name] = _read(hint, data[field.name], name)
            _check_range(field.metadata, values[field.name], name)
    return kind(**values)


def describe(kind: type, default: Any | None = None, prefix: str = "") -> list[tuple[str, str, Any]]:
    """(name, what it takes, default) of every setting below `kind`, depth first."""
    default = kind() if default is None else default
    hints, rows = get_type_hints(kind), []
    for field in dataclasses.fields(kind):
        value = getattr(default, field.name)
        if dataclasses.is_dataclass(value):
            rows += describe(type(value), value, prefix + field.name + ".")
        else:
            rows.append((prefix + field.name, _takes(hints[field.name]) + _range(field.metadata), value))
    return rows


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
    if isinstance(hint, type) and type(value) is hint:
        return value
    raise SettingError(f"{name} takes {_takes(hint)}, not {value!r}.")


def _check_range(metadata: Mapping[str, Any], value: Any, name: str) -> None:
    low, high, above = (metadata.get(key) for key in ("low", "high", "above"))
    for item in value if isinstance(value, tuple) else (value,):
        if isinstance(item, (int, float)) and not (
            (low is None or item >= low) and (high is None or item <= high) and (above is None or item > above)
        ):
            raise SettingError(f"{name} must be{_range(metadata)}, not {item!r}.")
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
