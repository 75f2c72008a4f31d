"""How a mechanism attends, measured: its error against exact spherical Yat attention, the entropy
of its weights, its normalisers, and its score as a function of the cosine.

Everything is computed in fp64 from the mechanism's own parameters and draws, so an error is the
map's and not rounding's. Fidelity to the kernel says nothing about the loss of a language model.

Shape suffixes: B batch, H heads, T queries, S keys, D head width, N pairs (a query and a key).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from slayformer.attention.base import Attention
from slayformer.attention.linear import LinearAttention
from slayformer.baselines.uniform import UniformConfig
from slayformer.config import AttentionConfig
from slayformer.data.loader import Batch
from slayformer.evaluation.attention_sample import (
    COSINES,
    Sample,
    attention_weights,
    entropy,
    random_sample,
    window_samples,
)
from slayformer.finite import deviation
from slayformer.model.gpt2 import GPT2

UNIFORM = UniformConfig(name="uniform")
# the length at which states are compared
STATE_TOKENS = 1024
# bins of a normaliser per visible key over its median; the outer ones hold all beyond them
NORMALISER_EDGES = np.linspace(-2.0, 4.0, 61)


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over samples; `std` is None for one."""

    mean: float
    std: float | None


@dataclass(frozen=True)
class Curve:
    """Scores at COSINES: their mean and 10th and 90th percentile, NaN where there was no pair.

    The unit is the head's mean absolute score over visible pairs: 2 is twice an average key.
    """

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class Measurement:
    """One mechanism on random vectors, or one layer of a model on real ones."""

    mechanism: str
    # None for random vectors
    layer: int | None
    head_dim: int
    samples: int
    control: bool
    # no weight can be negative
    positive: bool
    # the time of a token and the state do not grow with the length
    constant_time: bool
    # None for mechanisms over explicit pairs
    features: int | None
    # of one head after STATE_TOKENS tokens, fp32
    state_bytes: int
    # of one head
    parameters: int
    # ‖y − exact‖/‖exact‖ and the cosine between y and exact, over all positions and heads
    relative_error: Spread
    cosine: Spread
    # of |weights|, normalised: weights of signed maps can be negative
    entropy_nats: Spread
    # shares of rows whose normaliser is not positive, and of rows that the guard replaced
    nonpositive_share: float
    guarded_share: float
    entropy_by_position: np.ndarray
    # share of rows in each bin of NORMALISER_EDGES
    normaliser_histogram: np.ndarray
    score_curve: Curve
    exact_curve: Curve


def with_uniform(options: Sequence[AttentionConfig]) -> list[AttentionConfig]:
    """Return `options` with `uniform`, the floor every mechanism must beat, if it is not there."""
    present = any(isinstance(one, UniformConfig) for one in options)
    return [*options] if present else [*options, UNIFORM]


def measure(
    options: Sequence[AttentionConfig],
    *,
    head_dim: int,
    length: int,
    seeds: int,
    progress: Callable[[], None] = lambda: None,
) -> list[Measurement]:
    """Return a measurement of each mechanism, and of `uniform`, on iid Gaussian q, k and v.

    Seeds 0 to `seeds` − 1 each draw q, k, v of one head and the mechanism's own randomness; all
    mechanisms see the same vectors. `progress` is called after each mechanism and seed.
    """
    options = with_uniform(options)
    tallies = [Tally(one.name, layer=None) for one in options]
    for seed in range(seeds):
        sample = random_sample(head_dim=head_dim, length=length, seed=seed)
        for one, tally in zip(options, tallies, strict=True):
            tally.add(sample.build(one, seed), sample)
            progress()
    return [tally.measurement() for tally in tallies]


def measure_model(
    model: GPT2, windows: Iterable[Batch], progress: Callable[[], None] = lambda: None
) -> list[Measurement]:
    """Return a measurement of each layer's own mechanism, and of `uniform`, on real q, k and v.

    They are what `model` (on the CPU, in evaluation mode) gives its mechanisms when it reads
    `windows`, each a batch of one sample. `progress` is called after each layer and window.
    """
    layers: list[Attention] = [block.attention for block in model.blocks]  # type: ignore[misc]
    tallies = [
        (Tally(attention.config.name, layer), Tally(UNIFORM.name, layer))
        for layer, attention in enumerate(layers)
    ]
    for window in windows:
        samples = window_samples(model, window)
        for attention, (own, uniform), sample in zip(layers, tallies, samples, strict=True):
            own.add(attention, sample)
            uniform.add(sample.build(UNIFORM, seed=0), sample)
            progress()
    rows = [tally.measurement() for pair in tallies for tally in pair]
    return rows[::2] if isinstance(layers[0].config, UniformConfig) else rows


