"""States carried over chunks: one after the other, or in segments that are joined afterwards.

Shape suffixes: B batch, H heads, T positions, C chunks, E width of v, F columns of factors, M
features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from slayformer.attention.backends import triton_start
from slayformer.attention.backends.triton_layout import Tables
from slayformer.attention.backends.triton_start import Blocks, block_of, strides_of
from slayformer.attention.backends.triton_states import carry_states, join_segments

# the sequence is cut into segments until so many programs carry its states
PROGRAMS = 528
# numbers of a state that a program joins
JOIN_BLOCK = 1024


@dataclass(frozen=True)
class Carrier:
    """Carries the states of one walk, in either direction."""

    tables: Tables
    blocks: Blocks
    form: int
    features: int
    # queries of the walk, of a chunk, and how many chunks
    length: int
    chunk: int
    chunks: int
    # whether the state goes on into a chunk [B, C]; None: always
    keeps_BC: Tensor | None

    def carry(
        self,
        x_BHTF: Tensor,
        value_BHTE: Tensor,
        weight_BHT: Tensor | None,
        enters_BT: Tensor | None,
        before: Tensor | None,
        reverse: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return Σ φ(x) ⊗ value and Σ φ(x) · weight around every chunk, and both at the end.

        Around a chunk means before it, or after it in `reverse`: [B·H, C, M, E] and [B·H, C, M].
        Both at the end are one tensor [B, H, M, E + 1], as is `before`.
        """
        batch, heads, x_length, _ = x_BHTF.shape
        m, e = self.features, value_BHTE.shape[-1]
        slices = triton.cdiv(m, self.blocks.carry_features)
        wanted = triton.cdiv(PROGRAMS, batch * heads * slices)
        per_segment = triton.cdiv(self.chunks, max(1, min(wanted, self.chunks // 4)))
        segments = triton.cdiv(self.chunks, per_segment)
        around = value_BHTE.new_empty(batch * heads, self.chunks, m, e)
        sums_around = around.new_empty(around.shape[:-1], dtype=torch.float32)
        after = sums_around.new_empty(batch * heads, segments, m, e + 1)
        arguments = {
            "x": x_BHTF,
            "value": value_BHTE,
            "weight": x_BHTF if weight_BHT is None else weight_BHT,
            "enters": x_BHTF if enters_BT is None else enters_BT,
            "keeps": x_BHTF if self.keeps_BC is None else self.keeps_BC,
            "around": around,
            "sums_around": sums_around,
            "table": self.tables.columns,
            "scale": self.tables.scale,
            **strides_of(value_BHTE, "value"),
            "x_length": x_length,
            "length": self.length,
            "chunk": self.chunk,
            "chunks": self.chunks,
            "segment_chunks": per_segment,
        }
        constants = {
            "H": heads,
            "E": e,
            "F": self.tables.width,
            "FORM": self.form,
            "M": m,
            "TERMS": self.tables.terms,
            "BT": self.blocks.tokens,
            "BM": self.blocks.carry_features,
            "BE": block_of(e),
            "REVERSE": reverse,
            "HAS_WEIGHT": weight_BHT is not None,
            "HAS_MASKS": enters_BT is not None,
        }
        grid = (slices, segments, batch * heads)

        def run(before: Tensor | None, after: Tensor, keep_all: bool) -> None:
            given = {"before": after if before is None else before, "after": after}
            kinds = {"HAS_BEFORE": before is not None, "KEEP_ALL": keep_all}
            triton_start.launch(
                carry_states, grid, {**arguments, **given}, {**constants, **kinds}, 4
            )

        if segments > 1:
            own = torch.empty_like(after)
            run(None, own, False)
            before = self._joined(own, before, per_segment, reverse)
        run(before, after, True)
        return around, sums_around, after[:, -1].unflatten(0, (batch, heads))

    def _joined(
        self, own: Tensor, before: Tensor | None, per_segment: int, reverse: bool
    ) -> Tensor:
        """Return the states with which segments start, from those that they sum themselves."""
        batch_heads, segments, m, columns = own.shape
        keeps = self.keeps_BC
        if keeps is not None:
            keeps = keeps.flip(1) if reverse else keeps
            rest = per_segment * segments - self.chunks
            keeps = torch.nn.functional.pad(keeps, (0, rest), value=1)
            keeps = keeps.unflatten(1, (segments, per_segment)).amin(2).contiguous()
        starts = torch.empty_like(own)
        triton_start.launch(
            join_segments,
            (triton.cdiv(m * columns, JOIN_BLOCK), batch_heads),
            {
                "own": own,
                "keeps": own if keeps is None else keeps,
                "before": own if before is None else before,
                "starts": starts,
                "size": m * columns,
                "segments": segments,
            },
            {
                "H": 1 if keeps is None else batch_heads // len(keeps),
                "BLOCK": JOIN_BLOCK,
                "HAS_MASKS": keeps is not None,
                "HAS_BEFORE": before is not None,
            },
            4,
        )
        return starts
