"""Needles in haystacks: what a mechanism finds again in contexts far longer than it trained on.

A haystack is filler with a few key-value pairs anywhere in it; at its end each key is asked for and
the model has to say its value. Models are trained on short haystacks and measured on long ones,
read through the mechanism's state as in generation. Every token has the same position embedding,
so that none is new to the model; order comes from causality and the short convolutions.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from slayformer.attention.base import generator
from slayformer.config import AttentionConfig, ModelConfig
from slayformer.config_commands import LongContextConfig
from slayformer.config_loading import to_plain
from slayformer.errors import ConfigError
from slayformer.evaluation.answers import Answers, train_on_answers
from slayformer.evaluation.long_context_report import draw, markdown, print_table
from slayformer.evaluation.progress import progress_bar
from slayformer.model.gpt2 import GPT2
from slayformer.presets import load_preset
from slayformer.registry import attention_entry
from slayformer.training.objective import IGNORE_INDEX
from slayformer.training.run_directory import describe_environment, write_json

# training, measuring and weights draw apart from one another
MEASURING_SEED = 2**31 - 1


@dataclass(frozen=True)
class Measurement:
    """A mechanism at one length: what it found, what it remembers, and how long a token takes."""

    mechanism: str
    length_tokens: int
    found: int
    asked: int
    state_bytes: int
    read_ms_per_token: float
    next_token_ms: float


def draw_haystacks(
    length: int, samples: int, config: LongContextConfig, draws: torch.Generator, *, rounds: int = 1
) -> tuple[Tensor, Tensor]:
    """Return ids and targets, both [samples, length + 2 pairs · rounds]: haystacks, then questions.

    Ids are those of keys, then values, then fillers. A pair takes two places in a row, and keys
    of a haystack differ. A round asks for every key once, in an order of its own. Targets are
    IGNORE_INDEX but where a key is asked for.
    """
    pairs, keys, values = config.pairs, config.keys, config.values
    key_BN = torch.rand(samples, keys, generator=draws).argsort(dim=-1)[:, :pairs]
    value_BN = keys + torch.randint(values, (samples, pairs), generator=draws)
    slot_BN = torch.rand(samples, length // 2, generator=draws).argsort(dim=-1)[:, :pairs]
    filler_BL = torch.randint(config.fillers, (samples, length), generator=draws)
    told_BL = keys + values + filler_BL
    told_BL.scatter_(1, 2 * slot_BN, key_BN)
    told_BL.scatter_(1, 2 * slot_BN + 1, value_BN)
    order_BRN = torch.rand(samples, rounds, pairs, generator=draws).argsort(dim=-1)
    asked_BN, answer_BN = (x_BN.gather(1, order_BRN.flatten(1)) for x_BN in (key_BN, value_BN))
    questions_BQ = torch.stack([asked_BN, answer_BN], dim=-1).flatten(1)
    targets = torch.full((samples, length + questions_BQ.shape[1]), IGNORE_INDEX)
    targets[:, length::2] = answer_BN
    return torch.cat([told_BL, questions_BQ], dim=1), targets


def run(config: LongContextConfig) -> list[Measurement]:
    """Train and measure every mechanism; print the table and write it with a picture.

    Raises ConfigError if a mechanism or an option cannot work.
    """
    options = _options(config)
    directory = Path(config.directory or time.strftime("long_contexts/%Y-%m-%d_%H-%M-%S"))
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = f"the folder cannot be made: {error.strerror}"
        raise ConfigError("directory", directory, hint) from error
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console = Console()
    rows: list[Measurement] = []
    for one in options:
        model = _train(config, one, directory, device, console)
        with progress_bar() as progress:
            task = progress.add_task(f"{one.name}: reading", total=sum(config.lengths_tokens))
            for length in config.lengths_tokens:
                rows.append(measure(model, one.name, length, config))
                progress.advance(task, length)
    about = (
        f"{config.pairs} pairs, {config.samples} haystacks of each length, trained on at most "
        f"{max(config.training_lengths_tokens):,} tokens, {device.type}, "
        f"{torch.get_num_threads()} thread(s)"
    )
    plain = [asdict(row) for row in rows]
    chance = 1 / config.values
    print_table(plain, about, chance, console)
    record = {
        "config": to_plain(config),
        "environment": describe_environment(),
        "chance": chance,
        "rows": plain,
    }
    write_json(directory / "table.json", record)
    (directory / "table.md").write_text(markdown(plain, about, chance), encoding="utf-8")
    trained = max(config.training_lengths_tokens)
    draw(directory / "long_context.png", plain, about, chance=chance, trained_tokens=trained)
    for name in ("table.md", "table.json", "long_context.png"):
        console.print(str(directory / name), soft_wrap=True, highlight=False, markup=False)
    return rows


def _options(config: LongContextConfig) -> list[AttentionConfig]:
    """Return the options of each mechanism; raises ConfigError for one that has an end."""
    options = [load_preset(name) for name in config.attention]
    for one in options:
        if attention_entry(one.mechanism or one.name).attention.bounded_length:
            hint = f"{one.name} is defined up to the length it was made for, and not beyond"
            raise ConfigError("attention", one.name, hint)
    return options


def _train(
    config: LongContextConfig,
    attention: AttentionConfig,
    directory: Path,
    device: torch.device,
    console: Console,
) -> GPT2:
    questions = 2 * config.pairs * config.training_rounds
    shape = ModelConfig(
        **to_plain(config.model),
        context_length=max(config.training_lengths_tokens) + questions,
    )
    vocabulary_size = config.keys + config.values + config.fillers
    model = GPT2(shape, attention, vocabulary_size=vocabulary_size, seed=config.seed).to(device)
    draws = generator(config.seed)

    def draw(update: int) -> Answers:
        length = config.training_lengths_tokens[update % len(config.training_lengths_tokens)]
        samples = config.tokens_per_update // (length + questions)
        drawn = draw_haystacks(length, samples, config, draws, rounds=config.training_rounds)
        ids, targets = (part.to(device) for part in drawn)
        about = {"length_tokens": length}
        return Answers(ids, targets, about, f"{length} tokens", torch.zeros_like(ids))

    return train_on_answers(
        model,
        draw,
        updates=config.updates,
        optimizer=config.optimizer,
        schedule=config.schedule,
        metrics=directory / f"{attention.name}.jsonl",
        title=attention.name,
        console=console,
    )


@torch.no_grad()
def measure(model: GPT2, name: str, length: int, config: LongContextConfig) -> Measurement:
    """Return what `model` finds in haystacks of `length` tokens, one after the other."""
    device = model.token_embedding.weight.device
    ids_BT, targets_BT = draw_haystacks(length, config.samples, config, generator(MEASURING_SEED))
    read_seconds: list[float] = []
    next_seconds: list[float] = []
    found = 0
    for row_1T, targets_T in zip(ids_BT.to(device).split(1), targets_BT, strict=True):
        states = model.init_states(1)
        start = _now(device)
        for segment in row_1T[:, :length].split(config.segment_tokens, dim=1):
            _, states = model(segment, position_ids_BT=torch.zeros_like(segment), states=states)
        read_seconds.append(_now(device) - start)
        # question by question and answer by answer, as in generation
        for place in range(length, row_1T.shape[1]):
            token = row_1T[:, place : place + 1]
            start = _now(device)
            hidden, states = model(token, position_ids_BT=torch.zeros_like(token), states=states)
            said = model.logits(hidden).argmax().item()
            next_seconds.append(_now(device) - start)
            found += said == targets_T[place].item()
    return Measurement(
        name,
        length,
        found,
        config.samples * config.pairs,
        model.state_bytes(length),
        1000 * statistics.median(read_seconds) / length,
        1000 * statistics.median(next_seconds),
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
