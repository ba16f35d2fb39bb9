"""The one reader of pictures: a file, a PIL image, an array or a tensor becomes the same bytes.

`read_picture` gives a picture as a person sees it: upright by its EXIF orientation, on white paper where it is
transparent, with eight bits a channel, grey or RGB. `picture_bytes` gives it at the size and with the channels
that a network takes. `picture_list` splits what a user gives as several pictures.
"""

import io
import os
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from npbml.errors import DataError

SUFFIXES = (
    *(".avif", ".bmp", ".gif", ".heic", ".heif", ".jfif", ".jpe", ".jpeg", ".jpg"),
    *(".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"),
)
"""The endings of files that are taken for pictures in a folder, in lower case."""

_GREY = frozenset(("1", "L", "LA", "La"))
_CHANNELS = (1, 2, 3, 4)  # grey, grey and alpha, RGB, RGB and alpha
# What stands in bytes 8 to 11 of files that begin with "ftyp": phones save HEIC under other endings too.
_HEIC = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_AVIF = (b"avif", b"avis")


class UnreadableError(DataError):
    """A file that cannot be read as a picture.

    Attributes:
        reason: Why not, without the name of the file.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} cannot be read as an image ({reason}). Replace or remove it.")
        self.reason = reason


@runtime_checkable
class Encoded(Protocol):
    """A picture file that is not a path: a member of an archive, or an open file. Its string names it."""

    def read(self) -> bytes: ...


def read_picture(source: Any, name: str | None = None) -> Image.Image:
    """Return the picture as a person sees it, as a PIL image of mode "L" (grey) or "RGB".

    It is turned upright by its EXIF orientation and laid on white paper where it is transparent. Sixteen bits
    are cut to the upper eight. Reading the result again gives the same picture.

    Args:
        source: One of
            - a path (a string or a `Path`), or an object whose `read()` gives the bytes of a file;
            - a PIL image of any mode that has an agreed range; it is not changed;
            - an array or a tensor [height, width], [height, width, channels] or [channels, height, width] with 1
              (grey), 2 (grey and alpha), 3 (RGB) or 4 (RGB and alpha) channels. If both ends of a shape could be
              the channels, the last is. Values are bytes in any integer type, sixteen bits in uint16, floats in
              0 to 1 (rounded to bytes), or booleans (black and white).
        name: How messages call the picture, such as "Image 3"; a path is always called by itself.

    Raises:
        DataError: The file is missing, damaged or not a picture; or the pixels are of the wrong shape or kind, are
            out of range, not finite, or none at all.
    """
    if isinstance(source, Image.Image):
        return _as_seen(source, name or getattr(source, "filename", "") or "The image")
    if _is_file(source):
        name = _file_name(source, name)
        with _open(source, name) as image:
            return _as_seen(image, name)
    name = name or "The image"
    return _as_seen(Image.fromarray(_pixel_bytes(source, name)), name)


def picture_bytes(
    source: Any,
    size: int,
    channels: int,
    resample: Image.Resampling = Image.Resampling.BILINEAR,
    name: str | None = None,
) -> np.ndarray:
    """Return a picture as bytes, uint8 [channels, size, size].

    Args:
        source: A picture in any form that `read_picture` takes, of any size.
        size: Pixels a side. A picture that is not square is stretched.
        channels: 1 (colour becomes grey) or 3 (grey is repeated).
        resample: How the picture is resized.
        name: How messages call the picture.

    Raises:
        DataError: The picture cannot be read, or `size` or `channels` is impossible.
    """
    check_size(size, channels)
    mode = "L" if channels == 1 else "RGB"
    picture = read_picture(source, name)
    if picture.mode != mode:
        picture = picture.convert(mode)
    pixels = np.asarray(picture.resize((size, size), resample))
    return np.array(pixels.reshape(size, size, channels).transpose(2, 0, 1), order="C")


def picture_list(pictures: Any) -> list[Any]:
    """Return the single pictures of a collection, each in a form that `read_picture` takes.

    Args:
        pictures: A list or other iterable of pictures, in any mixture of forms; or an array or a tensor
            [n, height, width], [n, height, width, channels] or [n, channels, height, width].

    Raises:
        DataError: It is empty, a single picture, or no collection.
    """
    if isinstance(pictures, Image.Image | bytes | bytearray) or _is_file(pictures):
        raise DataError("Give a list of images, even for one: [image].")
    if isinstance(pictures, Mapping | set | frozenset):
        raise DataError(f"The images are a {type(pictures).__name__}: give a list of images.")
    if hasattr(pictures, "detach") or hasattr(pictures, "__array__"):
        pictures = _array(pictures, "The array of images")
        if pictures.dtype.kind not in "OUS":  # arrays of objects or of strings are lists
            _check_several(pictures.shape)
    try:
        found = list(pictures)
    except TypeError:
        raise DataError(f"The images are of type {type(pictures).__name__}: give a list of images.") from None
    if not found:
        raise DataError("There are no images.")
    return found


def is_grey(source: str | os.PathLike[str] | Encoded) -> bool:
    """Return whether `read_picture` gives a grey picture for this file, from the head of the file alone.

    Raises:
        DataError: The file is missing, damaged or not a picture.
    """
    with _open(source, _file_name(source, None)) as image:
        return image.mode in _GREY or image.mode.startswith("I")


def check_size(size: int, channels: int) -> None:
    """Raise a DataError unless pictures can have this size and number of channels."""
    if size < 1:
        raise DataError(f"size is {size}; images need at least 1 pixel a side.")
    if channels not in (1, 3):
        raise DataError(f"channels is {channels}; images have 1 (grey) or 3 (colour).")


def _is_file(source: Any) -> bool:
    return isinstance(source, str | os.PathLike | Encoded)


def _file_name(source: Any, name: str | None) -> str:
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    return name or str(source)


def _open(source: Any, name: str) -> Image.Image:
    """The picture file, not yet decoded."""
    if isinstance(source, str | os.PathLike):
        if os.path.isdir(source):
            raise DataError(f"{name} is a folder; an image file was expected.")
        if not os.path.exists(source):
            raise DataError(f"There is no image file {name!r}.")
        file: Any = source
    else:
        content = source.read()
        if not isinstance(content, bytes):
            raise DataError(f"{name} is not open as a file of bytes: open it with mode 'rb'.")
        file = io.BytesIO(content)
    try:
        return Image.open(file)
    except UnidentifiedImageError as error:
        brand = _brand(file)
        if brand in _HEIC:
            return _open_heic(file, name)
        if brand in _AVIF:
            raise UnreadableError(
                name, "it is an AVIF picture, which Pillow reads after `pip install --upgrade pillow`"
            ) from error
        # Pillow would name the file a second time.
        raise UnreadableError(name, "its format is unknown" if _head(file) else "it is empty") from error
    except Exception as error:  # Pillow's decoders raise whatever the damage leads to
        raise _unreadable(name, error) from error


def _head(file: Any) -> bytes:
    """The first bytes of a path or of an open file."""
    if isinstance(file, io.BytesIO):
        return file.getvalue()[:12]
    with open(file, "rb") as opened:
        return opened.read(12)


def _brand(file: Any) -> bytes:
    """The kind of a file of the family of MP4, to which HEIC and AVIF belong; else nothing."""
    head = _head(file)
    return head[8:12] if head[4:8] == b"ftyp" else b""


def _open_heic(file: Any, name: str) -> Image.Image:
    """A HEIC picture, by a package that need not be there. Pillow's own table of formats is left as it is."""
    try:
        from pillow_heif import HeifImageFile
    except ImportError:
        raise UnreadableError(
            name, "it is a HEIC picture, which can be read after `pip install pillow-heif`"
        ) from None
    try:
        return HeifImageFile(file)
    except Exception as error:
        raise _unreadable(name, error) from error


