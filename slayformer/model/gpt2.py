"""GPT-2 (Radford et al., 2019): pre-norm blocks, learned positions, tied head, any attention.

With `attention=softmax` it is GPT-2 itself: weights of other implementations load and the logits
agree. Everything outside the mechanism is initialised from the seed alone, the same for every
mechanism.

Shape suffixes: B batch, T positions, C model width, H heads, D head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slayformer.attention.base import generator, is_recording
from slayformer.attention.context_parallel import Stretch, attend, convolve, make_stretch
from slayformer.config import ModelConfig
from slayformer.model.recompute import CHECKPOINT, Checkpoint, call
from slayformer.model.short_convolution import ConvolutionState, ShortConvolution
from slayformer.registry import build_attention

INITIAL_STANDARD_DEVIATION = 0.02
# keeps the mechanisms' draws apart from layer to layer and from the weights' draws
LAYER_SEED_STRIDE = 1_000_003


@dataclass(frozen=True)
class BlockState:
    """What a block remembers: the mechanism's state, and the convolution's if there is one."""

    attention: Any
    convolution: ConvolutionState | None


@dataclass(frozen=True)
class ModelState:
    """What cached decoding remembers: a state per layer and the tokens seen per sequence."""

    layers: list[BlockState]
    seen_B: Tensor


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)); heads go to the mechanism and come back."""

    def __init__(self, model: ModelConfig, attention: Any, seed: int) -> None:
        super().__init__()
        self.heads = model.heads
        self.attention_norm = nn.LayerNorm(model.width)
        self.query_key_value = nn.Linear(model.width, 3 * model.width)
        self.convolution: ShortConvolution | None = None
        if model.short_convolution:
            self.convolution = ShortConvolution(3 * model.width, model.short_convolution)
        self.attention = build_attention(
            attention,
            num_heads=model.heads,
            head_dim=model.width // model.heads,
            max_sequence_length=model.context_length,
            seed=seed,
        )
        self.attention_output = nn.Linear(model.width, model.width)
        self.mlp_norm = nn.LayerNorm(model.width)
        self.mlp_input = nn.Linear(model.width, model.mlp_ratio * model.width)
        self.mlp_output = nn.Linear(model.mlp_ratio * model.width, model.width)
        self.dropout = nn.Dropout(model.dropout)
        # what lets the backward pass compute all of it again, or the half with the attention
        self.recompute_whole: Checkpoint | None = None
        self.recompute_half: Checkpoint | None = None

    def init_state(self, batch_size: int, device: torch.device) -> BlockState:
        """Return the state before the first token."""
        convolution = None
        if self.convolution is not None:
            convolution = self.convolution.init_state(batch_size, device)
        return BlockState(self.attention.init_state(batch_size, device), convolution)

    def forward(
        self,
        x_BTC: Tensor,
        mask: Tensor | None,
        document_ids: Tensor | None,
        state: BlockState | None,
        stretch: Stretch | None,
    ) -> tuple[Tensor, BlockState | None]:
        """Return (the block's output, its new state or None if `state` is None)."""
        x_BTC, attention, convolution = call(
            self._attend, x_BTC, mask, document_ids, state, stretch, recompute=self.recompute_half
        )
        hidden = F.gelu(self.mlp_input(self.mlp_norm(x_BTC)), approximate="tanh")
        x_BTC = x_BTC + self.dropout(self.mlp_output(hidden))
        return x_BTC, None if state is None else BlockState(attention, convolution)

    def _attend(
        self,
        x_BTC: Tensor,
        mask: Tensor | None,
        document_ids: Tensor | None,
        state: BlockState | None,
        stretch: Stretch | None,
    ) -> tuple[Tensor, Any, ConvolutionState | None]:
        """Return x + attention(norm(x)), and the new states of attention and convolution."""
        batch_size, length, width = x_BTC.shape
        before = state or BlockState(None, None)
        qkv = self.query_key_value(self.attention_norm(x_BTC))
        convolution = None
        if self.convolution is not None and stretch is not None:
            qkv = convolve(self.convolution, qkv, stretch)
        elif self.convolution is not None:
            qkv, convolution = self.convolution(qkv, mask, document_ids, before.convolution)
        q_BHTD, k_BHTD, v_BHTD = (
            part.view(batch_size, length, self.heads, width // self.heads).transpose(1, 2)
            for part in qkv.split(width, dim=-1)
        )
        attention = None
        if stretch is not None:
            y_BHTD = attend(self.attention, q_BHTD, k_BHTD, v_BHTD, stretch)
        else:
            y_BHTD, attention = self.attention(
                q_BHTD, k_BHTD, v_BHTD, mask=mask, document_ids=document_ids, state=before.attention
            )
        y_BTC = y_BHTD.transpose(1, 2).reshape(batch_size, length, width)
        return x_BTC + self.dropout(self.attention_output(y_BTC)), attention, convolution


class GPT2(nn.Module):
    """The language model up to its final norm; `logits` or the objective applies the tied head."""

    def __init__(
        self, model: ModelConfig, attention: Any, *, vocabulary_size: int, seed: int
    ) -> None:
        super().__init__()
        multiple = model.vocabulary_multiple
        self.model = model
        self.vocabulary_size = vocabulary_size
        self.padded_vocabulary_size = math.ceil(vocabulary_size / multiple) * multiple
        self.context_length = model.context_length
        self.token_embedding = nn.Embedding(self.padded_vocabulary_size, model.width)
        self.position_embedding = nn.Embedding(model.context_length, model.width)
        self.dropout = nn.Dropout(model.dropout)
        self.blocks = nn.ModuleList(
            Block(model, attention, seed * LAYER_SEED_STRIDE + layer)
            for layer in range(model.layers)
        )
        self.final_norm = nn.LayerNorm(model.width)
        self._initialise(seed)

    def recompute(
        self, what: str, checkpoint: Checkpoint = CHECKPOINT, *, every_layers: int = 1
    ) -> None:
        """Let the backward pass compute again: `none`, a `block`, or its `attention` half.

        `checkpoint` calls it so, in the first block and every `every_layers`-th after it.
        """
        for layer, block in enumerate(self.blocks):
            chosen = checkpoint if layer % every_layers == 0 else None
            block.recompute_whole = chosen if what == "block" else None  # type: ignore[assignment]
            block.recompute_half = chosen if what == "attention" else None  # type: ignore[assignment]

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        """Draw GPT-2's initial weights; projections into the residual stream start smaller."""
        draws = generator(seed)
        residual_scale = (2 * self.model.layers) ** -0.5
        mechanism = {
            id(parameter)
            for block in self.blocks
            for parameter in block.attention.parameters()  # type: ignore[union-attr]
        }
        for name, parameter in self.named_parameters():
            if id(parameter) in mechanism or "norm" in name or "convolution" in name:
                continue
            if name.endswith("bias"):
                parameter.zero_()
                continue
            rows = self.vocabulary_size if name.startswith("token") else parameter.shape[0]
            drawn = torch.randn(rows, parameter.shape[1], generator=draws)
            if name.endswith(("attention_output.weight", "mlp_output.weight")):
                drawn *= residual_scale
            # rows beyond the vocabulary stay zero
            parameter.zero_()
            parameter[:rows] = drawn * INITIAL_STANDARD_DEVIATION

    @property
    def head_weight(self) -> Tensor:
        """The tied head, [padded vocabulary, C]."""
        return self.token_embedding.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the real vocabulary, [..., vocabulary_size]; padding is cut off."""
        return F.linear(hidden, self.head_weight)[..., : self.vocabulary_size]

    def init_states(self, batch_size: int, device: torch.device | str | None = None) -> ModelState:
        """Return the state before the first token, each block's where its weights are.

        `device` is that of the ids (None: the embedding's), to which offloaded weights come.
        """
        device = device or self.token_embedding.weight.device
        layers = []
        for block in self.blocks:
            place = block.query_key_value.weight.device  # type: ignore[union-attr]
            place = device if place.type == "meta" else place
            layers.append(block.init_state(batch_size, place))  # type: ignore[operator]
        return ModelState(layers, torch.zeros(batch_size, dtype=torch.long, device=device))

    def flops_per_token(self, sequence_length: int) -> int:
        """Return the FLOPs of one token's forward pass: matrix products (×2) and attention."""
        model = self.model
        matrices = model.layers * (4 + 2 * model.mlp_ratio) * model.width**2
        matrices += model.layers * 3 * model.width * model.short_convolution
        head = self.vocabulary_size * model.width
        attention = sum(block.attention.flops_per_token(sequence_length) for block in self.blocks)  # type: ignore[operator, union-attr]
        return 2 * (matrices + head) + attention

    def state_bytes(self, sequence_length: int) -> int:
        """Return the bytes all mechanisms remember of one sequence of that many tokens, fp32."""
        return sum(block.attention.state_bytes(sequence_length) for block in self.blocks)  # type: ignore[operator, union-attr]

    def guarded_share(self) -> Tensor | None:
        """Return the share of rows whose normaliser was guarded in the last call, mean of layers.

        None for mechanisms without a guard.
        """
        shares = [getattr(block.attention, "guarded_share", None) for block in self.blocks]
        guarded = [share for share in shares if share is not None]
        return torch.stack(guarded).mean() if guarded else None

    def forward(
        self,
        ids_BT: Tensor,
        *,
        mask_BT: Tensor | None = None,
        document_ids_BT: Tensor | None = None,
        position_ids_BT: Tensor | None = None,
        states: ModelState | None = None,
        context_group: Any = None,
    ) -> tuple[Tensor, ModelState | None]:
        """Return (hidden states after the final norm [B, T, C], the new states or None).

        `mask_BT`: True for real tokens; left padding then equals no padding. `states`: from
        `init_states` or an earlier call. `context_group`: the ranks that hold the sequence, each a
        stretch of it, without padding or states. Raises ValueError for a position beyond the
        context.
        """
        length = ids_BT.shape[1]
        real_BT = torch.ones_like(ids_BT) if mask_BT is None else mask_BT.long()
        seen_B = real_BT.new_zeros(ids_BT.shape[0]) if states is None else states.seen_B
        stretch = None
        if context_group is not None:
            stretch = make_stretch(
                context_group, ids_BT.shape[0], length, document_ids_BT, ids_BT.device
            )
            seen_B = seen_B + stretch.start
        given = position_ids_BT is not None
        if position_ids_BT is None:
            position_ids_BT = seen_B[:, None] + (real_BT.cumsum(dim=1) - 1).clamp_min(0)
        # without a cache or padding the length tells, and no device has to be waited for
        plain = states is None and mask_BT is None
        start = 0 if stretch is None else stretch.start
        # whoever records a graph sees to it that there is room
        last = start + length - 1 if plain or is_recording() else int(position_ids_BT.max())
        # those who give positions of their own see to them too
        if last >= self.context_length and not (given and plain):
            raise ValueError(
                f"position {last} is beyond the context of {self.context_length} tokens"
            )
        x_BTC = self.token_embedding(ids_BT) + self.position_embedding(position_ids_BT)
        x_BTC = self.dropout(x_BTC)
        layer_states: list[Any] = [None] * len(self.blocks) if states is None else states.layers
        new_states = []
        for block, state in zip(self.blocks, layer_states, strict=True):
            x_BTC, new_state = call(
                *(block, x_BTC, mask_BT, document_ids_BT, state, stretch),
                recompute=block.recompute_whole,  # type: ignore[arg-type]
            )
            new_states.append(new_state)
        hidden_BTC = self.final_norm(x_BTC)
        if states is None:
            return hidden_BTC, None
        return hidden_BTC, ModelState(new_states, seen_B + real_BT.sum(dim=1))
