"""One process of a launch that splits sequences over ranks: `context_worker.py CASES.json FOLDER`.

Every rank compares its stretch of outputs and gradients with the whole sequence on one rank, and
then trains as `train_worker.py` does.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slayformer.attention.context_parallel import attend, make_stretch
from slayformer.config import ModelConfig
from slayformer.errors import ConfigError
from slayformer.model.gpt2 import GPT2
from slayformer.presets import load_preset
from slayformer.registry import build_attention
from slayformer.training import distributed

HEADS, WIDTH, BATCH = 2, 16, 2
MECHANISMS: list[tuple[str, dict[str, Any]]] = [
    ("slay", {}),
    ("slay_best", {}),
    ("slay_best", {"local": "window", "local_size": 100}),
    ("linear_elu", {}),
    ("performer", {}),
    ("cosformer", {}),
    ("based", {}),
    ("slay_random_maclaurin", {}),
]


def options(name: str, changes: dict[str, Any]) -> Any:
    return load_preset(name, backend="torch", **changes)


def documents(total: int, kind: str) -> torch.Tensor | None:
    """Return no ids, or boundaries on both sides of a cut and one exactly at it."""
    if kind == "none":
        return None
    half = total // 2
    starts = torch.zeros(BATCH, total, dtype=torch.long)
    starts[0, [half - 3, half + 2]] = 1
    starts[1, [half, total - 1]] = 1
    return starts.cumsum(1)


def gradient(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the gradient, zero where there is none."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.clone()


def compare(name: str, changes: dict[str, Any], total: int, kind: str) -> None:
    rank = dist.get_rank()
    sizes = {"num_heads": HEADS, "head_dim": WIDTH, "max_sequence_length": 8192, "seed": 5}
    whole = build_attention(options(name, changes), **sizes)
    parts = build_attention(options(name, changes), **sizes)
    draws = torch.Generator().manual_seed(total)
    # short sequences in fp64 show that nothing is left out. Long ones stay in fp32, but for signed
    # maps, whose normaliser can be near zero, and for based with its e^s: fp32 says little there
    in_fp32 = total > 1000 and whole.positive and name != "based"
    dtype, tolerance = (torch.float32, 1e-5) if in_fp32 else (torch.float64, 1e-10)
    whole, parts = whole.to(dtype), parts.to(dtype)
    q, k, v, weight = (
        torch.randn(BATCH, HEADS, total, WIDTH, generator=draws, dtype=torch.float64).to(dtype)
        for _ in range(4)
    )
    ids = documents(total, kind)
    # of few keys that are all nearly orthogonal to a query fp32 says little either
    q, k = q + 1, k + 1
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    y, _ = whole(*inputs, document_ids=ids)
    loss = (y * weight).square().sum()
    loss.backward()

    own = distributed.own_stretch(total)
    own_q, own_k, own_v = (x[:, :, own].clone().requires_grad_() for x in (q, k, v))
    own_ids = None if ids is None else ids[:, own]
    length = own.stop - own.start
    stretch = make_stretch(distributed.context_group(), BATCH, length, own_ids, "cpu")
    piece = attend(parts, own_q, own_k, own_v, stretch)
    own_loss = (piece * weight[:, :, own]).square().sum()
    own_loss.backward()
    label = f"{name} {changes} T={total} documents={kind} rank {rank}"

    def close(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
        error = float((ours - theirs).detach().norm() / theirs.detach().norm().clamp_min(1e-9))
        assert error < tolerance, f"{what}: relative error {error:.2e}"

    close(piece, y[:, :, own], f"{label}: output")
    total_loss = own_loss.detach().clone()
    dist.all_reduce(total_loss)
    close(total_loss, loss.detach(), f"{label}: loss")
    for part, full, letter in zip((own_q, own_k, own_v), inputs, "qkv", strict=True):
        close(gradient(part), gradient(full)[:, :, own], f"{label}: d{letter}")
    for (parameter_name, ours), theirs in zip(
        parts.named_parameters(), whole.parameters(), strict=True
    ):
        summed = gradient(ours)
        dist.all_reduce(summed)
        close(summed, gradient(theirs), f"{label}: {parameter_name}")


def compare_model() -> None:
    """Compare loss and gradients of a GPT-2 with short convolutions, stretch by stretch."""
    total = 261
    shape = ModelConfig(layers=2, heads=2, width=32, context_length=300, short_convolution=4)
    # softmax near and a small far scale leave the scale's own gradient a difference of large sums
    changes = {"local_kernel": "yat", "local_size": 16, "far_scale": 0.25, "last_far_scale": None}
    whole, parts = (
        GPT2(shape, options("slay_best", changes), vocabulary_size=50, seed=3) for _ in range(2)
    )
    ids = torch.randint(50, (BATCH, total + 1), generator=torch.Generator().manual_seed(7))
    for kind in ("none", "cut"):
        document_ids = documents(total, kind)
        for model in (whole, parts):
            model.zero_grad()

        def loss(model: GPT2, span: slice, group: Any, given: Any = document_ids) -> Any:
            own_ids = None if given is None else given[:, span]
            hidden, _ = model(ids[:, :-1][:, span], document_ids_BT=own_ids, context_group=group)
            targets = ids[:, 1:][:, span].flatten()
            logits = model.logits(hidden).flatten(0, 1)
            return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")

        expected = loss(whole, slice(None), None)
        expected.backward()
        own = loss(parts, distributed.own_stretch(total), distributed.context_group())
        own.backward()
        summed = own.detach().clone()
        dist.all_reduce(summed)
        torch.testing.assert_close(summed, expected.detach(), rtol=1e-6, atol=0)
        for (name, ours), theirs in zip(parts.named_parameters(), whole.parameters(), strict=True):
            total_gradient, wanted = gradient(ours), gradient(theirs)
            dist.all_reduce(total_gradient)
            error = float((total_gradient - wanted).norm() / wanted.norm().clamp_min(1e-6))
            assert error < 1e-5, f"{name} documents={kind}: relative error {error:.2e}"


def refuse() -> None:
    """A mechanism over all pairs, and stretches too short for what is near, say so."""
    q = torch.randn(1, HEADS, 8, WIDTH)
    stretch = make_stretch(distributed.context_group(), 1, 8, None, "cpu")
    sizes = {"num_heads": HEADS, "head_dim": WIDTH, "max_sequence_length": 64, "seed": 5}
    for name, changes, message in (
        ("softmax", {}, "softmax compares all pairs"),
        ("slay_best", {"local_size": 9}, "a device 8 tokens, fewer than the 9 that its near pairs"),
    ):
        with pytest.raises(ConfigError, match=message):
            attend(build_attention(options(name, changes), **sizes), q, q, q, stretch)


def form_groups() -> None:
    """Consecutive ranks share a sequence, without gap or overlap, and only while told to."""
    rank, world = distributed.rank(), distributed.world_size()
    with distributed.shared_sequences(2):
        group = distributed.context_group()
        assert dist.get_process_group_ranks(group) == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert (distributed.data_rank(), distributed.data_world_size()) == (rank // 2, world // 2)
        # five tokens: two and three
        assert distributed.own_stretch(5) == (slice(0, 2), slice(2, 5))[rank % 2]
    with distributed.shared_sequences(2):
        assert distributed.context_group() is group
    assert distributed.context_group() is None
    assert (distributed.data_rank(), distributed.data_world_size()) == (rank, world)
    assert distributed.own_stretch(5) == slice(0, 5)


distributed.initialize()
form_groups()
with distributed.shared_sequences(distributed.world_size()):
    refuse()
    compare_model()
    # of 517 and 4,100 some ranks have a token more than others
    for total in (517, 4096, 4100):
        for name, changes in MECHANISMS:
            for kind in ("none", "cut"):
                # the long ones with every mechanism once
                if total < 1000 or (kind == "cut") == (total % 4096 > 0):
                    compare(name, changes, total, kind)
(Path(sys.argv[2]) / f"compared-{dist.get_rank()}").write_text("")
runpy.run_path(str(Path(__file__).with_name("train_worker.py")), run_name="__main__")
