"""Multi-query associative recall (MQAR; Arora et al., 2023, "Zoology"): a task for the context.

A sequence names n key-value pairs, k₁ v₁ k₂ v₂ …, each key once, and then asks for all of them in
another order: after each key the model has to say its value. Nothing but the context tells it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from slayformer.attention.base import generator
from slayformer.config_commands import RecallConfig
from slayformer.config_loading import to_plain
from slayformer.errors import ConfigError
from slayformer.evaluation.answers import Answers, train_on_answers
from slayformer.model.gpt2 import GPT2
from slayformer.training.objective import IGNORE_INDEX
from slayformer.training.plan_table import own_parameters
from slayformer.training.run_directory import write_json
from slayformer.training.small import count_right

# training, evaluation and weights draw apart from one another
EVALUATION_SEED = 2**31 - 1


def draw_batch(
    pairs: int, samples: int, *, keys: int, values: int, draws: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return ids and targets, both [samples, 4 pairs]; targets are IGNORE_INDEX but at queries.

    Keys are ids 0 … keys − 1, values the `values` ids after them. Keys of a sequence differ, so
    `pairs` must not be above `keys`.
    """
    key_BN = torch.rand(samples, keys, generator=draws).argsort(dim=-1)[:, :pairs]
    value_BN = keys + torch.randint(values, (samples, pairs), generator=draws)
    order_BN = torch.rand(samples, pairs, generator=draws).argsort(dim=-1)
    asked_BN, answer_BN = key_BN.gather(1, order_BN), value_BN.gather(1, order_BN)
    told = torch.stack([key_BN, value_BN], dim=-1).flatten(1)
    asked = torch.stack([asked_BN, answer_BN], dim=-1).flatten(1)
    targets = torch.full_like(asked, IGNORE_INDEX)
    targets[:, ::2] = answer_BN
    return torch.cat([told, asked], dim=1), torch.cat(
        [torch.full_like(told, IGNORE_INDEX), targets], dim=1
    )


def run(config: RecallConfig) -> dict[str, Any]:
    """Train on every number of pairs in turn, and return and write the accuracy for each.

    The run directory gets metrics.jsonl and, at the end, summary.json with `accuracy`: the share
    of values named right, by number of pairs. Raises ConfigError if there cannot be
    such a directory.
    """
    console = Console()
    default = time.strftime(f"runs/recall-{config.attention.name}-%Y-%m-%d_%H-%M-%S")
    directory = Path(config.run_directory or default).absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = f"the folder cannot be made: {error.strerror}"
        raise ConfigError("run_directory", directory, hint) from error
    start = time.monotonic()
    model = _train(config, directory, console)
    accuracy = {pairs: _accuracy(model, config, pairs) for pairs in config.pairs}
    seconds = time.monotonic() - start
    summary = {
        "mechanism": config.attention.name,
        "seed": config.seed,
        "updates": config.updates,
        "accuracy": {str(pairs): share for pairs, share in accuracy.items()},
        "chance": 1 / config.values,
        "parameters": own_parameters(model),
        "seconds": seconds,
        "config": to_plain(config),
        "finished": True,
    }
    write_json(directory / "summary.json", summary)
    told = ", ".join(f"{100 * share:.1f} % of {pairs}" for pairs, share in accuracy.items())
    console.print(f"recalled values: {told} pairs; chance {100 / config.values:.1f} %")
    console.print(f"{seconds:.0f} s, run directory: {directory}", soft_wrap=True)
    return summary


def _train(config: RecallConfig, directory: Path, console: Console) -> GPT2:
    model = GPT2(
        config.model,
        config.attention,
        vocabulary_size=config.keys + config.values,
        seed=config.seed,
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    draws = generator(config.seed)

    def draw(update: int) -> Answers:
        pairs = config.pairs[update % len(config.pairs)]
        samples = config.tokens_per_update // (4 * pairs)
        batch = _batch(config, pairs, samples, draws, device)
        return Answers(*batch, about={"pairs": pairs}, told=f"{pairs} pairs")

    return train_on_answers(
        model,
        draw,
        updates=config.updates,
        optimizer=config.optimizer,
        schedule=config.schedule,
        metrics=directory / "metrics.jsonl",
        title=config.attention.name,
        console=console,
    )


def _batch(
    config: RecallConfig, pairs: int, samples: int, draws: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor]:
    ids, targets = draw_batch(pairs, samples, keys=config.keys, values=config.values, draws=draws)
    return ids.to(device), targets.to(device)


@torch.no_grad()
def _accuracy(model: GPT2, config: RecallConfig, pairs: int) -> float:
    """Return the share of answers that the model's most likely token gets right."""
    device = model.token_embedding.weight.device
    draws = generator(EVALUATION_SEED)
    right = total = 0
    at_once = max(1, 4 * config.tokens_per_update // (4 * pairs))
    for start in range(0, config.evaluation_samples, at_once):
        samples = min(at_once, config.evaluation_samples - start)
        hits, asked = count_right(model, *_batch(config, pairs, samples, draws, device))
        right += hits
        total += asked
    return right / total
