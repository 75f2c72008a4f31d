"""Dynamic loss scaling (Micikevicius et al., 2018): small gradients survive fp16 products."""

from __future__ import annotations

from slayformer.errors import UserError

FIRST_SCALE = 2.0**16
SMALLEST_SCALE = 1.0
# updates without an overflow before the scale doubles
GROWTH_UPDATES = 2000


class LossScale:
    """A power of two that losses are multiplied by, and gradients divided by.

    `sound_updates` counts updates since the last overflow or growth.
    """

    def __init__(self) -> None:
        self.value = FIRST_SCALE
        self.sound_updates = 0

    def after_update(self, *, overflowed: bool) -> None:
        """Halve the scale after an overflow, double it after GROWTH_UPDATES sound updates.

        Raises UserError if gradients overflow at the smallest scale.
        """
        if overflowed:
            if self.value <= SMALLEST_SCALE:
                raise UserError(
                    f"gradients overflow in fp16 even at a loss scale of {self.value:g}; try a "
                    f"lower optimizer.learning_rate, or engine.precision=fp32 or bf16"
                )
            self.value, self.sound_updates = self.value / 2, 0
            return
        self.sound_updates += 1
        if self.sound_updates == GROWTH_UPDATES:
            self.value, self.sound_updates = self.value * 2, 0

    @property
    def state(self) -> dict[str, float]:
        """What a checkpoint keeps; set it to go on from there."""
        return {"value": self.value, "sound_updates": self.sound_updates}

    @state.setter
    def state(self, state: dict[str, float]) -> None:
        self.value, self.sound_updates = state["value"], int(state["sound_updates"])
