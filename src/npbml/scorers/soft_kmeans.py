"""Scores by angles between embeddings: prototypes, and soft k-means over the query items."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from npbml.nets.layers import channels_last
from npbml.nets.views import enlarged, rotations
from npbml.scorers.scorer import Scorer
from npbml.scorers.whiten import whiten


class SoftKMeans(Scorer):
    """Embeddings of support and query -> softmax of the scaled cosine to each class's mean embedding.

    `encoder` is a whole network, `tail` the part of the learner's own that adapts, kept as it was pre-trained;
    where both are there, their embeddings stand side by side. In each of `rounds` the query items join the means
    of the classes by their scores (soft k-means, Ren et al., 2018).
    """

    def views(self, images: Tensor) -> list[Tensor]:
        """What is embedded of images, floats [n, C, H, W]; where they are not enlarged, themselves come first."""
        images = enlarged(images, self.settings.enlarge)
        seen = [images, images.flip(-1)] if self.settings.flip else [images]
        return [view for image in seen for view in (rotations(image) if self.settings.rotations else [image])]

    def embed(self, images: Tensor, stem: Callable[[Tensor], Tensor]) -> Tensor:
        """Images to embeddings [n, networks * views * width]; each network's of a view have length 1."""
        views, tail, found = [channels_last(view) for view in self.views(images)], self.tail, []
        if self.encoder is not None:
            found += self._parts(self.encoder, views)
        if tail is not None:
            found += self._parts(lambda view: tail(stem(view)), views)
        return torch.cat(found, 1)

    @property
    def view_settings(self) -> tuple[float, ...]:
        return self.settings.rotations, self.settings.enlarge, self.settings.flip

    def _parts(self, network: Callable[[Tensor], Tensor], views: Sequence[Tensor]) -> list[Tensor]:
        """A network's embeddings of each view; those of mirrored ones, which come last, join the others."""
        parts = [F.normalize(network(view), dim=1) for view in views]
        if not self.settings.flip:
            return parts
        half = len(parts) // 2
        return [F.normalize(a + b, dim=1) for a, b in zip(parts[:half], parts[half:], strict=True)]

    def forward(self, support: Tensor, labels: Tensor, query: Tensor, ways: int) -> Tensor:
        """embeddings support [n, width], labels [n], query [m, width] -> scores [m, ways] that sum to 1"""
        every = torch.cat([support, query])
        if self.settings.centre:
            every = every - every.mean(0)
        every = F.normalize(every, dim=1)
        if self.settings.whiten:
            every = F.normalize(whiten(every), dim=1)
        support, query = every.tensor_split([len(support)])
        members = (labels.unsqueeze(-1) == torch.arange(ways, device=labels.device)).to(support.dtype)
        known = members.T @ support
        scores = self._scores(query, known)
        for _ in range(self.settings.rounds):
            scores = self._scores(query, known + scores.T @ query)
        return scores

    def _scores(self, query: Tensor, sums: Tensor) -> Tensor:
        """Of embeddings whose sums, or means, are those of the classes, [ways, width]."""
        return torch.softmax(self.settings.temperature * query @ F.normalize(sums, dim=1).T, -1)
