"""Table 1: properties of the maps of x² and of whole mechanisms, each found by measuring."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from slayformer.attention.base import Attention, generator
from slayformer.attention.polynomial import POLYNOMIALS
from slayformer.attention.states import tensor_bytes, tensors_of
from slayformer.evaluation.attention_sample import attention_weights, pair_scores
from slayformer.paper.item import FAILS, HOLDS, Claim, Data, Item, Request, Table
from slayformer.paper.mechanisms import one_head
from slayformer.paper.published import TABLE_1
from slayformer.paper.theory import MOST_ERRORS, unit_pairs

WIDTH, BUDGET = 64, 8
COSINES = (-0.9, -0.5, 0.0, 0.5, 0.9)
MECHANISMS = (
    "softmax",
    "yat",
    "yat_spherical",
    "slay",
    "slay_best",
    "slay_block_quadratic",
    "slay_tensor_sketch",
    "slay_random_maclaurin",
    "linear_elu",
    "performer",
    "cosformer",
)
SHORT, LONG = 1024, 2048
# a ratio of FLOPs for twice the length; linear is 2, quadratic 4
LINEAR_BELOW = 2.5
LENGTHENED = 100.0


@torch.no_grad()
def map_statistics(name: str, draws: int) -> dict[str, Any]:
    """Return the bias of ⟨φ(q), φ(k)⟩ at COSINES over `draws` maps, and its smallest values."""
    q, k = unit_pairs(torch.tensor(COSINES, dtype=torch.float64), WIDTH, 3)
    many = torch.randn(200, WIDTH, generator=generator(4), dtype=torch.float64)
    many = many / many.norm(dim=-1, keepdim=True)
    own: dict[str, Any] = {"anchor_scale": "unbiased"} if name == "anchor" else {}
    products, lowest, negative = [], math.inf, 0.0
    for seed in range(draws):
        feature_map = POLYNOMIALS[name](
            budget=BUDGET, heads=1, width=WIDTH, seed=seed, trainable=False, **own
        )
        tensors = feature_map.tensors(torch.float64)

        def features(u: Tensor, tensors: Any = tensors, feature_map: Any = feature_map) -> Tensor:
            return feature_map.features(u[None, None], *tensors).expand()[0, 0]

        products.append((features(q) * features(k)).sum(-1))
        if seed < 20:
            phi = features(many)
            scores = phi @ phi.mT
            lowest = min(lowest, float(scores.min()))
            # where x² itself is the score, rounding is not a sign
            negative += float((scores < -1e-12).double().mean()) / min(draws, 20)
    all_products = torch.stack(products)
    error = all_products.std(0) / math.sqrt(draws)
    return {
        "features": feature_map.feature_count,
        "flops": feature_map.flops() + 2 * feature_map.feature_count,
        "bias": all_products.mean(0) - torch.tensor(COSINES, dtype=torch.float64).square(),
        "error": error,
        "lowest": lowest,
        "negative": negative,
    }


def heads(length: int, seed: int = 0) -> Tensor:
    """Return Gaussian q, k and v [3, 1, 1, T, D], fp64."""
    shape = (3, 1, 1, length, WIDTH)
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def counted_flops(attention: Attention, length: int) -> int:
    """Return the FLOPs of matrix products that a forward pass really makes."""
    q, k, v = heads(length).float()
    with FlopCounterMode(display=False) as counter:
        if attention.config.name == "softmax":
            # the fused call hides its products from the counter on a CPU
            (q @ k.mT).softmax(-1) @ v
        else:
            attention(q, k, v)
    return counter.get_total_flops()


def state_bytes(attention: Attention, length: int) -> int:
    """Return the bytes of the numbers in the state after `length` tokens."""
    q, k, v = heads(length).float()
    state = attention(q, k, v, state=attention.init_state(1))[1]
    # positions and masks are a few integers a token
    return tensor_bytes([x for x in tensors_of(state) if x.is_floating_point()])


@torch.no_grad()
def mechanism_statistics(name: str, length: int) -> dict[str, float]:
    """Return what the mechanism does to FLOPs, state, weights, scores and causality."""
    # the kernel itself, also of a mechanism that puts a softmax over it
    changes = {"normalization": "kernel"} if name == "yat" else {}
    attention = one_head(name, WIDTH, 0, **changes)
    q, k, v = heads(length)
    # opposite and orthogonal vectors as well, and one that is zero
    k[0, 0, 1], k[0, 0, 2], k[0, 0, 3] = -q[0, 0, -1], 0, q[0, 0, -2]
    weights = attention_weights(attention, q, k)[0, 0]
    changed_k, changed_v = k.clone(), v.clone()
    changed_k[..., -1, :], changed_v[..., -1, :] = 7.0, -7.0
    before, after = attention(q, k, v)[0], attention(q, changed_k, changed_v)[0]
    places = torch.arange(length)[None]
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    scores = [
        float(pair_scores(attention, scale * q, scale * k, places, places).abs().max())
        for scale in (1.0, LENGTHENED)
    ]
    return {
        "flops_ratio": counted_flops(attention, LONG) / counted_flops(attention, SHORT),
        "state_ratio": state_bytes(attention, LONG) / state_bytes(attention, SHORT),
        "state_bytes": state_bytes(attention, SHORT),
        "smallest_weight": float(weights[visible].min()),
        "row_sum_error": float((weights.sum(-1) - 1).abs().max()),
        "leak": float((before - after)[..., :-1, :].abs().max()),
        "score_growth": scores[1] / scores[0],
    }


def compute(request: Request) -> Data:
    """Return the statistics of every map of the paper's Table 1 and of every mechanism."""
    draws = request.choose(quick=500, full=10_000)
    total = len(TABLE_1) + len(MECHANISMS)
    maps, found = {}, {}
    for number, name in enumerate(TABLE_1):
        maps[name] = map_statistics(name, draws)
        request.progress((number + 1) / total)
    for number, name in enumerate(MECHANISMS):
        found[name] = mechanism_statistics(name, length=160)
        request.progress((len(TABLE_1) + number + 1) / total)
    return {"draws": draws, "maps": maps, "mechanisms": found}


