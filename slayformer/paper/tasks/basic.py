"""Information routing: copy, sort and reverse (paper, Table 7: Basic), and copy at 256 tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from slayformer.paper.tasks.base import Task, binomial, certain


class Copy(Task):
    """Each answer is the token itself."""

    name, length, vocabulary_size = "copy", 32, 32

    def targets(self, ids_BT: Tensor) -> Tensor:
        return ids_BT.clone()


class LongCopy(Copy):
    """Copy, eight times as long."""

    name, length = "long_copy", 256


class Sort(Task):
    """The t-th answer is the t-th smallest token of all, many of which are still to come."""

    name, length, vocabulary_size = "sort", 16, 32

    def targets(self, ids_BT: Tensor) -> Tensor:
        return ids_BT.sort(dim=-1).values

    def posterior(self, ids_BT: Tensor) -> Tensor:
        size, length = self.vocabulary_size, ids_BT.shape[1]
        # how many tokens seen so far are at most v
        known_BTV = F.one_hot(ids_BT, size).cumsum(dim=1).cumsum(dim=-1)
        at_most_BTV = torch.ones(known_BTV.shape, dtype=torch.float64)
        for t in range(length):
            for value in range(size - 1):
                hits = binomial(length - 1 - t, (value + 1) / size)
                # the answer is at most v if t + 1 tokens are, of which some are still needed
                enough = F.pad(hits.flip(0).cumsum(0).flip(0), (0, t + 2))
                at_most_BTV[:, t, value] = enough[(t + 1 - known_BTV[:, t, value]).clamp_min(0)]
        return at_most_BTV.diff(dim=-1, prepend=torch.zeros_like(at_most_BTV[..., :1]))


class Reverse(Task):
    """The sequence backwards: the first half of the answers is still to come."""

    name, length, vocabulary_size = "reverse", 32, 32

    def targets(self, ids_BT: Tensor) -> Tensor:
        return ids_BT.flip(-1)

    def posterior(self, ids_BT: Tensor) -> Tensor:
        posterior_BTV = certain(ids_BT.flip(-1), self.vocabulary_size)
        # T − 1 − t is above t
        posterior_BTV[:, : ids_BT.shape[1] // 2] = 1 / self.vocabulary_size
        return posterior_BTV
