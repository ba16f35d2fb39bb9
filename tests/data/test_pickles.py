import builtins
import collections
import io
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from npbml.data.pickles import load_pickle
from npbml.errors import DataError


def loads(content: bytes) -> Any:
    return load_pickle(io.BytesIO(content), "the.pkl")


class Calls:
    """Pickled, it is a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.binary(), inner, max_size=4)
        | st.sets(st.integers() | st.text(), max_size=4)
    ),
    max_leaves=12,
)
some_array = arrays.arrays(
    st.sampled_from(["u1", "<i4", ">i4", "i8", "f4", "f8", "?", "S3", "U3"]), arrays.array_shapes(min_side=0)
)


@given(plain, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_content_is_read(content: Any, protocol: int) -> None:
    assert loads(pickle.dumps(content, protocol)) == content


@given(some_array, st.integers(0, pickle.HIGHEST_PROTOCOL), st.booleans())
def test_arrays_are_read(array: np.ndarray, protocol: int, columns: bool) -> None:
    array = np.asfortranarray(array) if columns else array
    pickled = pickle.dumps({"data": [array]}, protocol)
    read = np.asarray(loads(pickled)["data"][0])
    assert type(read) is np.ndarray
    np.testing.assert_array_equal(read, array)
    assert read.dtype == pickle.loads(pickled)["data"][0].dtype


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_scalars_ordered_dicts_and_arrays_of_objects(protocol: int) -> None:
    objects = np.empty(2, object)
    objects[:] = [np.arange(3, dtype=np.uint8), {"a": b"b"}]
    content = collections.OrderedDict(one=np.float32(1.5), two=np.int64(-3), three=objects)
    read = loads(pickle.dumps(content, protocol))
    assert list(read) == list(content)
    assert (read["one"], read["two"], read["three"][1]) == (1.5, -3, {"a": b"b"})
    np.testing.assert_array_equal(read["three"][0], [0, 1, 2])


def python2(values: bytes, *more: bytes) -> bytes:
    """{'data': uint8 array, 'fine_labels': [7]} as Python 2 with its numpy pickled it, in protocol 2."""

    def string(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    dtype = b"cnumpy\ndtype\n(" + string(b"u1") + b"K\x00K\x01tR(K\x03" + string(b"|") + b"NNNJ\xff\xff\xff\xff"
    dtype += b"J\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85" + string(b"b") + b"tR(K\x01"
    array += b"K" + bytes([len(values)]) + b"\x85" + dtype + b"\x89" + string(values) + b"tb"
    return b"\x80\x02}(" + string(b"data") + array + string(b"fine_labels") + b"]K\x07au."


def test_files_of_python_2(tmp_path: Path) -> None:
    (tmp_path / "train").write_bytes(python2(b"\x00\x80\xff"))
    read = load_pickle(tmp_path / "train")
    np.testing.assert_array_equal(read[b"data"], np.array([0, 128, 255], np.uint8))
    assert read[b"fine_labels"] == [7]


def test_a_large_array_is_not_copied() -> None:
    array = np.arange(1 << 16, dtype=np.uint8)
    assert not np.asarray(loads(pickle.dumps(array, 4))).flags.owndata


@given(st.integers(0, 5), st.integers(0, 2))
def test_long_arrays_of_the_protocols_without_bytes(more: int, protocol: int) -> None:
    array = np.random.default_rng(more).integers(0, 256, (1 << 20) + more, dtype=np.uint8)
    np.testing.assert_array_equal(loads(pickle.dumps({"data": array}, protocol))["data"], array)


def test_a_long_text_that_is_no_array_is_refused() -> None:
    with pytest.raises(DataError, match=r"the\.pkl cannot be read"):
        loads(pickle.dumps("\u20ac" * (1 << 20)))


HOSTILE = {
    "os.system": lambda mark: pickle.dumps(Calls(os.system, f"touch {mark}"), 2),
    "posix.system by name on the stack": lambda mark: pickle.dumps(Calls(os.system, f"touch {mark}"), 4),
    "builtins.eval": lambda mark: pickle.dumps(Calls(eval, f"open({str(mark)!r}, 'w')")),
    "builtins.exec": lambda mark: pickle.dumps(Calls(exec, f"open({str(mark)!r}, 'w')"), 0),
    "getattr": lambda mark: pickle.dumps(Calls(getattr, "text", "upper")),
    "open": lambda mark: pickle.dumps(Calls(open, str(mark), "w")),
    "within a dictionary": lambda mark: pickle.dumps(
        {"image_data": [1, {"a": Calls(os.system, f"touch {mark}")}]}
    ),
    "within an array of objects": lambda mark: pickle.dumps(
        np.array([Calls(os.system, f"touch {mark}"), None], object)
    ),
    "an instance": lambda mark: b"(S'touch %s'\nios\nsystem\n." % str(mark).encode(),
    "an object": lambda mark: b"(cos\nsystem\nS'touch %s'\no." % str(mark).encode(),
    "a dotted name": lambda mark: b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.fromkeys\x93(\x8c\x01att R.",
    "a path": lambda mark: pickle.dumps(mark),
    "numpy's own loader": lambda mark: b"cnumpy\nload\n(S'%s'\ntR." % str(mark).encode(),
    "an extension": lambda mark: b"\x80\x02\x82\x01.",
    "a persistent object": lambda mark: b"Pname\n.",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_pickle_is_refused_and_runs_nothing(kind: str, tmp_path: Path) -> None:
    mark, file = tmp_path / "mark", tmp_path / "hostile.pkl"
    file.write_bytes(HOSTILE[kind](mark))
    with pytest.raises(DataError, match=r"hostile\.pkl"):
        load_pickle(file)
    assert not mark.exists()


def test_what_was_asked_for_is_named() -> None:
    with pytest.raises(
        DataError, match=r"the\.pkl is refused: it asks for (posix|nt)\.system.*nothing in it was run"
    ):
        loads(pickle.dumps([Calls(os.system, "true")]))
    with pytest.raises(DataError, match=r"asks for builtins\.eval"):
        loads(pickle.dumps(Calls(builtins.eval, "1")))


def test_what_was_asked_for_is_told_in_a_line() -> None:
    for name in ("a\nb", "\r\n" * 99, "x" * 10**6):
        with pytest.raises(DataError, match=r"is refused") as error:
            loads(b"\x80\x04" + pickle.dumps(name, 4)[2:-1] + pickle.dumps("f", 4)[2:-1] + b"\x93.")
        assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_what_may_be_called_cannot_be_changed() -> None:
    """BUILD with a pair as state sets attributes of whatever is on the stack."""
    change = b"\x80\x02c_codecs\nencode\nN}X\x08\x00\x00\x00functionNs\x86b."
    with pytest.raises(DataError, match="a change of"):
        loads(change)
    assert loads(pickle.dumps(b"abc", 2)) == b"abc"


def forged(dtype: bytes, content: bytes) -> bytes:
    """An array whose pickle claims `dtype` for `content`."""
    return (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR(K\x01K\x01\x85"
        + dtype
        + b"\x89"
        + content
        + b"tb."
    )


def test_bytes_are_never_taken_for_objects() -> None:
    pointer = struct.pack("P", 0x1234)
    objects = b"cnumpy\ndtype\n(U\x02O8K\x00K\x01tR"
    with pytest.raises(DataError, match=r"the\.pkl"):
        loads(forged(objects, b"U\x08" + pointer))
    records = b"cnumpy\ndtype\n(U\x02V8K\x00K\x01tR"
    with pytest.raises(DataError, match="an array of 'V8'"):
        loads(forged(records, b"U\x08" + pointer))
    fields = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|N(U\x01at}NNK\x00tb"
    with pytest.raises(DataError, match="an array of records"):
        loads(forged(fields, b"U\x01a"))
    with pytest.raises(DataError, match=r"a call of numpy\.ndarray"):
        loads(b"\x80\x02cnumpy\nndarray\nK\x05\x85R.")


@pytest.mark.parametrize(
    "shape", [(3,), (2, 2), (1,), (0,), (-1,), (-2,), (2, -1), (2**62,), (2**62, 4), ("a",), 2, None]
)
def test_an_array_has_as_many_values_as_its_shape(shape: Any) -> None:
    """numpy reads past the end of a list that is too short."""
    for values in (np.array(["a", "b"], object), np.zeros(2, np.uint8)):
        state = (1, shape, values.dtype, False, values.tolist() if values.dtype == object else values.tobytes())
        array = values.__reduce__()[:2]

        class Forged:
            def __reduce__(self, state: Any = state, array: Any = array) -> Any:
                return (*array, state)

        with pytest.raises(DataError, match=r"the\.pkl cannot be read as a pickle"):
            loads(pickle.dumps(Forged(), 2))


def test_arrays_are_made_from_bytes_alone() -> None:
    """One that is made from another array would lose its memory when that one is built again."""
    dtype = b"cnumpy\ndtype\n\x8c\x02u1\x85R"
    whole = pickle.dumps(np.zeros(4, np.uint8), 2)[2:-1]
    for call in (
        b"cnumpy._core.numeric\n_frombuffer\n(%s" + dtype + b"K\x04\x85\x8c\x01CtR.",
        b"cnumpy._core.multiarray\nscalar\n(" + dtype + b"%stR.",
    ):
        with pytest.raises(DataError, match="is made from _Array"):
            loads(b"\x80\x04" + call.replace(b"%s", whole))


@given(st.integers(0, 400))
def test_a_truncated_pickle_is_named(length: int) -> None:
    whole = pickle.dumps({"image_data": np.zeros((4, 8, 8, 3), np.uint8), "class_dict": {"a": [0, 1, 2, 3]}}, 2)
    with pytest.raises(DataError, match=r"the\.pkl cannot be read as a pickle"):
        loads(whole[: min(length, len(whole) - 1)])


@pytest.mark.parametrize("opcode", [b"\x8d", b"\x8e", b"\x96"])
@pytest.mark.parametrize("length", [1 << 40, 1 << 62, (1 << 64) - 1])
def test_a_length_that_is_a_lie_takes_neither_time_nor_memory(opcode: bytes, length: int) -> None:
    with pytest.raises(DataError, match=r"the\.pkl cannot be read as a pickle"):
        loads(b"\x80\x05" + opcode + struct.pack("<Q", length) + b"abc.")


@given(st.binary(max_size=80))
def test_noise_gives_an_error_of_ours_or_plain_content(noise: bytes) -> None:
    try:
        loads(b"\x80\x02" + noise + b".")
    except DataError as error:
        assert "the.pkl" in str(error)
