"""The relation network g (docs/method.md): how much a query image belongs to each class of the task."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npbml.nets.layers import ResidualBlock
from npbml.scorers.scorer import Scorer
from npbml.scorers.settings import ScorerSettings


class RelationNetwork(Scorer):
    """support and query images -> scores [queries, ways] in [0, 1]"""

    embeds = asks_learner = False
    episodic = True

    def __init__(
        self,
        channels: int,
        settings: ScorerSettings,
        encoder: nn.Module | None = None,
        tail: nn.Module | None = None,
    ) -> None:
        super().__init__(channels, settings)
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

    def take_trained(self, tensors: Mapping[str, Tensor]) -> None:
        self.load_state_dict(tensors)
