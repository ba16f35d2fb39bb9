"""Nearest class means of a run's pre-trained encoder, as a classifier of pictures."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from npbml.classifier.labels import class_list, label_array
from npbml.classifier.reading import read_pictures
from npbml.errors import DataError
from npbml.lab.run import Run
from npbml.lab.weights import pretrained_network
from npbml.pictures import picture_list
from npbml.stages.pretrain import prototype_logits
from npbml.tasks import Task

PROTOTYPES = "prototypes"


class PrototypeClassifier:
    """Label pictures by the nearest mean of the labelled ones' embeddings, as `npbml test` judges them.

    Args:
        run: A run whose encoder is pre-trained.
        threshold: Kept for those who ask.
    """

    def __init__(self, run: Run, threshold: float | None = None) -> None:
        self.run, self.threshold = run, threshold
        self.network = pretrained_network(run)
        records = [record for record in run.records.all() if record["method"] == PROTOTYPES]
        self.temperature = float(records[0].get("temperature", 1.0)) if records else 1.0
        spec = run.images
        self._mean, self._std = (torch.tensor(part)[:, None, None] for part in (spec.mean, spec.std))

    def fit(self, pictures: Any, labels: Sequence[str], unlabelled: Any | None = None) -> "PrototypeClassifier":
        """Keep labelled pictures; there is no use for others."""
        classes = class_list(labels)
        self.classes_ = label_array(classes)
        self._support = self._normalised(pictures)
        self._codes = torch.tensor([classes.index(label) for label in labels], device=self.run.device)
        return self

    def predict_proba(self, pictures: Any) -> np.ndarray:
        """Return the probabilities [n, classes]; of networks with batch norm, they depend on all the pictures."""
        if not hasattr(self, "classes_"):
            raise DataError("This classifier has no labelled pictures yet: call fit(pictures, labels) first.")
        query = self._normalised(pictures)
        none = torch.zeros(len(query), dtype=torch.long, device=query.device)
        task = Task(self._support, self._codes, query, none)
        logits = prototype_logits(self.network, task, len(self.classes_), self.run.config.pretrain.prototype_batch)
        return (logits / self.temperature).softmax(-1).cpu().numpy()

    def _normalised(self, pictures: Any) -> torch.Tensor:
        images = read_pictures(picture_list(pictures), self.run.images)
        return ((images.float() / 255 - self._mean) / self._std).to(self.run.device)
