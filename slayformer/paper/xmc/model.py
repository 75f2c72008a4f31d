"""Documents attend to labels: the weight a mechanism gives to a label is its probability.

Features of documents and labels are of one map: with a linear mechanism the sum over all labels,
which normalises, costs one pass over them a batch, however many documents there are.

Shape suffixes: B documents, L labels, N labels of a document, T tokens, C width, H heads, D head
width, M features.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from slayformer.attention.base import Attention
from slayformer.attention.linear import LinearAttention
from slayformer.attention.quadratic import QuadraticAttention
from slayformer.config import AttentionConfig
from slayformer.errors import ConfigError
from slayformer.registry import build_attention

# keeps the logarithm of a weight finite
TINY = 1e-30
# of embeddings at first: with N(0, 1) a step of Adam moves them too little to learn in some epochs
EMBEDDING_SCALE = 0.1


class XmcModel(nn.Module):
    """Embeds a document, and gives the logarithm of its attention to every label.

    `encoder` `mean`: the weighted mean of its features' embeddings, as published; `attention`
    (ours): the features attend to one another first. A label is as likely to be met as it is
    frequent: its score is multiplied by a factor that starts as its share of `label_counts` and is
    learned. Weights start from `seed`, those outside the mechanism the same for each. Raises
    ConfigError for a mechanism that looks at positions.
    """

    def __init__(
        self,
        options: AttentionConfig,
        *,
        feature_count: int,
        label_counts: Tensor,
        width: int,
        heads: int,
        encoder: str,
        seed: int,
    ) -> None:
        super().__init__()
        self.heads = heads
        label_count = len(label_counts)
        seen_L = label_counts.float() + 1
        # a mean factor of one leaves the mechanism's own offsets as they are
        self.log_frequency = nn.Parameter((seen_L / seen_L.mean()).log())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.feature_embedding = nn.Embedding(feature_count, width)
            self.label_keys = nn.Embedding(label_count, width)
            self.document_norm = nn.LayerNorm(width)
            self.query = nn.Linear(width, width)
            # the weights of both encoders are drawn, so that the rest is the same for both
            self.query_key_value = nn.Linear(width, 3 * width)
            self.output = nn.Linear(width, width)
        for table in (self.feature_embedding, self.label_keys):
            table.weight.data *= EMBEDDING_SCALE
        self.label_attention = _mechanism(options, heads, width // heads, label_count, 2 * seed)
        self.token_attention: Attention | None = None
        if encoder == "attention":
            self.token_attention = _mechanism(
                options, heads, width // heads, feature_count, 2 * seed + 1
            )
        else:
            del self.query_key_value, self.output

    def encode(self, features: Tensor, weights: Tensor, starts_B: Tensor) -> Tensor:
        """Return the documents' embeddings [B, C].

        `features` and `weights` hold those of all documents, one after the other from `starts_B`.
        """
        device = features.device
        ends_B = torch.cat([starts_B[1:], torch.tensor([len(features)], device=device)])
        lengths_B = ends_B - starts_B
        document = torch.arange(len(lengths_B), device=device).repeat_interleave(lengths_B)
        total_B = weights.new_zeros(len(lengths_B)).index_add_(0, document, weights.abs())
        share = weights / total_B.clamp_min(TINY)[document]
        if self.token_attention is None:
            embedded_BC = F.embedding_bag(
                features,
                self.feature_embedding.weight,
                starts_B,
                mode="sum",
                per_sample_weights=share,
            )
            return self.document_norm(embedded_BC)
        counts = lengths_B.tolist()
        x_BTC, share_BT = (
            pad_sequence(list(flat.split(counts)), batch_first=True)
            for flat in (self.feature_embedding(features), share)
        )
        mask_BT = torch.arange(x_BTC.shape[1], device=device) < lengths_B[:, None]
        batch, length, width = x_BTC.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.query_key_value(x_BTC).chunk(3, dim=-1)
        )
        y_BHTD, _ = self.token_attention(q, k, v, causal=False, mask=mask_BT)
        x_BTC = x_BTC + self.output(y_BHTD.transpose(1, 2).reshape(x_BTC.shape))
        return self.document_norm((x_BTC * share_BT[..., None]).sum(dim=1))

    def log_weights(self, document_BC: Tensor, labels_BN: Tensor | None = None) -> Tensor:
        """Return the logarithm of the attention to each label [B, L], the mean of the heads'.

        Or only to `labels_BN`, [B, N]; the weights of all labels sum to one in any case.
        """
        q_HBD, k_HLD = (
            _split_heads(x, self.heads) for x in (self.query(document_BC), self.label_keys.weight)
        )
        if isinstance(self.label_attention, LinearAttention):
            scores, total_HB1 = self._linear_scores(self.label_attention, q_HBD, k_HLD, labels_BN)
            log_HBN = (scores.clamp_min(TINY) / total_HB1).log()
            frequency = self.log_frequency
            log_HBN = log_HBN + (frequency if labels_BN is None else frequency[labels_BN])
        else:
            log_HBN = self._quadratic_log_weights(q_HBD, k_HLD)
            if labels_BN is not None:
                log_HBN = log_HBN.gather(2, labels_BN.expand(self.heads, -1, -1))
        return log_HBN.logsumexp(dim=0) - math.log(self.heads)

    def _linear_scores(
        self, attention: LinearAttention, q_HBD: Tensor, k_HLD: Tensor, labels_BN: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the scores of the labels asked for and their sum over all labels, [H, B, 1]."""
        tensors = attention.feature_tensors(q_HBD.dtype)
        query_HBM, key_HLM = (
            attention.feature_map(
                x_HND[None],
                *tensors,
                is_query=is_query,
                # all at one place
                positions=torch.zeros(1, x_HND.shape[1], dtype=torch.long, device=x_HND.device),
            ).expand()[0]
            for x_HND, is_query in ((q_HBD, True), (k_HLD, False))
        )
        offset = torch.as_tensor(attention.normaliser_offset(q_HBD.dtype), device=q_HBD.device)
        all_HM1 = key_HLM.mT @ self.log_frequency.exp()[:, None]
        total_HB1 = query_HBM @ all_HM1 + offset.reshape(-1, 1, 1)
        if labels_BN is None:
            return query_HBM @ key_HLM.mT, total_HB1
        asked_HBNM = F.embedding(labels_BN, key_HLM.transpose(0, 1).flatten(1)).unflatten(
            -1, (self.heads, -1)
        )
        return torch.einsum("hbm,bnhm->hbn", query_HBM, asked_HBNM), total_HB1

    def _quadratic_log_weights(self, q_HBD: Tensor, k_HLD: Tensor) -> Tensor:
        attention = self.label_attention
        assert isinstance(attention, QuadraticAttention)
        scores_HBL = attention.scores(q_HBD[None], k_HLD[None])[0]
        if attention.normalization == "softmax":
            return (scores_HBL + self.log_frequency).log_softmax(dim=-1)
        scores_HBL = scores_HBL.clamp_min(TINY) * self.log_frequency.exp()
        return (scores_HBL / scores_HBL.sum(dim=-1, keepdim=True)).log()


def _mechanism(
    options: AttentionConfig, heads: int, head_dim: int, length: int, seed: int
) -> Attention:
    attention = build_attention(
        options, num_heads=heads, head_dim=head_dim, max_sequence_length=length, seed=seed
    )
    if getattr(attention, "local", "none") != "none":
        hint = "tells near keys from far ones, and labels stand nowhere; attention.local=none works"
        raise ConfigError("attention", options.name, hint)
    return attention


def _split_heads(x_NC: Tensor, heads: int) -> Tensor:
    return x_NC.unflatten(-1, (heads, -1)).transpose(0, 1)
