"""Needles in haystacks: what a mechanism finds again in contexts far longer than it trained on.

A haystack is filler with a few key-value pairs anywhere in it; at its end each key is asked for and
the model has to say its value. Models are trained on short haystacks and measured on long ones,
read through the mechanism's state as in generation. Every token has the same position embedding,
so that none is new to the model; order comes from causality and the short convolutions.

The folder keeps what is done: trained weights by mechanism, and a row for each length measured.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import safetensors.torch
import torch
from rich.console import Console
from torch import Tensor

from slayformer.attention.base import generator
from slayformer.config import AttentionConfig, ModelConfig
from slayformer.config_commands import LongContextConfig
from slayformer.config_differences import differing_keys, value_of
from slayformer.config_loading import dotted, to_plain
from slayformer.data.shards import write_atomically
from slayformer.errors import ConfigError, as_written
from slayformer.evaluation.answers import Answers, train_on_answers
from slayformer.evaluation.long_context_report import (
    INTERVAL,
    draw,
    interval,
    markdown,
    print_table,
)
from slayformer.evaluation.progress import progress_bar
from slayformer.model.gpt2 import GPT2
from slayformer.presets import load_preset
from slayformer.registry import attention_entry
from slayformer.training.objective import IGNORE_INDEX
from slayformer.training.run_directory import describe_environment

# training, measuring and weights draw apart from one another
MEASURING_SEED = 2**31 - 1
RECORD = "table.json"


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

    A directory of an earlier run goes on: what it has trained and measured is not done again, and
    more mechanisms and lengths may join. Returns all its rows. Raises ConfigError if a mechanism
    or an option cannot work, or if the directory was made with other settings.
    """
    options = _options(config)
    directory = Path(config.directory or time.strftime("long_contexts/%Y-%m-%d_%H-%M-%S"))
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = f"the folder cannot be made: {error.strerror}"
        raise ConfigError("directory", directory, hint) from error
    rows = {(row.mechanism, row.length_tokens): row for row in _earlier_rows(directory, config)}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console = Console()
    _write_rows(directory, config, list(rows.values()))
    for one in options:
        missing = [n for n in config.lengths_tokens if (one.name, n) not in rows]
        if not missing:
            continue
        model = _trained(config, one, directory, device, console)
        with progress_bar() as progress:
            tokens = sum(length * samples_of(length, config, model) for length in missing)
            task = progress.add_task(f"{one.name}: reading", total=tokens)
            for length in missing:
                row = measure(model, one.name, length, config, told=partial(progress.advance, task))
                rows[one.name, length] = row
                _write_rows(directory, config, list(rows.values()))
    done = sorted(rows.values(), key=lambda row: (_place(row.mechanism, config), row.length_tokens))
    about = (
        f"{config.pairs} pairs, trained on at most {max(config.training_lengths_tokens):,} tokens, "
        f"{device.type}, {torch.get_num_threads()} thread(s)"
    )
    plain = [asdict(row) for row in done]
    chance = 1 / config.values
    print_table(plain, about, chance, console)
    (directory / "table.md").write_text(markdown(plain, about, chance), encoding="utf-8")
    trained = max(config.training_lengths_tokens)
    draw(directory / "long_context.png", plain, about, chance=chance, trained_tokens=trained)
    for name in ("table.md", RECORD, "long_context.png"):
        console.print(str(directory / name), soft_wrap=True, highlight=False, markup=False)
    return done


