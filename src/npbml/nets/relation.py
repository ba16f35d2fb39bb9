"""The relation network g (docs/method.md): how much a query image belongs to each class of the task.

Beside it, scores from the pre-trained encoder itself, which need no network of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npbml.data.augment import quarter_turns
from npbml.nets.layers import ResidualBlock
from npbml.nets.network import WIDTHS
from npbml.settings import setting


@dataclass(frozen=True)
class RelationSettings:
    """The relation network."""

    kind: Literal["network", "encoder", "prototypes", "both"] = setting("network")
    """A relation network; or angles between embeddings of a ResNet-12 that is pre-trained to score (encoder), of
    the learner's own encoder as it was pre-trained (prototypes), or of both side by side."""
    temperature: float = setting(10.0, above=0)
    """Of embeddings: what the cosines are multiplied by before softmax."""
    enlarged: float = setting(1.0, low=1)
    """Of embeddings: by what factor images are enlarged first; those of pre-training are, by their crops."""
    turns: bool = setting(False)
    """Of embeddings: take those of an image in each of its quarter turns, all four together."""
    mirrored: bool = setting(False)
    """Of embeddings: take the mean of those of an image and of its mirror image."""
    centred: bool = setting(False)
    """Of embeddings: take the mean of a task's from each before angles are looked at."""
    evened: bool = setting(False)
    """Of embeddings: let directions in which those of a task spread widely count less."""
    rounds: int = setting(0, low=0)
    """Of embeddings: how often the query images, by their scores, join the means of their classes."""
    widths: tuple[int, ...] = setting(WIDTHS["resnet12"], low=1)
    """Filters of the encoder's residual blocks; the relation module has the last width."""
    pools: int = setting(2, low=0)
    """How many of the encoder's blocks pool, counted from the first."""
    combine: Literal["sum", "mean"] = setting("sum")
    """How the maps of a class's shots become one; mean makes the network independent of the shots."""

    @property
    def pretrains(self) -> bool:
        """Whether a ResNet-12 is pre-trained to score."""
        return self.kind in ("encoder", "both")

    @property
    def asks_learner(self) -> bool:
        """Whether the learner's own encoder scores."""
        return self.kind in ("prototypes", "both")


class RelationNetwork(nn.Module):
    """support and query images -> scores [queries, ways] in [0, 1]"""

    def __init__(self, channels: int, settings: RelationSettings) -> None:
        super().__init__()
        widths, width = settings.widths, settings.widths[-1]
        self.encoder = nn.Sequential(
            *(
                ResidualBlock(inputs, outputs, F.relu, pool=index < settings.pools)
                for index, (inputs, outputs) in enumerate(zip((channels, *widths), widths, strict=False))
            )
        )
        self.relation = nn.Sequential(ResidualBlock(2 * width, width, F.relu), ResidualBlock(width, width, F.relu))
        self.score = nn.Linear(width, 1)
        self.combine = settings.combine

    def forward(self, support: Tensor, labels: Tensor, query: Tensor, ways: int) -> Tensor:
        """support [n, C, H, W], labels [n], query [m, C, H, W] -> scores [m, ways]"""
        maps = self.encoder(torch.cat([support, query]))
        support_maps, query_maps = maps[: len(support)], maps[len(support) :]
        members = (labels.unsqueeze(-1) == torch.arange(ways, device=labels.device)).to(maps.dtype)
        if self.combine == "mean":
            members = members / members.sum(0)
        class_maps = torch.einsum("nk,nchw->kchw", members, support_maps)
        shape = (len(query), ways, *maps.shape[1:])
        pairs = torch.cat([class_maps.expand(shape), query_maps.unsqueeze(1).expand(shape)], 2).flatten(0, 1)
        pooled = self.relation(pairs).mean((2, 3))
        return torch.sigmoid(self.score(pooled)).view(len(query), ways)


class PrototypeScores(nn.Module):
    """Embeddings of support and query -> softmax of the scaled cosine to each class's mean embedding.

    `encoder` is a whole network, `tail` the part of the learner's own that adapts, kept as it was pre-trained;
    where both are there, their embeddings stand side by side. In each of `rounds` the query items join the means
    of the classes by their scores (soft k-means, Ren et al., 2018).
    """

    def __init__(self, encoder: nn.Module | None, tail: nn.Module | None, settings: RelationSettings) -> None:
        super().__init__()
        self.encoder, self.tail, self.settings = encoder, tail, settings

    def views(self, images: Tensor) -> list[Tensor]:
        """What is embedded of images, floats [n, C, H, W]; where they are not enlarged, themselves come first."""
        if self.settings.enlarged > 1:
            size = [round(self.settings.enlarged * side) for side in images.shape[-2:]]
            images = F.interpolate(images, size, mode="bilinear", align_corners=False)
        seen = [images, images.flip(-1)] if self.settings.mirrored else [images]
        return [view for image in seen for view in (quarter_turns(image) if self.settings.turns else [image])]

    def embed(self, views: Sequence[Tensor], stem: Callable[[Tensor], Tensor]) -> Tensor:
        """Views of images to embeddings [n, networks * views * width]; each network's of a view have length 1.

        `stem` is that of the learner's network.
        """
        tail, found = self.tail, []
        if self.encoder is not None:
            found += self._parts(self.encoder, views)
        if tail is not None:
            found += self._parts(lambda view: tail(stem(view)), views)
        return torch.cat(found, 1)

    def _parts(self, network: Callable[[Tensor], Tensor], views: Sequence[Tensor]) -> list[Tensor]:
        """A network's embeddings of each view; those of mirrored ones, which come last, join the others."""
        parts = [F.normalize(network(view), dim=1) for view in views]
        if not self.settings.mirrored:
            return parts
        half = len(parts) // 2
        return [F.normalize(a + b, dim=1) for a, b in zip(parts[:half], parts[half:], strict=True)]

    def forward(self, support: Tensor, labels: Tensor, query: Tensor, ways: int) -> Tensor:
        """embeddings support [n, width], labels [n], query [m, width] -> scores [m, ways] that sum to 1"""
        every = torch.cat([support, query])
        if self.settings.centred:
            every = every - every.mean(0)
        every = F.normalize(every, dim=1)
        if self.settings.evened:
            every = F.normalize(evened(every), dim=1)
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


def evened(items: Tensor) -> Tensor:
    """items [n, width] -> [n, n], whose inner products are the root of the matrix of those of the items.

    The singular values become their roots, as if the items were multiplied by the inverse of the fourth root of
    their covariance. A rotation of all items is left open, which no angle sees.
    """
    wide = items.double()  # what is small among the singular values is lost in less
    return root(root(wide @ wide.T)).to(items.dtype)


def root(matrix: Tensor, steps: int = 20, least: float = 1e-5) -> Tensor:
    """The root of a symmetric matrix with no negative eigenvalue, by products alone, which a GPU can record.

    Newton and Schulz's iteration needs eigenvalues above 0 and a step for each factor of 2.25 that they differ by:
    `least` of the norm is added to all.
    """
    identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    size = matrix.norm()
    found, inverse = matrix / size + least * identity, identity
    for _ in range(steps):
        change = 1.5 * identity - 0.5 * inverse @ found
        found, inverse = found @ change, change @ inverse
    return found * size.sqrt()
