"""Which settings differ: by value, within what is null, and what says nothing."""

from __future__ import annotations

from typing import Any

import pytest

from slayformer.config_differences import ABSENT, differing_keys, value_of
from slayformer.config_loading import dotted

RAMP = {"batch": {"ramp": {"start_samples": 8, "updates": 5}}}


@pytest.mark.parametrize(
    ("one", "other", "keys"),
    [
        ({"model": {"width": 8}}, {"model": {"width": 8}}, []),
        ({"model": {"width": 8}}, {"model": {"width": 9}}, ["model.width"]),
        # an option that a version did not have
        ({"model": {"width": 8}}, {"model": {"heads": 2}}, []),
        ({"batch": {}}, RAMP, []),
        # null where the other has settings
        ({"batch": {"ramp": None}}, RAMP, ["batch.ramp.start_samples", "batch.ramp.updates"]),
        # free settings that only one has
        (
            {"engine": {"deepspeed": None}},
            {"engine": {"deepspeed": {"a": 1}}},
            ["engine.deepspeed.a"],
        ),
        (
            {"engine": {"deepspeed": {"b": {"c": 1}}}},
            {"engine": {"deepspeed": {"b": {"c": 1}, "a": 1}}},
            ["engine.deepspeed.a"],
        ),
        ({"seeds": [1, 2]}, {"seeds": [1, 3]}, ["seeds"]),
        # what says nothing of training
        ({"logging": {"every_updates": 1}}, {"logging": {"every_updates": 2}}, []),
        ({"data": {"cache_directory": "a"}}, {"data": {"cache_directory": "b"}}, []),
    ],
)
def test_what_differs(one: dict[str, Any], other: dict[str, Any], keys: list[str]) -> None:
    for pair in ((one, other), (other, one), (one, other, one)):
        assert sorted(differing_keys(map(dotted, pair))) == keys


def test_the_ignored_are_keys_or_their_beginnings() -> None:
    pair = [{"seed": 1, "logging.x": 1, "a.b": 1}, {"seed": 2, "logging.x": 2, "a.b": 2}]
    assert differing_keys(pair) == ["seed", "a.b"]
    assert differing_keys(pair, ("seed", "a.")) == ["logging.x"]


def test_a_value_is_known_null_or_absent() -> None:
    config = {"model.width": 8, "batch.ramp": None}
    assert value_of(config, "model.width") == 8
    assert value_of(config, "batch.ramp.updates") is None
    assert value_of(config, "model.depth") is ABSENT
    assert value_of(config, "optimizer.beta1") is ABSENT
