"""Tables 2 and 6: maps of x² by the error of attention outputs against exact spherical Yat.

The published protocol: random tokens, one attention layer whose projections of q, k, v and of the
output every method shares, and its output compared with that of the exact kernel.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from slayformer.attention.base import generator
from slayformer.attention.kernels import unit
from slayformer.paper.item import FAILS, HOLDS, HOLDS_AT, Claim, Data, Item, Request, Table
from slayformer.paper.published import TABLE_2, TABLE_6
from slayformer.paper.quadrature import quadrature_kernel
from slayformer.presets import make_attention

WIDTH, HEADS, BATCH, NODES, EPSILON = 64, 4, 8, 2, 1e-6
HEAD_WIDTH = WIDTH // HEADS


@dataclass(frozen=True)
class Scale:
    """Tokens, positive random features of a node (D) and features of x² (P)."""

    tokens: int
    exponential: int
    polynomial: int


SCALES = {"small": Scale(128, 8, 8), "medium": Scale(256, 16, 16), "large": Scale(512, 32, 32)}
# what each method is called in the table
LABELS = {
    "exact": "exact spherical Yat",
    "quadrature": "quadrature alone (R = 2), x² and exponentials exact",
    "exact_poly": "x² exact, with random exponentials",
    "anchor": "anchors (SLAY)",
    "laplace": "Laplace-only",
    "hadamard": "Hadamard",
    "nystrom": "Nyström",
    "tensor_sketch": "TensorSketch",
    "random_maclaurin": "Random Maclaurin",
    "uniform": "uniform (mean of v)",
}
# how much an error or a time has to be above anchors' for the claims of Table 2
SUBSTANTIAL, ORDERS_OF_MAGNITUDE, MARKEDLY_FASTER = 1.25, 10.0, 1.5
# how near to the published errors ours have to be
NEAR = 0.05
SIGNED = ("nystrom", "tensor_sketch", "random_maclaurin")


def options(method: str, scale: Scale) -> dict[str, Any]:
    """Return the options of SLAY that make up `method`; every method has P·D features a node."""
    common: dict[str, Any] = {"nodes": NODES, "epsilon": EPSILON, "backend": "torch"}
    both = scale.polynomial * scale.exponential
    if method == "laplace":
        return {**common, "fusion": "laplace_only", "exponential_features": both}
    if method == "hadamard":
        sizes = {"polynomial_features": both, "exponential_features": both}
        return {**common, **sizes, "fusion": "hadamard"}
    common["exponential_features"] = scale.exponential
    if method == "exact_poly":
        return {**common, "polynomial": "exact"}
    if method in SIGNED:
        common["denominator"] = "paper"
    return {**common, "polynomial": method, "polynomial_features": scale.polynomial}


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attend(method: str, scale: Scale, seed: int) -> Attend:
    """Return `method` as a function of q, k and v."""
    if method == "quadrature":
        return _quadrature_attention
    name, changes = "slay", dict[str, Any]()
    if method == "exact":
        name, changes = "yat_spherical", {"epsilon": EPSILON}
    elif method == "uniform":
        name, changes = "uniform", {"backend": "torch"}
    else:
        changes = options(method, scale)
    attention = make_attention(
        name,
        num_heads=HEADS,
        head_dim=HEAD_WIDTH,
        max_sequence_length=scale.tokens,
        seed=seed,
        **changes,
    ).eval()
    return lambda q, k, v: attention(q, k, v)[0]


def _quadrature_attention(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
    x = (unit(q_BHTD) @ unit(k_BHTD).mT).double()
    scores = quadrature_kernel(x, NODES, EPSILON).tril()
    return ((scores @ v_BHTD.double()) / scores.sum(-1, keepdim=True)).to(v_BHTD.dtype)


@torch.no_grad()
def errors(
    scale: Scale, *, biases: bool, seed: int, methods: Sequence[str] = tuple(LABELS)
) -> dict[str, dict[str, float]]:
    """Return relative ℓ2, cosine, mean squared error and processor ms of `methods`.

    The first is what the others are compared with.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        project_in = nn.Linear(WIDTH, 3 * WIDTH, bias=biases)
        project_out = nn.Linear(WIDTH, WIDTH, bias=biases)
    draws = generator(1000 + seed)
    tokens_BTD = torch.randn(BATCH, scale.tokens, WIDTH, generator=draws)
    heads = project_in(tokens_BTD).unflatten(-1, (3, HEADS, HEAD_WIDTH)).permute(2, 0, 3, 1, 4)
    q, k, v = (x.contiguous() for x in heads)
    found, exact = {}, torch.empty(0)
    for method in methods:
        one = attend(method, scale, seed)
        # what a first call sets up is not the method's time
        one(q[:1, :, :16], k[:1, :, :16], v[:1, :, :16])
        # of the processor, so that other work on the machine does not count
        start = time.process_time()
        y_BHTD = one(q, k, v)
        milliseconds = 1e3 * (time.process_time() - start)
        output = project_out(y_BHTD.transpose(1, 2).flatten(2)).double()
        exact = output if method == methods[0] else exact
        difference = output - exact
        found[method] = {
            "relative_error": float(difference.norm() / exact.norm()),
            "cosine": float(cosine_similarity(output.flatten(), exact.flatten(), dim=0)),
            "squared_error": float(difference.square().mean()),
            "latency_ms": milliseconds,
        }
    return found


