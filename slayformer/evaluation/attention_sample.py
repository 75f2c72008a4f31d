"""Heads to measure a mechanism on, random or real, and what it makes of them: scores and weights.

Shape suffixes: B batch, H heads, T queries, S keys, D head width, N pairs (a query and a key).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from slayformer.attention.base import Attention, Place, generator, token_positions
from slayformer.attention.linear import LinearAttention
from slayformer.attention.quadratic import QuadraticAttention
from slayformer.attention.yat_spherical import SphericalYatConfig
from slayformer.config import AttentionConfig
from slayformer.data.loader import Batch
from slayformer.model.gpt2 import GPT2
from slayformer.registry import build_attention

EXACT = SphericalYatConfig(name="yat_spherical", normalization="kernel", epsilon=1e-3)
# cosines at which scores are shown, and pairs drawn for each, or for a window of real text
COSINES = np.linspace(-1.0, 1.0, 61)
PAIRS_PER_COSINE = 12
PAIRS_PER_WINDOW = 1024
# keeps q, k and v apart from the mechanisms' draws with the same seed
SAMPLE_SEED = 500_000_003
# e^650 times any number of keys is still finite in fp64
LARGEST_EXPONENT = 650.0


@dataclass(frozen=True)
class Sample:
    """Heads to measure on, [1, H, T, D] fp64, and pairs [N, H, 1, D] to show scores of."""

    q_BHTD: Tensor
    k_BHTD: Tensor
    v_BHTD: Tensor
    document_ids_BT: Tensor | None
    pair_q_NH1D: Tensor
    pair_k_NH1D: Tensor

    @cached_property
    def positions_BT(self) -> Tensor:
        """Positions in each token's document."""
        real = torch.ones(1, self.q_BHTD.shape[2], dtype=torch.bool)
        return token_positions(real, self.document_ids_BT, Place.start(1, "cpu"))

    @cached_property
    def visible_B1TS(self) -> Tensor:
        """Which keys each query sees."""
        length = self.q_BHTD.shape[2]
        return visible_pairs(length, self.document_ids_BT)[:, None]

    @cached_property
    def exact(self) -> Attention:
        """Exact spherical Yat attention for these heads."""
        return self.build(EXACT, seed=0)

    @cached_property
    def exact_BHTD(self) -> Tensor:
        """Its output."""
        return self.run(self.exact)

    @cached_property
    def exact_ratio_NH(self) -> Tensor:
        """Its relative scores of the pairs."""
        return self.pair_ratios(self.exact, self.scores(self.exact))

    def build(self, options: AttentionConfig, seed: int) -> Attention:
        """Return the mechanism with `options` for these heads, in evaluation mode."""
        _, heads, length, width = self.q_BHTD.shape
        attention = build_attention(
            options, num_heads=heads, head_dim=width, max_sequence_length=length, seed=seed
        )
        return attention.eval()

    def run(self, attention: Attention) -> Tensor:
        """Return the output of `attention`, [1, H, T, D]."""
        heads = self.q_BHTD, self.k_BHTD, self.v_BHTD
        return attention(*heads, document_ids=self.document_ids_BT)[0]

    def scores(self, attention: Attention) -> Tensor:
        """Return the scores of `attention`, [1, H, T, S], 0 where a key is not visible."""
        scores_BHTS = pair_scores(
            attention, self.q_BHTD, self.k_BHTD, self.positions_BT, self.positions_BT
        )
        return torch.where(self.visible_B1TS, scores_BHTS, 0.0)

    def normalisers(self, attention: Attention) -> Tensor:
        """Return what `attention` divides each query's sum by, [1, H, T]."""
        sums_BHT = self.scores(attention).sum(-1)
        if not isinstance(attention, LinearAttention):
            return sums_BHT
        return sums_BHT + torch.as_tensor(attention.normaliser_offset(torch.float64)).reshape(-1, 1)

    def pair_ratios(self, attention: Attention, scores_BHTS: Tensor) -> Tensor:
        """Return the scores of the pairs over the mean absolute one of `scores_BHTS`, [N, H].

        A mechanism with exact near scores is shown as it scores far pairs.
        """
        key = torch.zeros(len(self.pair_q_NH1D), 1, dtype=torch.long)
        query = key + (attention.local_size if isinstance(attention, LinearAttention) else 0)
        scores_NH11 = pair_scores(attention, self.pair_q_NH1D, self.pair_k_NH1D, query, key)
        mean_BH = scores_BHTS.abs().sum((2, 3)) / self.visible_B1TS.sum((2, 3))
        return scores_NH11[..., 0, 0] / mean_BH


def visible_pairs(length: int, document_ids_BT: Tensor | None) -> Tensor:
    """Return which keys a causal query sees, boolean [B, T, S]."""
    visible = torch.ones(1, length, length, dtype=torch.bool).tril()
    if document_ids_BT is None:
        return visible
    return visible & (document_ids_BT[:, :, None] == document_ids_BT[:, None])


