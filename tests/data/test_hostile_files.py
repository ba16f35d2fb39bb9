"""Pickles, archives and pictures that were made to harm, or hold what no reader expects: a sentence, and soon."""

import gzip
import io
import pickle
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from npbml.data.archives import unpack
from npbml.data.benchmarks import PUBLISHED, Benchmark
from npbml.data.pickles import load_pickle
from npbml.data.prepare import prepare
from npbml.data.store import SPLITS
from npbml.errors import DataError
from npbml.pictures import picture_bytes

Small = Callable[..., Benchmark]

DEEP = b"\x80\x04)" + b"\x85" * 400_000  # a tuple in a tuple, and so on
DOUBLED = b"\x80\x04)" + b"2\x86" * 60  # a tuple of a tuple twice, and so on
BOMBS = {
    "key of a dictionary": b"}%sNs.",
    "keys of a dictionary": b"}(%sNu.",
    "key of an old dictionary": b"(%sNd.",
    "item of a set": b"\x8f(%s\x90.",
    "item of a frozen set": b"(%s\x91.",
    "item of a set that is called": b"cbuiltins\nset\n(]%sat\x85R.",
    "key of an ordered dictionary": b"ccollections\nOrderedDict\n(]%sN\x86a\x85R.",
    "attribute": b"ccollections\nOrderedDict\n)R}%sNsb.",
    "dtype": b"cnumpy\ndtype\n%s\x85R.",
    "encoding": b"c_codecs\nencode\nX\x01\x00\x00\x00a%s\x86R.",
    "state of an array": b"cnumpy.core.multiarray\n_reconstruct\n)R%sb.",
    "shape of an array": b"cnumpy._core.numeric\n_frombuffer\n(C\x01acnumpy\ndtype\n\x8c\x02u1\x85R%s\x8c\x01CtR.",
    "persistent object": b"%sQ.",
    "function": b"%s)R.",
}
READ = """
import sys
from npbml.data.pickles import load_pickle
from npbml.errors import DataError
try:
    load_pickle(sys.stdin.buffer, "the.pkl")
except DataError as error:
    print(error)
"""


@pytest.mark.parametrize("bomb", [DEEP, DOUBLED], ids=["deep", "doubled"])
def test_a_nested_tuple_neither_hangs_nor_crashes(bomb: bytes) -> None:
    """In another process, which a segmentation fault would end."""
    for place, content in BOMBS.items():
        made = bomb[:2] + content.replace(b"%s", bomb[2:])
        done = subprocess.run([sys.executable, "-c", READ], input=made, capture_output=True, timeout=60)
        assert done.returncode == 0 and done.stdout.startswith(b"the.pkl "), (place, done)
        assert len(done.stdout) < 1000 and done.stdout.count(b"\n") == 1


def amplified(call: bytes, times: int = 20_000) -> bytes:
    """One large value, of which a list of calls makes others."""
    return (
        b"\x80\x04"
        + call.replace(b"%s", struct.pack("<I", 200_000) + b"a" * 200_000)
        + b"0]("
        + times
        * (
            {b"c": b"h\x00h\x01\x85R", b"e": b"h\x00h\x01\x8c\x06latin1\x86R"}[
                b"e" if b"_codecs" in call else b"c"
            ]
        )
        + b"e."
    )


@pytest.mark.parametrize(
    "call", [b"cbuiltins\nset\nq\x000X%sq\x01", b"c_codecs\nencode\nq\x000X%sq\x01"], ids=["set", "encode"]
)
def test_a_small_file_makes_no_large_content(call: bytes) -> None:
    with pytest.raises(DataError, match="asks for far more than is in it"):
        load_pickle(io.BytesIO(amplified(call)), "the.pkl")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_small_tuples_are_keys(protocol: int) -> None:
    content = {("a", 1, (2.5, None)): {(1, 2), b"x"}, True: frozenset({("b",)})}
    assert load_pickle(io.BytesIO(pickle.dumps(content, protocol)), "the.pkl") == content


