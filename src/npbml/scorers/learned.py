"""Soft k-means whose numbers are meta-learned with the rule (docs/method.md).

    w_c^0 = sum over S_c of e_i
    p_ic  = softmax_c(tau_rc <e_i, w_c^r / |w_c^r|> + b_rc log q_c^r)          r = 0, ..., rounds
    w_c^{r+1} = kappa_rc w_c^0 + sum_i p_ic e_i

q_c is the share that class c has of the pool's predictions, with one more item of each class. b < 0 pulls towards
a balanced pool; b > 0 lets a prior follow the pool. log tau, log kappa and b of each round are linear in what the
shape says: log ways, log n_c (labelled items of the class) and |U| / (|U| + 75).

The angles are a mixture of three: those of the embeddings as they are, without the mean of the task, and whitened
too. They are frozen work, done once for a task: only inner products of its items are needed.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npbml.rule.pairs import shape_inputs
from npbml.scorers.settings import ScorerSettings
from npbml.scorers.soft_kmeans import SoftKMeans
from npbml.scorers.whiten import whitened_products

ANGLES = 3  # as they are, centred, whitened
LARGEST = 6.0  # of the logarithms of tau and kappa, and of b, so that no scores overflow
SPEED = 10.0  # a few numbers learn this much faster than the weights of networks, by one rate for all of phi
EPS = 1e-12


class LearnedSoftKMeans(SoftKMeans):
    """Scores by soft k-means with learned temperatures, weights of the labelled items and priors."""

    learned = True

    def __init__(
        self,
        channels: int,
        settings: ScorerSettings,
        encoder: nn.Module | None = None,
        tail: nn.Module | None = None,
    ) -> None:
        super().__init__(channels, settings, encoder, tail)
        rounds = settings.rounds + 1
        self.numbers = nn.Parameter(torch.zeros(rounds, 3))  # log tau, log kappa and b of each round, over SPEED
        self.by_shape = nn.Parameter(torch.zeros(rounds, 3, 3))  # their slopes in what the shape says
        self.mixture = nn.Parameter(torch.zeros(ANGLES))
        self.mixture_by_shape = nn.Parameter(torch.zeros(ANGLES, 3))

    def similarities(self, support: Tensor, unlabelled: Tensor) -> Tensor:
        """The cosines of all items with each other, in three ways: [3, items, items]."""
        every = torch.cat([support, unlabelled])
        plain, centred = F.normalize(every, dim=1), F.normalize(every - every.mean(0), dim=1)
        whitened = whitened_products(centred)
        scale = whitened.diagonal().clamp_min(EPS).rsqrt()
        whitened = scale[:, None] * whitened * scale
        return torch.stack([plain @ plain.T, centred @ centred.T, whitened.to(plain.dtype)])

    def forward(self, support: Tensor, labels: Tensor, query: Tensor, ways: int) -> Tensor:
        """embeddings support [n, width], labels [n], query [m, width] -> scores [m, ways] that sum to 1"""
        members = (labels.unsqueeze(-1) == torch.arange(ways, device=labels.device)).to(support.dtype)
        return self.scores(self.similarities(support, query), members)

    def scores(self, similarities: Tensor, members: Tensor) -> Tensor:
        """similarities [3, items, items], one-hot labels [n, ways] -> scores [items - n, ways] that sum to 1"""
        (labelled, ways), unlabelled = members.shape, similarities.shape[-1] - members.shape[0]
        shape = shape_inputs(members, unlabelled)
        learned = SPEED * (self.numbers[..., None] + self.by_shape @ shape.T)
        start = learned.new_tensor([math.log(self.settings.temperature), 0.0, 0.0])
        numbers = (start[:, None] + learned).clamp(-LARGEST, LARGEST)
        weights = (SPEED * (self.mixture + self.mixture_by_shape @ shape.mean(0))).softmax(0)
        angles = torch.einsum("a,aij->ij", weights, similarities)
        scores = members.new_zeros(unlabelled, ways)
        for number, (log_tau, log_kappa, slope) in enumerate(numbers.unbind()):
            known = members if number == 0 else log_kappa.exp() * members
            sums = torch.cat([known, scores])
            products = angles @ sums
            lengths = (sums * products).sum(0).clamp_min(EPS).sqrt()
            logits = log_tau.exp() * products[labelled:] / lengths
            if number > 0:
                logits = logits + slope * ((scores.sum(0) + 1) / (unlabelled + ways)).log()
            scores = logits.softmax(-1)
        return scores
