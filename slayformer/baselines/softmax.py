"""Standard softmax attention, through torch's fused scaled_dot_product_attention."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slayformer.attention.quadratic import KeyValueState, QuadraticAttention, gather_context
from slayformer.config import AttentionConfig
from slayformer.registry import register_attention


class SoftmaxConfig(AttentionConfig):
    """Softmax has no options."""


@register_attention("softmax", SoftmaxConfig)
class SoftmaxAttention(QuadraticAttention):
    """softmax(q·k/√D) over the visible keys."""

    normalization = "softmax"

    def forward(
        self,
        q_BHTD: Tensor,
        k_BHTD: Tensor,
        v_BHTE: Tensor,
        *,
        causal: bool = True,
        mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        state: KeyValueState | None = None,
    ) -> tuple[Tensor, KeyValueState | None]:
        """See `Attention.forward`."""
        if mask is None and document_ids is None and state is None:
            return scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTE, is_causal=causal), None
        context = gather_context(
            k_BHTD, v_BHTE, causal=causal, mask=mask, document_ids=document_ids, state=state
        )
        y_BHTE = scaled_dot_product_attention(
            q_BHTD, context.k_BHSD, context.v_BHSE, attn_mask=context.visible
        )
        return y_BHTE, context.state

    def scores(self, q_BHTD: Tensor, k_BHSD: Tensor) -> Tensor:
        """Return q·k/√D."""
        return q_BHTD @ k_BHSD.mT * self.head_dim**-0.5

    def score_flops(self) -> int:
        """Return the product, the scale and the exponential."""
        return 2 * self.head_dim + 2
