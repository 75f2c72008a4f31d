"""Next-token cross entropy that never holds all logits when they are many.

Shapes: N tokens, C width, V rows of the head (with padding), K columns of one vocabulary block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slayformer.model.gpt2 import GPT2

IGNORE_INDEX = -100

# above this size of [N x V] fp32 logits the vocabulary is taken block by block
DENSE_LIMIT_BYTES = 16 * 2**20
# one block of logits: it should stay in the caches of a CPU, and fill a GPU
BLOCK_BYTES = {"cpu": 8 * 2**20}
BLOCK_BYTES_ELSEWHERE = 512 * 2**20
SMALLEST_BLOCK = 256


# the dtype of matrix products by `engine.precision`
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def token_losses(
    hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, vocabulary_size: int, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Return every target's cross entropy in nats plus its z-loss, and the z-loss alone, both [N].

    The z-loss is `z_loss` × (log-sum-exp of the logits)² (Chowdhery et al., 2022, section 5); alone
    it carries no gradient. Both are fp32 (fp64 for fp64 input), and 0 where the target is
    IGNORE_INDEX. Rows of `weight_VC` from `vocabulary_size` on are padding: they have probability
    zero and get no gradient. Under autocast the products run in its dtype, exponentials and sums
    in fp32.
    """
    device = hidden_NC.device.type
    product_dtype = hidden_NC.dtype
    if torch.is_autocast_enabled(device):
        product_dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        if len(targets_N) * vocabulary_size * 4 <= DENSE_LIMIT_BYTES:
            weight_KC = weight_VC[:vocabulary_size].to(product_dtype)
            logits_NK = _widen(hidden_NC.to(product_dtype) @ weight_KC.t())
            nats_N = F.cross_entropy(
                logits_NK, targets_N, ignore_index=IGNORE_INDEX, reduction="none"
            )
            if z_loss == 0:
                return nats_N, torch.zeros_like(nats_N)
            z_N = z_loss * logits_NK.logsumexp(1).square()
            z_N = z_N.masked_fill(targets_N == IGNORE_INDEX, 0)
            return nats_N + z_N, z_N.detach()
        return _BlockedCrossEntropy.apply(
            hidden_NC, weight_VC, targets_N, vocabulary_size, product_dtype, z_loss
        )