def compute(request: Request) -> Data:
    """Return for each scale, bias setting and method the measures of every seed."""
    seeds = request.seed_count(quick=3, full=20)
    total, done = len(SCALES) * 2 * seeds, 0
    data: Data = {"seeds": seeds, "scales": {}}
    for name, scale in SCALES.items():
        data["scales"][name] = {}
        for biases in (False, True):
            rows = []
            for seed in range(seeds):
                rows.append(errors(scale, biases=biases, seed=seed))
                done += 1
                request.progress(done / total)
            data["scales"][name]["biases" if biases else "bias-free"] = {
                method: {key: [row[method][key] for row in rows] for key in rows[0][method]}
                for method in LABELS
            }
    return data


def mean_std(values: list[float]) -> str:
    """Return mean ± sample standard deviation over seeds, in as many digits as they are worth."""
    mean = statistics.fmean(values)
    if abs(mean) >= 100:
        # heavy tails: the middle seed says more than the mean
        return f"{mean:.1e} (median {statistics.median(values):.1e})"
    std = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{mean:.3f}{std}"


def tables(data: Data) -> list[Table]:
    """Return Table 2 (the large scale) and Table 6 (relative errors at all three)."""
    return [_large(data), _sweep(data)]


def _mean(data: Data, scale: str, biases: str, method: str, key: str) -> float:
    return statistics.fmean(data["scales"][scale][biases][method][key])


def _large(data: Data) -> Table:
    rows = []
    for method, label in LABELS.items():
        published = TABLE_2.get(method)
        own: Mapping[str, list[float]] = data["scales"]["large"]["bias-free"][method]
        biased = data["scales"]["large"]["biases"][method]
        rows.append(
            [
                label,
                mean_std(own["relative_error"]),
                mean_std(own["cosine"]),
                f"{statistics.fmean(own['squared_error']):.2e}",
                mean_std(biased["relative_error"]),
                f"{statistics.median(own['latency_ms']):.0f}",
                "–" if published is None else f"{published.relative_error:,.3f}",
                "–" if published is None else f"{published.cosine:.3f}",
                "–" if published is None else f"{published.squared_error:.2e}",
                "–" if published is None else f"{published.latency_ms:,.0f}",
            ]
        )
    columns = [
        "method",
        "relative ℓ2",
        "cosine",
        "MSE",
        "relative ℓ2, default biases",
        "forward (processor ms)",
        "published ℓ2",
        "published cosine",
        "published MSE",
        "published (ms)",
    ]
    note = (
        f"{data['seeds']} seeds, mean ± standard deviation; T = 512, R = 2, D = P = 32, "
        f"ε = 1e-6; projections without biases unless said. Times: our CPU, processor time, torch "
        "engine; theirs a GPU. The published exact row repeats Hadamard's."
    )
    return Table("table_2_polynomial_ablation", "Table 2: maps of x²", columns, rows, note)


def _sweep(data: Data) -> Table:
    rows = []
    for method, label in LABELS.items():
        row = [label]
        for biases in ("bias-free", "biases"):
            row += [
                mean_std(data["scales"][scale][biases][method]["relative_error"])
                for scale in SCALES
            ]
        published = TABLE_6.get(method)
        row += ["–"] * 3 if published is None else [_short(value) for value in published]
        rows.append(row)
    columns = ["method"]
    for kind in ("", "default biases, ", "published, "):
        columns += [f"{kind}{scale}" for scale in SCALES]
    return Table(
        "table_6_polynomial_sweep",
        "Table 6: relative ℓ2 of outputs by scale",
        columns,
        rows,
        f"{data['seeds']} seeds. {_consequence(data)}",
    )


def _short(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:,.1f}" if value < 100 else f"{value:.1e}"


