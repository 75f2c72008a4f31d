"""Updates that cannot be right: a loss or gradient that is not finite, a loss that leaps."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

from torch import Tensor

from slayformer.config import BadUpdateConfig
from slayformer.errors import UserError

# a spike is measured against the mean loss of this many good updates, once there are as many
RECENT = 50


@dataclass(frozen=True)
class Fault:
    """What is wrong with an update."""

    what: str
    is_spike: bool = False


class BadUpdates:
    """Judges every update by the same numbers on all ranks, so that all judge alike.

    `recent` are the losses before a resumed run's first update, from `state`.
    """

    def __init__(self, config: BadUpdateConfig, recent: list[float] | None = None) -> None:
        self._config = config
        self._recent = deque(recent or [], maxlen=RECENT)
        self._skipped_in_a_row = 0

    @property
    def state(self) -> list[float]:
        """What a resumed run needs to judge as this one would."""
        return list(self._recent)

    def of_loss(self, loss: float) -> Fault | None:
        """Return what is wrong with a mean loss in nats/token, None if nothing is."""
        if not math.isfinite(loss):
            return Fault(f"the loss became {loss}")
        factor = self._config.spike_factor
        if factor is None or len(self._recent) < RECENT:
            return None
        mean = statistics.fmean(self._recent)
        if loss <= factor * mean:
            return None
        what = f"the loss leapt to {loss:.4f} nats/token, from {mean:.4f} over {RECENT} updates"
        return Fault(what, is_spike=True)

    def of_gradient(self, norm: float) -> Fault | None:
        """Return what is wrong with a gradient norm, None if nothing is."""
        return None if math.isfinite(norm) else Fault(f"the gradient norm became {norm}")

    def decide(self, fault: Fault, where: str) -> None:
        """Return if the update is to be skipped; raise UserError if the run is to stop.

        `where` names the update, its samples and the newest checkpoint.
        """
        policy = self._config.spike if fault.is_spike else self._config.not_finite
        advice = "try a lower optimizer.learning_rate or a longer warm-up (group schedule)"
        if policy == "stop":
            raise UserError(f"{fault.what} in {where}; {advice}")
        self._skipped_in_a_row += 1
        most = self._config.most_skipped
        if self._skipped_in_a_row > most:
            raise UserError(
                f"{fault.what} in {where}: more than bad_updates.most_skipped={most} updates were "
                f"skipped in a row; {advice}"
            )

    def accept(self, loss: float) -> None:
        """Remember the loss of an update that changed the weights."""
        self._recent.append(loss)
        self._skipped_in_a_row = 0


def poisoned(loss: Tensor, fault: Fault | None) -> Tensor:
    """Return `loss`, or if it is at fault one whose gradients are NaN.

    Such gradients are dropped on every rank and in every ZeRO stage, weights and moments unchanged.
    """
    return loss if fault is None else loss * math.nan
