"""The one reader of pictures: the same picture in any form, through any door, is the same bytes."""

import io
import sys
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, features

from npbml.classifier.reading import read_pictures as read_for_learner
from npbml.data.folder import read_pictures_by_class
from npbml.errors import DataError
from npbml.lab.labelling import Reader
from npbml.learner.settings import ImageSpec
from npbml.pictures import UnreadableError, is_grey, picture_bytes, picture_list, read_picture

SIZE = 6
random = np.random.default_rng(0)
RGBA = random.integers(0, 256, (9, 13, 4), dtype=np.uint8)
RGBA[:2, :, 3], RGBA[2:4, :, 3] = 0, 255
RGBA[5, 5, :3], RGBA[6, 6, :3] = 0, 255
RGB, GREY, GREY_ALPHA = RGBA[..., :3].copy(), RGBA[..., 0].copy(), RGBA[..., [0, 3]].copy()
DEEP = random.integers(0, 65536, (9, 13), dtype=np.uint16)
DEEP[0, 0] = 77
BITS = GREY > 127


def on_white(rgba: np.ndarray) -> np.ndarray:
    """[height, width, 4] to [height, width, 3]."""
    picture = Image.fromarray(rgba)
    return np.asarray(Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture))[..., :3]


def saved(picture: Image.Image, suffix: str, **options: Any) -> Callable[[Path], Path]:
    """Write the picture into a folder."""

    def save(folder: Path) -> Path:
        picture.save(folder / f"picture{suffix}", **options)
        return folder / f"picture{suffix}"

    return save


def written(content: bytes, suffix: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / f"picture{suffix}").write_bytes(content)
        return folder / f"picture{suffix}"

    return write


# What turns a picture upright, by its EXIF orientation.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def orientation(value: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