def _unreadable(name: str, error: Exception) -> UnreadableError:
    why = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return UnreadableError(name, why.rstrip("."))


def _as_seen(image: Image.Image, name: str) -> Image.Image:
    """A new image, upright, on white paper, eight bits a channel: mode L or RGB, without any other data."""
    if 0 in image.size:
        raise DataError(f"{name} is empty: it is {image.width} pixels wide and {image.height} high.")
    try:
        picture = ImageOps.exif_transpose(image)  # a copy, even if there is nothing to turn
    except Exception as error:  # this decodes the file
        raise _unreadable(name, error) from error
    if picture.mode.startswith(("I", "F")):
        picture = _from_deep(picture, image.format, name)
    mode = "L" if picture.mode in _GREY else "RGB"
    try:
        if picture.mode == "La":
            picture = picture.convert("LA")
        if picture.has_transparency_data:
            # What lies beneath transparent pixels is arbitrary; on paper they are white.
            picture = picture.convert("RGBA")
            picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
        if picture.mode not in ("L", "RGB"):
            picture = picture.convert("RGB")  # every mode by way of RGB, also on the way to grey
        if picture.mode != mode:
            picture = picture.convert(mode)
    except (ValueError, OSError) as error:
        raise DataError(
            f"{name} has pixels of mode {image.mode!r}, which cannot become RGB ({error}). Save it as RGB."
        ) from error
    picture.info = {}  # an orientation or a transparent colour must not be applied a second time
    return picture


