"""No option of a mechanism is accepted and ignored: each one matters or is named as unused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from slayformer.cli import compose as compose_command
from slayformer.config import AttentionConfig
from slayformer.errors import ConfigError
from slayformer.presets import load_preset, preset_names
from slayformer.registry import build_attention

COMMON = {field.name for field in dataclasses.fields(AttentionConfig)}
# options of slay that change which others matter
SLAY_CHOICES: list[dict[str, Any]] = [
    {"polynomial": "block_quadratic", "polynomial_features": 30},
    {"polynomial": "learned_quadratic", "polynomial_features": 66, "fusion": "polynomial_only"},
    {"polynomial": "exact", "fusion": "polynomial_only"},
    {"polynomial": "tensor_sketch", "fusion": "sketch", "sketch_features": 9},
    {"fusion": "laplace_only", "local": "chunk"},
]
CASES: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in preset_names()] + [
    ("slay", changes) for changes in SLAY_CHOICES
]


def others(field: dataclasses.Field, value: Any) -> list[Any]:
    """Return values that the option could have instead of `value`."""
    if choices := field.metadata.get("choices"):
        return [choice for choice in choices if choice != value]
    if isinstance(value, bool):
        return [not value]
    if value is None:
        return [5]
    # numbers that some map rounds down, and a δ beside the largest sums of features
    return [9, 2 * value + 1] if isinstance(value, int) else [value * 3 + 0.01, 1e20]


def fingerprint(config: Any) -> list[torch.Tensor]:
    """Return what a mechanism is and does: parameters, buffers, output and gradients."""
    attention = build_attention(config, num_heads=2, head_dim=8, max_sequence_length=99, seed=5)
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draws), alpha=0.1)
    q, k, v = (torch.randn(1, 2, 70, 8, generator=draws).requires_grad_() for _ in range(3))
    # what happens only between training passes happens before the second
    attention(q, k, v)
    y, _ = attention(q, k, v)
    dq, *_ = torch.autograd.grad(y.square().sum(), q)
    learned = torch.tensor([p.numel() for p in attention.parameters()])
    return [*attention.state_dict().values(), learned, y.detach(), dq]


def differ(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    if len(first) != len(second):
        return True
    return any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("name", "changes"), CASES, ids=str)
def test_every_option_matters_or_is_named_as_unused(name: str, changes: dict[str, Any]) -> None:
    config = load_preset(name, **changes)
    reference = fingerprint(config)
    assert not differ(reference, fingerprint(config))
    unused = config.without_effect()
    fields = {field.name: field for field in dataclasses.fields(config) if field.name not in COMMON}
    assert unused.keys() <= fields.keys()
    for option, field in fields.items():
        matters = []
        for value in others(field, getattr(config, option)):
            changed = dataclasses.replace(config, **{option: value})
            try:
                changed.check()
                found = fingerprint(changed)
            except (ConfigError, RuntimeError):
                # a choice that others must follow, so it does not go unnoticed
                continue
            matters.append(differ(reference, found))
        # each choice by itself; of numbers, one is enough
        numbers = "choices" not in field.metadata
        seen = any(matters) if numbers else all(matters)
        assert not matters or seen == (option not in unused), option


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["attention=slay_best", "attention.nodes=4"], "fusion=polynomial_only"),
        (["attention=slay", "++attention.far_scale=0.5"], "local=none"),
        (["attention=slay_exact_poly", "attention.anchor_scale=unbiased"], "polynomial=exact"),
        (["attention=slay", "attention.denominator=paper"], "never negative"),
    ],
)
def test_an_option_without_effect_is_refused_by_name(arguments: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as error:
        compose_command("train", arguments)
    assert error.value.field == arguments[1].lstrip("+").partition("=")[0]


def test_what_matters_is_taken() -> None:
    arguments = ["attention=slay", "attention.local=chunk", "attention.far_scale=0.5"]
    composed = compose_command("train", arguments)
    assert (composed.attention.local, composed.attention.far_scale) == ("chunk", 0.5)
