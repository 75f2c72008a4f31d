"""The models that learn the tasks; both give `model(ids) -> (hidden, None)` and `model.logits`.

Shape suffixes: B sequences, T positions, C width, H heads, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slayformer.config import ModelConfig
from slayformer.model.gpt2 import GPT2, LAYER_SEED_STRIDE
from slayformer.paper.tasks.base import Task
from slayformer.registry import build_attention

WIDTH, HEADS, LAYERS = 64, 4, 2


class AttentionLayer(nn.Module):
    """x + attention(x): projections around a mechanism, with neither norm nor MLP."""

    def __init__(self, attention: Any, length: int, seed: int) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.attention = build_attention(
            attention,
            num_heads=HEADS,
            head_dim=WIDTH // HEADS,
            max_sequence_length=length,
            seed=seed,
        )

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Return x + attention(x)."""
        batch, length, width = x_BTC.shape
        q_BHTD, k_BHTD, v_BHTD = (
            part.view(batch, length, HEADS, width // HEADS).transpose(1, 2)
            for part in self.query_key_value(x_BTC).split(width, dim=-1)
        )
        y_BHTD, _ = self.attention(q_BHTD, k_BHTD, v_BHTD, causal=True)
        return x_BTC + self.output(y_BHTD.transpose(1, 2).reshape(batch, length, width))


class AttentionOnlyModel(nn.Module):
    """The paper's model for its tasks: embeddings, two layers of attention, a linear head.

    Weights start as torch's modules do, from `seed` alone: the same for every mechanism.
    """

    def __init__(self, attention: Any, *, length: int, vocabulary_size: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.token_embedding = nn.Embedding(vocabulary_size, WIDTH)
            self.position_embedding = nn.Embedding(length, WIDTH)
            self.logits = nn.Linear(WIDTH, vocabulary_size)
            self.layers = nn.Sequential(
                *(
                    AttentionLayer(attention, length, seed * LAYER_SEED_STRIDE + layer)
                    for layer in range(LAYERS)
                )
            )

    def forward(self, ids_BT: Tensor) -> tuple[Tensor, None]:
        """Return (hidden states [B, T, C], None)."""
        positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        x_BTC = self.token_embedding(ids_BT) + self.position_embedding(positions_T)
        return self.layers(x_BTC), None


def build_model(task: Task, attention: Any, seed: int) -> nn.Module:
    """Return the model that `task` is learned with; `attention` holds a mechanism's options."""
    if task.training.published_model:
        return AttentionOnlyModel(
            attention, length=task.length, vocabulary_size=task.vocabulary_size, seed=seed
        )
    shape = ModelConfig(
        layers=LAYERS,
        heads=2,
        width=WIDTH,
        context_length=task.length,
        short_convolution=4,
        vocabulary_multiple=1,
    )
    return GPT2(shape, attention, vocabulary_size=task.vocabulary_size, seed=seed)