def is_unbiased(row: dict[str, Any]) -> bool:
    """Return whether no mean is farther from x² than its standard error explains."""
    pairs = zip(row["bias"], row["error"], strict=True)
    return all(abs(bias) <= MOST_ERRORS * error + 1e-12 for bias, error in pairs)


def tables(data: Data) -> list[Table]:
    """Return Table 1 with our measurements, and the properties of mechanisms."""
    return [_maps(data), _mechanisms(data)]


def _maps(data: Data) -> Table:
    rows = []
    for name, published in TABLE_1.items():
        row = data["maps"][name]
        zero, half = COSINES.index(0.0), COSINES.index(0.5)
        rows.append(
            [
                name,
                f"{row['features']:,}",
                published.features,
                f"{row['flops']:,}",
                published.cost,
                *(f"{row['bias'][i]:+.4f} ± {row['error'][i]:.4f}" for i in (zero, half)),
                "yes" if is_unbiased(row) else "no",
                published.unbiased,
                f"{100 * row['negative']:.1f}",
                "yes" if row["lowest"] >= -1e-12 else "no",
                published.never_negative,
            ]
        )
    columns = [
        "map",
        "features",
        "published",
        "FLOPs a vector",
        "published",
        "bias at x = 0",
        "bias at x = 0.5",
        "unbiased?",
        "published",
        "pairs below 0 (%)",
        "never negative?",
        "published",
    ]
    note = (
        f"Head width {WIDTH}, {BUDGET} features asked for, bias against x² ± its standard error "
        f"over {data['draws']:,} draws; anchors scaled so that x² has the factor 1. The exact map "
        "has its d(d + 1)/2 different products."
    )
    return Table("table_1_maps", "Table 1: maps of x²", columns, rows, note)


