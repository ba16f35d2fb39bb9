"""A contact sheet of a store: a row of images for each class, with its name beside them."""

import numpy as np
import torch
from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

from npbml.data.store import SPLITS, Split, Store
from npbml.errors import DataError
from npbml.randomness import generator

_SMALLEST = 56  # pixels a side at which an image of 28 or 32 can still be made out
_GAP = 4
_FONT = 15
_LONGEST = 40


def contact_sheet(store: Store, split: Split, classes: int = 10, images: int = 12, seed: int = 0) -> Image.Image:
    """`images` images of each of `classes` classes of `split`, drawn by `seed`, in the order of the store."""
    entries = [entry for entry in store.entries if entry.split == split]
    if not entries:
        raise DataError(f"{store.name} has no classes in its split {split!r}; the splits are {', '.join(SPLITS)}.")
    if classes < 1 or images < 1:
        raise DataError(f"A sheet of {classes} classes and {images} images is empty: give at least 1 of each.")
    random = generator(seed, "show")
    chosen = [
        entries[place] for place in sorted(torch.randperm(len(entries), generator=random)[:classes].tolist())
    ]
    scale = max(1, -(-_SMALLEST // store.size))
    side = store.size * scale
    font = ImageFont.truetype(font_manager.findfont("DejaVu Sans"), _FONT)
    lines = {entry.name: _lines(entry.name, entry.superclass) for entry in chosen}
    margin = 2 * _GAP + max(int(font.getlength(line)) for written in lines.values() for line in written)
    row = max(side, max(map(len, lines.values())) * (_FONT + 3)) + _GAP
    title = f"{store.name}, {split}: {len(chosen)} of {len(entries)} classes"
    width = max(margin + images * (side + _GAP), int(font.getlength(title)) + 2 * _GAP)
    sheet = Image.new("RGB", (width, len(chosen) * row + _FONT + 3 * _GAP), "gainsboro")
    draw = ImageDraw.Draw(sheet)
    draw.text((_GAP, _GAP), title, "black", font)
    for number, entry in enumerate(chosen):
        top = _FONT + 3 * _GAP + number * row
        for line, words in enumerate(lines[entry.name]):
            draw.text((_GAP, top + line * (_FONT + 3)), words, "black" if line == 0 else "dimgrey", font)
        drawn = torch.randperm(entry.count, generator=random)[:images].sort().values.numpy()
        for column, place in enumerate(drawn):
            picture = _picture(store.images[entry.start + place]).resize((side, side), Image.Resampling.NEAREST)
            sheet.paste(picture, (margin + column * (side + _GAP), top))
    return sheet


def _lines(name: str, superclass: str) -> list[str]:
    """The name, and the superclass below it unless the name says it; long ones are cut."""
    lines = [name] if not superclass or name.startswith(superclass) else [name, superclass]
    return [
        line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]}...{line[-_LONGEST // 2 :]}" for line in lines
    ]


def _picture(image: np.ndarray) -> Image.Image:
    """uint8 [channels, height, width] as a picture in colour."""
    return Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0)).convert("RGB")
