"""Every pair of SLAY's choices together: the walk against the dense form, and what is promised."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from slayformer.attention.kernels import unit
from slayformer.attention.slay import SlayAttention, SlayConfig
from slayformer.config_loading import load_attention_config
from slayformer.errors import ConfigError
from slayformer.presets import load_preset

PAPER = dataclasses.asdict(load_preset("slay"))

CHOICES: dict[str, list[Any]] = {
    "polynomial": [
        "exact",
        "anchor",
        "block_quadratic",
        "learned_quadratic",
        "nystrom",
        "random_maclaurin",
        "tensor_sketch",
    ],
    "fusion": ["tensor", "hadamard", "sketch", "laplace_only", "polynomial_only"],
    "anchor_scale": ["paper", "unbiased"],
    "random_features": ["iid", "orthogonal"],
    "quadrature": ["gauss_laguerre", "fitted"],
    "nodes": [1, 3],
    "trainable": [False, True],
    "local": ["none", "chunk", "window"],
    "denominator": ["guard", "paper"],
    "local_kernel": ["yat", "softmax"],
    "learnable_epsilon": [False, True],
}


def options(**changes: Any) -> SlayConfig:
    """Return the paper's options with `changes`; small maps, sizes that the fusion asks for."""
    plain = {**PAPER, "polynomial_features": 12, "exponential_features": 5, "block_width": 3}
    plain |= {"local_size": 6, **changes}
    if plain["fusion"] == "hadamard":
        plain["polynomial_features"] = plain["exponential_features"]
    if plain["fusion"] == "sketch":
        plain["sketch_features"] = 7
    config = SlayConfig(**plain)
    config.check()
    return config


def is_allowed(**changes: Any) -> bool:
    try:
        options(**changes)
    except ConfigError:
        return False
    return True


def pairwise() -> list[dict[str, Any]]:
    """Return few allowed combinations in which every allowed pair of choices occurs."""
    everything = [
        dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())
    ]
    allowed = [combination for combination in everything if is_allowed(**combination)]

    def pairs(combination: dict[str, Any]) -> set[Any]:
        return set(itertools.combinations(sorted(combination.items(), key=str), 2))

    missing: set[Any] = set().union(*(pairs(c) for c in allowed))
    chosen = []
    draws = torch.Generator().manual_seed(0)
    while missing:
        some = torch.randint(0, len(allowed), (300,), generator=draws).tolist()
        best = max((allowed[i] for i in some), key=lambda c: len(pairs(c) & missing))
        if not pairs(best) & missing:
            best = next(c for c in allowed if pairs(c) & missing)
        chosen.append(best)
        missing -= pairs(best)
    return chosen


PAIRWISE = pairwise()


def build(config: SlayConfig, *, width: int = 6, seed: int = 3) -> SlayAttention:
    return SlayAttention(config, num_heads=2, head_dim=width, max_sequence_length=99, seed=seed)


