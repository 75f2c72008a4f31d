"""Tasks of this project, not of the paper: the context holds every answer, and chance is far below.

The model is the project's GPT-2 with short convolutions, which hand a token to the next one (Arora
et al., 2023, "Zoology"); what is left to the mechanism is to find it again.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from slayformer.config import OptimizerConfig, ScheduleConfig
from slayformer.evaluation.recall import draw_batch
from slayformer.paper.tasks.base import Task, Training, distinct
from slayformer.training.objective import IGNORE_INDEX

LEARNABLE = Training(
    updates=400,
    samples=64,
    optimizer=OptimizerConfig(learning_rate=5e-3, weight_decay=0.1),
    schedule=ScheduleConfig(decay="cosine", warmup_updates=50, final_fraction=0.1),
    published_model=False,
)


class SolvableTask(Task):
    """A task whose answers the tokens before them determine."""

    training = LEARNABLE


class AssociativeRecall(SolvableTask):
    """Multi-query associative recall: pairs of key and value, then every key asks for its value.

    Training begins with a quarter of the pairs and goes on with half of them: from the start, with
    all, nothing is learned in as many updates.
    """

    name, length, vocabulary_size = "mqar", 64, 64
    training = replace(LEARNABLE, updates=1000, samples=32)

    def draw(self, samples: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
        return self._pairs(self.length // 4, samples, draws)

    def lesson(self, samples: int, draws: torch.Generator, share: float) -> tuple[Tensor, Tensor]:
        quarters = 1 if share < 0.25 else 2 if share < 0.5 else 4
        return self._pairs(quarters * self.length // 16, samples, draws)

    def _pairs(self, pairs: int, samples: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
        half = self.vocabulary_size // 2
        return draw_batch(pairs, samples, keys=half, values=half, draws=draws)


class InContextBigrams(SolvableTask):
    """Each of four triggers has a successor, drawn anew for each sequence; it is asked for again.

    Every other token is followed by a random one.
    """

    name, length, vocabulary_size = "incontext_bigram", 32, 16
    triggers = 4

    def tokens(self, samples: int, draws: torch.Generator) -> Tensor:
        size, shape = self.vocabulary_size, (samples, self.length)
        successors = torch.randint(self.triggers, size, (samples, self.triggers), generator=draws)
        ids_BT = torch.randint(size, shape, generator=draws)
        for t in range(1, self.length):
            before_B1 = ids_BT[:, t - 1 : t]
            follows = successors.gather(1, before_B1.clamp_max(self.triggers - 1))
            ids_BT[:, t : t + 1] = torch.where(
                before_B1 < self.triggers, follows, ids_BT[:, t, None]
            )
        return ids_BT

    def targets(self, ids_BT: Tensor) -> Tensor:
        same_BTS = (ids_BT[:, :, None] == ids_BT[:, None, :]).tril(-1)
        asked_BT = (ids_BT < self.triggers) & same_BTS.any(dim=-1)
        follower_BT = ids_BT.gather(1, same_BTS.long().argmax(dim=-1) + 1)
        return follower_BT.masked_fill(~asked_BT, IGNORE_INDEX)


class SolvableStack(SolvableTask):
    """A token is pushed, or V − 1 pops: which token was on top? Asked at each pop."""

    name, length, vocabulary_size = "solvable_stack", 32, 32

    def tokens(self, samples: int, draws: torch.Generator) -> Tensor:
        pop, shape = self.vocabulary_size - 1, (samples, self.length)
        ids_BT = torch.randint(pop, shape, generator=draws)
        wants_pop_BT = torch.rand(shape, generator=draws) < 0.5
        depth_B = torch.zeros(samples, dtype=torch.long)
        for t in range(self.length):
            pops_B = wants_pop_BT[:, t] & (depth_B > 0)
            ids_BT[pops_B, t] = pop
            depth_B += 1 - 2 * pops_B.long()
        return ids_BT

    def targets(self, ids_BT: Tensor) -> Tensor:
        pops_BT = ids_BT == self.vocabulary_size - 1
        # depth after each token: what pops to depth d was pushed at the last step up from d
        depth_BT = torch.where(pops_BT, -1, 1).cumsum(dim=1)
        pushed_to_BT = depth_BT.masked_fill(pops_BT, -1)
        stack_BD = torch.zeros(len(ids_BT), ids_BT.shape[1] + 2, dtype=torch.long)
        targets_BT = torch.full_like(ids_BT, IGNORE_INDEX)
        for t in range(ids_BT.shape[1]):
            top_B1 = stack_BD.gather(1, depth_BT[:, t : t + 1] + 1)
            targets_BT[:, t] = torch.where(pops_BT[:, t], top_B1[:, 0], IGNORE_INDEX)
            place_B1 = pushed_to_BT[:, t : t + 1].clamp_min(0)
            stack_BD.scatter_(1, place_B1, ids_BT[:, t : t + 1])
        return targets_BT


class SolvableMultihop(SolvableTask):
    """Facts in random order, start → middle and middle → end; each start asks for its end.

    Two layers can answer, one for each hop, but from naming any end that was told neither hop gains
    anything by itself: twice the updates, a third layer, and lessons in single hops, which
    were learned, left softmax there.
    """

    name, length, vocabulary_size = "solvable_multihop", 20, 48
    chains = 4
    remark = f"naming any end that was told is right {1 / chains:.2f} of the time"

    def tokens(self, samples: int, draws: torch.Generator) -> Tensor:
        third, chains = self.vocabulary_size // 3, self.chains
        starts, middles, ends = (
            kind * third + distinct(samples, chains, third, draws) for kind in range(3)
        )
        facts_BN2 = torch.stack(
            [torch.cat([starts, middles], 1), torch.cat([middles, ends], 1)], -1
        )
        order_BN = distinct(samples, 2 * chains, 2 * chains, draws)
        told_BN2 = facts_BN2.gather(1, order_BN[..., None].expand_as(facts_BN2))
        return torch.cat([told_BN2.flatten(1), starts], dim=1)

    def targets(self, ids_BT: Tensor) -> Tensor:
        told, asked_BN = ids_BT[:, : -self.chains], ids_BT[:, -self.chains :]
        subject_BN, object_BN = told[:, ::2], told[:, 1::2]
        reached_BN = asked_BN
        for _ in range(2):
            fact_BN = (reached_BN[..., None] == subject_BN[:, None]).long().argmax(dim=-1)
            reached_BN = object_BN.gather(1, fact_BN)
        return torch.cat([torch.full_like(told, IGNORE_INDEX), reached_BN], dim=1)
