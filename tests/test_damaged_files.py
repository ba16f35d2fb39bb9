"""Files that have changed, or were made to harm: a sentence names them, or they are read right."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from npbml import NpbmlError, load
from npbml.errors import RunError, SettingError
from npbml.json_files import read_json, sealed, write_json
from npbml.learner.file import load_learner, save_learner
from npbml.learner.learner import Learner
from npbml.learner.settings import ImageSpec
from npbml.tensor_files import check_weights, load_tensors, save_tensors

LEARNERS = Path(__file__).parents[1] / "src" / "npbml" / "learners"


@pytest.fixture
def saved(make_learner: Callable[..., Learner], tmp_path: Path) -> Path:
    save_learner(make_learner(channels=3).float(), tmp_path / "some.safetensors")
    return tmp_path / "some.safetensors"


def refused(path: Path, match: str = r"\.safetensors") -> None:
    with pytest.raises(RunError, match=match) as error:
        load_learner(path, "cpu")
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("part", range(40))
def test_a_flipped_bit_is_found_or_changes_nothing(saved: Path, part: int) -> None:
    content, before = bytearray(saved.read_bytes()), load_tensors(saved)
    content[part * (len(content) - 1) // 39] ^= 1 << part % 8
    saved.write_bytes(content)
    try:
        tensors, about = load_tensors(saved)
    except RunError as error:
        assert str(saved) in str(error)
        return
    assert all(torch.equal(tensors[name], tensor) for name, tensor in before[0].items())
    assert len(tensors) == len(before[0]) and {**before[1], **about} == {**about, **before[1]}


@pytest.mark.parametrize("where", ["tensor", "name", "shape", "dtype", "about"])
def test_every_part_of_a_file_is_under_its_digest(tmp_path: Path, where: str) -> None:
    path = tmp_path / "some.safetensors"
    save_tensors(path, {"x": torch.ones(2, 3)}, {"step": 7})
    content = path.read_bytes()
    old, new = {
        "tensor": (b"\x00\x00\x80?", b"\x01\x00\x80?"),
        "name": (b'"x":', b'"y":'),
        "shape": (b"[2,3]", b"[3,2]"),
        "dtype": (b'"F32"', b'"I32"'),
        "about": (b"step", b"stop"),
    }[where]
    assert old in content
    path.write_bytes(content.replace(old, new, 1))
    with pytest.raises(RunError, match="its digest is not that of its content"):
        load_tensors(path)


def test_files_without_a_digest_are_read(saved: Path, tmp_path: Path) -> None:
    tensors, about = load_tensors(saved)
    save_file(tensors, tmp_path / "old.safetensors", {"about": json.dumps(about)})
    old, new = load_learner(tmp_path / "old.safetensors", "cpu"), load_learner(saved, "cpu")
    assert all(torch.equal(value, new.state_dict()[name]) for name, value in old.state_dict().items())


def test_metadata_whose_names_are_numbers_are_read(tmp_path: Path) -> None:
    """JSON makes text of them, which has another order."""
    save_tensors(tmp_path / "x", {}, {"notes": {10: "a", 9: "b"}})
    assert load_tensors(tmp_path / "x")[1] == {"notes": {"10": "a", "9": "b"}}
    write_json(tmp_path / "y", sealed({"notes": {10: "a", 9: "b"}}))
    assert read_json(tmp_path / "y") == {"notes": {"10": "a", "9": "b"}}


@pytest.mark.parametrize("name", sorted(path.stem for path in LEARNERS.glob("cifar*.safetensors")))
def test_a_learner_that_is_shipped_is_found_damaged(name: str, tmp_path: Path) -> None:
    """It has no digest: weights that are not finite are still refused."""
    tensors, about = load_tensors(LEARNERS / f"{name}.safetensors")
    first = next(key for key, value in tensors.items() if value.is_floating_point() and value.numel())
    tensors[first].view(-1)[0] = float("nan")
    save_file(tensors, tmp_path / "x.safetensors", {"about": json.dumps(about)})
    with pytest.raises(RunError, match="has values that are not finite"):
        load(tmp_path / "x.safetensors", device="cpu")


def put(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Set an entry of the metadata, by dots; `del` where the value is ..."""

    def change(about: dict[str, Any]) -> None:
        *way, last = name.split(".")
        for step in way:
            about = about[step]
        about[last] = value
        if value is ...:
            del about[last]

    return change