def _worse_than_uniform(data: Data, method: str, biases: str = "bias-free") -> list[str]:
    return [
        scale
        for scale in SCALES
        if _mean(data, scale, biases, method, "relative_error")
        > _mean(data, scale, biases, "uniform", "relative_error")
    ]


def _consequence(data: Data) -> str:
    """Return in one sentence what the table says."""
    worse = _worse_than_uniform(data, "anchor")
    against = f"worse than the mean of v at {', '.join(worse)}" if worse else "better than it"
    anchor, exact, quadrature = (
        _mean(data, "large", "bias-free", method, "relative_error")
        for method in ("anchor", "exact_poly", "quadrature")
    )
    return (
        f"Anchors are {against}; of their error at the large scale ({anchor:.2f}) random "
        f"exponentials alone make {exact:.2f} and quadrature alone {quadrature:.2f}, signed maps "
        "are orders of magnitude off, and a bias shared by all tokens makes every method look "
        "nearer."
    )


def claims(data: Data) -> list[Claim]:
    """Return the paper's conclusions from these tables with what we measured."""

    def error(method: str, biases: str = "bias-free", scale: str = "large") -> float:
        return _mean(data, scale, biases, method, "relative_error")

    anchors = " / ".join(f"{error('anchor', scale=scale):.3f}" for scale in SCALES)
    biased = " / ".join(f"{error('anchor', 'biases', scale):.3f}" for scale in SCALES)
    near = all(
        abs(error("anchor", "biases", s) - TABLE_6["anchor"][i]) < NEAR
        for i, s in enumerate(SCALES)
    )
    positive = ("anchor", "laplace", "hadamard")
    best_two = sorted(positive, key=error)[:2]
    lowest = set(best_two) == {"anchor", "laplace"}
    signed = min(error(method) for method in ("tensor_sketch", "random_maclaurin"))
    faster = _mean(data, "large", "bias-free", "laplace", "latency_ms") / _mean(
        data, "large", "bias-free", "anchor", "latency_ms"
    )
    worse = _worse_than_uniform(data, "anchor")
    uniform = " / ".join(f"{error('uniform', scale=scale):.3f}" for scale in SCALES)
    return [
        Claim(
            "Anchors: relative ℓ2 .663 / .567 / .494 at small / medium / large "
            f"(to within {NEAR:g})",
            "Table 6",
            f"{biased} with default biases, {anchors} without",
            f"{HOLDS_AT} projections with biases" if near else FAILS,
        ),
        Claim(
            "Anchor and Laplace-only features have the lowest errors",
            "Section 3.1",
            ", ".join(f"{LABELS[m]} {error(m):.3f}" for m in positive),
            HOLDS if lowest else FAILS,
        ),
        Claim(
            "Anchors represent the kernel (implied: better than not attending)",
            "Section 3.1",
            f"anchors {anchors}, mean of v {uniform}",
            HOLDS
            if not worse
            else FAILS
            if len(worse) == len(SCALES)
            else f"{HOLDS_AT} {', '.join(s for s in SCALES if s not in worse)}",
        ),
        Claim(
            "Anchors are markedly faster than Laplace-only at equal features (3.9×; by "
            f"{MARKEDLY_FASTER:g}× or more)",
            "Table 2",
            f"{faster:.1f}× on our CPU",
            HOLDS if faster >= MARKEDLY_FASTER else FAILS,
        ),
        Claim(
            "Nyström is substantially less accurate than anchors (70 against .53; an error "
            f"{SUBSTANTIAL:g}× theirs or more)",
            "Table 2",
            f"{error('nystrom'):.2f} against {error('anchor'):.2f}, "
            f"{error('nystrom') / error('anchor'):.2f}× (mean of v {error('uniform'):.2f})",
            HOLDS if error("nystrom") >= SUBSTANTIAL * error("anchor") else FAILS,
        ),
        Claim(
            "TensorSketch and Random Maclaurin are unstable, orders of magnitude off (10⁴; "
            f"{ORDERS_OF_MAGNITUDE:g}× anchors' error or more)",
            "Table 2",
            f"the better of the two errs by {signed:.3g} (relative ℓ2, large)",
            HOLDS if signed >= ORDERS_OF_MAGNITUDE * error("anchor") else FAILS,
        ),
    ]


ITEM = Item(
    name="polynomial_ablation",
    title="maps of x² compared by attention outputs",
    sources=("Table 2", "Table 6"),
    minutes=3,
    compute=compute,
    published="anchor and Laplace-only features come nearest to the exact kernel; anchors are "
    "faster and become the default",
    tables=tables,
    claims=claims,
)
