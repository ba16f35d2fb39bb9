"""A contact sheet of pictures that a classifier is least certain of."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

from npbml.errors import DataError
from npbml.json_files import write_whole
from npbml.pictures import read_picture
from npbml.report.labels import one_line

COUNT, COLUMNS = 30, 6
_SIDE, _GAP, _TITLE = 184, 16, 46
_TEXT = 64  # below each picture: the label, the bar, the file name
_PAPER, _CARD, _INK, _QUIET, _BAR = "#f4f5f7", "#ffffff", "#1b3a4b", "#6b7686", "#d8dde4"
_COLOURS = ((0.5, "#d1495b"), (0.8, "#e0a030"), (1.1, "#3a8f5c"))  # of the bar, by probability


@dataclass(frozen=True)
class Uncertain:
    """A picture of the sheet: its file, the name that is shown, and its two most probable classes."""

    file: Path
    name: str
    label: str
    probability: float
    second: str
    second_probability: float


def draw_sheet(pictures: Sequence[Uncertain], title: str) -> Image.Image:
    """Draw the pictures, each with its labels, their probabilities and its file name."""
    bold, plain, small = _font(15, "bold"), _font(13), _font(12)
    columns = min(COLUMNS, max(3, len(pictures)))
    rows = max(1, -(-len(pictures) // columns))
    width, height = columns * (_SIDE + _GAP) + _GAP, _TITLE + rows * (_SIDE + _TEXT + _GAP)
    sheet = Image.new("RGB", (width, height + _GAP), _PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((_GAP, _GAP - 2), _shortened(title, _font(18, "bold"), width - 2 * _GAP), _INK, _font(18, "bold"))
    for number, picture in enumerate(pictures):
        left = _GAP + number % columns * (_SIDE + _GAP)
        top = _TITLE + number // columns * (_SIDE + _TEXT + _GAP)
        draw.rounded_rectangle((left - 5, top - 5, left + _SIDE + 4, top + _SIDE + _TEXT), 6, _CARD)
        shown = _fitted(picture.file)
        if shown is None:
            draw.text((left + 8, top + 8), "cannot be read any more", _QUIET, small)
        else:
            sheet.paste(shown, (left + (_SIDE - shown.width) // 2, top + (_SIDE - shown.height) // 2))
        _caption(draw, picture, left, top + _SIDE + 4, bold, plain, small)
    return sheet


def write_sheet(path: Path, sheet: Image.Image) -> None:
    """Write the sheet as PNG, whole or not at all."""
    content = io.BytesIO()
    sheet.save(content, "PNG")
    write_whole(path, content.getvalue())


def _caption(
    draw: ImageDraw.ImageDraw,
    picture: Uncertain,
    left: int,
    top: int,
    bold: ImageFont.FreeTypeFont,
    plain: ImageFont.FreeTypeFont,
    small: ImageFont.FreeTypeFont,
) -> None:
    percent = f"{100 * picture.probability:.0f} %"
    room = _SIDE - int(bold.getlength(percent)) - 8
    draw.text((left, top), _shortened(one_line(picture.label), bold, room), _INK, bold)
    draw.text((left + _SIDE - int(bold.getlength(percent)), top), percent, _INK, bold)
    colour = next(colour for limit, colour in _COLOURS if picture.probability < limit)
    draw.rectangle((left, top + 20, left + _SIDE - 1, top + 22), _BAR)
    draw.rectangle((left, top + 20, left + max(1, round((_SIDE - 1) * picture.probability)), top + 22), colour)
    other = f"{100 * picture.second_probability:.0f} %"
    room = _SIDE - int(plain.getlength(other)) - 8
    draw.text((left, top + 26), _shortened(one_line(picture.second), plain, room), _QUIET, plain)
    draw.text((left + _SIDE - int(plain.getlength(other)), top + 26), other, _QUIET, plain)
    draw.text((left, top + 44), _shortened(one_line(picture.name), small, _SIDE), _QUIET, small)


def _font(size: int, weight: str = "normal") -> ImageFont.FreeTypeFont:
    properties = font_manager.FontProperties(family="DejaVu Sans", weight=weight)
    return ImageFont.truetype(font_manager.findfont(properties), size)


def _fitted(file: Path) -> Image.Image | None:
    """The picture with its proportions within a square; small ones are enlarged without blur."""
    try:
        picture = read_picture(file).convert("RGB")
    except (DataError, OSError):
        return None
    scale = min(_SIDE / picture.width, _SIDE / picture.height)
    if scale >= 2:
        how, scale = Image.Resampling.NEAREST, float(int(scale))
    else:
        how = Image.Resampling.LANCZOS
    return picture.resize((max(1, round(picture.width * scale)), max(1, round(picture.height * scale))), how)


def _shortened(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """Text that is no wider than this; of longer text, the middle is left out."""
    if font.getlength(text) <= width:
        return text
    kept = len(text)
    while kept > 1 and font.getlength(f"{text[: (kept + 1) // 2]}…{text[len(text) - kept // 2 :]}") > width:
        kept -= 1
    return f"{text[: (kept + 1) // 2]}…{text[len(text) - kept // 2 :]}"
