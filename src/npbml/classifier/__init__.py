"""The practitioner's door: fit a classifier to a few labelled pictures, predict, save, share and export it."""

from npbml.classifier.classifier import FewShotClassifier
from npbml.classifier.leave_one_out import LeaveOneOut, LeftOut
from npbml.classifier.sklearn_base import NotFittedError

__all__ = ["FewShotClassifier", "LeaveOneOut", "LeftOut", "NotFittedError"]
