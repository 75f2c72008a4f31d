"""Which parameters are decayed, and one step against AdamW by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from slayformer.config import OptimizerConfig
from slayformer.model.gpt2 import GPT2
from slayformer.training.optimizer import build_optimizer, parameter_groups

CPU = torch.device("cpu")
DECAYED = OptimizerConfig(0.01, weight_decay=0.1)


def test_vectors_are_not_decayed() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    decayed, spared = parameter_groups(model, DECAYED)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert [tuple(p.shape) for p in decayed["params"]] == [(5, 4), (3, 4)]
    assert [tuple(p.shape) for p in spared["params"]] == [(4,), (4,), (3,)]


def test_embeddings_and_vectors_are_decayed_by_option() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    shapes = {
        (embeddings, vectors): {
            group["weight_decay"]: [tuple(p.shape) for p in group["params"]]
            for group in parameter_groups(
                model, replace(DECAYED, decay_embeddings=embeddings, decay_vectors=vectors)
            )
        }
        for embeddings in (False, True)
        for vectors in (False, True)
    }
    vectors_only = [(4,), (4,), (3,)]
    assert shapes[False, False] == {0.0: [(5, 4), *vectors_only], 0.1: [(3, 4)]}
    assert shapes[True, False] == {0.1: [(5, 4), (3, 4)], 0.0: vectors_only}
    assert shapes[False, True] == {0.0: [(5, 4)], 0.1: [(4,), (4,), (3, 4), (3,)]}
    assert shapes[True, True] == {0.1: [(5, 4), (4,), (4,), (3, 4), (3,)]}


def test_the_tied_head_is_an_embedding(train_config: Any) -> None:
    config = train_config()
    model = GPT2(config.model, config.attention, vocabulary_size=257, seed=0)
    spared = parameter_groups(model, replace(DECAYED, decay_embeddings=False))
    (group,) = [g for g in spared if any(p is model.head_weight for p in g["params"])]
    assert group["weight_decay"] == 0.0


def test_mechanisms_parameters_have_their_own_rate_and_no_decay() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    scale = nn.Parameter(torch.zeros(2, 1, 1))
    scale.no_weight_decay, scale.learning_rate_scale = True, 5.0  # type: ignore[attr-defined]
    model.register_parameter("scale", scale)
    own, matrices = parameter_groups(model, replace(DECAYED, decay_vectors=True))
    assert own["params"] == [scale]
    assert (own["weight_decay"], own["learning_rate_scale"]) == (0.0, 5.0)
    assert (matrices["weight_decay"], matrices["learning_rate_scale"]) == (0.1, 1.0)


def test_frozen_parameters_and_empty_groups_are_left_out() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert [len(group["params"]) for group in parameter_groups(model, DECAYED)] == [1]


def test_two_steps_equal_adamw_by_hand() -> None:
    config = OptimizerConfig(0.01, weight_decay=0.1, beta1=0.8, beta2=0.9, epsilon=1e-6)
    weight = nn.Parameter(torch.tensor([[2.0]]))
    model = nn.Module()
    model.weight = weight
    optimizer = build_optimizer(model, config, CPU)
    value, first, second = 2.0, 0.0, 0.0
    for step, gradient in enumerate((3.0, -1.0), start=1):
        weight.grad = torch.tensor([[gradient]])
        optimizer.step()
        first = 0.8 * first + 0.2 * gradient
        second = 0.9 * second + 0.1 * gradient**2
        value -= 0.01 * 0.1 * value
        root = math.sqrt(second / (1 - 0.9**step))
        value -= 0.01 * first / (1 - 0.8**step) / (root + 1e-6)
    assert weight.item() == pytest.approx(value, rel=1e-6)