def random_sample(*, head_dim: int, length: int, seed: int) -> Sample:
    """Return one head of iid standard Gaussian q, k, v, and pairs at every one of COSINES.

    A pair's query has a random direction, its key turns away from it in a random plane through
    all the cosines; both have the typical length √D.
    """
    draws = generator(SAMPLE_SEED + seed)
    heads = torch.randn(3, 1, 1, length, head_dim, generator=draws, dtype=torch.float64)
    shape = (2, PAIRS_PER_COSINE, 1, head_dim)
    query, other = torch.randn(shape, generator=draws, dtype=torch.float64)
    query = normalize(query, dim=-1)
    across = normalize(other - (other * query).sum(-1, keepdim=True) * query, dim=-1)
    cosine = torch.from_numpy(COSINES)[:, None]
    key = cosine * query + (1 - cosine.square()).sqrt() * across
    pairs = (head_dim**0.5 * x.flatten(0, 1)[:, None, None] for x in (query.expand_as(key), key))
    return Sample(heads[0], heads[1], heads[2], None, *pairs)


@torch.no_grad()
def window_samples(model: GPT2, window: Batch) -> list[Sample]:
    """Return the q, k and v of every layer while `model` reads `window`, a batch of one sample.

    The pairs are drawn from those in which the query sees the key.
    """
    documents = window.document_ids_BT
    pairs = visible_pairs(window.ids_BT.shape[1], documents)[0].nonzero()
    order = torch.randperm(len(pairs), generator=generator(SAMPLE_SEED))
    query_N, key_N = pairs[order[:PAIRS_PER_WINDOW]].T
    samples: list[Sample] = []

    def keep(_module: Any, arguments: tuple[Tensor, ...], _options: dict[str, Any]) -> None:
        q, k, v = (x.double() for x in arguments)
        pair_q, pair_k = (
            x[0, :, index].transpose(0, 1)[:, :, None] for x, index in ((q, query_N), (k, key_N))
        )
        samples.append(Sample(q, k, v, documents, pair_q, pair_k))

    hooks = [
        block.attention.register_forward_pre_hook(keep, with_kwargs=True)  # type: ignore[union-attr]
        for block in model.blocks
    ]
    try:
        model(window.ids_BT, document_ids_BT=documents, position_ids_BT=window.position_ids_BT)
    finally:
        for hook in hooks:
            hook.remove()
    return samples


def pair_scores(
    attention: Attention,
    q_BHTD: Tensor,
    k_BHSD: Tensor,
    query_positions_BT: Tensor,
    key_positions_BS: Tensor,
) -> Tensor:
    """Return what `attention` weighs each key by before it normalises, [B, H, T, S].

    For a softmax that is the exponential, of at most LARGEST_EXPONENT.
    """
    if isinstance(attention, QuadraticAttention):
        scores = attention.scores(q_BHTD, k_BHSD)
        added = attention.position_scores(query_positions_BT[..., None], key_positions_BS[:, None])
        scores = scores if added is None else scores + added
        if attention.normalization == "softmax":
            return scores.clamp(max=LARGEST_EXPONENT).exp()
        return scores
    assert isinstance(attention, LinearAttention)
    tensors = attention.feature_tensors(q_BHTD.dtype)
    query = attention.feature_map(q_BHTD, *tensors, is_query=True, positions=query_positions_BT)
    key = attention.feature_map(k_BHSD, *tensors, is_query=False, positions=key_positions_BS)
    scores = query.scores(key)
    if attention.local != "none":
        near = attention.is_near(query_positions_BT[..., None], key_positions_BS[:, None])
        exact = attention.near_scores(q_BHTD, k_BHSD, *tensors)
        scores = torch.where(near[:, None], exact, scores)
    return scores


def attention_weights(
    attention: Attention, q_BHTD: Tensor, k_BHTD: Tensor, document_ids_BT: Tensor | None = None
) -> Tensor:
    """Return the causal weights as `attention` applies them: its outputs for v = I, [B, H, T, T].

    The columns of the identity go in D at a time, the width of v that states are made for.
    """
    length, width = q_BHTD.shape[2], attention.head_dim
    identity = pad(torch.eye(length, dtype=q_BHTD.dtype), (0, -length % width))
    parts = []
    for columns in identity.split(width, dim=-1):
        v_BHTD = columns.expand_as(q_BHTD)
        parts.append(attention(q_BHTD, k_BHTD, v_BHTD, document_ids=document_ids_BT)[0])
    return torch.cat(parts, dim=-1)[..., :length]


def entropy(weights: Tensor) -> Tensor:
    """Return the entropy of each row of |weights| in nats, after dividing by the row's sum.

    A row without weights has none.
    """
    sizes = weights.abs()
    shares = sizes / sizes.sum(-1, keepdim=True).clamp_min(torch.finfo(sizes.dtype).tiny)
    return torch.special.entr(shares).sum(-1)
