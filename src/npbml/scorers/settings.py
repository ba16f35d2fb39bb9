"""The settings of what scores query items."""

from dataclasses import dataclass
from typing import Literal

from npbml.parts import BACKBONES, SCORERS, ScorerName
from npbml.settings import setting


@dataclass(frozen=True)
class ScorerSettings:
    """What scores query items."""

    kind: ScorerName = setting(ScorerName("relation-network"), values={"network": "relation-network"})
    """relation-network; or angles between embeddings of a ResNet-12 that is pre-trained to score (encoder), of
    the learner's own encoder as it was pre-trained (prototypes), or of both side by side (both); or soft k-means,
    whose numbers are meta-learned, on the embeddings that the learner starts from (soft-kmeans); or your own."""
    temperature: float = setting(10.0, above=0)
    """Of embeddings: what the cosines are multiplied by before softmax."""
    enlarge: float = setting(1.0, low=1, high=100, was="enlarged")
    """Of embeddings: by what factor images are enlarged first; those of pre-training are, by their crops."""
    rotations: bool = setting(False, was="turns")
    """Of embeddings: take those of an image in each of its 4 rotations, side by side."""
    flip: bool = setting(False, was="mirrored")
    """Of embeddings: take the mean of those of an image and of its mirror image."""
    centre: bool = setting(False, was="centred")
    """Of embeddings: subtract the mean of a task's before angles are looked at."""
    whiten: bool = setting(False, was="evened")
    """Of embeddings: let directions in which those of a task spread widely count less."""
    rounds: int = setting(0, low=0, high=1000)
    """Of embeddings: rounds of soft k-means, in each of which the query items join the means of the classes."""
    widths: tuple[int, ...] = setting(BACKBONES.fact("resnet12", "widths"), low=1, high=10**6)
    """Filters of the residual blocks of a scorer's own network; the relation module has the last width."""
    pools: int = setting(2, low=0, high=100)
    """Of a relation network: how many of the encoder's blocks pool, counted from the first."""
    combine: Literal["sum", "mean"] = setting("sum")
    """Of a relation network: how the maps of a class's shots become one; mean does not depend on their number."""

    @property
    def pretrains(self) -> bool:
        """Whether an encoder is pre-trained to score."""
        return SCORERS.fact(self.kind, "pretrains")

    @property
    def asks_learner(self) -> bool:
        """Whether the learner's own encoder scores."""
        return SCORERS.fact(self.kind, "asks_learner")

    @property
    def trains(self) -> bool:
        """Whether the scorer has weights of its own, which a stage trains."""
        return self.pretrains or SCORERS.fact(self.kind, "episodic")