def _widen(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


class _BlockedCrossEntropy(torch.autograd.Function):
    """Two passes over the vocabulary: log-sum-exp forward, probabilities again backward.

    Between them only the log-sum-exp [N] is kept, beside the inputs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NC: Tensor,
        weight_VC: Tensor,
        targets_N: Tensor,
        vocabulary_size: int,
        product_dtype: torch.dtype,
        z_loss: float,
    ) -> tuple[Tensor, Tensor]:
        hidden_product_NC = hidden_NC.to(product_dtype)
        total_dtype = torch.float64 if hidden_NC.dtype == torch.float64 else torch.float32
        log_sum_N = hidden_NC.new_full((len(targets_N),), -torch.inf, dtype=total_dtype)
        target_logit_N = torch.zeros_like(log_sum_N)
        for start, stop in _blocks(hidden_NC, vocabulary_size):
            logits_NK = _logits(hidden_product_NC, weight_VC[start:stop])
            inside_N, column_N1 = _columns(targets_N, start, stop)
            picked_N = logits_NK.gather(1, column_N1).squeeze(1)
            maximum_N1 = logits_NK.amax(1, keepdim=True)
            block_sum_N = logits_NK.sub_(maximum_N1).exp_().sum(1).log_() + maximum_N1.squeeze(1)
            log_sum_N = torch.logaddexp(log_sum_N, block_sum_N)
            target_logit_N = torch.where(inside_N, picked_N, target_logit_N)
        ctx.save_for_backward(hidden_NC, weight_VC, targets_N, log_sum_N)
        ctx.vocabulary_size, ctx.product_dtype = vocabulary_size, product_dtype
        ctx.z_loss = z_loss
        ignored_N = targets_N == IGNORE_INDEX
        z_N = (z_loss * log_sum_N.square()).masked_fill_(ignored_N, 0)
        ctx.mark_non_differentiable(z_N)
        return (log_sum_N - target_logit_N + z_N).masked_fill_(ignored_N, 0), z_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NC, weight_VC, targets_N, log_sum_N = ctx.saved_tensors
        hidden_product_NC = hidden_NC.to(ctx.product_dtype)
        scale_N1 = gradients[0].masked_fill(targets_N == IGNORE_INDEX, 0).unsqueeze(1)
        log_sum_N1 = log_sum_N.unsqueeze(1)
        # both losses have gradients along the probabilities, d(z_loss l²) = 2 z_loss l dl
        pull_N1 = scale_N1 * (1 + 2 * ctx.z_loss * log_sum_N1)
        d_hidden_NC = torch.zeros_like(hidden_NC)
        d_weight_VC = torch.zeros_like(weight_VC)
        for start, stop in _blocks(hidden_NC, ctx.vocabulary_size):
            weight_KC = weight_VC[start:stop].to(ctx.product_dtype)
            logits_NK = _logits(hidden_product_NC, weight_KC)
            d_logits_NK = logits_NK.sub_(log_sum_N1).exp_().mul_(pull_N1)
            inside_N, column_N1 = _columns(targets_N, start, stop)
            d_logits_NK.scatter_add_(1, column_N1, -scale_N1 * inside_N.unsqueeze(1))
            d_logits_NK = d_logits_NK.to(ctx.product_dtype)
            d_hidden_NC += d_logits_NK @ weight_KC
            d_weight_VC[start:stop] = d_logits_NK.t() @ hidden_product_NC
        return d_hidden_NC, d_weight_VC, None, None, None, None


def _blocks(hidden_NC: Tensor, vocabulary_size: int) -> list[tuple[int, int]]:
    """Return the ranges of the vocabulary whose logits fit into one block."""
    budget = BLOCK_BYTES.get(hidden_NC.device.type, BLOCK_BYTES_ELSEWHERE)
    size = max(SMALLEST_BLOCK, budget // (4 * len(hidden_NC)))
    return [
        (start, min(start + size, vocabulary_size)) for start in range(0, vocabulary_size, size)
    ]


def _logits(hidden_NC: Tensor, weight_KC: Tensor) -> Tensor:
    """Return the logits of one block, fp32 or wider."""
    return _widen(hidden_NC @ weight_KC.to(hidden_NC.dtype).t())


def _columns(targets_N: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return which targets lie in start..stop, and every target's column [N, 1], clamped."""
    inside_N = (targets_N >= start) & (targets_N < stop)
    return inside_N, (targets_N - start).clamp(0, stop - start - 1).unsqueeze(1)


class LanguageModelObjective(nn.Module):
    """A GPT-2 and its loss: what DeepSpeed wraps. `model` is the GPT-2.

    In training a loss holds the z-loss too, if there is one; `z_nats` is its sum over the targets
    of the last call. Half precision is torch.autocast here rather than DeepSpeed's
    `torch_autocast`: that one marks the weights of linear layers and then reduces their gradients
    over devices in half precision (and gathers them so in stage 3). This way weights, gradients and
    their sums are fp32 in every ZeRO stage.

    With a `context_group` every rank of it gives its stretch of the sequences.
    """

    def __init__(
        self, model: GPT2, precision: str, z_loss: float = 0.0, context_group: Any = None
    ) -> None:
        super().__init__()
        self.model = model
        self.precision = precision
        self.z_loss = z_loss
        self.context_group = context_group
        self.z_nats: Tensor | None = None

    def forward(
        self,
        ids_BT: Tensor,
        targets_BT: Tensor,
        document_ids_BT: Tensor | None = None,
        position_ids_BT: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of every target in nats, fp32, shape [B, T]."""
        dtype = AUTOCAST.get(self.precision)
        z_loss = self.z_loss if self.training else 0.0
        with torch.autocast(ids_BT.device.type, dtype, enabled=dtype is not None):
            hidden_BTC, _ = self.model(
                ids_BT,
                document_ids_BT=document_ids_BT,
                position_ids_BT=position_ids_BT,
                context_group=self.context_group,
            )
            loss_N, z_N = token_losses(
                hidden_BTC.flatten(0, 1),
                self.model.head_weight,
                targets_BT.flatten(),
                self.model.vocabulary_size,
                z_loss,
            )
        self.z_nats = z_N.sum(dtype=torch.float64) if z_loss else None
        return loss_N.view_as(targets_BT)