def doubled(depth: int = 60) -> Any:
    made: Any = []
    for _ in range(depth):
        made = [made, made]
    return made


ODD = {
    "none": None,
    "number": 3,
    "fraction": 0.5,
    "text": "apple",
    "bytes": b"apple",
    "table": {"a": 1},
    "empty": [],
    "nested": [[1, 2], [3]],
    "strings": ["a"] * 5,
    "nones": [None] * 5,
    "fractions": [0.5] * 5,
    "negative": [-1] * 5,
    "too large": [10**6] * 5,
    "huge": [2**70] * 5,
    "doubled": doubled(),
    "array of fractions": np.zeros(5),
    "array of two dimensions": np.zeros((5, 5), np.int64),
    "array of no dimension": np.array(3),
    "array of objects": np.array([1, "a", None, [2]], object),
    "array of large numbers": np.full(5, 2**64 - 1, np.uint64),
    "array of images": np.zeros((5, 84, 84, 3), np.float32),
    "flat images": np.zeros((5, 3), np.uint8),
    "images of no size": np.zeros((8, 0, 0, 3), np.uint8),
}


def cifar(folder: Path) -> dict[str, dict[Any, Any]]:
    names = sorted(PUBLISHED["cifar-fs"].split_of())
    return {
        "meta": {b"fine_label_names": [name.encode() for name in names]},
        "train": {b"fine_labels": [*range(100)] * 2, b"data": np.zeros((200, 3072), np.uint8)},
        "test": {b"fine_labels": [*range(100)], b"data": np.zeros((100, 3072), np.uint8)},
    }


def mini(folder: Path) -> dict[str, dict[Any, Any]]:
    made = {}
    for split in SPLITS:
        names = list(PUBLISHED["mini-imagenet"].classes[split])
        rows = {name: [*range(4 * place, 4 * place + 4)] for place, name in enumerate(names)}
        images = np.zeros((4 * len(names), 84, 84, 3), np.uint8)
        made[f"mini-imagenet-cache-{split}.pkl"] = {"image_data": images, "class_dict": rows}
    return made


def tiered(folder: Path) -> dict[str, dict[Any, Any]]:
    made = {}
    png = io.BytesIO()
    Image.new("RGB", (84, 84)).save(png, "PNG")
    for split in SPLITS:
        names = list(PUBLISHED["tiered-imagenet"].classes[split])
        labels = [place for place in range(len(names)) for _ in range(2)]
        made[f"{split}_labels.pkl"] = {"label_specific": labels, "label_specific_str": names}
        made[f"{split}_images_png.pkl"] = [np.frombuffer(png.getvalue(), np.uint8)[:, None]] * len(labels)  # type: ignore[assignment]
    return made


@pytest.fixture(autouse=True)
def few_classes(small: Small) -> None:
    small("cifar-fs", 3, 64, 16, 20)
    small("mini-imagenet", 4, 3, 2, 2)
    small("tiered-imagenet", None, 3, 2, 2, totals={"train": 6, "val": 4, "test": 4})


SETS = {"cifar-fs": cifar, "mini-imagenet": mini, "tiered-imagenet": tiered}
PLACES = [
    ("cifar-fs", "meta", b"fine_label_names"),
    ("cifar-fs", "test", b"fine_labels"),
    ("cifar-fs", "test", b"data"),
    ("mini-imagenet", "mini-imagenet-cache-val.pkl", "image_data"),
    ("mini-imagenet", "mini-imagenet-cache-val.pkl", "class_dict"),
    ("tiered-imagenet", "val_labels.pkl", "label_specific"),
    ("tiered-imagenet", "val_labels.pkl", "label_specific_str"),
]


def made(name: str, folder: Path, change: Callable[[dict[str, Any]], object] = lambda files: None) -> Path:
    files = SETS[name](folder)
    change(files)
    folder.mkdir()
    for file, content in files.items():
        (folder / file).write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
    return folder


