"""When the compiled CPU backend is taken, and what is told when it cannot be."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from slayformer.attention import backends
from slayformer.attention.backends import cpu
from slayformer.attention.features import Dense, Kronecker
from slayformer.errors import ConfigError
from slayformer.presets import load_preset
from tests.attention.cpu_cases import HEADS, WIDTH, draw, make


def test_auto_takes_the_compiled_walk_and_fp64_goes_to_torch(monkeypatch: pytest.MonkeyPatch):
    called: list[str] = []
    for name, backend in backends.BACKENDS.items():

        def spy(*arguments: Any, name=name, apply=backend.apply) -> Any:
            called.append(name)
            return apply(*arguments)

        monkeypatch.setitem(backends.BACKENDS, name, dataclasses.replace(backend, apply=spy))
    attention = make("best", "auto")
    attention(*(x.float() for x in draw(1, HEADS, 5, WIDTH, count=3)))
    attention(*draw(1, HEADS, 5, WIDTH, count=3))
    assert called == ["cpu", "torch"]
    with pytest.raises(ConfigError, match=r"attention\.backend=cpu: .*float64"):
        make("best", "cpu")(*draw(1, HEADS, 5, WIDTH, count=3))


def test_a_map_it_does_not_know_runs_on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Dense(torch.ones(1, HEADS, 5, 1))
    with pytest.raises(cpu.NotCovered):
        cpu.factors(Kronecker(Kronecker(one, one), one))
    q, k, v = (x.float() for x in draw(1, HEADS, 5, WIDTH, count=3))
    expected, _ = make("linear_elu", "torch")(q, k, v)

    def refuse(features: Any) -> Any:
        raise cpu.NotCovered("this one")

    monkeypatch.setattr(cpu, "factors", refuse)
    assert torch.equal(make("linear_elu", "auto")(q, k, v)[0], expected)
    with pytest.raises(ConfigError, match=r"attention\.backend=cpu: .*this one"):
        make("linear_elu", "cpu")(q, k, v)


def test_quadratic_mechanisms_refuse_it() -> None:
    with pytest.raises(ConfigError, match=r"attention\.backend=cpu: softmax .* auto, torch"):
        load_preset("softmax", backend="cpu")
    assert load_preset("softmax", backend="torch").backend == "torch"
