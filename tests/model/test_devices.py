"""Models on a device that is not there: shapes without numbers, so nothing can be looked at.

What runs so also runs on a GPU as far as devices go: no tensor is left on the CPU, and no step
waits for a number, as one recorded in a CUDA graph must not.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slayformer.attention import backends
from slayformer.attention.states import tensors_of
from slayformer.config import ModelConfig
from slayformer.errors import ConfigError
from slayformer.model.gpt2 import GPT2
from slayformer.model.token_graph import check_constant
from slayformer.presets import load_preset, make_attention, preset_names

QUADRATIC = ["softmax", "softmax_chunk_factor", "yat", "yat_spherical"]
LINEAR = sorted(set(preset_names()) - set(QUADRATIC))
LENGTH = 40


def cases() -> list[tuple[str, str]]:
    """Return every preset, and with near pairs of both kinds those whose option that is."""
    found = [(name, "") for name in preset_names()]
    for name, local in itertools.product(preset_names(), ("chunk", "window")):
        if hasattr(load_preset(name), "local"):
            with suppress(ConfigError):
                load_preset(name, local=local).check()
                found.append((name, local))
    return found


class OneDevice(TorchDispatchMode):
    """Refuses operations on tensors of two devices; a single number may be the CPU's."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        devices = {x.device.type for x in tensors_of([list(args), result]) if x.dim() or x.is_meta}
        assert len(devices) <= 1, f"{func} goes between {devices}"
        return result


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    """Choose the backend of the test's parameter; list the kernels it starts, which do not run."""
    names: list[str] = []
    chosen = {"torch": backends.BACKENDS["torch"]}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    if request.param == "triton":
        pytest.importorskip("triton")
        from slayformer.attention.backends import triton_layout, triton_start

        apply = backends.BACKENDS["triton"].apply
        chosen = {"triton": backends.Backend(apply, lambda q, v: None), **chosen}
        monkeypatch.setattr(triton_start, "launch", lambda *a: names.append(a[0].__name__))
        monkeypatch.setattr(triton_start, "architecture_of", lambda device: 90)
        triton_layout.tables_of.cache_clear()
    monkeypatch.setattr(backends, "BACKENDS", chosen)
    return names


def small(name: str, local: str) -> GPT2:
    """Return a layer with mechanism `name` and short convolutions, on the other device."""
    shape = ModelConfig(layers=1, heads=2, width=32, context_length=64, short_convolution=4)
    attention = load_preset(name, **({"local": local} if local else {}))
    return GPT2(shape, attention, vocabulary_size=65, seed=3).to("meta")


@pytest.mark.parametrize("started", ["torch", "triton"], indirect=True)
@pytest.mark.parametrize(("name", "local"), cases())
def test_a_training_step_stays_on_its_device(name: str, local: str, started: list[str]) -> None:
    model = small(name, local)
    ids = torch.zeros(3, LENGTH, dtype=torch.long, device="meta")
    options = {"document_ids_BT": ids, "mask_BT": ids.bool()}
    # what is kept for later is made
    model(ids, **options)
    with OneDevice():
        hidden, _ = model(ids, **options)
        model.logits(hidden).logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.is_meta for p in model.parameters())
    if "triton" in backends.BACKENDS and name in LINEAR:
        assert {"chunk_outputs", "pairs_backward"} <= set(started)


@pytest.mark.parametrize("started", ["torch", "triton"], indirect=True)
@pytest.mark.parametrize(("name", "local"), cases())
@torch.no_grad()
def test_a_decoded_token_waits_for_nothing(name: str, local: str, started: list[str]) -> None:
    model = small(name, local).eval()
    ids = torch.zeros(3, 1, dtype=torch.long, device="meta")
    _, states = model(ids, states=model.init_states(3))
    with OneDevice():
        _, after = model(ids, states=states)
    if name not in LINEAR:
        return
    check_constant(states, after)
    if "triton" in backends.BACKENDS:
        assert started == ["step_forward"] * 2


@pytest.mark.parametrize("started", ["triton"], indirect=True)
@pytest.mark.parametrize(
    ("name", "options", "heads", "strides", "longest"),
    [
        # of q, k and v from token to token; then the output's, 64 · 16, and the factors'
        # and the keys of the lag count
        ("slay_best", {"local_kernel": "yat", "local_size": 4}, 1, (2**12, 16, 16), 2**19 - 4),
        ("slay_best", {"local": "chunk"}, 1, (16, 2**12, 16), 2**19),
        ("slay", {}, 1, (16, 16, 2**12), 2**19),
        ("slay", {}, 64, (16, 16, 16), 2**21),
        ("slay", {"fusion": "sketch", "sketch_features": 384}, 1, (16, 16, 16), 2**31 // 1152 + 1),
    ],
)
def test_sequences_too_long_for_32_bits_are_refused(
    name: str,
    options: dict[str, Any],
    heads: int,
    strides: tuple[int, ...],
    longest: int,
    started: list[str],
) -> None:
    attention = make_attention(
        name, num_heads=heads, head_dim=16, max_sequence_length=64, backend="triton", **options
    ).to("meta")

    def run(length: int) -> None:
        started.clear()
        shapes = ((1, heads, length, width) for width in strides)
        attention(*(torch.empty(shape, device="meta")[..., :16] for shape in shapes))

    run(longest - 1)
    assert "chunk_outputs" in started
    with pytest.raises(ConfigError, match=f"sequences as long as {longest:,} tokens"):
        run(longest)
    assert not started