def refused(name: str, source: Path) -> None:
    with pytest.raises(DataError) as error:
        prepare(name, source, source.parent / "stores")
    assert str(source) in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 600
    assert not list((source.parent / "stores").glob("*"))


@pytest.mark.parametrize("name", SETS)
def test_what_is_not_changed_is_read(name: str, tmp_path: Path) -> None:
    assert prepare(name, made(name, tmp_path / "in"), tmp_path / "stores").entries


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize(("name", "file", "key"), PLACES)
def test_an_odd_entry_is_refused(name: str, file: str, key: Any, odd: str, tmp_path: Path) -> None:
    refused(name, made(name, tmp_path / "in", lambda files: files[file].update({key: ODD[odd]})))


@pytest.mark.parametrize(("name", "file", "key"), PLACES)
def test_a_missing_entry_is_refused(name: str, file: str, key: Any, tmp_path: Path) -> None:
    refused(name, made(name, tmp_path / "in", lambda files: files[file].pop(key)))


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("cifar-fs", "meta"),
        ("cifar-fs", "train"),
        ("mini-imagenet", "mini-imagenet-cache-val.pkl"),
        ("tiered-imagenet", "val_labels.pkl"),
        ("tiered-imagenet", "val_images_png.pkl"),
    ],
)
def test_an_odd_file_is_refused(name: str, file: str, odd: str, tmp_path: Path) -> None:
    refused(name, made(name, tmp_path / "in", lambda files: files.update({file: pickle.dumps(ODD[odd])})))


@pytest.mark.parametrize("odd", ODD)
def test_odd_rows_of_a_class_are_refused(odd: str, tmp_path: Path) -> None:
    def change(files: dict[str, Any]) -> None:
        rows = files["mini-imagenet-cache-val.pkl"]["class_dict"]
        rows[next(iter(rows))] = ODD[odd]

    refused("mini-imagenet", made("mini-imagenet", tmp_path / "in", change))


@pytest.mark.parametrize("name", [None, 3, 0.5, ("a", "b"), b"\xff"])
def test_odd_names_of_a_class_are_refused(name: Any, tmp_path: Path) -> None:
    def change(files: dict[str, Any]) -> None:
        rows = files["mini-imagenet-cache-val.pkl"]["class_dict"]
        rows[name] = rows.pop(next(iter(rows)))

    refused("mini-imagenet", made("mini-imagenet", tmp_path / "in", change))


@pytest.mark.parametrize("odd", [*ODD, "no picture"])
def test_odd_pictures_in_a_pickle_are_refused(odd: str, tmp_path: Path) -> None:
    def change(files: dict[str, Any]) -> None:
        files["val_images_png.pkl"][1] = ODD.get(odd, b"no picture")

    refused("tiered-imagenet", made("tiered-imagenet", tmp_path / "in", change))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("content", [b"", b"\x80", b".", b"N.", b"no pickle", b"\x80\x04" + b"(" * 100_000])
def test_a_file_that_is_no_pickle_is_refused(name: str, content: bytes, tmp_path: Path) -> None:
    files = list(SETS[name](tmp_path))
    refused(name, made(name, tmp_path / "in", lambda found: found.update({files[-1]: content})))


def npz(array: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("images.npy", array)
    return out.getvalue()


def npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def shaped(shape: str, kind: str = "|u1") -> str:
    return f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no zip",
        npz(b""),
        npz(npy(shaped("(4, 84, 84, 3)"))),
        npz(npy(shaped("(99999999999, 84, 84, 3)"))),
        npz(npy(shaped("(-1, 84, 84, 3)"))),
        npz(npy(shaped("(4,)", "|O"), b"N.")),
        npz(npy("(" * 9000)),
        npz(npy("{'descr': [")),
        npz(npy(shaped("(4, 84, 84, 3)"), b"\0" * 300_000_000)),
        npy(shaped("(4,)"), b"\0" * 4),
    ],
    ids=range(11),
)
def test_arrays_that_lie_are_refused(content: bytes, tmp_path: Path) -> None:
    def change(files: dict[str, Any]) -> None:
        for split in SPLITS:
            del files[f"{split}_images_png.pkl"]
            files[f"{split}_images.npz"] = content

    refused("tiered-imagenet", made("tiered-imagenet", tmp_path / "in", change))


