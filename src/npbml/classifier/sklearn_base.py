"""What the classifier inherits: scikit-learn's base classes where it is installed, else the least they do."""

import inspect
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from npbml.errors import DataError


@contextmanager
def _process_unchanged() -> Iterator[None]:
    """Give environment variables and warning filters back as they were.

    When it is imported, scikit-learn sets two variables of Intel's OpenMP, and scipy two warning filters.
    """
    before = dict(os.environ)
    with warnings.catch_warnings():
        yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


class _Parameters:
    """Parameters of the constructor by name, as scikit-learn's BaseEstimator has them."""

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters of the constructor by name."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self, **params: Any) -> Any:
        """Set parameters of the constructor by name."""
        for name, value in params.items():
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        default = {name: one.default for name, one in inspect.signature(type(self)).parameters.items()}
        changed = {name: value for name, value in self.get_params().items() if value is not default[name]}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items())})"


class _NotFitted(ValueError, AttributeError):
    pass


class _Classifies:
    def __sklearn_tags__(self) -> Any:
        raise NotImplementedError("scikit-learn is not installed")


class _Transforms:
    pass


if TYPE_CHECKING:
    BaseEstimator = _Parameters
    ClassifierMixin = _Classifies
    TransformerMixin = _Transforms
    _Unfitted = _NotFitted
    UNUSED: Any = None  # scikit-learn's name for an argument that is not routed
else:
    try:
        with _process_unchanged():
            from sklearn.base import BaseEstimator, ClassifierMixin, TransformerMixin
            from sklearn.exceptions import NotFittedError as _Unfitted
            from sklearn.utils.metadata_routing import UNUSED
    except ImportError:
        BaseEstimator, ClassifierMixin, TransformerMixin = _Parameters, _Classifies, _Transforms
        _Unfitted, UNUSED = _NotFitted, None


class NotFittedError(DataError, _Unfitted):
    """The classifier has no labelled pictures yet. It is scikit-learn's error too, where that is installed."""
