"""The loss scale halves at once and doubles slowly, and goes on where it stopped."""

from __future__ import annotations

import pytest

from slayformer.errors import UserError
from slayformer.training.loss_scale import FIRST_SCALE, GROWTH_UPDATES, LossScale


def test_it_halves_on_overflow_and_doubles_after_many_sound_updates() -> None:
    scale = LossScale()
    scale.after_update(overflowed=True)
    assert scale.value == FIRST_SCALE / 2
    for _ in range(GROWTH_UPDATES - 1):
        scale.after_update(overflowed=False)
    assert scale.value == FIRST_SCALE / 2
    resumed = LossScale()
    resumed.state = scale.state
    resumed.after_update(overflowed=False)
    assert resumed.value == FIRST_SCALE
    # counting begins anew
    resumed.after_update(overflowed=False)
    assert resumed.state == {"value": FIRST_SCALE, "sound_updates": 1}


def test_overflow_at_the_smallest_scale_ends_the_run() -> None:
    scale = LossScale()
    while scale.value > 1:
        scale.after_update(overflowed=True)
    with pytest.raises(UserError, match=r"overflow in fp16 even at a loss scale of 1; .*bf16"):
        scale.after_update(overflowed=True)
