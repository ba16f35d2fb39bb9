"""The examples in the docstrings run, and every parameter has its line."""

import doctest
import inspect

import pytest

import npbml.classifier.classifier
from npbml import FewShotClassifier


def test_the_examples_run() -> None:
    found = doctest.testmod(npbml.classifier.classifier)
    assert found.failed == 0 and found.attempted > 15


PUBLIC = [name for name, value in vars(FewShotClassifier).items() if not name.startswith(("_", "set_fit_r"))]


@pytest.mark.parametrize("name", [*PUBLIC, "__init__"])
def test_parameters_are_documented(name: str) -> None:
    member = inspect.getattr_static(FewShotClassifier, name)
    function = getattr(member, "__func__", member)
    text = inspect.getdoc(FewShotClassifier if name == "__init__" else function) or ""
    if name == "fit_transform":  # it names the two calls that it stands for
        return
    for parameter in list(inspect.signature(function).parameters)[1:]:
        assert f"{parameter} :" in text or f"**{parameter} :" in text, parameter
