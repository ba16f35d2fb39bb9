"""Soft k-means whose numbers are meta-learned with the rule (docs/method.md).

    w_c^0 = sum over S_c of e_i
    p_ic  = softmax_c(tau_rc <e_i, w_c^r / |w_c^r|> + b_rc log q_c^r)          r = 0, ..., rounds
    w_c^{r+1} = kappa_rc w_c^0 + sum_i p_ic e_i

e are the embeddings of the learner's own network at theta_0, so that it learns to be scored. q_c is the share that
class c has of the pool's predictions, with one more item of each class. b < 0 pulls towards a balanced pool; b > 0
lets a prior follow the pool. log tau, log kappa and b of each round are linear in what the shape says: log ways,
log n_c (labelled items of the class) and |U| / (|U| + 75).

The angles are a mixture of those of the embeddings as they are and without the mean of the task; with
scorer.whiten, of whitened ones too.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npbml.rule.pairs import shape_inputs
from npbml.scorers.scorer import Scorer
from npbml.scorers.settings import ScorerSettings
from npbml.scorers.whiten import whitened_cosines

LARGEST = 6.0  # of the logarithms of tau and kappa, and of b, so that no scores overflow
SPEED = 10.0  # a few numbers learn this much faster than the weights of networks, by one rate for all of phi
EPS = 1e-12


class LearnedSoftKMeans(Scorer):
    """Scores by soft k-means with learned temperatures, weights of the labelled items and priors."""

    embeds = asks_learner = False  # it is given embeddings that are not frozen
    learned = True

    def __init__(
        self,
        channels: int,
        settings: ScorerSettings,
        encoder: nn.Module | None = None,
        tail: nn.Module | None = None,
    ) -> None:
        super().__init__(channels, settings)
        rounds, angles = settings.rounds + 1, 2 + settings.whiten
        self.numbers = nn.Parameter(torch.zeros(rounds, 3))  # log tau, log kappa and b of each round, over SPEED
        self.by_shape = nn.Parameter(torch.zeros(rounds, 3, 3))  # their slopes in what the shape says
        self.mixture = nn.Parameter(torch.zeros(angles))
        self.mixture_by_shape = nn.Parameter(torch.zeros(angles, 3))

    def forward(self, support: Tensor, labels: Tensor, query: Tensor, ways: int) -> Tensor:
        """embeddings support [n, width], labels [n], query [m, width] -> scores [m, ways] that sum to 1"""
        members = (labels.unsqueeze(-1) == torch.arange(ways, device=labels.device)).to(support.dtype)
        return self.scores(support, members, query)

    def scores(self, support: Tensor, members: Tensor, unlabelled: Tensor) -> Tensor:
        """embeddings support [n, width], one-hot labels [n, ways], pool [m, width] -> scores [m, ways]"""
        (labelled, ways), pool = members.shape, len(unlabelled)
        shape = shape_inputs(members, pool)
        learned = SPEED * (self.numbers[..., None] + self.by_shape @ shape.T)
        # A tensor made of numbers would be copied from the host, which a CUDA graph cannot record.
        log_taus = (learned[:, 0] + math.log(self.settings.temperature)).clamp(-LARGEST, LARGEST)
        log_kappas, slopes = learned[:, 1:].clamp(-LARGEST, LARGEST).unbind(1)
        angles = self._angles(torch.cat([support, unlabelled]), shape)
        scores = members.new_zeros(pool, ways)
        for number, (log_tau, log_kappa, slope) in enumerate(zip(log_taus, log_kappas, slopes, strict=True)):
            known = members if number == 0 else log_kappa.exp() * members
            sums = torch.cat([known, scores])
            products = angles @ sums
            lengths = (sums * products).sum(0).clamp_min(EPS).sqrt()
            logits = log_tau.exp() * products[labelled:] / lengths
            if number > 0:
                logits = logits + slope * ((scores.sum(0) + 1) / (pool + ways)).log()
            scores = logits.softmax(-1)
        return scores

    def _angles(self, items: Tensor, shape: Tensor) -> Tensor:
        """The mixture of the cosines of all items with each other, [items, items]."""
        weights = (SPEED * (self.mixture + self.mixture_by_shape @ shape.mean(0))).softmax(0)
        plain, centred = F.normalize(items, dim=1), F.normalize(items - items.mean(0), dim=1)
        kinds = [plain @ plain.T, centred @ centred.T]
        if self.settings.whiten:
            kinds.append(whitened_cosines(centred))
        return torch.einsum("a,aij->ij", weights, torch.stack(kinds))
