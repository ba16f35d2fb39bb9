"""Pre-training of the tail of an encoder that is there already: the main directions of its features."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from npbml.data.tasks import ClassSet
from npbml.engine.capture import Replay
from npbml.engine.evaluate import over_tasks
from npbml.learner.settings import ImageSpec
from npbml.measures import ACCURACY
from npbml.nets.layers import initialise
from npbml.nets.network import Network
from npbml.randomness import generator
from npbml.stages.pretrain import pretrain_network, prototype_accuracies, use_norms
from npbml.stages.settings import PretrainSettings
from npbml.stages.setup import Setup


class ProjectionTrainer:
    """The tail's linear map becomes that to the principal components of the training features.

    It is the best start without labels: of all maps to as few numbers, it keeps most of the features' variance.
    """

    def __init__(
        self, setup: Setup, settings: PretrainSettings, train: ClassSet, val: ClassSet, images: ImageSpec
    ) -> None:
        """`train` and `val` have the encoder's features in the place of images; `images` are those it takes."""
        self.setup, self.settings, self.train, self.val = setup, settings, train, val
        self.module: Network = pretrain_network(setup.learner, settings, images)
        initialise(self.module, setup.learner.init.std, generator(setup.seed, "pretrain"))
        use_norms(self.module, setup.learner)
        self.module.to(setup.device)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.0)  # there is nothing to descend on
        self.notes: dict[str, Any] = {}
        self.share = self._project()  # at once: validation may prefer a random map by chance

    def decide(self, index: int) -> None:
        """Nothing is decided by measuring."""

    def step(self, index: int) -> dict[str, float]:
        return {"variance kept": self.share}

    @torch.no_grad()
    def _project(self) -> float:
        block: Any = self.module.tail.blocks[0]
        features = self.train.images.float().mean((2, 3))
        weight, bias, share = principal_map(features, len(block.block.weight))
        block.block.weight.copy_(weight[..., None, None])
        block.block.bias.copy_(bias)
        stem: Any = self.module.stem.blocks[0]
        stem.centre.copy_(features.mean(0)[:, None, None])
        return share

    def validate(self) -> float:
        replay = Replay("validation", False, self.setup.say)
        per_task = prototype_accuracies(
            self.module,
            self.setup,
            self.settings,
            self.val,
            self.settings.validation_tasks,
            "validation",
            replay,
        )
        return over_tasks(ACCURACY, per_task).mean

    def result(self) -> Mapping[str, Tensor]:
        return self.module.state_dict()

    def conclude(self, best: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
        return {}


def principal_map(features: Tensor, width: int) -> tuple[Tensor, Tensor, float]:
    """The linear map of features [n, inputs] to their principal components, scaled to a mean square of 1.

    Returns:
        Its weight [width, inputs], its bias [width], and the share of the variance that it keeps. Where there are
        fewer directions than `width`, the remaining rows are 0.
    """
    mean = features.double().mean(0)
    centred = features.double() - mean
    values, vectors = torch.linalg.eigh(centred.T @ centred / len(centred))
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
    count = min(width, len(values))
    scale = (width / values[:count].sum().clamp_min(1e-12)).sqrt()
    weight = torch.zeros(width, len(values), dtype=torch.float64, device=features.device)
    weight[:count] = scale * vectors.T[:count]
    share = (values[:count].sum() / values.sum().clamp_min(1e-12)).item()
    return weight.to(features.dtype), -(weight @ mean).to(features.dtype), share
