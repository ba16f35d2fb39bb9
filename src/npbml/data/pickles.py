"""Pickles from the internet: arrays and plain containers are read, and nothing is ever run.

A pickle is a program that may call whatever it can name. Here it can name only what numpy's arrays and
Python's plain containers need, and even those names lead to functions of this file, which check what they are
given: numpy's own would take a hostile dtype at its word.
"""

import codecs
import collections
import io
import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np

from npbml.errors import DataError

_PIECE = 1 << 20
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
                return _Reader(_Lines(file), encoding="bytes").load()
        return _Reader(_Lines(source), encoding="bytes").load()
    except _Refused as error:
        raise DataError(
            f"{name} is refused: it asks for {error}, and a file of images needs only arrays and plain "
            "containers. It may be hostile; nothing in it was run. Get the file from its publisher again."
        ) from None
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(
            f"{name} cannot be read as a pickle ({type(error).__name__}: {error}). It is damaged or cut "
            "short, or no pickle: get it again."
        ) from error


class _Refused(Exception):
    """What the pickle asked for."""


class _Lines:
    """A file whose lines are whole: half a name would be taken for another one."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.read = file, file.read

    def readline(self) -> bytes:
        line = self.file.readline()
        if not line.endswith(b"\n"):
            raise EOFError("it ends within a line")
        return line


_InPython: Any = pickle._Unpickler


class _Reader(_InPython):
    """The unpickler that is written in Python: unlike the one in C it holds a large array in memory only once."""

    dispatch: ClassVar[dict[int, Any]] = dict(_InPython.dispatch)

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

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None

    def persistent_load(self, pid: Any) -> Any:
        raise _Refused("an object from outside the file")


class _Latin:
    """A long text of which every character is one byte."""

    def __init__(self, made: io.BytesIO) -> None:
        self.made = made


class _Array(np.ndarray):
    """An array whose state is checked before numpy takes it."""

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, columns, content = state
        dtype = _plain(kind)
        if isinstance(content, str):
            content = content.encode("latin1")
        if not isinstance(content, list if dtype.hasobject else bytes):
            raise ValueError(f"an array of {dtype} is made from {type(content).__name__}")
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
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


def _reconstruct(*_: Any) -> np.ndarray:
    return np.ndarray.__new__(_Array, (0,), "b")


def _frombuffer(content: Any, kind: Any, shape: Any, order: Any, *_: Any) -> np.ndarray:
    return np.frombuffer(content, _plain(kind)).reshape(shape, order=order)


def _scalar(kind: Any, content: Any = b"") -> Any:
    return np.frombuffer(content, _plain(kind))[0]


def _encode(text: "str | _Latin", encoding: Any = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1", b"latin1"):
        raise _Refused(f"the encoding {encoding!r}")
    return text.made.getvalue() if isinstance(text, _Latin) else text.encode("latin1")


def _bytes() -> bytes:
    return b""


def _ndarray(*_: Any) -> None:
    raise _Refused("a call of numpy.ndarray")


_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("_codecs", "encode"): _encode,
    ("builtins", "bytes"): _bytes,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "set"): set,
    ("collections", "OrderedDict"): collections.OrderedDict,
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
    (spelling, name): _Call(function)
    for (module, name), function in _FUNCTIONS.items()
    for spelling in (module, _OLDER.get(module, module))
}
