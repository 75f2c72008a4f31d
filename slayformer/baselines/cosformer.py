"""cosFormer (Qin et al., 2022): relu(q)·relu(k) cos(π/2 · (i − j)/M).

cos(a − b) = cos a cos b + sin a sin b makes it linear: φ(x_i) = [relu(x) cos a_i, relu(x) sin a_i]
with a_i = πi/2M. The period M is the configured maximum length, not the current one, so that a
prefix means the same in a longer text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import relu

from slayformer.attention.base import is_recording
from slayformer.attention.features import Dense, Features
from slayformer.attention.linear import LinearAttention
from slayformer.config import AttentionConfig, positive
from slayformer.registry import register_attention


@dataclass(kw_only=True)
class CosformerConfig(AttentionConfig):
    """`delta` is added to the normaliser."""

    delta: float = positive()


@register_attention("cosformer", CosformerConfig)
class CosformerAttention(LinearAttention):
    """2·D features without parameters; never negative up to the configured maximum length."""

    bounded_length = True

    def __init__(self, config: CosformerConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        self.delta = config.delta
        self.feature_count = self.score_width = 2 * self.head_dim

    def feature_map(
        self, x_BHTD: Tensor, *tensors: Tensor, is_query: bool, positions: Tensor
    ) -> Features:
        """Return [relu(x) cos a_i, relu(x) sin a_i]; ValueError beyond the maximum length."""
        if not is_recording() and int(positions.max()) >= self.max_sequence_length:
            raise ValueError(
                f"position {int(positions.max())} is beyond cosformer's maximum length of "
                f"{self.max_sequence_length} tokens"
            )
        angle_BT = positions.to(x_BHTD.dtype) * (math.pi / 2 / self.max_sequence_length)
        angle_B1T1 = angle_BT[:, None, :, None]
        x_BHTD = relu(x_BHTD)
        return Dense(torch.cat([x_BHTD * angle_B1T1.cos(), x_BHTD * angle_B1T1.sin()], dim=-1))

    def feature_flops(self) -> int:
        """Return a ReLU and two products a component."""
        return 3 * self.head_dim
