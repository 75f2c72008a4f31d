"""Ignoring noise and repetition: the paper's Robustness tasks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from slayformer.paper.tasks.base import Task


class NoisyCopy(Task):
    """Copy, but tokens of the second half can be noise (V − 1), of which the answer is 0."""

    name, length, vocabulary_size = "noisy_copy", 64, 32
    noise = 0.3

    def tokens(self, samples: int, draws: torch.Generator) -> Tensor:
        ids_BT = torch.randint(self.vocabulary_size - 1, (samples, self.length), generator=draws)
        noisy_BT = torch.rand(ids_BT.shape, generator=draws) < self.noise
        noisy_BT[:, : self.length // 2] = False
        return ids_BT.masked_fill(noisy_BT, self.vocabulary_size - 1)

    def targets(self, ids_BT: Tensor) -> Tensor:
        return ids_BT.masked_fill(ids_BT == self.vocabulary_size - 1, 0)


class Compression(Task):
    """Runs of one to three equal tokens; the answers are the runs' tokens from the left, then 0.

    The t-th run has begun at place t only if every run before it is a single token.
    """

    name, length, vocabulary_size = "compression", 32, 16
    longest = 3

    def tokens(self, samples: int, draws: torch.Generator) -> Tensor:
        shape = (samples, self.length)
        run_lengths = torch.randint(1, self.longest + 1, shape, generator=draws)
        run_tokens = torch.randint(self.vocabulary_size, shape, generator=draws)
        places = torch.arange(self.length).repeat(samples, 1)
        run_BT = torch.searchsorted(run_lengths.cumsum(dim=1), places, right=True)
        return run_tokens.gather(1, run_BT)

    def targets(self, ids_BT: Tensor) -> Tensor:
        targets_BT = torch.zeros_like(ids_BT)
        # within a run every token writes the same to the same place
        return targets_BT.scatter(1, _run_numbers(ids_BT), ids_BT)

    def posterior(self, ids_BT: Tensor) -> Tensor:
        size, length = self.vocabulary_size, ids_BT.shape[1]
        places_T = torch.arange(length)
        # runs that still have to begin for the t-th to be there, and the tokens left for it
        missing_BT = places_T - _run_numbers(ids_BT)
        begins_ABT = self._begin_probability(length)[:, length - 1 - places_T, missing_BT]
        begins_BT = (self._ages(ids_BT) * begins_ABT).sum(dim=0)
        # each run's token is any but the last one's: after n runs, the same again with …
        same_BT = 1 / size + (1 - 1 / size) * (-1.0 / (size - 1)) ** missing_BT.double()
        posterior_BTV = ((1 - same_BT) / (size - 1))[..., None].repeat(1, 1, size)
        posterior_BTV.scatter_(2, ids_BT[..., None], same_BT[..., None])
        posterior_BTV *= begins_BT[..., None]
        posterior_BTV[..., 0] += 1 - begins_BT
        return posterior_BTV

    def _end_probability(self) -> Tensor:
        """Return how likely a run as drawn ends after its first, second, … token, [A]."""
        return 1 / torch.arange(self.longest, 0, -1, dtype=torch.float64)

    def _ages(self, ids_BT: Tensor) -> Tensor:
        """Return the probability that the run as drawn has had 1, 2, … tokens, [A, B, T].

        Two runs drawn with the same token one after the other are seen as one.
        """
        ends_A1 = self._end_probability()[:, None]
        now_AB = torch.zeros(self.longest, len(ids_BT), dtype=torch.float64)
        now_AB[0] = 1
        ages = [now_AB]
        for t in range(1, ids_BT.shape[1]):
            same_B = ids_BT[:, t] == ids_BT[:, t - 1]
            starts_B = (now_AB * ends_A1).sum(dim=0) / self.vocabulary_size
            goes_on_AB = now_AB * (1 - ends_A1) * same_B
            now_AB = torch.cat([starts_B[None], goes_on_AB[:-1]])
            now_AB = now_AB / now_AB.sum(dim=0)
            ages.append(now_AB)
        return torch.stack(ages, dim=-1)

    def _begin_probability(self, length: int) -> Tensor:
        """Return how likely runs still begin, [A, T, N]: by age, tokens left and number of runs."""
        ends, differs = self._end_probability(), 1 - 1 / self.vocabulary_size
        likely = torch.zeros(self.longest, length, length, dtype=torch.float64)
        likely[..., 0] = 1
        for left in range(1, length):
            new, before = likely[0, left - 1], likely[:, left - 1]
            begun = differs * new[:-1] + (1 - differs) * new[1:]
            for age in range(self.longest):
                goes_on = before[age + 1, 1:] if age + 1 < self.longest else 0.0
                likely[age, left, 1:] = ends[age] * begun + (1 - ends[age]) * goes_on
        return likely


def _run_numbers(ids_BT: Tensor) -> Tensor:
    """Return the number of each token's run, from 0."""
    changes = ids_BT[:, 1:] != ids_BT[:, :-1]
    return F.pad(changes.long().cumsum(dim=1), (1, 0))
