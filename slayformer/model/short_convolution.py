"""A causal depthwise convolution over the last few tokens, for q, k and v before the attention.

Shape suffixes: B batch, T positions, C channels, K = width − 1 remembered inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slayformer.attention.base import real_document_ids
from slayformer.attention.padding import in_order, padding_first


@dataclass(frozen=True)
class ConvolutionState:
    """The last K inputs and the documents they belong to; zeros of document -1 fill both up."""

    inputs_BKC: Tensor
    documents_BK: Tensor


class ShortConvolution(nn.Module):
    """y_t = Σ_j w_j x_{t−j} over j < width, within one document, padding left out.

    Starts as the identity: w_0 = 1, all else 0.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.width = width
        weight = torch.zeros(width, channels)
        weight[0] = 1.0
        self.weight = nn.Parameter(weight)

    def init_state(self, batch_size: int, device: torch.device | str) -> ConvolutionState:
        """Return the state before the first token."""
        size = (batch_size, self.width - 1)
        return ConvolutionState(
            torch.zeros(*size, self.weight.shape[1], device=device),
            torch.full(size, -1, dtype=torch.long, device=device),
        )

    def forward(
        self,
        x_BTC: Tensor,
        mask: Tensor | None,
        document_ids: Tensor | None,
        state: ConvolutionState | None,
    ) -> tuple[Tensor, ConvolutionState | None]:
        """Return (y of the shape of x, the new state or None if `state` is None)."""
        batch_size, length, _ = x_BTC.shape
        before = state or self.init_state(batch_size, x_BTC.device)
        inputs = torch.cat([before.inputs_BKC.to(x_BTC.dtype), x_BTC], dim=1)
        documents = real_document_ids(mask, document_ids, before.documents_BK[:, -1])
        if documents is None:
            # without ids the tokens go on with the document before them
            documents = before.documents_BK[:, -1:].clamp_min(0).expand(-1, length)
        documents = torch.cat([before.documents_BK, documents], dim=1)
        remembered = self.width - 1
        if mask is not None:
            real = torch.cat([torch.ones_like(mask[:, :1]).expand(-1, remembered), mask], dim=1)
            order = padding_first(real)
            inputs, documents = in_order(inputs, order, 1), in_order(documents, order, 1)
        y_BTC = torch.zeros_like(x_BTC)
        for back in range(self.width):
            span = slice(remembered - back, remembered - back + length)
            same = documents[:, span] == documents[:, remembered:]
            y_BTC = y_BTC + self.weight[back].to(x_BTC.dtype) * inputs[:, span] * same[..., None]
        if mask is not None:
            y_BTC = in_order(y_BTC, padding_first(mask).argsort(dim=1), 1)
        if state is None:
            return y_BTC, None
        kept = slice(inputs.shape[1] - remembered, None)
        return y_BTC, ConvolutionState(inputs[:, kept], documents[:, kept])
