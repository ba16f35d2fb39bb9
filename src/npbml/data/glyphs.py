"""The embedded data set `glyphs`: characters of many scripts, drawn on the spot with matplotlib's fonts.

A class is a character; an image is that character in a random face (family, weight and slant), scaled,
sheared, rotated and moved, its strokes thickened or thinned, blurred and noisy: dark ink on light paper, 28 x
28, grey. FreeType's rasteriser computes with whole numbers, and so does everything here, from the raw output
of PCG64 on: the same versions give the same bytes on every machine.
"""

import functools
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, features

from npbml.data.characters import characters
from npbml.data.store import ClassEntry, Store, data_root
from npbml.errors import DataError

REVISION = 1
IMAGES_PER_CLASS = 24
SIZE = 28

FACES = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
)

_FINE = 2 * SIZE  # glyphs are bent at twice the size, and averaged down at the end
_INK = 40  # the longer side of a glyph, in fine pixels, before it is scaled
_ONE = 1 << 12  # 1 in the fixed-point numbers of the affine map
_PART = 1 << 5  # parts of a pixel in bilinear sampling


def glyphs(
    root: str | Path | None = None, seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> Store:
    """The store of glyphs in the folder `root` (`data_root()` if not given), made now if it is not there.

    A store that other versions of this module or of the fonts' libraries made is made anew. `progress` is
    told how many classes are drawn, of how many.
    """
    folder = Path(root or data_root()) / (f"glyphs-{seed}" if seed else "glyphs")
    provenance = {"seed": seed, "revision": REVISION} | versions()
    try:
        store = Store.open(folder)
        if store.provenance == provenance:
            return store
    except DataError:
        pass  # missing, damaged or half copied: whatever it was, drawing it again puts it right
    chosen = characters()
    images = np.empty((len(chosen), IMAGES_PER_CLASS, 1, SIZE, SIZE), dtype=np.uint8)
    for done, (_, _, code) in enumerate(chosen):
        images[done, :, 0] = draw(code, seed)
        if progress:
            progress(done + 1, len(chosen))
    return Store.write(
        folder,
        name="glyphs",
        images=images.reshape(-1, 1, SIZE, SIZE),
        classes=[
            ClassEntry(f"{script} U+{code:04X}", split, place * IMAGES_PER_CLASS, IMAGES_PER_CLASS, script)
            for place, (split, script, code) in enumerate(chosen)
        ],
        provenance=provenance,
    )


def versions() -> dict[str, str]:
    """What the bytes depend on besides this module and the seed."""
    return {
        "pillow": version("pillow"),
        "freetype": str(features.version("freetype2")),
        "matplotlib": version("matplotlib"),
    }


def draw(code: int, seed: int, count: int = IMAGES_PER_CLASS) -> np.ndarray:
    """`count` pictures of the character with that code point: uint8 [count, 28, 28].

    They depend on the character and the seed alone, not on what else is drawn.
    """
    random = _Random(seed, code)
    masters = renderings(code)
    picked = masters[random.between(0, len(masters) - 1, count)]
    ink = _thicken(_bend(picked, random), random)
    return _print(_blur(_halve(ink) >> 2, random), random)


def renderings(code: int) -> np.ndarray:
    """The character in every face that has it, centred, all of one size: uint8 [faces, 56, 56]."""
    masters = [_render(face, code) for face in FACES if code in _charmap(face)]
    if not masters:
        raise DataError(f"None of matplotlib's fonts has U+{code:04X}. Install matplotlib's own fonts again.")
    return np.stack(masters)


def resemblance(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Cosine similarity of slightly blurred renderings: [a, 56, 56] and [b, 56, 56] to float [a, b]."""

    def directions(images: np.ndarray) -> np.ndarray:
        flat = _binomial(_halve(images.astype(np.int32))).reshape(len(images), -1).astype(np.float32)
        return flat / np.linalg.norm(flat, axis=1, keepdims=True)

    return directions(one) @ directions(other).T


def _render(face: str, code: int) -> np.ndarray:
    """uint8 [56, 56] with the ink in the middle, its longer side about `_INK`."""
    ink = _ink(face, 100, code)
    ink = _ink(face, 100 * _INK // max(ink.size), code)
    canvas = Image.new("L", (_FINE, _FINE))
    canvas.paste(ink, ((_FINE - ink.width) // 2, (_FINE - ink.height) // 2))
    return np.asarray(canvas)


def _ink(face: str, points: int, code: int) -> Image.Image:
    """The character's coverage, cut to its bounds."""
    font = _font(face, points)
    left, top, right, bottom = (round(edge) for edge in font.getbbox(chr(code)))
    image = Image.new("L", (right - left + 4, bottom - top + 4))
    ImageDraw.Draw(image).text((2 - left, 2 - top), chr(code), fill=255, font=font)
    return image.crop(image.getbbox())


def _font_file(face: str) -> Path:
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{face}.ttf"


@functools.cache
def _font(face: str, points: int) -> ImageFont.FreeTypeFont:
    # The basic layout is FreeType alone; the other one also depends on libraries that the system may have.
    return ImageFont.truetype(_font_file(face), points, layout_engine=ImageFont.Layout.BASIC)


@functools.cache
def _charmap(face: str) -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(str(_font_file(face))).get_charmap())


class _Random:
    """Whole numbers from the raw output of PCG64, the one stream that numpy promises never to change."""

    def __init__(self, seed: int, code: int) -> None:
        self.bits = np.random.PCG64(np.random.SeedSequence([seed, code]))

    def between(self, low: int, high: int, count: int) -> np.ndarray:
        """int64 [count], uniform from `low` to `high`, both included."""
        span = np.uint64(high - low + 1)
        return low + ((self.bits.random_raw(count) >> np.uint64(32)) * span >> np.uint64(32)).astype(np.int64)

    def bell(self, *shape: int) -> np.ndarray:
        """int32 [*shape], nearly normal: the sum of four bytes about its mean; standard deviation 148."""
        raw = self.bits.random_raw((int(np.prod(shape)) + 1) // 2).astype("<u8").view(np.uint8)
        return (raw.reshape(-1, 4).sum(1, dtype=np.int32) - 510)[: int(np.prod(shape))].reshape(shape)


def _bend(masters: np.ndarray, random: _Random) -> np.ndarray:
    """Scale, shear, rotate and move each of uint8 [count, 56, 56], by bilinear sampling: int32."""
    count = len(masters)

    def between(low: float, high: float) -> np.ndarray:
        return random.between(round(low * _ONE), round(high * _ONE), count)

    # The cosine and sine of twice the angle whose tangent is t are rational in t: no rounding of a library's.
    t = between(-0.28, 0.28)
    norm = _ONE * _ONE + t * t
    cosine, sine = (_ONE * _ONE - t * t) * _ONE // norm, 2 * t * _ONE * _ONE // norm
    shear, size = between(-0.35, 0.35), between(0.85, 1.5)
    wide, high = size * between(0.8, 1.25) // _ONE, size * between(0.8, 1.25) // _ONE
    xx = wide * (cosine + shear * sine // _ONE) // _ONE
    xy = wide * (shear * cosine // _ONE - sine) // _ONE
    yx, yy = high * sine // _ONE, high * cosine // _ONE
    move_x, move_y = between(-6, 6), between(-6, 6)

    # In half pixels from the middle, so that they are whole; then in parts of a pixel from the corner of the
    # paper, which has a border of two pixels where everything that lies outside is read.
    half = np.arange(1 - _FINE, _FINE, 2)
    side = _FINE + 4
    x, y = (
        (across[:, None] * half)[:, None, :] + (along[:, None] * half)[:, :, None] + (2 * move)[:, None, None]
        for across, along, move in ((xx, xy, move_x), (yx, yy, move_y))
    )
    x, y = (
        np.clip((axis + (side - 1) * _ONE) // (2 * _ONE // _PART), 0, (side - 2) * _PART).astype(np.int32)
        for axis in (x, y)
    )
    paper = np.pad(masters, ((0, 0), (2, 2), (2, 2))).ravel().astype(np.int32)
    at = (np.arange(count) * side * side)[:, None, None] + (y // _PART) * side + x // _PART
    right, down = x % _PART, y % _PART
    upper = paper[at] * (_PART - right) + paper[at + 1] * right
    lower = paper[at + side] * (_PART - right) + paper[at + side + 1] * right
    return (upper * (_PART - down) + lower * down) // (_PART * _PART)


def _thicken(ink: np.ndarray, random: _Random) -> np.ndarray:
    """Grow or thin the strokes of [count, 56, 56] by up to one fine pixel on each side."""
    amount = random.between(-128, 256, len(ink)).astype(np.int32)[:, None, None]
    wide = np.pad(ink, ((0, 0), (1, 1), (1, 1)))
    near = (ink, wide[:, :-2, 1:-1], wide[:, 2:, 1:-1], wide[:, 1:-1, :-2], wide[:, 1:-1, 2:])
    target = np.where(amount > 0, functools.reduce(np.maximum, near), functools.reduce(np.minimum, near))
    return ink + ((target - ink) * np.abs(amount) >> 8)


def _blur(ink: np.ndarray, random: _Random) -> np.ndarray:
    """Mix each of [count, 28, 28] with its binomial blur, by a random share."""
    share = random.between(0, 256, len(ink)).astype(np.int32)[:, None, None]
    return ink + (((_binomial(ink) >> 4) - ink) * share >> 8)


def _halve(images: np.ndarray) -> np.ndarray:
    """The sums of two by two pixels."""
    return images[:, ::2, ::2] + images[:, 1::2, ::2] + images[:, ::2, 1::2] + images[:, 1::2, 1::2]


def _binomial(images: np.ndarray) -> np.ndarray:
    """Weights 1 2 1 across and down, 16 in all: whole numbers in, whole numbers out."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    across = padded[:, :, :-2] + 2 * padded[:, :, 1:-1] + padded[:, :, 2:]
    return across[:, :-2] + 2 * across[:, 1:-1] + across[:, 2:]


def _print(ink: np.ndarray, random: _Random) -> np.ndarray:
    """Ink [count, 28, 28] on paper, each of a random tone, with noise: uint8."""
    count = len(ink)
    paper, tone, grain = (
        random.between(low, high, count).astype(np.int32)[:, None, None]
        for low, high in ((190, 250), (0, 110), (6, 40))
    )
    noise = random.bell(*ink.shape) * grain // 148
    return np.clip(paper - (paper - tone) * ink // 255 + noise, 0, 255).astype(np.uint8)
