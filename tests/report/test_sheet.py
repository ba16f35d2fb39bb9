"""The contact sheet of uncertain pictures."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from npbml.report.sheet import COUNT, Uncertain, draw_sheet, write_sheet


def uncertain(file: Path, name: str = "a.jpg") -> Uncertain:
    return Uncertain(file, name, "a label that is far too long for the room that it has", 0.4, "dog", 0.3)


@pytest.mark.parametrize("count", [1, 2, 7, COUNT])
def test_every_picture_is_on_the_sheet(tmp_path: Path, count: int) -> None:
    colours = [(200, 8 * number, 255 - 8 * number) for number in range(count)]
    files = [tmp_path / f"{number}.png" for number in range(count)]
    for number, (file, colour) in enumerate(zip(files, colours, strict=True)):
        Image.new("RGB", (30 + 40 * (number % 3), 50), colour).save(file)
    sheet = draw_sheet([uncertain(file, "x" * 300) for file in files], f"the {count} least certain")
    pixels = {tuple(colour) for colour in np.asarray(sheet).reshape(-1, 3)}
    assert set(colours) <= pixels and max(sheet.size) < 1500
    write_sheet(tmp_path / "sheet.png", sheet)
    with Image.open(tmp_path / "sheet.png") as written:
        assert written.size == sheet.size and written.format == "PNG"


def test_a_picture_that_is_gone_leaves_a_gap(tmp_path: Path) -> None:
    assert draw_sheet([uncertain(tmp_path / "gone.jpg")], "one").width > 100
