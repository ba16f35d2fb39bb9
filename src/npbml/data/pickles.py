"""Pickles from the internet: arrays and plain containers are read, and nothing is ever run.

A pickle is a program that may call whatever it can name. Here it can name only what numpy's arrays and
Python's plain containers need, and even those names lead to functions of this file, which check what they are
given: numpy's own would take a hostile dtype at its word.

Nothing is hashed or printed before it is known to be small: a tuple that holds another twice, sixty times over,
or one that is nested a million deep, would take for ever or crash. No file makes more than a multiple of its size.
"""

import codecs
import collections
import io
import math
import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np

from npbml.errors import DataError

_PIECE = 1 << 20
_KEY_PARTS = 64  # values in a tuple that is a key
_SAID = 200  # characters of an error
_PLAIN = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248]|[SU]\d{1,6}|O8?)")


def load_pickle(source: Path | IO[bytes], name: str | None = None) -> Any:
    """The content of a pickle: numpy arrays, plain values, and containers of them.

    `name` is what the file is called in errors. The strings of Python 2 come as bytes. Every array is also an
    array of a class of this file; `np.asarray` gives the plain one without a copy.
    """
    name = name or str(source)
    try:
        if isinstance(source, Path):
            with open(source, "rb") as file:
                return _Reader(_Lines(file)).load()
        return _Reader(_Lines(source)).load()
    except _Refused as error:
        raise DataError(
            f"{name} is refused: it asks for {_said(error)}, and a file of images needs only arrays and "
            "plain containers. It may be hostile; nothing in it was run. Get the file from its publisher again."
        ) from None
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(
            f"{name} cannot be read as a pickle ({type(error).__name__}: {_said(error)}). It is damaged or "
            "cut short, or no pickle: get it again."
        ) from error


def _said(error: Exception) -> str:
    """What an error says, in a line: it may quote the file."""
    return " ".join(str(error)[:_SAID].split())


class _Refused(Exception):
    """What the pickle asked for."""


class _Lines:
    """A file whose lines are whole: half a name would be taken for another one. It counts what was read."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.done = file, 0

    def read(self, size: int) -> bytes:
        content = self.file.read(size)
        self.done += len(content)
        return content

    def readline(self) -> bytes:
        line = self.file.readline()
        self.done += len(line)
        if not line.endswith(b"\n"):
            raise EOFError("it ends within a line")
        return line


_InPython: Any = pickle._Unpickler


class _Reader(_InPython):
    """The unpickler that is written in Python: unlike the one in C it holds a large array in memory only once."""

    dispatch: ClassVar[dict[int, Any]] = dict(_InPython.dispatch)

    def __init__(self, lines: _Lines) -> None:
        super().__init__(lines, encoding="bytes")
        self.lines, self.made = lines, 0

    def charge(self, *values: Any) -> None:
        """Count what is made of `values`, which a file may name again and again for two bytes."""
        for value in values:
            if isinstance(value, _SIZED):
                self.made += value.size if isinstance(value, np.ndarray) else len(value)
        if self.made > _PIECE + 4 * self.lines.done:
            raise _Refused("far more than is in it")

    def load_binunicode(self) -> None:
        (length,) = struct.unpack("<I", self.read(4))
        self.append(self._text(length))

    dispatch[pickle.BINUNICODE[0]] = load_binunicode

    def load_binunicode8(self) -> None:
        (length,) = struct.unpack("<Q", self.read(8))
        self.append(self._text(length))

    dispatch[pickle.BINUNICODE8[0]] = load_binunicode8

    def load_bytearray8(self) -> None:
        # As bytes: room for as many as a file claims to have is not made before they are there.
        (length,) = struct.unpack("<Q", self.read(8))
        self.append(self.read(length))

    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8

    def _text(self, length: int) -> "str | _Latin":
        """Protocols below 3 have no bytes: an array is then text, which is decoded piece by piece."""
        if length <= _PIECE:
            return str(self.read(length), "utf-8", "surrogatepass")
        decoder, made = codecs.getincrementaldecoder("utf-8")(), io.BytesIO()
        for done in range(0, length, _PIECE):
            piece = self.read(min(_PIECE, length - done))
            if not piece:
                raise EOFError("it ends within a text")
            made.write(decoder.decode(piece, done + _PIECE >= length).encode("latin1"))
        return _Latin(made)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1][_key(key)] = value

    dispatch[pickle.SETITEM[0]] = load_setitem

    def load_setitems(self) -> None:
        items = self.pop_mark()
        table = self.stack[-1]
        for place in range(0, len(items), 2):
            table[_key(items[place])] = items[place + 1]

    dispatch[pickle.SETITEMS[0]] = load_setitems

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append({_key(items[place]): items[place + 1] for place in range(0, len(items), 2)})

    dispatch[pickle.DICT[0]] = load_dict

    def load_additems(self) -> None:
        items = self.pop_mark()
        self.stack[-1].update(map(_key, items))

    dispatch[pickle.ADDITEMS[0]] = load_additems

    def load_frozenset(self) -> None:
        items = self.pop_mark()
        self.append(frozenset(map(_key, items)))

    dispatch[pickle.FROZENSET[0]] = load_frozenset

    def load_build(self) -> None:
        if not isinstance(self.stack[-2], _Array | _Dtype | _Call):
            raise _Refused(f"a change of {type(self.stack[-2]).__name__}")
        if isinstance(self.stack[-1], tuple):
            self.charge(*self.stack[-1])
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        try:
            function = _ADMITTED[module, name]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None

        def charged(*arguments: Any) -> Any:
            self.charge(*arguments)
            return function(*arguments)

        return _Call(charged)

    def persistent_load(self, pid: Any) -> Any:
        raise _Refused("an object from outside the file")


class _Latin:
    """A long text of which every character is one byte."""

    def __init__(self, made: io.BytesIO) -> None:
        self.made = made

    def __len__(self) -> int:
        return self.made.getbuffer().nbytes


_SIZED = (str, bytes, list, tuple, dict, set, frozenset, np.ndarray, _Latin)


class _Array(np.ndarray):
    """An array whose state is checked before numpy takes it."""

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, columns, content = state
        dtype = _plain(kind)
        if isinstance(content, str):
            content = content.encode("latin1")
        if not isinstance(content, list if dtype.hasobject else bytes):
            raise ValueError(f"an array of {dtype} is made from {type(content).__name__}")
        # numpy would read on after the end of a list that is shorter than the array.
        if not isinstance(shape, tuple) or not all(type(side) is int and side >= 0 for side in shape):
            raise ValueError("an array without a shape")
        if len(content) != math.prod(shape) * (1 if dtype.hasobject else dtype.itemsize):
            raise ValueError(f"an array of {dtype} {list(shape)} is made from {len(content)} values")
        super().__setstate__((1, shape, dtype, bool(columns), content))  # type: ignore[arg-type]


class _Dtype:
    """A dtype by its code and byte order alone: one with fields or flags of its own is refused."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code, self.order = _text(code), "="
        if not _PLAIN.fullmatch(self.code):
            raise _Refused(f"an array of {self.code!r}")

    def __setstate__(self, state: Any) -> None:
        self.order = _text(state[1])
        if any(part is not None for part in state[2:5]):
            raise _Refused("an array of records")