def dense(attention: SlayAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the causal dense form from expanded features and near scores."""
    length = q.shape[2]
    positions = torch.arange(length)[None].expand(q.shape[0], -1)
    tensors = attention.feature_tensors(q.dtype)
    phi_q, phi_k = (
        attention.feature_map(x, *tensors, is_query=is_query, positions=positions).expand()
        for x, is_query in ((q, True), (k, False))
    )
    kernel = phi_q @ phi_k.mT
    if attention.config.local != "none":
        size = attention.config.local_size
        distance = positions[0][:, None] - positions[0][None]
        near = distance < size
        if attention.config.local == "chunk":
            near = positions[0][:, None] // size == positions[0][None] // size
        kernel = torch.where(near, attention.near_scores(q, k, *tensors), kernel)
    kernel = kernel.tril()
    normaliser = kernel.sum(-1, keepdim=True) + attention.normaliser_offset(q.dtype)
    if attention.guard_floor:
        keys = torch.arange(1, length + 1, dtype=q.dtype)[:, None]
        sound = normaliser > attention.guard_floor * keys
        return torch.where(sound, kernel @ v / torch.where(sound, normaliser, 1.0), v)
    return kernel @ v / normaliser


@pytest.mark.parametrize("combination", PAIRWISE, ids=lambda c: "-".join(map(str, c.values())))
def test_walk_equals_the_dense_form_with_gradients_of_everything(combination):
    attention = build(options(**combination)).double()
    draws = torch.Generator().manual_seed(1)
    for parameter in attention.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=draws).double()
    *inputs, weight = torch.randn(4, 2, 2, 41, 6, generator=draws, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in inputs]
    everything = [*inputs, *attention.parameters()]
    results = []
    for chunk in (0, 8):
        attention.chunk = chunk
        y = attention(*inputs)[0] if chunk else dense(attention, *inputs)
        gradients = torch.autograd.grad((y * weight).sum(), everything, allow_unused=True)
        results.append([y, *(torch.zeros(1) if g is None else g for g in gradients)])
    for reference, ours in zip(*results, strict=True):
        scale = max(1.0, float(reference.detach().abs().max()))
        assert float((ours - reference).detach().abs().max()) < 1e-9 * scale
    # token by token through the state
    state, parts = attention.init_state(2), []
    state = type(state)(
        state.memory_BHMN.double(), state.memory_document_B, state.place, state.recent
    )
    for t in range(41):
        y, state = attention(*(x[:, :, t : t + 1] for x in inputs), state=state)
        parts.append(y)
    steps = torch.cat(parts, 2)
    scale = max(1.0, float(results[0][0].detach().abs().max()))
    assert float((steps - results[0][0]).detach().abs().max()) < 1e-9 * scale


def test_pairwise_leaves_out_only_what_validation_refuses():
    for polynomial in CHOICES["polynomial"]:
        for fusion in CHOICES["fusion"]:
            seen = any(c["polynomial"] == polynomial and c["fusion"] == fusion for c in PAIRWISE)
            own_size = polynomial in ("exact", "block_quadratic", "learned_quadratic")
            assert seen != (own_size and fusion == "hadamard")
    assert not is_allowed(fusion="tensor", sketch_features=8)
    assert not is_allowed(polynomial="tensor_sketch", local="chunk")
    assert not is_allowed(learnable_epsilon=True)
    assert not is_allowed(learnable_epsilon=True, local="chunk", local_kernel="softmax")
    with pytest.raises(ConfigError, match=r"block_center=1e.200: .* at most 100"):
        options(polynomial="learned_quadratic", block_center=1e200)
    with pytest.raises(ConfigError, match="anchor, nystrom"):
        options(polynomial="exact", fusion="hadamard")


def test_sizes_decide_what_validation_says():
    plain = {**PAPER, "fusion": "hadamard"}
    with pytest.raises(ConfigError, match="exponential_features=16"):
        load_attention_config(plain)


def denominators(config: SlayConfig, seed: int, *, length: int, width: int, dtype) -> Tensor:
    """Return Σ_{s≤t} φ(q_t)·φ(k_s) + δ for random heads, [rows]."""
    attention = build(config, width=width, seed=seed)
    draws = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 1, 2, length, width, generator=draws).to(dtype)
    tensors = attention.feature_tensors(torch.float32)
    positions = torch.arange(length)[None]
    phi_q, phi_k = (
        attention.feature_map(x.float(), *tensors, is_query=is_query, positions=positions)
        for x, is_query in ((q, True), (k, False))
    )
    kernel = phi_q.scores(phi_k).tril().sum(-1)
    return (kernel + attention.normaliser_offset(torch.float32)).flatten()


@pytest.mark.parametrize("polynomial", ["random_maclaurin", "tensor_sketch"])
def test_signed_maps_have_negative_denominators(polynomial):
    """At P = 8 and d = 16 about a quarter of the rows (measured: 26–28 %)."""
    config = load_attention_config({**PAPER, "polynomial": polynomial})
    rows = torch.cat(
        [
            denominators(config, seed, length=128, width=16, dtype=torch.float32)
            for seed in range(20)
        ]
    )
    assert 0.05 < float((rows <= 0).float().mean()) < 0.5


POSITIVE_MAPS: list[dict[str, Any]] = [
    {},
    {"anchor_scale": "unbiased", "random_features": "orthogonal"},
    {"fusion": "laplace_only"},
    {"polynomial": "block_quadratic", "polynomial_features": 40, "fusion": "polynomial_only"},
    {"polynomial": "learned_quadratic", "polynomial_features": 66, "fusion": "polynomial_only"},
]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_positive_maps_have_none_in_a_thousand_seeds(dtype):
    for seed in range(1000):
        config = load_attention_config({**PAPER, **POSITIVE_MAPS[seed % len(POSITIVE_MAPS)]})
        assert denominators(config, seed, length=24, width=16, dtype=dtype).min() > 0


def test_guard_counts_rows_and_bounds_outputs():
    plain = {**PAPER, "polynomial": "tensor_sketch"}
    draws = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 300, 16, generator=draws)
    published = build(load_attention_config({**plain, "denominator": "paper"}), width=16)
    guarded = build(load_attention_config(plain), width=16)
    wild, calm = published(q, k, v)[0], guarded(q, k, v)[0]
    assert published.guarded_share is None
    assert guarded.guarded_share is not None
    share = guarded.guarded_share.item()
    # a guarded row is its own v, any other is the published one
    own = (calm == v).all(-1)
    assert 0.05 < share < 0.9
    assert float(own.float().mean()) == pytest.approx(share, abs=1e-6)
    torch.testing.assert_close(calm[~own], wild[~own])


def test_a_state_keeps_nothing_of_a_long_prompt_alive():
    attention = build(options(local="chunk"))
    q, k, v = torch.randn(3, 1, 2, 300, 6).unbind()
    state = attention(q, k, v, state=attention.init_state(1))[1]
    size = attention.init_state(1).recent.k_BHWD.numel()
    for kept in (state.recent.k_BHWD, state.recent.v_BHWE):
        assert kept.untyped_storage().nbytes() == 4 * size


def test_decode_remembers_a_fixed_number_of_keys():
    attention = build(options(local="window"))
    state = attention.init_state(1)
    for length in (1, 3, 50, 1):
        q, k, v = torch.randn(3, 1, 2, length, 6)
        _, state = attention(q, k, v, state=state)
        assert state.recent.k_BHWD.shape == (1, 2, 6, 6)
    assert bool(state.recent.mask_BW.all())
    assert state.recent.position_BW.tolist() == [list(range(49, 55))]


@pytest.mark.parametrize(
    ("last", "heads", "expected"),
    [(None, 3, [0.04, 0.04, 0.04]), (1.0, 3, [0.04, 0.2, 1.0]), (1.0, 1, [0.04])],
)
def test_far_scales_go_in_equal_ratios_from_the_first_head_to_the_last(last, heads, expected):
    config = options(local="chunk", far_scale=0.04, last_far_scale=last)
    attention = SlayAttention(config, num_heads=heads, head_dim=6, max_sequence_length=99, seed=3)
    found = attention.log_far_scale.exp().flatten()
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kernel", ["yat", "softmax"])
def test_far_scores_of_x_squared_are_the_kernels_first_node_times_the_far_scale(kernel):
    config = options(
        polynomial="exact",
        fusion="polynomial_only",
        local="window",
        local_kernel=kernel,
        far_scale=0.3,
        epsilon=0.01,
    )
    attention = build(config).double()
    q, k = torch.randn(2, 1, 2, 9, 6, dtype=torch.float64)
    tensors = attention.feature_tensors(torch.float64)
    positions = torch.arange(9)[None]
    phi_q, phi_k = (
        attention.feature_map(x, *tensors, is_query=is_query, positions=positions).expand()
        for x, is_query in ((q, True), (k, False))
    )
    x = unit(q) @ unit(k).mT
    # far ones as they are, near ones divided by the far scale
    torch.testing.assert_close(phi_q @ phi_k.mT, x**2 / 2.01, rtol=1e-6, atol=1e-6)
    near = attention.near_scores(q, k, *tensors)
    exact = x**2 / (2.01 - 2 * x) if kernel == "yat" else torch.exp(q @ k.mT / 6**0.5)
    torch.testing.assert_close(0.3 * near, exact, rtol=1e-6, atol=1e-6)