def samples_of(length: int, config: LongContextConfig, model: GPT2) -> int:
    """Return how many haystacks of `length` tokens `model` reads: fewer of long ones, at least one.

    Where the state stays as it is each token takes the same time, and more of them are read.
    """
    is_constant = model.state_bytes(2 * length) == model.state_bytes(length)
    most_tokens = config.constant_state_read_tokens if is_constant else config.read_tokens
    return max(1, min(config.samples, most_tokens // length))


def _place(mechanism: str, config: LongContextConfig) -> tuple[int, str]:
    """Return what sorts mechanisms as they were asked for, others after them."""
    asked = mechanism in config.attention
    return config.attention.index(mechanism) if asked else len(config.attention), mechanism


def _earlier_rows(directory: Path, config: LongContextConfig) -> list[Measurement]:
    """Return the rows that `directory` has; raises ConfigError if they were made otherwise."""
    file = directory / RECORD
    if not file.is_file():
        return []
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        # what follows from the others is no field
        kept = [{k: v for k, v in row.items() if k != INTERVAL} for row in record["rows"]]
        before, rows = dotted(record["config"]), [Measurement(**row) for row in kept]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        hint = f"{file} is not the record of such a run; choose another directory"
        raise ConfigError("directory", directory, hint) from error
    now = dotted(to_plain(config))
    for key in differing_keys([before, now], ("attention", "lengths_tokens", "directory")):
        hint = f"{directory} was made with {as_written(value_of(before, key))}"
        raise ConfigError(key, value_of(now, key), f"{hint}; choose another directory")
    return rows


def _write_rows(directory: Path, config: LongContextConfig, rows: list[Measurement]) -> None:
    record = {
        "config": to_plain(config),
        "environment": describe_environment(),
        "chance": 1 / config.values,
        "rows": [asdict(row) | {INTERVAL: interval(row.found, row.asked)} for row in rows],
    }
    write_atomically(directory / RECORD, ((json.dumps(record, indent=2) + "\n").encode(),))


def _options(config: LongContextConfig) -> list[AttentionConfig]:
    """Return the options of each mechanism; raises ConfigError for one that has an end."""
    options = [load_preset(name) for name in config.attention]
    for one in options:
        if attention_entry(one.mechanism or one.name).attention.bounded_length:
            hint = f"{one.name} is defined up to the length it was made for, and not beyond"
            raise ConfigError("attention", one.name, hint)
    return options


def _trained(
    config: LongContextConfig,
    attention: AttentionConfig,
    directory: Path,
    device: torch.device,
    console: Console,
) -> GPT2:
    """Return the model of `attention`, trained here or in an earlier run."""
    questions = 2 * config.pairs * config.training_rounds
    shape = ModelConfig(
        **to_plain(config.model),
        context_length=max(config.training_lengths_tokens) + questions,
    )
    vocabulary_size = config.keys + config.values + config.fillers
    model = GPT2(shape, attention, vocabulary_size=vocabulary_size, seed=config.seed).to(device)
    weights = directory / f"{attention.name}.safetensors"
    if weights.is_file():
        model.load_state_dict(safetensors.torch.load_file(weights))
        return model.eval()
    draws = generator(config.seed)

    def draw(update: int) -> Answers:
        length = config.training_lengths_tokens[update % len(config.training_lengths_tokens)]
        samples = config.tokens_per_update // (length + questions)
        drawn = draw_haystacks(length, samples, config, draws, rounds=config.training_rounds)
        ids, targets = (part.to(device) for part in drawn)
        about = {"length_tokens": length}
        return Answers(ids, targets, about, f"{length} tokens", torch.zeros_like(ids))

    train_on_answers(
        model,
        draw,
        updates=config.updates,
        optimizer=config.optimizer,
        schedule=config.schedule,
        metrics=directory / f"{attention.name}.jsonl",
        title=attention.name,
        console=console,
    )
    write_atomically(weights, (safetensors.torch.save(model.state_dict()),))
    return model


@torch.no_grad()
def measure(
    model: GPT2,
    name: str,
    length: int,
    config: LongContextConfig,
    *,
    told: Callable[[int], None] = lambda tokens: None,
) -> Measurement:
    """Return what `model` finds in haystacks of `length` tokens, one after the other.

    `told` is called with the number of tokens after each segment that was read.
    """
    device = model.token_embedding.weight.device
    samples = samples_of(length, config, model)
    ids_BT, targets_BT = draw_haystacks(length, samples, config, generator(MEASURING_SEED))
    read_seconds: list[float] = []
    next_seconds: list[float] = []
    found = 0
    for row_1T, targets_T in zip(ids_BT.to(device).split(1), targets_BT, strict=True):
        states = model.init_states(1)
        start = _now(device)
        for segment in row_1T[:, :length].split(config.segment_tokens, dim=1):
            _, states = model(segment, position_ids_BT=torch.zeros_like(segment), states=states)
            told(segment.shape[1])
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
        samples * config.pairs,
        model.state_bytes(length),
        1000 * statistics.median(read_seconds) / length,
        1000 * statistics.median(next_seconds),
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