def zipped(folder: Path, size: int) -> Path:
    with zipfile.ZipFile(folder / "a.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("class/one.png", bytes(size))
    return folder / "a.zip"


class Zeros(io.BytesIO):
    def read(self, size: int | None = -1) -> bytes:
        return bytes(size or 0)


def tarred(folder: Path, size: int) -> Path:
    with tarfile.open(folder / "a.tar.gz", "w:gz", compresslevel=1) as tar:
        entry = tarfile.TarInfo("class/one.png")
        entry.size = size
        tar.addfile(entry, Zeros())
    return folder / "a.tar.gz"


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_a_small_archive_writes_no_large_files(pack: Callable[..., Path], tmp_path: Path) -> None:
    archive = pack(tmp_path, 300 << 20)
    with pytest.raises(DataError, match=r"a\.(zip|tar\.gz) is refused: it has .* and would unpack to 314,572,800"):
        unpack(archive, tmp_path / "room")
    with pytest.raises(DataError, match="is refused: it has"):
        prepare("mine", archive, tmp_path / "stores")
    assert not (tmp_path / "room").exists()


def test_a_header_of_a_tar_is_no_bomb(tmp_path: Path) -> None:
    entry = tarfile.TarInfo("x")
    entry.type, entry.size = tarfile.XHDTYPE, 64 << 20
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(entry.tobuf() + bytes(64 << 20), 1))
    with pytest.raises(DataError, match=r"a\.tar\.gz cannot be unpacked"):
        unpack(tmp_path / "a.tar.gz", tmp_path / "room")


@pytest.mark.parametrize("damage", ["flipped", "cut in a header", "cut between files"])
def test_a_tar_is_not_read_up_to_its_damage(damage: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("one", "two", "three"):
            entry = tarfile.TarInfo(name)
            entry.size = 512
            tar.addfile(entry, io.BytesIO(bytes(512)))
    content = bytearray((tmp_path / "a.tar").read_bytes())
    content[1024 + 3] ^= 1
    new = {"flipped": content, "cut in a header": content[:1300], "cut between files": content[:1024]}[damage]
    (tmp_path / "a.tar").write_bytes(new)
    with pytest.raises(DataError, match=r"a\.tar cannot be unpacked"):
        unpack(tmp_path / "a.tar", tmp_path / "room")


def png(width: int, height: int) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1 << 20))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    "content",
    [
        png(100_000, 100_000),
        png(2**31 - 1, 2**31 - 1),
        png(0, 0),
        b"BM" + bytes(60),
        b"GIF89a" + b"\xff" * 20,
        b"\xff\xd8\xff\xe0" + bytes(30),
        b"P6\n999999 999999\n255\n",
        b"II*\0" + b"\xff" * 40,
    ],
    ids=range(8),
)
def test_pictures_that_were_made_to_harm_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(content)
    with pytest.raises(DataError, match=r"one\.png"):
        picture_bytes(tmp_path / "one.png", 32, 3)


@pytest.mark.parametrize("file", ["fine_label_names.txt", "train.bin", "test.bin"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe\xff", b"\xff" * 3074])
def test_damage_in_the_binary_version(file: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    names = sorted(PUBLISHED["cifar-fs"].split_of())
    (tmp_path / "in" / "fine_label_names.txt").write_text("\n".join(names))
    for name, count in (("train.bin", 2), ("test.bin", 1)):
        rows = [bytes([0, label]) + bytes(3072) for label in range(100) for _ in range(count)]
        (tmp_path / "in" / name).write_bytes(b"".join(rows))
    (tmp_path / "in" / file).write_bytes(content)
    refused("cifar-fs", tmp_path / "in")