def _mechanisms(data: Data) -> Table:
    rows = []
    for name in MECHANISMS:
        row = data["mechanisms"][name]
        growth = row["score_growth"]
        rows.append(
            [
                name,
                f"{row['flops_ratio']:.2f}",
                f"{row['state_bytes'] / 1024:,.0f}",
                "constant" if row["state_ratio"] == 1 else f"×{row['state_ratio']:.2f}",
                f"{row['smallest_weight']:.1e}",
                "yes" if row["smallest_weight"] >= 0 else "no",
                f"{row['row_sum_error']:.0e}",
                "yes" if growth < 1.01 else f"no, ×{growth:.1e}",
                "yes" if row["leak"] == 0 else f"no: {row['leak']:.0e}",
            ]
        )
    columns = [
        "mechanism",
        f"FLOPs at {LONG:,} ÷ at {SHORT:,} tokens",
        f"state at {SHORT:,} tokens (KiB)",
        "state at twice the tokens",
        "smallest weight",
        "weights ≥ 0?",
        "|row sum − 1|",
        "scores bounded?",
        "causal?",
    ]
    note = (
        f"One head of width {WIDTH}. FLOPs: matrix products counted in a forward pass (2 is "
        "linear, 4 quadratic). Bounded: the largest score when q and k are "
        f"{LENGTHENED:.0f} times as long. Rows off 1: δ in the normaliser; signed maps: rows that "
        "the guard replaced count as their own v. Causal: earlier outputs when the last key and "
        "value change, bit for bit."
    )
    return Table("table_1_mechanisms", "Properties of the mechanisms", columns, rows, note)


def claims(data: Data) -> list[Claim]:
    """Return what the paper says of these properties."""
    maps, found = data["maps"], data["mechanisms"]
    signs = {name: row["lowest"] >= -1e-12 for name, row in maps.items()}
    expected = {name: row.never_negative == "yes" for name, row in TABLE_1.items()}
    unbiased = [name for name, row in maps.items() if is_unbiased(row)]
    slay = found["slay"]
    return [
        Claim(
            "Exact and anchor features keep inner products ≥ 0, signed sketches and Nyström do not",
            "Table 1",
            ", ".join(
                f"{name} {100 * row['negative']:.1f} % below 0" for name, row in maps.items()
            ),
            HOLDS if signs == expected else FAILS,
        ),
        Claim(
            "Exact and Random Maclaurin are unbiased, anchors are not, TensorSketch approximately",
            "Table 1",
            f"unbiased within {MOST_ERRORS:.0f} standard errors of {data['draws']:,} draws: "
            + ", ".join(unbiased),
            HOLDS
            if {"exact", "random_maclaurin"} <= set(unbiased) and "anchor" not in unbiased
            else FAILS,
        ),
        Claim(
            "SLAY takes linear time and constant memory a token",
            "Section 2.5",
            f"twice the tokens cost {slay['flops_ratio']:.2f} times the FLOPs (softmax "
            f"{found['softmax']['flops_ratio']:.2f}), the state stays at "
            f"{slay['state_bytes'] / 1024:,.0f} KiB a head",
            HOLDS if slay["flops_ratio"] < LINEAR_BELOW and slay["state_ratio"] == 1 else FAILS,
        ),
        Claim(
            "SLAY's scores are bounded and its weights never negative",
            "Appendix, numerical stability",
            f"scores grow by {slay['score_growth']:.3f} when q and k are {LENGTHENED:.0f} times as "
            f"long; smallest weight {slay['smallest_weight']:.1e}",
            HOLDS if slay["score_growth"] < 1.01 and slay["smallest_weight"] >= 0 else FAILS,
        ),
    ]


ITEM = Item(
    name="properties",
    title="properties of maps and mechanisms",
    sources=("Table 1",),
    minutes=0.5,
    compute=compute,
    published="of the maps of x² the exact one and anchors keep inner products non-negative",
    tables=tables,
    claims=claims,
)
