"""Generation against uncached forwards, counted draws and whole texts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from slayformer.config import ModelConfig
from slayformer.config_loading import load_attention_config
from slayformer.errors import ConfigError
from slayformer.model.generation import generate, stream_text
from slayformer.model.gpt2 import GPT2
from slayformer.registry import load_mechanisms

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
VOCABULARY_SIZE = 257
CONTEXT_LENGTH = 40
PROMPT = [72, 101, 108, 108, 111, 44, 32]


def tiny(mechanism: str = "softmax", dropout: float = 0.0) -> GPT2:
    shape = ModelConfig(layers=2, heads=2, width=24, context_length=CONTEXT_LENGTH, dropout=dropout)
    published = OmegaConf.load(CONFIGS / "attention" / f"{mechanism}.yaml")
    options = load_attention_config(OmegaConf.to_container(published))
    model = GPT2(shape, options, vocabulary_size=VOCABULARY_SIZE, seed=3)
    # larger weights, so that the likeliest token changes along the way
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model


def logits_after(model: GPT2, ids: list[int]) -> torch.Tensor:
    """Return the logits of the next token from one forward without states."""
    hidden, _ = model(torch.tensor([ids]))
    return (hidden[0, -1] @ model.token_embedding.weight.T)[:VOCABULARY_SIZE]


@pytest.mark.parametrize("mechanism", sorted(load_mechanisms()))
@torch.no_grad()
def test_greedy_equals_uncached_argmax(mechanism: str) -> None:
    model = tiny(mechanism).eval()
    expected = list(PROMPT)
    while len(expected) < CONTEXT_LENGTH:
        expected.append(int(logits_after(model, expected).argmax()))
    generated = list(generate(model, PROMPT, max_new_tokens=1000, temperature=0))
    # it ends where the context ends
    assert generated == expected[len(PROMPT) :]
    assert len(set(generated)) > 3


@torch.no_grad()
def test_draws_follow_temperature_and_top_k() -> None:
    model = tiny().eval()
    expected = (logits_after(model, PROMPT) / 2.5).topk(5)
    probabilities = expected.values.softmax(-1)
    draws = 2000
    counts = Counter(
        next(generate(model, PROMPT, max_new_tokens=1, temperature=2.5, top_k=5, seed=seed))
        for seed in range(draws)
    )
    assert set(counts) <= set(expected.indices.tolist())
    for token, probability in zip(expected.indices.tolist(), probabilities.tolist(), strict=True):
        spread = (draws * probability * (1 - probability)) ** 0.5
        assert abs(counts[token] - draws * probability) < 4.5 * spread


def test_seed_repeats_and_changes_the_text() -> None:
    model = tiny()

    def text(seed: int) -> list[int]:
        return list(generate(model, PROMPT, max_new_tokens=20, temperature=3.0, seed=seed))

    assert text(1) == text(1)
    assert text(1) != text(2)


@pytest.mark.parametrize("temperature", [1e-30, 1e-45, 1e-46, 5e-324])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    model = tiny()
    greedy = list(generate(model, PROMPT, max_new_tokens=10, temperature=0))
    assert list(generate(model, PROMPT, max_new_tokens=10, temperature=temperature)) == greedy


def test_padded_ids_are_never_drawn() -> None:
    model = tiny()
    with torch.no_grad():
        hidden, _ = model(torch.tensor([PROMPT]))
        # padding rows that would win every draw
        model.token_embedding.weight[VOCABULARY_SIZE:] = 100 * hidden[0, -1]
    for temperature in (0.0, 1.0):
        drawn = generate(model, PROMPT, max_new_tokens=30, temperature=temperature)
        assert all(token < VOCABULARY_SIZE for token in drawn)


def test_stops_before_the_stop_token() -> None:
    model = tiny()
    greedy = list(generate(model, PROMPT, max_new_tokens=12, temperature=0))
    stop = greedy[-1]
    stopped = list(generate(model, PROMPT, max_new_tokens=12, temperature=0, stop_token=stop))
    assert stopped == greedy[: greedy.index(stop)]


def test_leaves_mode_gradients_and_prompt_alone() -> None:
    model = tiny(dropout=0.5).train()
    prompt = list(PROMPT)
    tokens = generate(model, prompt, max_new_tokens=5, temperature=0)
    first = next(tokens)
    # between two tokens the caller's own work still has gradients
    assert torch.is_grad_enabled()
    rest = list(tokens)
    assert model.training
    assert prompt == PROMPT
    # dropout was off: the same again
    assert [first, *rest] == list(generate(model, prompt, max_new_tokens=5, temperature=0))


@pytest.mark.parametrize(
    ("ids", "options", "field"),
    [
        ([], {}, "prompt"),
        ([1] * CONTEXT_LENGTH, {}, "prompt"),
        ([1], {"max_new_tokens": -1}, "tokens"),
        ([1], {"temperature": -0.1}, "temperature"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"temperature": float("inf")}, "temperature"),
        ([1], {"top_k": 0}, "top_k"),
        ([1], {"seed": 2**64}, "seed"),
        ([1], {"seed": -(2**63) - 1}, "seed"),
    ],
)
def test_impossible_requests_are_refused_at_once(ids: list[int], options: dict, field: str) -> None:
    with pytest.raises(ConfigError) as error:
        generate(tiny(), ids, **{"max_new_tokens": 3, **options})
    assert error.value.field == field


class ByteTokenizer:
    """One id a byte: characters beyond ASCII are always split."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def test_streamed_characters_are_whole() -> None:
    text = "naïve – 語 🙂 ok"
    pieces = list(stream_text(ByteTokenizer(), text.encode()))  # type: ignore[arg-type]
    assert pieces == list(text)


@pytest.mark.parametrize("raw", [b"a\xe2\x82", b"a\xffb\xc3", b"\xff\xfe", b""])
def test_streamed_broken_text_joins_to_the_whole(raw: bytes) -> None:
    streamed = "".join(stream_text(ByteTokenizer(), raw))  # type: ignore[arg-type]
    assert streamed == raw.decode("utf-8", errors="replace")