class Tally:
    """Collects what samples show of one mechanism."""

    def __init__(self, mechanism: str, layer: int | None) -> None:
        self.mechanism, self.layer = mechanism, layer
        self.attention: Attention | None = None
        self.errors: list[float] = []
        self.cosines: list[float] = []
        self.nonpositive: list[float] = []
        self.guarded: list[float] = []
        self.entropies: list[Tensor] = []
        self.normalisers: list[Tensor] = []
        # cosine, score and exact score of pairs
        self.pairs: list[Tensor] = []

    @torch.no_grad()
    def add(self, attention: Attention, sample: Sample) -> None:
        """Measure `attention` on `sample`."""
        self.attention = attention
        exact, y = sample.exact_BHTD, sample.run(attention)
        guarded = getattr(attention, "guarded_share", None)
        self.guarded.append(0.0 if guarded is None else float(guarded))
        self.errors.append(float((y - exact).norm() / exact.norm()))
        self.cosines.append(float(cosine_similarity(y.flatten(), exact.flatten(), dim=0)))

        heads = sample.q_BHTD, sample.k_BHTD
        weights_BHTS = attention_weights(attention, *heads, sample.document_ids_BT)
        self.entropies.append(entropy(weights_BHTS).mean((0, 1)))

        scores_BHTS = sample.scores(attention)
        normaliser_BHT = sample.normalisers(attention)
        self.nonpositive.append(float((normaliser_BHT <= 0).double().mean()))
        per_key_BHT = normaliser_BHT / sample.visible_B1TS.sum(-1)
        median_BH1 = per_key_BHT.abs().median(-1, keepdim=True).values
        self.normalisers.append((per_key_BHT / median_BH1).flatten())

        cosine_NH = cosine_similarity(sample.pair_q_NH1D, sample.pair_k_NH1D, dim=-1)[..., 0]
        ratio_NH = sample.pair_ratios(attention, scores_BHTS)
        shown = cosine_NH, ratio_NH, sample.exact_ratio_NH
        self.pairs.append(torch.stack([x.flatten() for x in shown]))

    def measurement(self) -> Measurement:
        """Return the averages over all samples added; there must be one at least."""
        attention = self.attention
        assert attention is not None
        normalisers = torch.cat(self.normalisers).nan_to_num().numpy()
        inside = normalisers.clip(NORMALISER_EDGES[0], NORMALISER_EDGES[-1])
        counts, _ = np.histogram(inside, NORMALISER_EDGES)
        cosines, ratios, exact_ratios = torch.cat(self.pairs, dim=1).numpy()
        parameters = sum(parameter.numel() for parameter in attention.parameters())
        return Measurement(
            mechanism=self.mechanism,
            layer=self.layer,
            head_dim=attention.head_dim,
            samples=len(self.errors),
            control=attention.control,
            positive=attention.positive,
            constant_time=isinstance(attention, LinearAttention),
            features=attention.feature_count if isinstance(attention, LinearAttention) else None,
            state_bytes=attention.state_bytes(STATE_TOKENS) // attention.num_heads,
            parameters=parameters // attention.num_heads,
            relative_error=_spread(self.errors),
            cosine=_spread(self.cosines),
            entropy_nats=_spread([float(one.mean()) for one in self.entropies]),
            nonpositive_share=statistics.fmean(self.nonpositive),
            guarded_share=statistics.fmean(self.guarded),
            entropy_by_position=torch.stack(self.entropies).mean(0).numpy(),
            normaliser_histogram=counts / len(normalisers),
            score_curve=_curve(cosines, ratios),
            exact_curve=_curve(cosines, exact_ratios),
        )


def _spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.fmean(values), deviation(values))


def _curve(cosines: np.ndarray, ratios: np.ndarray) -> Curve:
    """Return the curve of pairs, each counted at the nearest of COSINES."""
    nearest_place = np.abs(cosines[:, None] - COSINES).argmin(axis=1)
    statistic = np.full((3, len(COSINES)), np.nan)
    for place in np.unique(nearest_place):
        there = ratios[nearest_place == place]
        statistic[:, place] = there.mean(), *np.quantile(there, (0.1, 0.9))
    return Curve(*statistic)