@pytest.mark.parametrize(
    "change",
    [
        *(put("images.size", size) for size in (0, -1, 10**9, 1.5, "large", None, ..., [16], True)),
        *(put("images.channels", channels) for channels in (0, -3, 10**6, "rgb", 1, None)),
        *(put("images.mean", mean) for mean in ([0.5] * 7, [], 0.5, ["a"] * 3, [float("nan")] * 3, None, ...)),
        *(put("images.std", std) for std in ([0, 0, 0], [-1] * 3, [1], [float("inf")] * 3, [[1]] * 3, {})),
        *(put("images", images) for images in (None, [], 3, {}, ...)),
        *(put("settings", settings) for settings in (None, [], 3, {"no_such": 1}, ...)),
        put("images.depth", 3),
        put("settings.net.filters", 10**12),
        put("settings.net.filters", 7),
        put("settings.net", "wide"),
    ],
)
def test_metadata_are_checked_like_settings(saved: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Under a digest that is right."""
    tensors, about = load_tensors(saved)
    change(about)
    save_tensors(saved, tensors, about)
    refused(saved)


@pytest.mark.parametrize(
    "spec",
    [
        (3, 0, (0.5,) * 3, (1.0,) * 3),
        (3, 10**9, (0.5,) * 3, (1.0,) * 3),
        (0, 16, (), ()),
        (3, 16, (0.5,) * 7, (1.0,) * 3),
        (3, 16, (0.5,) * 3, (1.0,)),
        (1, 16, (float("nan"),), (1.0,)),
        (1, 16, (0.5,), (0.0,)),
        (1, 16, (0.5,), (-1.0,)),
        (1, 16, (0.5,), (float("inf"),)),
    ],
)
def test_images_that_cannot_be_are_refused(spec: Any) -> None:
    with pytest.raises(SettingError, match=r"^images\.(channels|size|mean|std) .*\.$|divided by it"):
        ImageSpec(*spec)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda weight: weight * float("nan"), "'head.weight' has values that are not finite"),
        (lambda weight: weight / 0, "'head.weight' has values that are not finite"),
        (lambda weight: weight.int(), r"'head.weight' is of torch\.int32, where torch\.float32 was expected"),
        (lambda weight: weight > 0, r"'head.weight' is of torch\.bool"),
        (lambda weight: weight.to(torch.complex64), r"'head.weight' is of torch\.complex64|damaged"),
        (lambda weight: weight[:, :1].contiguous(), "does not fit its settings"),
        (lambda weight: weight[0].clone(), "does not fit its settings"),
        (lambda weight: None, "does not fit its settings"),
    ],
)
def test_weights_that_no_learner_has_are_refused_by_name(
    saved: Path, change: Callable[[torch.Tensor], torch.Tensor | None], said: str
) -> None:
    tensors, about = load_tensors(saved)
    new = change(tensors.pop("head.weight") + 1)
    save_tensors(saved, tensors if new is None else {**tensors, "head.weight": new}, about)
    refused(saved, said)


def test_weights_of_another_precision_are_taken(saved: Path) -> None:
    tensors, about = load_tensors(saved)
    save_tensors(saved, {name: t.half() if t.is_floating_point() else t for name, t in tensors.items()}, about)
    load_learner(saved, "cpu")
    check_weights(saved, {"x": torch.ones(2, dtype=torch.int64)}, {"x": torch.zeros(2, dtype=torch.int64)})


DEEP = "[" * 200_000


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {},
        {"format": "pt"},
        *({"about": text} for text in ("", "{", "[1]", "3", "null", DEEP, '{"a":' * 99_999, '{"x": 1, "x": 2}')),
        *(
            {"about": text}
            for text in ('{"images": "\\ud800"}', "9" * 5000, "{}", '{"sha256": 3}', '{"sha256": ""}')
        ),
    ],
)
def test_metadata_of_another_kind_are_refused(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    path = tmp_path / "some.safetensors"
    path.write_bytes(save({"x": torch.ones(2)}, metadata))
    refused(path)


def header(text: bytes, length: int | None = None, data: bytes = b"") -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        header(b"{}", 1 << 63),
        header(b"{}", 1 << 40),
        header(b"[]"),
        header(b"[" * 100_000),
        header(b'{"x":{"dtype":"F32","shape":[9999999999],"data_offsets":[0,4]}}', data=b"\0" * 4),
        header(b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}', data=b"\0" * 4),
        header(b'{"x":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}', data=b"\0" * 4),
        header(b'{"x":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', data=b"\0" * 4),
        header(
            b'{"__metadata__":{"about":{}},"x":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}}', data=b"\0" * 4
        ),
        header(b'{"__metadata__":3}'),
        header('{"__metadata__":{"about":"{}"},"ü":3}'.encode()),
    ],
)
def test_headers_that_lie_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "some.safetensors"
    path.write_bytes(content)
    refused(path, "is damaged or not one of npbml")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (DEEP, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ('{"a": 1, "b": 2, "a": 3}', "it has the name 'a' twice"),
        ('{"a": {"b": 1, "b": 1}}', "it has the name 'b' twice"),
        ("9" * 5000, "cannot be read"),
        ('"\\ud800"', "cannot be read"),
        ('{"a": 1}}', "cannot be read"),
        ("\ufeff{}", "cannot be read"),
    ],
)
def test_json_that_cannot_be_meant_is_refused(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "data.json").write_text(content, encoding="utf-8")
    with pytest.raises(RunError, match=rf"data\.json cannot be read: .*{said}|{said}"):
        read_json(tmp_path / "data.json")


def test_a_sealed_table_is_read_and_one_that_changed_is_refused(tmp_path: Path) -> None:
    path, table = tmp_path / "done.json", {"validation": 51.25, "best_step": 300, "ä": [1, None]}
    write_json(path, sealed(table))
    assert read_json(path) == table
    path.write_text(path.read_text().replace("51.25", "61.25"))
    with pytest.raises(NpbmlError, match=r"done\.json cannot be read: its digest .* damaged or edited"):
        read_json(path)
    write_json(path, table)
    assert read_json(path) == table


def test_what_others_wrote_is_no_file_of_npbml(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.ones(2)}, path)
    refused(path, "its header has no metadata of npbml")
    assert set(load_file(path)) == {"x"}
