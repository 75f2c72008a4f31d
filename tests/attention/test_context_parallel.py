"""What cannot share a sequence is refused early; tests/distributed has the mathematics."""

from __future__ import annotations

import pytest

from slayformer.attention.context_parallel import check_context_parallel
from slayformer.cli import compose
from slayformer.config_loading import load_config
from slayformer.errors import ConfigError


def check(ranks: int, *overrides: str) -> None:
    config = load_config(compose("train", ["model.context_length=64", *overrides]))
    check_context_parallel(config.model, config.attention, ranks)


@pytest.mark.parametrize("attention", ["softmax", "softmax_chunk_factor", "yat", "yat_spherical"])
def test_mechanisms_over_all_pairs(attention: str) -> None:
    check(1, f"attention={attention}")
    message = (
        f"engine.context_parallel=2: {attention} compares all pairs .*attention=slay_best, or "
        f"engine.context_parallel=1"
    )
    with pytest.raises(ConfigError, match=message):
        check(2, f"attention={attention}")


@pytest.mark.parametrize(
    "attention",
    ["slay", "slay_best", "linear_elu", "performer", "cosformer", "hedgehog", "uniform"],
)
def test_linear_mechanisms_can(attention: str) -> None:
    check(4, f"attention={attention}")


@pytest.mark.parametrize(
    ("ranks", "overrides", "message"),
    [
        (65, [], r"each needs a token of model.context_length=64; use at most 64"),
        (4, ["attention=slay_best", "attention.local_size=17"], r"16 tokens, fewer than the 17"),
        (4, ["attention=based", "attention.window=17"], r"the 17 that its near pairs reach back"),
        (33, ["model.short_convolution=4"], r"1 tokens, fewer than the 3 that model.short_conv"),
    ],
)
def test_stretches_that_are_too_short(ranks: int, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(ranks, *overrides)