def png_with_key(pixels: np.ndarray, key: int) -> bytes:
    """A PNG of sixteen-bit grey of which one value is transparent."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    chunk = b"tRNS" + key.to_bytes(2, "big")
    chunk = (2).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big")
    content = buffer.getvalue()
    place = content.index(b"IDAT") - 4
    return content[:place] + chunk + content[place:]


def decoded(picture: Image.Image, form: str, **options: Any) -> np.ndarray:
    """The RGB pixels after a lossy format."""
    buffer = io.BytesIO()
    picture.save(buffer, form, **options)
    return np.asarray(Image.open(buffer).convert("RGB"))


colour, palette = Image.fromarray(RGB), Image.fromarray(RGB).quantize(32)
cmyk, ycbcr = colour.convert("CMYK"), colour.convert("YCbCr")
keyed = palette.convert("RGBA")
keyed.putalpha(Image.fromarray(np.where(np.asarray(palette) == 5, 0, 255).astype(np.uint8)))
alphas = bytes(range(0, 256, 8))
faded = palette.convert("RGBA")
faded.putalpha(Image.fromarray(np.frombuffer(alphas, np.uint8)[np.asarray(palette)]))
DEEP_BYTES = (DEEP >> 8).astype(np.uint8)
KEYED_BYTES = np.where(DEEP[3, 3] == DEEP, 255, DEEP_BYTES).astype(np.uint8)
big_endian = np.arange(60000, 60000 + DEEP.size, dtype=">u2").reshape(DEEP.shape)

# By name: how the file is written, the bytes [height, width(, 3)] that are seen, the array that means the same.
FILES: dict[str, tuple[Callable[[Path], Path], np.ndarray, np.ndarray | None]] = {
    "RGB PNG": (saved(colour, ".png"), RGB, RGB),
    "RGB BMP": (saved(colour, ".bmp"), RGB, RGB),
    "RGB PPM": (saved(colour, ".ppm"), RGB, RGB),
    "RGB TIFF": (saved(colour, ".tif"), RGB, RGB),
    "RGB JPEG": (saved(colour, ".jpg"), decoded(colour, "JPEG"), decoded(colour, "JPEG")),
    "lossless WebP": (saved(colour, ".webp", lossless=True), RGB, RGB),
    "grey PNG": (saved(Image.fromarray(GREY), ".png"), GREY, GREY),
    "grey PGM": (saved(Image.fromarray(GREY), ".pgm"), GREY, GREY),
    "1-bit PNG": (saved(Image.fromarray(BITS), ".png"), 255 * BITS.astype(np.uint8), BITS),
    "1-bit TIFF": (saved(Image.fromarray(BITS), ".tiff"), 255 * BITS.astype(np.uint8), BITS),
    "1-bit PBM": (saved(Image.fromarray(BITS), ".pbm"), 255 * BITS.astype(np.uint8), BITS),
    "16-bit PNG": (saved(Image.fromarray(DEEP), ".png"), DEEP_BYTES, DEEP),
    "16-bit TIFF": (saved(Image.fromarray(DEEP), ".tif"), DEEP_BYTES, DEEP),
    "16-bit PGM": (written(b"P5 13 9 65535\n" + DEEP.astype(">u2").tobytes(), ".pgm"), DEEP_BYTES, DEEP),
    "dark 16-bit PGM": (written(b"P5 2 1 65535\n\0\1\0\2", ".pgm"), np.zeros((1, 2), np.uint8), None),
    "16-bit PNG with a transparent value": (
        written(png_with_key(DEEP, int(DEEP[3, 3])), ".png"),
        KEYED_BYTES,
        None,
    ),
    "RGBA PNG": (saved(Image.fromarray(RGBA), ".png"), on_white(RGBA), RGBA),
    "RGBA TIFF": (saved(Image.fromarray(RGBA), ".tif"), on_white(RGBA), RGBA),
    "LA PNG": (saved(Image.fromarray(GREY_ALPHA), ".png"), on_white(RGBA[..., [0, 0, 0, 3]])[..., 0], GREY_ALPHA),
    "palette PNG": (
        saved(palette, ".png"),
        np.asarray(palette.convert("RGB")),
        np.asarray(palette.convert("RGB")),
    ),
    "palette GIF": (
        saved(palette, ".gif"),
        np.asarray(palette.convert("RGB")),
        np.asarray(palette.convert("RGB")),
    ),
    "palette PNG, one transparent": (
        saved(palette, ".png", transparency=5),
        on_white(np.asarray(keyed)),
        np.asarray(keyed),
    ),
    "palette GIF, one transparent": (
        saved(palette, ".gif", transparency=5),
        on_white(np.asarray(keyed)),
        np.asarray(keyed),
    ),
    "palette PNG, each with its alpha": (
        saved(palette, ".png", transparency=alphas),
        on_white(np.asarray(faded)),
        np.asarray(faded),
    ),
    "CMYK TIFF": (saved(cmyk, ".tif"), np.asarray(cmyk.convert("RGB")), np.asarray(cmyk.convert("RGB"))),
    "CMYK JPEG": (saved(cmyk, ".jpg"), decoded(cmyk, "JPEG"), decoded(cmyk, "JPEG")),
    "YCbCr TIFF": (saved(ycbcr, ".tif"), np.asarray(ycbcr.convert("RGB")), np.asarray(ycbcr.convert("RGB"))),
}
for value in range(2, 9):
    for form, suffix in (("PNG", ".png"), ("TIFF", ".tif"), ("JPEG", ".jpg")):
        upright = np.asarray(Image.fromarray(decoded(colour, form)).transpose(TURNS[value]))
        file = saved(colour, suffix, exif=orientation(value))
        FILES[f"{form} with orientation {value}"] = (file, upright, upright)


def expected_bytes(pixels: np.ndarray, channels: int) -> np.ndarray:
    """What Pillow makes of bytes [height, width(, 3)]: uint8 [channels, SIZE, SIZE]."""
    picture = Image.fromarray(pixels).convert("L" if channels == 1 else "RGB")
    resized = np.asarray(picture.resize((SIZE, SIZE), Image.Resampling.BILINEAR))
    return resized.reshape(SIZE, SIZE, channels).transpose(2, 0, 1)


def as_classifier_reads(channels: int, pictures: Any) -> np.ndarray:
    """What FewShotClassifier gives to its learner."""
    images = ImageSpec(channels, SIZE, (0.5,) * channels, (0.25,) * channels)
    return read_for_learner(picture_list(pictures), images).numpy()


def through_doors(path: Path, array: np.ndarray | None, channels: int) -> dict[str, np.ndarray]:
    """The picture as it comes in by every way that there is."""
    with Image.open(path) as unloaded:
        lazily = picture_bytes(unloaded, SIZE, channels)
    with Image.open(path) as opened:
        opened.load()
    images = ImageSpec(channels, SIZE, (0.5,) * channels, (0.25,) * channels)
    by_command = Reader(images).all([path])[0].pixels
    read, tensor = read_picture(path), partial(as_classifier_reads, channels)
    found = {
        "a path": picture_bytes(path, SIZE, channels),
        "a string": picture_bytes(str(path), SIZE, channels),
        "an open file": picture_bytes(io.BytesIO(path.read_bytes()), SIZE, channels),
        "a PIL image": picture_bytes(opened, SIZE, channels),
        "a PIL image that is not loaded": lazily,
        "read twice": picture_bytes(read_picture(read), SIZE, channels),
        "the bytes that are seen": picture_bytes(np.asarray(read), SIZE, channels),
        "the store's reader": next(read_pictures_by_class([[path]], SIZE, channels))[0],
        "the command's reader": tensor([by_command])[0],
        "the classifier": tensor([str(path), opened, path])[2],
    }
    if opened.mode != "I":  # a copy does not say any more that its file has sixteen bits
        found["a copy"] = picture_bytes(opened.copy(), SIZE, channels)
    if array is not None:
        found |= {
            "an array": picture_bytes(array, SIZE, channels),
            "a tensor": picture_bytes(torch.from_numpy(array.copy()), SIZE, channels),
            "the classifier's array": tensor(array[None])[0],
        }
    return found


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", list(FILES))
def test_a_file_is_the_same_bytes_through_every_door(tmp_path: Path, name: str, channels: int) -> None:
    write, seen, array = FILES[name]
    (tmp_path / "kinds" / "cat").mkdir(parents=True)
    path = write(tmp_path / "kinds" / "cat")
    for door, found in through_doors(path, array, channels).items():
        assert found.dtype == np.uint8 and found.shape == (channels, SIZE, SIZE), door
        np.testing.assert_array_equal(found, expected_bytes(seen, channels), door)


@pytest.mark.parametrize("name", list(FILES))
def test_a_picture_is_read_as_a_person_sees_it(tmp_path: Path, name: str) -> None:
    write, seen, _ = FILES[name]
    path = write(tmp_path)
    picture = read_picture(path)
    assert picture.mode == ("L" if seen.ndim == 2 else "RGB") and picture.info == {}
    assert is_grey(path) == (picture.mode == "L")
    np.testing.assert_array_equal(np.asarray(picture), seen)


# By name: the array, and the bytes [height, width(, 3)] that it means.
ARRAYS: dict[str, tuple[np.ndarray, np.ndarray]] = {
    "bytes": (RGB, RGB),
    "channels first": (RGB.transpose(2, 0, 1), RGB),
    "float64": (RGB / 255, RGB),
    "float32": ((RGB / 255).astype(np.float32), RGB),
    "float16": ((RGB / 255).astype(np.float16), RGB),
    "floats, channels first": ((RGB / 255).transpose(2, 0, 1), RGB),
    "floats between bytes": (np.array([[0.001, 0.5, 0.7, 1.0]]), np.array([[0, 128, 178, 255]], np.uint8)),
    "int64": (RGB.astype(np.int64), RGB),
    "uint32": (RGB.astype(np.uint32), RGB),
    "int16": (RGB.astype(np.int16), RGB),
    "int8": (np.array([[0, 100, 127]], np.int8), np.array([[0, 100, 127]], np.uint8)),
    "uint16": (RGB.astype(np.uint16) * 256 + 200, RGB),
    "uint16, the other byte order": (big_endian, (big_endian >> 8).astype(np.uint8)),
    "booleans": (BITS, 255 * BITS.astype(np.uint8)),
    "grey": (GREY, GREY),
    "grey, channels last": (GREY[..., None], GREY),
    "grey, channels first": (GREY[None], GREY),
    "grey and alpha": (GREY_ALPHA, on_white(RGBA[..., [0, 0, 0, 3]])[..., 0]),
    "grey and alpha, channels first": (GREY_ALPHA.transpose(2, 0, 1), on_white(RGBA[..., [0, 0, 0, 3]])[..., 0]),
    "alpha": (RGBA, on_white(RGBA)),
    "alpha in floats": (RGBA / 255, on_white(RGBA)),
    "alpha in sixteen bits": (RGBA.astype(np.uint16) * 257, on_white(RGBA)),
    "alpha, channels first": (RGBA.transpose(2, 0, 1), on_white(RGBA)),
    "opaque": (np.dstack([RGB, np.full_like(GREY, 255)]), RGB),
    "either end could be channels": (RGB[:3], RGB[:3]),
    "strides": (RGB[::-1, ::2], np.ascontiguousarray(RGB[::-1, ::2])),
    "one pixel": (np.array([[7]], np.uint8), np.array([[7]], np.uint8)),
}


@pytest.mark.parametrize("name", list(ARRAYS))
def test_an_array_is_the_same_bytes_through_every_door(name: str) -> None:
    array, seen = ARRAYS[name]
    plain = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("=")))
    found = {
        "array": read_picture(array),
        "tensor": read_picture(torch.from_numpy(plain)),
        "with gradient": read_picture(torch.from_numpy(plain).requires_grad_(plain.dtype.kind == "f")),
    }
    if plain.dtype != np.uint16:  # a list does not say that it has sixteen bits
        found["nested list"] = read_picture(array.tolist())
    for door, picture in found.items():
        np.testing.assert_array_equal(np.asarray(picture), seen, door)
    for channels in (1, 3):
        expected = expected_bytes(seen, channels)
        np.testing.assert_array_equal(picture_bytes(array, SIZE, channels), expected)
        np.testing.assert_array_equal(as_classifier_reads(channels, [array])[0], expected)
        if array.ndim == 3 or array.shape[-1] > 4:
            np.testing.assert_array_equal(as_classifier_reads(channels, array[None])[0], expected)


def test_bfloat16_is_rounded_to_bytes() -> None:
    picture = read_picture(torch.tensor([[0.0, 0.5, 1.0]], dtype=torch.bfloat16))
    assert np.asarray(picture).tolist() == [[0, 128, 255]]


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "HSV", "LAB"]
)
def test_a_pil_image_of_any_mode_is_read_and_not_changed(mode: str) -> None:
    first = Image.fromarray(RGBA).convert("LA") if mode == "La" else Image.fromarray(RGBA)
    image = (first if mode in ("La", "RGBa") else colour).convert(mode)
    image.info["exif"] = orientation(6).tobytes()
    before, mode_before, info = image.tobytes(), image.mode, dict(image.info)
    picture = read_picture(image)
    assert picture.mode in ("L", "RGB") and picture.size == image.size[::-1]
    assert (image.tobytes(), image.mode, image.info) == (before, mode_before, info)
    if mode not in ("La", "RGBa"):
        image.info.clear()
        opaque = np.asarray(image.convert("RGB").rotate(-90, expand=True).convert(picture.mode))
        np.testing.assert_array_equal(np.asarray(picture), opaque)


def test_premultiplied_alpha_is_laid_on_white_too() -> None:
    for mode, pixels in (("RGBa", RGBA), ("La", GREY_ALPHA)):
        picture = read_picture(Image.fromarray(pixels).convert(mode))
        seen = np.asarray(read_picture(pixels)).astype(int)
        assert np.abs(np.asarray(picture).astype(int) - seen).max() <= 2  # they are stored rounded
        assert (np.asarray(picture)[:2] == 255).all()


def test_pictures_can_be_resized_otherwise() -> None:
    lanczos = np.asarray(colour.resize((SIZE, SIZE), Image.Resampling.LANCZOS)).transpose(2, 0, 1)
    np.testing.assert_array_equal(picture_bytes(RGB, SIZE, 3, Image.Resampling.LANCZOS), lanczos)


@pytest.mark.parametrize(
    ("picture", "said"),
    [
        (np.full((8, 8), np.nan), "Image 7 has values that are NaN or infinite"),
        (np.full((8, 8, 3), np.inf, np.float32), "Image 7 has values that are NaN or infinite"),
        (torch.full((3, 8, 8), torch.nan), "Image 7 has values that are NaN or infinite"),
        (RGB / 254, "Image 7 has floats outside 0 to 1"),
        (RGB / 255 - 0.5, "Image 7 has floats outside 0 to 1: they go from -0.5 to 0.5"),
        (RGB.astype(np.float32), "Image 7 has floats outside 0 to 1: they go from 0 to 255"),
        (RGB.astype(np.int64) * 2, "Image 7 is of int64 with values from 0 to 510"),
        (RGB.astype(np.int16) - 1, "Image 7 is of int16 with values from -1 to 254"),
        (np.zeros((8, 8, 5), np.uint8), r"Image 7 has the shape \[8, 8, 5\]; expected"),
        (np.zeros((8,), np.uint8), r"Image 7 has the shape \[8\]; expected"),
        (np.zeros((1, 3, 8, 8), np.uint8), r"Image 7 has the shape \[1, 3, 8, 8\]; expected"),
        (5, r"Image 7 has the shape \[\]; expected"),
        (np.zeros((0, 8), np.uint8), r"Image 7 is empty: it has the shape \[0, 8\]"),
        (np.zeros((3, 8, 0)), r"Image 7 is empty: it has the shape \[3, 8, 0\]"),
        (Image.new("RGB", (0, 4)), "Image 7 is empty: it is 0 pixels wide and 4 high"),
        (np.full((8, 8), None), "Image 7 is an array of object"),
        (np.zeros((8, 8), complex), "Image 7 is an array of complex128"),
        (np.full((8, 8), "a"), "Image 7 is an array of <U1"),
        (None, "Image 7 is NoneType"),
        (b"bytes", "Image 7 is bytes"),
        ({"a": 1}, "Image 7 is dict"),
        ([[1, 2], [3]], "Image 7 cannot become an array"),
        (Image.new("F", (4, 4), 0.5), "Image 7 has pixels of mode 'F'"),
        (
            Image.fromarray(RGB[..., 0].astype(np.int32)),
            "Image 7 has pixels of mode 'I' with values from 0 to 255",
        ),
        (Image.new("I", (4, 4), 65536), "Image 7 has pixels of mode 'I' with values from 65536 to 65536"),
        (Image.new("I", (4, 4), -1), "Image 7 has pixels of mode 'I' with values from -1 to -1"),
        (io.BytesIO(b"not an image"), r"Image 7 cannot be read as an image \(its format is unknown\)"),
        (io.StringIO("text"), "Image 7 is not open as a file of bytes"),
    ],
)
def test_pixels_that_have_no_meaning_are_refused(picture: Any, said: str) -> None:
    with pytest.raises(DataError, match=f"^{said}"):
        picture_bytes(picture, SIZE, 3, name="Image 7")
    with pytest.raises(DataError, match=f"^{said.replace('Image 7', 'Image 1')}"):
        if isinstance(picture, io.BytesIO | io.StringIO):
            picture.seek(0)
        as_classifier_reads(3, [RGB, picture])


def png(cut: bool = False) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(random.integers(0, 256, (60, 60, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()[: 5000 if cut else None]


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".gif", ".tif", ".webp", ".bmp", ".ppm"])
def test_a_damaged_file_is_named(tmp_path: Path, suffix: str) -> None:
    """Cut anywhere, or with bytes changed anywhere: a picture or a DataError, never another error."""
    path = tmp_path / f"picture{suffix}"
    noise = Image.fromarray(random.integers(0, 256, (12, 12, 3), dtype=np.uint8))
    noise.save(path, exif=orientation(6))
    whole = path.read_bytes()
    for _ in range(60):
        broken = bytearray(whole[: random.integers(len(whole))] if random.random() < 0.5 else whole)
        for place in random.integers(0, max(len(broken), 1), 5 if broken else 0):
            broken[place] = random.integers(256)
        path.write_bytes(broken)
        try:
            picture_bytes(path, SIZE, 3)
        except DataError as error:
            assert str(error).startswith(f"{path} ")
    path.write_bytes(whole[: len(whole) // 3])
    with pytest.raises(DataError, match=f"picture{suffix} cannot be read as an image"):
        picture_bytes(path, SIZE, 3)
    with pytest.raises(DataError, match=f"picture{suffix} cannot be read as an image"):
        as_classifier_reads(3, [str(path)])


def test_a_file_that_is_no_picture_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "empty.png").touch()
    Image.new("F", (5, 5), 0.5).save(tmp_path / "float.tif")
    for name, said in (
        ("text.png", r"text.png cannot be read as an image \(its format is unknown\). Replace or remove it."),
        ("empty.png", "empty.png cannot be read as an image"),
        ("float.tif", "float.tif has pixels of mode 'F'"),
        ("", f"{tmp_path} is a folder; an image file was expected"),
        ("nowhere.png", "There is no image file '.*nowhere.png'"),
    ):
        for source in (tmp_path / name, str(tmp_path / name)):
            with pytest.raises(DataError, match=said):
                read_picture(source)
            with pytest.raises(DataError, match=said):
                as_classifier_reads(1, [source])
        if name != "float.tif":
            with pytest.raises(DataError, match=said):
                is_grey(tmp_path / name)


def test_a_pil_image_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    (tmp_path / "cut.png").write_bytes(png(cut=True))
    with Image.open(tmp_path / "cut.png") as cut, pytest.raises(DataError, match=r"cut\.png cannot be read"):
        read_picture(cut)
    (tmp_path / "whole.png").write_bytes(png())
    with Image.open(tmp_path / "whole.png") as closed:
        pass
    with pytest.raises(DataError, match="Image 0 cannot be read as an image"):
        as_classifier_reads(3, [closed])


def test_a_decompression_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bomb.png").write_bytes(png())
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(DataError, match=r"bomb\.png cannot be read as an image \(.*decompression bomb"):
        picture_bytes(tmp_path / "bomb.png", SIZE, 3)


@pytest.mark.parametrize(
    ("size", "channels", "said"), [(0, 3, "size is 0"), (4, 2, "channels is 2; images have 1 .* or 3")]
)
def test_impossible_sizes_are_refused(size: int, channels: int, said: str) -> None:
    with pytest.raises(DataError, match=said):
        picture_bytes(RGB, size, channels)


@pytest.mark.parametrize(
    ("pictures", "count"),
    [
        (np.stack([RGB] * 2), 2),
        (np.stack([RGB.transpose(2, 0, 1)] * 2), 2),
        (np.stack([GREY] * 3), 3),
        (torch.from_numpy(np.stack([RGB] * 2)) / 255, 2),
        ([RGB, GREY, colour], 3),
        ((picture for picture in (RGB, GREY)), 2),
        (np.array(["a.png", "b.png"]), 2),
        (np.array([colour, None], dtype=object), 2),
        (["a.png"], 1),
        ([Path("a.png"), io.BytesIO()], 2),
    ],
)
def test_several_pictures_are_split(pictures: Any, count: int) -> None:
    assert len(picture_list(pictures)) == count


@pytest.mark.parametrize(
    ("pictures", "said"),
    [
        (colour, r"Give a list of images, even for one: \[image\]"),
        ("a.png", r"Give a list of images, even for one: \[image\]"),
        (Path("a.png"), r"Give a list of images, even for one: \[image\]"),
        (io.BytesIO(), r"Give a list of images, even for one: \[image\]"),
        (b"", r"Give a list of images, even for one: \[image\]"),
        (RGB, r"shape \[9, 13, 3\] looks like one image with 3 channels: give \[image\].*\[9, 13, 3, 1\]"),
        (torch.from_numpy(RGBA), r"shape \[9, 13, 4\] looks like one image"),
        (GREY, r"not \[9, 13\]"),
        (np.zeros((1, 1, 3, 8, 8)), r"not \[1, 1, 3, 8, 8\]"),
        (torch.tensor(1.0), r"not \[\]"),
        ({"a": colour}, "a dict: give a list of images"),
        (5, "of type int: give a list of images"),
        (None, "of type NoneType: give a list of images"),
        ([], "There are no images"),
        (np.zeros((0, 8, 8), np.uint8), "There are no images"),
    ],
)
def test_what_is_not_several_pictures_is_refused(pictures: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        picture_list(pictures)
    with pytest.raises(DataError, match=said):
        as_classifier_reads(3, pictures)


def heic(kind: bytes = b"heic") -> bytes:
    """The head of a file of that kind, by which it is known."""
    return b"\0\0\0\x18ftyp" + kind + b"\0\0\0\0mif1" + kind


@pytest.mark.parametrize("name", ["phone.heic", "phone.jpg"])
def test_heic_is_explained_where_it_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    (tmp_path / name).write_bytes(heic())
    for source in (tmp_path / name, io.BytesIO(heic())):
        with pytest.raises(UnreadableError, match=r"HEIC picture.*`pip install pillow-heif`"):
            read_picture(source)


def test_heic_is_read_by_pillow_heif_without_changing_pillows_formats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []

    def open_heif(file: Any) -> Image.Image:
        opened.append(file)
        return Image.new("RGB", (8, 6), "red")

    monkeypatch.setitem(sys.modules, "pillow_heif", SimpleNamespace(HeifImageFile=open_heif))
    (tmp_path / "a.heic").write_bytes(heic())
    formats = set(Image.OPEN)
    assert read_picture(tmp_path / "a.heic").size == (8, 6) and opened == [tmp_path / "a.heic"]
    assert set(Image.OPEN) == formats


def test_avif_is_explained_where_pillow_lacks_it(tmp_path: Path) -> None:
    (tmp_path / "a.avif").write_bytes(heic(b"avis"))
    with pytest.raises(UnreadableError) as refused:
        read_picture(tmp_path / "a.avif")
    assert "a.avif cannot be read as an image" in str(refused.value) and "a.avif" not in refused.value.reason


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow is built without AVIF")
def test_avif_is_read(tmp_path: Path) -> None:
    Image.new("RGB", (16, 12), "red").save(tmp_path / "a.avif")
    assert read_picture(tmp_path / "a.avif").size == (16, 12)


def test_an_empty_file_is_said_to_be_empty(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"")
    with pytest.raises(UnreadableError) as refused:
        read_picture(tmp_path / "a.jpg")
    assert refused.value.reason == "it is empty"
