"""What a synthetic task is: how its sequences are drawn, what is asked, and what can be known.

Shape suffixes: B sequences, T positions, V tokens of the vocabulary (answers are tokens too).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from slayformer.attention.base import generator
from slayformer.config import OptimizerConfig, ScheduleConfig
from slayformer.training.objective import IGNORE_INDEX

# sequences that chance and ceiling are averaged over, and the seed of their draws
BOUND_SAMPLES = 16_384
BOUND_SEED = 2**31 - 2


@dataclass(frozen=True)
class Training:
    """How a task is trained: `updates` of `samples` fresh sequences.

    `published_model`: the paper's attention-only model; otherwise the project's GPT-2 with short
    convolutions.
    """

    updates: int
    samples: int
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    published_model: bool


# paper, section 3.3; what it does not tell is torch's default
PUBLISHED = Training(
    updates=200,
    samples=32,
    optimizer=OptimizerConfig(
        learning_rate=1e-3, weight_decay=0.01, beta2=0.999, gradient_clipping=0.0
    ),
    schedule=ScheduleConfig(decay="constant", warmup_updates=0),
    published_model=True,
)


class Task:
    """A task; each is a subclass that sets the sizes and gives tokens, targets and posterior."""

    name: str
    length: int
    vocabulary_size: int
    training: Training = PUBLISHED
    # what has to be known to read its accuracies
    remark: str = ""

    def draw(self, samples: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return ids and targets, both [B, T]; targets are IGNORE_INDEX where nothing is asked."""
        ids_BT = self.tokens(samples, draws)
        return ids_BT, self.targets(ids_BT)

    def lesson(self, samples: int, draws: torch.Generator, share: float) -> tuple[Tensor, Tensor]:
        """Return what to train on after `share` of the training, 0 to 1, as `draw` does.

        A task may begin with shorter sequences than those that are scored.
        """
        return self.draw(samples, draws)

    def tokens(self, samples: int, draws: torch.Generator) -> Tensor:
        """Return ids [B, T]; unless a task says otherwise, tokens are independent and uniform."""
        return torch.randint(self.vocabulary_size, (samples, self.length), generator=draws)

    def targets(self, ids_BT: Tensor) -> Tensor:
        """Return the right answers [B, T], the task's rule."""
        raise NotImplementedError

    def posterior(self, ids_BT: Tensor) -> Tensor | None:
        """Return the probability of each answer given the tokens up to its place, [B, T, V].

        None if these tokens determine every answer that is asked for.
        """
        return None


def last_only(ids_BT: Tensor, answers_B: Tensor) -> Tensor:
    """Return targets that ask for `answers_B` at the last position."""
    return asked_at(ids_BT, ids_BT.shape[1] - 1, answers_B)


def asked_at(ids_BT: Tensor, position: int, answers_B: Tensor) -> Tensor:
    """Return targets that ask for `answers_B` at one position."""
    targets_BT = torch.full_like(ids_BT, IGNORE_INDEX)
    targets_BT[:, position] = answers_B
    return targets_BT


def distinct(samples: int, count: int, choices: int, draws: torch.Generator) -> Tensor:
    """Return `count` different numbers below `choices` for each sample, in random order."""
    return torch.rand(samples, choices, generator=draws).argsort(dim=-1)[:, :count]


def binomial(trials: int, probability: float) -> Tensor:
    """Return the probability of 0 … `trials` successes, fp64."""
    chances = (
        math.comb(trials, hits) * probability**hits * (1 - probability) ** (trials - hits)
        for hits in range(trials + 1)
    )
    return torch.tensor(list(chances), dtype=torch.float64)


@cache
def chance(task: Task) -> float:
    """Return the accuracy of the best answer that knows only its position, and not the tokens.

    By Monte Carlo without bias: half of the sequences choose the answers, the others score them.
    """
    _, targets_BT = task.draw(BOUND_SAMPLES, generator(BOUND_SEED))
    chosen_BT, scored_BT = targets_BT.split(BOUND_SAMPLES // 2)
    asked_BT = chosen_BT != IGNORE_INDEX
    places_BT = torch.arange(task.length).expand_as(chosen_BT) * task.vocabulary_size
    cells = (places_BT + chosen_BT)[asked_BT]
    counts = cells.bincount(minlength=task.length * task.vocabulary_size)
    best_T = counts.view(task.length, task.vocabulary_size).argmax(dim=-1)
    asked_BT = scored_BT != IGNORE_INDEX
    return float((scored_BT == best_T)[asked_BT].double().mean())


@cache
def ceiling(task: Task) -> float:
    """Return the accuracy of the best answers that see the tokens up to their own position.

    Exact for each sequence, by the task's posterior, and averaged over sequences.
    """
    ids_BT, targets_BT = task.draw(BOUND_SAMPLES // 4, generator(BOUND_SEED))
    posterior_BTV = task.posterior(ids_BT)
    if posterior_BTV is None:
        return 1.0
    return float(posterior_BTV.amax(dim=-1)[targets_BT != IGNORE_INDEX].mean())


def certain(answers: Tensor, vocabulary_size: int) -> Tensor:
    """Return the posterior of answers that are known, [..., V] fp64."""
    return F.one_hot(answers, vocabulary_size).double()
