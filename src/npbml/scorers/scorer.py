"""What a scorer is: how much each query item of a task belongs to each of its classes."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from npbml.scorers.settings import ScorerSettings


class Scorer(nn.Module):
    """support and query items of a task -> scores [query, ways], none negative.

    A scorer of embeddings (`embeds`) is given vectors, by default those of the learner's own encoder as it was
    pre-trained; any other is given the normalised images themselves. It is made from the channels of the images,
    the settings, a network of its own where its facts say that one is pre-trained for it (`pretrains`), and the
    learner's own tail as it was pre-trained where it asks for that (`asks_learner`). To write one's own:

        @npbml.SCORERS("nearest")
        class Nearest(npbml.Scorer):
            def forward(self, support, labels, query, ways): ...
    """

    embeds = True
    asks_learner = True  # unless a subclass, or its line in the registry, says otherwise
    episodic = pretrains = False
    learned = (
        False  # its numbers learn with the rule: it has `similarities` and `scores` in the place of `forward`
    )

    def __init__(
        self,
        channels: int,
        settings: ScorerSettings,
        encoder: nn.Module | None = None,
        tail: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.encoder: Any = encoder
        self.tail: Any = tail

    def forward(self, support: Tensor, labels: Tensor, query: Tensor, ways: int) -> Tensor:
        """support [n, ...], labels [n], query [m, ...] -> scores [m, ways]"""
        raise TypeError(f"{type(self).__name__} is a scorer without a `forward`: define one.")

    def scores(self, support: Tensor, members: Tensor, unlabelled: Tensor) -> Tensor:
        """Of a learned scorer: embeddings [n, width] of one-hot labels [n, ways], and of the pool, to scores."""
        raise TypeError(f"{type(self).__name__} is a learned scorer without `scores`: define them.")

    def embed(self, images: Tensor, stem: Callable[[Tensor], Tensor]) -> Tensor:
        """Normalised images [n, C, H, W] to embeddings [n, width]; `stem` is that of the learner's network."""
        network = self.encoder if self.encoder is not None else self.tail
        return network(images if self.encoder is not None else stem(images))

    @property
    def view_settings(self) -> tuple[float, ...]:
        """The settings that embeddings depend on, beside the weights."""
        return ()

    def take_trained(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the weights that the scorer's own stage has trained: an encoder with a head, or all of its own."""
        if self.encoder is None:
            self.load_state_dict(tensors)
        else:
            own = {n.removeprefix("network."): t for n, t in tensors.items() if n.startswith("network.")}
            self.encoder.load_state_dict(own)
