"""State and repetition: the paper's Reasoning tasks and bigram."""

from __future__ import annotations

import torch
from torch import Tensor

from slayformer.attention.base import generator
from slayformer.paper.tasks.base import Task, certain, last_only


class Stack(Task):
    """At each POP the value on top of the stack, 0 at every other token.

    As published a PUSH does not show its value, so that nobody can name it again.
    """

    name, length, vocabulary_size = "stack", 32, 32
    pop_probability, push_probability = 0.3, 0.5

    def draw(self, samples: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
        push, pop = self.vocabulary_size - 2, self.vocabulary_size - 1
        shape = (samples, self.length)
        wants_pop = torch.rand(shape, generator=draws) < self.pop_probability
        wants_push = torch.rand(shape, generator=draws) < self.push_probability
        values_BT = torch.randint(1, push, shape, generator=draws)
        ids_BT, targets_BT = torch.zeros(2, *shape, dtype=torch.long)
        stack_BT, depth_B = torch.zeros_like(ids_BT), torch.zeros(samples, dtype=torch.long)
        everyone = torch.arange(samples)
        for t in range(self.length):
            pops = wants_pop[:, t] & (depth_B > 0)
            pushes = wants_push[:, t] & ~pops
            depth_B = depth_B - pops.long()
            ids_BT[pops, t] = pop
            targets_BT[pops, t] = stack_BT[everyone, depth_B][pops]
            ids_BT[pushes, t] = push
            stack_BT[everyone[pushes], depth_B[pushes]] = values_BT[pushes, t]
            depth_B = depth_B + pushes.long()
        return ids_BT, targets_BT

    def posterior(self, ids_BT: Tensor) -> Tensor:
        push, pop = self.vocabulary_size - 2, self.vocabulary_size - 1
        posterior_BTV = certain(torch.zeros_like(ids_BT), self.vocabulary_size)
        any_value = torch.zeros(self.vocabulary_size, dtype=torch.float64)
        any_value[1:push] = 1 / (push - 1)
        posterior_BTV[ids_BT == pop] = any_value
        return posterior_BTV


class Induction(Task):
    """A token of the first half stands again before the last place: which token followed it?

    It occurs nowhere else, and the last token tells nothing.
    """

    name, length, vocabulary_size = "induction", 64, 64

    def tokens(self, samples: int, draws: torch.Generator) -> Tensor:
        size, length = self.vocabulary_size, self.length
        trigger_B1 = torch.randint(size, (samples, 1), generator=draws)
        others_BT = torch.randint(1, size, (samples, length), generator=draws)
        ids_BT = (trigger_B1 + others_BT) % size
        place_B1 = torch.randint(1, length // 2, (samples, 1), generator=draws)
        ids_BT.scatter_(1, place_B1, trigger_B1)
        ids_BT[:, -2:-1] = trigger_B1
        return ids_BT

    def targets(self, ids_BT: Tensor) -> Tensor:
        place_B1 = (ids_BT == ids_BT[:, -2:-1]).long().argmax(dim=-1, keepdim=True)
        return last_only(ids_BT, ids_BT.gather(1, place_B1 + 1)[:, 0])


class Pattern(Task):
    """A pattern of four tokens repeats: which token is next?"""

    name, length, vocabulary_size = "pattern", 32, 16
    period = 4

    def tokens(self, samples: int, draws: torch.Generator) -> Tensor:
        pattern = torch.randint(self.vocabulary_size, (samples, self.period), generator=draws)
        return pattern[:, torch.arange(self.length) % self.period]

    def targets(self, ids_BT: Tensor) -> Tensor:
        return ids_BT[:, (torch.arange(self.length) + 1) % self.period]

    def posterior(self, ids_BT: Tensor) -> Tensor:
        posterior_BTV = certain(self.targets(ids_BT), self.vocabulary_size)
        # the tokens of the first period come as a surprise
        posterior_BTV[:, : self.period - 1] = 1 / self.vocabulary_size
        return posterior_BTV


class Bigram(Task):
    """Each answer is what one fixed table says of the token."""

    name, length, vocabulary_size = "bigram", 32, 32

    def __init__(self) -> None:
        size = self.vocabulary_size
        self.table_V = torch.randint(size, (size,), generator=generator(0))

    def targets(self, ids_BT: Tensor) -> Tensor:
        return self.table_V[ids_BT]