def _from_deep(picture: Image.Image, file_format: str | None, name: str) -> Image.Image:
    """Sixteen bits a pixel to eight. Deeper pixels have no agreed range."""
    values, has = np.asarray(picture), ""
    sixteen = picture.mode.startswith("I;16")
    if picture.mode == "I":
        # Pillow reads the sixteen bits of some files into 32. In other images, 0 to 255 may as well be bytes.
        low, high = int(values.min()), int(values.max())
        sixteen = low >= 0 and high < 1 << 16 and (high > 255 or file_format in ("PNG", "PPM"))
        has = f" with values from {low} to {high}"
    if not sixteen:
        raise DataError(
            f"{name} has pixels of mode {picture.mode!r}{has}, of which the full range is not known. "
            "Save it with 8 or 16 bits a channel."
        )
    grey = (values >> 8).astype(np.uint8)
    transparent = picture.info.get("transparency")
    if isinstance(transparent, int):
        grey[values == transparent] = 255
    return Image.fromarray(grey)


def _array(source: Any, name: str) -> np.ndarray:
    if hasattr(source, "detach"):  # a tensor, without importing torch
        source = source.detach().cpu()
        try:
            return source.numpy()
        except TypeError:  # numpy has no bfloat16
            return source.float().numpy()
    try:
        return np.asarray(source)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} cannot become an array of pixels ({error}).") from error


def _check_several(shape: tuple[int, ...]) -> None:
    if len(shape) not in (3, 4):
        raise DataError(
            "An array of images has the shape [n, height, width], [n, height, width, channels] or "
            f"[n, channels, height, width], not {list(shape)}."
        )
    if len(shape) == 3 and shape[2] in _CHANNELS:
        raise DataError(
            f"An array of the shape {list(shape)} looks like one image with {shape[2]} channels: give [image]. "
            f"If it is {shape[0]} grey images that are {shape[2]} pixels wide, give it the shape {[*shape, 1]}."
        )


def _pixel_bytes(source: Any, name: str) -> np.ndarray:
    """The picture in an array: uint8 [height, width] or [height, width, 2, 3 or 4]."""
    pixels = _array(source, name)
    if pixels.dtype.kind not in "buif":
        what = f"an array of {pixels.dtype}" if isinstance(source, np.ndarray) else type(source).__name__
        raise DataError(
            f"{name} is {what}; expected is a path, a PIL image, or an array or tensor of bytes or of "
            "floats in 0 to 1."
        )
    shape = list(pixels.shape)
    if pixels.ndim == 3 and shape[2] not in _CHANNELS and shape[0] in _CHANNELS:
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in _CHANNELS):
        raise DataError(
            f"{name} has the shape {shape}; expected is [height, width], [height, width, channels] or "
            "[channels, height, width], with 1 to 4 channels."
        )
    if not pixels.size:
        raise DataError(f"{name} is empty: it has the shape {shape}.")
    pixels = _as_bytes(pixels, name)
    return np.ascontiguousarray(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)


def _as_bytes(pixels: np.ndarray, name: str) -> np.ndarray:
    kind, dtype = pixels.dtype.kind, pixels.dtype
    if kind == "b":
        return pixels.astype(np.uint8) * 255
    if kind == "u" and dtype.itemsize == 2:
        return (pixels >> 8).astype(np.uint8)
    if kind == "f" and not np.isfinite(pixels).all():
        raise DataError(f"{name} has values that are NaN or infinite.")
    low, high = pixels.min(), pixels.max()
    if kind == "f":
        if low < 0 or high > 1:
            raise DataError(
                f"{name} has floats outside 0 to 1: they go from {low:g} to {high:g}. Divide them by the value of "
                "white (bytes by 255), or give bytes (uint8)."
            )
        return np.round(pixels * 255).astype(np.uint8)
    if low < 0 or high > 255:
        raise DataError(
            f"{name} is of {dtype} with values from {low} to {high}; expected are bytes (0 to 255), floats in "
            "0 to 1, or sixteen bits as uint16."
        )
    return pixels.astype(np.uint8)
