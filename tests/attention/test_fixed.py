"""What is kept from a mechanism's own tensors is made anew whenever one of them changes."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor

from slayformer.attention.fixed import Fixed
from slayformer.attention.linear import LinearAttention
from slayformer.presets import make_attention

# fixed features, such beside a number that learns, a map that learns and one whose few numbers do
NAMES = ["slay", "slay near", "slay_best", "based"]


def make(name: str, seed: int = 0) -> LinearAttention:
    """Return a small mechanism."""
    options = {"local": "chunk", "local_size": 4} if name == "slay near" else {}
    attention = make_attention(
        name.split()[0], num_heads=2, head_dim=8, max_sequence_length=32, seed=seed, **options
    )
    assert isinstance(attention, LinearAttention)
    return attention


def heads() -> list[Tensor]:
    """Return q, k and v."""
    return list(torch.randn(3, 1, 2, 20, 8, generator=torch.Generator().manual_seed(0)))


def output(attention: LinearAttention) -> Tensor:
    """Return y without gradients, as validation and decoding compute it."""
    with torch.no_grad():
        return attention(*heads())[0]


@pytest.mark.parametrize("name", NAMES)
def test_the_same_tensors_are_prepared_once(name: str) -> None:
    attention = make(name)
    first = output(attention)
    with torch.no_grad():
        kept = attention._prepared(torch.float32)
        assert attention._prepared(torch.float32) is kept
        other = attention._prepared(torch.float64)
    assert other is not kept
    assert all(x.dtype == torch.float64 for x in other.tensors)
    assert torch.equal(output(attention), first)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", ["in place", "data", "loaded", "assigned"])
def test_a_change_is_seen(name: str, way: str) -> None:
    changed, other = make(name), make(name, seed=3)
    before = output(changed)
    expected = output(other)
    assert not torch.equal(before, expected)
    state = other.state_dict()
    if way == "in place":
        with torch.no_grad():
            for key, value in changed.state_dict(keep_vars=True).items():
                value.copy_(state[key])
    elif way == "data":
        # leaves no trace in the versions: what sharding and averages of weights do to parameters
        for key, parameter in changed.named_parameters():
            parameter.data = parameter.data.clone().copy_(state[key])
        with torch.no_grad():
            for key, buffer in changed.named_buffers():
                buffer.copy_(state[key])
    else:
        changed.load_state_dict(state, assign=way == "assigned")
    assert torch.equal(output(changed), expected)


def test_a_new_tensor_at_the_address_of_an_old_one_is_seen() -> None:
    attention, expected = make("slay near"), make("slay near")
    maps: Any = attention.get_submodule("exponential")
    memory = maps.omega_RHND.numpy().copy()
    maps.omega_RHND = torch.from_numpy(memory)
    # as in training
    attention(*heads())
    memory *= 2
    maps.omega_RHND = torch.from_numpy(memory)
    expected.load_state_dict(attention.state_dict())
    assert torch.equal(output(attention), output(expected))


def test_values_written_behind_the_versions_are_seen() -> None:
    attention = make("slay_best")
    before = output(attention)
    for parameter in attention.parameters():
        parameter.data.add_(0.1)
    assert not torch.allclose(output(attention), before)


def test_parameters_that_cannot_be_compared_are_prepared_every_time() -> None:
    module = torch.nn.Linear(2, 3)
    made: list[int] = []

    def make_one() -> int:
        made.append(len(made))
        return len(made)

    fixed = Fixed()
    with torch.no_grad():
        assert [fixed(module, "kind", make_one) for _ in range(3)] == [1, 1, 1]
        # as sharding leaves them between reads
        module.weight.data = torch.empty(0)
        assert [fixed(module, "kind", make_one) for _ in range(3)] == [2, 3, 4]
    module = torch.nn.Linear(2, 3)
    assert [fixed(module, "kind", make_one) for _ in range(2)] == [5, 6]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_flow_after_validation_and_inference(name: str) -> None:
    attention = make(name)
    with torch.inference_mode():
        attention(*heads())
    output(attention)
    q, k, v = (x.requires_grad_() for x in heads())
    y, _ = attention(q, k, v)
    sources = [q, k, v, *attention.parameters()]
    found = torch.autograd.grad(y.square().sum(), sources)
    assert all(torch.isfinite(x).all() for x in found)
    assert all(x.abs().max() > 0 for x in found)
    assert torch.equal(output(attention), y.detach())


@pytest.mark.parametrize("name", NAMES)
def test_copies_and_pickles_keep_nothing(name: str) -> None:
    attention = make(name)
    expected = output(attention)
    twin = copy.deepcopy(attention)
    assert twin._fixed._made is None
    assert torch.equal(output(twin), expected)
    file = io.BytesIO()
    torch.save(attention, file)
    file.seek(0)
    assert torch.equal(output(torch.load(file, weights_only=False)), expected)