class _Call:
    """A function that a pickle may call, and cannot change: it could set what is set in a plain function."""

    __slots__ = ("function",)
    function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "function", function)

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def __setattr__(self, name: str, value: Any) -> None:
        raise _Refused(f"a change of {name!r}")

    def __setstate__(self, state: Any) -> None:
        raise _Refused("a change of a function")


def _plain(kind: Any) -> np.dtype[Any]:
    if not isinstance(kind, _Dtype):
        raise ValueError("an array without a dtype")
    return np.dtype(kind.code).newbyteorder(kind.order)  # type: ignore[arg-type]


def _text(value: Any) -> str:
    if not isinstance(value, str | bytes):
        raise ValueError(f"{type(value).__name__} where text was expected")
    return value.decode("latin1") if isinstance(value, bytes) else value


def _key(value: Any) -> Any:
    """A value that can be hashed in no time: a plain one, or a small tuple of such."""
    parts = [value]
    for place in range(_KEY_PARTS):
        if place == len(parts):
            return value
        part = parts[place]
        if isinstance(part, tuple):
            parts += part[:_KEY_PARTS]
        elif part is not None and not isinstance(part, str | bytes | int | float | np.generic):
            raise ValueError(f"{type(part).__name__} cannot be a key")
    raise _Refused(f"a key of more than {_KEY_PARTS} values")


def _reconstruct(*_: Any) -> np.ndarray:
    return np.ndarray.__new__(_Array, (0,), "b")


def _frombuffer(content: Any, kind: Any, shape: Any, order: Any, *_: Any) -> np.ndarray:
    if not isinstance(content, bytes):  # an array that is built again would leave this one without its memory
        raise ValueError(f"an array is made from {type(content).__name__}")
    return np.frombuffer(content, _plain(kind)).reshape(shape, order=order)


def _scalar(kind: Any, content: Any = b"") -> Any:
    if not isinstance(content, bytes):
        raise ValueError(f"a number is made from {type(content).__name__}")
    return np.frombuffer(content, _plain(kind))[0]


def _encode(text: "str | _Latin", encoding: Any = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1", b"latin1"):
        raise _Refused("another encoding than latin1")
    return text.made.getvalue() if isinstance(text, _Latin) else text.encode("latin1")


def _bytes() -> bytes:
    return b""


def _frozenset(items: Any = ()) -> frozenset[Any]:
    return frozenset(map(_key, items))


def _set(items: Any = ()) -> set[Any]:
    return set(map(_key, items))


def _ordered(items: Any = ()) -> collections.OrderedDict[Any, Any]:
    return collections.OrderedDict((_key(key), value) for key, value in items)


def _ndarray(*_: Any) -> None:
    raise _Refused("a call of numpy.ndarray")


_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("_codecs", "encode"): _encode,
    ("builtins", "bytes"): _bytes,
    ("builtins", "frozenset"): _frozenset,
    ("builtins", "set"): _set,
    ("collections", "OrderedDict"): _ordered,
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): _ndarray,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "scalar"): _scalar,
    ("numpy._core.numeric", "_frombuffer"): _frombuffer,
}
_OLDER = {
    "builtins": "__builtin__",
    "numpy._core.multiarray": "numpy.core.multiarray",
    "numpy._core.numeric": "numpy.core.numeric",
}
_ADMITTED = {
    (spelling, name): function
    for (module, name), function in _FUNCTIONS.items()
    for spelling in (module, _OLDER.get(module, module))
}
