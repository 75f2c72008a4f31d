"""Aggregation over the whole sequence: the paper's Arithmetic tasks, majority and histogram."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from slayformer.paper.tasks.base import Task, binomial, certain, last_only


class Counting(Task):
    """How many tokens are 0 (the vocabulary's last number stands for more)."""

    name, length, vocabulary_size = "counting", 32, 32

    def targets(self, ids_BT: Tensor) -> Tensor:
        zeros_B = (ids_BT == 0).sum(dim=-1)
        return last_only(ids_BT, zeros_B.clamp_max(self.vocabulary_size - 1))


class Parity(Task):
    """Whether the number of ones is odd."""

    name, length, vocabulary_size = "parity", 32, 2

    def targets(self, ids_BT: Tensor) -> Tensor:
        return last_only(ids_BT, ids_BT.sum(dim=-1) % 2)


class Addition(Task):
    """The sum of the tokens, which are 0 or 1."""

    name, length, vocabulary_size = "addition", 16, 32

    def tokens(self, samples: int, draws: torch.Generator) -> Tensor:
        return torch.randint(2, (samples, self.length), generator=draws)

    def targets(self, ids_BT: Tensor) -> Tensor:
        return last_only(ids_BT, ids_BT.sum(dim=-1))


class Modular(Task):
    """The sum of the tokens modulo V − 1."""

    name, length, vocabulary_size = "modular", 16, 8

    def targets(self, ids_BT: Tensor) -> Tensor:
        return last_only(ids_BT, ids_BT.sum(dim=-1) % (self.vocabulary_size - 1))


class Majority(Task):
    """The most frequent token, the lowest of several."""

    name, length, vocabulary_size = "majority", 32, 8
    kinds = 5

    def tokens(self, samples: int, draws: torch.Generator) -> Tensor:
        return torch.randint(self.kinds, (samples, self.length), generator=draws)

    def targets(self, ids_BT: Tensor) -> Tensor:
        counts_BV = F.one_hot(ids_BT, self.kinds).sum(dim=1)
        # a lower token weighs more than a higher one with the same count
        ranked_BV = counts_BV * self.kinds - torch.arange(self.kinds)
        return last_only(ids_BT, ranked_BV.argmax(dim=-1))


class Histogram(Task):
    """The first places hold how often each kind of token occurs (V − 1 stands for more); then 0.

    The counts are asked for at places 0 to 4, where almost nothing has been seen yet.
    """

    name, length, vocabulary_size = "histogram", 32, 16
    kinds = 5

    def tokens(self, samples: int, draws: torch.Generator) -> Tensor:
        return torch.randint(self.kinds, (samples, self.length), generator=draws)

    def targets(self, ids_BT: Tensor) -> Tensor:
        counts_BV = F.one_hot(ids_BT, self.kinds).sum(dim=1)
        targets_BT = torch.zeros_like(ids_BT)
        targets_BT[:, : self.kinds] = counts_BV.clamp_max(self.vocabulary_size - 1)
        return targets_BT

    def posterior(self, ids_BT: Tensor) -> Tensor:
        size, length = self.vocabulary_size, ids_BT.shape[1]
        posterior_BTV = certain(torch.zeros_like(ids_BT), size)
        seen_BTV = F.one_hot(ids_BT, self.kinds).cumsum(dim=1)
        for t in range(self.kinds):
            posterior_BTV[:, t] = 0
            for more, probability in enumerate(binomial(length - 1 - t, 1 / self.kinds)):
                counts_B1 = (seen_BTV[:, t, t, None] + more).clamp_max(size - 1)
                posterior_BTV[:, t].scatter_add_(1, counts_B1, probability.expand(counts_B1.shape))
        return posterior_BTV
