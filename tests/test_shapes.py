"""The shapes of tasks, as they are written."""

import pytest

from npbml.errors import SettingError
from npbml.shapes import USUAL, Shape, benchmark_shape, read_shape, read_shapes


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("5x1", Shape(5, 1, 0, 15)),
        ("5x1+75", Shape(5, 1, 75)),
        ("5x1+~75", Shape(5, 1, 75, unequal_pool=True)),
        ("5x~3", Shape(5, 3, 0, 15, unequal_shots=True)),
        ("5x1+5", Shape(5, 1, 5, 15)),
        ("5x1+5/3", Shape(5, 1, 5, 3)),
        ("2x5+30", Shape(2, 5, 30)),
        ("16x1+240", Shape(16, 1, 240)),
        ("5x1+75/0", Shape(5, 1, 75)),
    ],
)
def test_a_shape_is_read(text: str, shape: Shape) -> None:
    assert read_shape(text) == shape
    assert read_shape(str(shape)) == shape


@pytest.mark.parametrize("text", USUAL)
def test_the_usual_shapes_are_written_as_they_are_read(text: str) -> None:
    assert str(read_shape(text)) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("5", "is not the shape of a task"),
        ("5x", "is not the shape of a task"),
        ("five ways", "is not the shape of a task"),
        ("5x1-75", "is not the shape of a task"),
        ("1x1", "at least 2"),
        ("5x0", "at least 1"),
        ("5x1/0", "nothing to predict"),
        ("5x1+76", "cannot be shared equally"),
    ],
)
def test_what_is_no_shape_is_refused(text: str, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        read_shape(text)


def test_usual_stands_for_a_list() -> None:
    assert read_shapes(["usual"]) == tuple(map(read_shape, USUAL))
    assert read_shapes(["5x1", "usual"])[0] == read_shape("5x1") and len(read_shapes(["5x1", "usual"])) == len(
        USUAL
    )


def test_counts() -> None:
    shape = read_shape("5x~3+~20/2")
    assert (shape.support, shape.scored) == (15, 30)
    assert shape.images == 11 + 20 + 2  # at least one labelled item of each of the others
    assert benchmark_shape(5, 1, 15) == read_shape("5x1+75")
