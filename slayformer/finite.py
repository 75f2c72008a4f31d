"""What becomes of NaN and infinities, which a run that diverged leaves among its numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np


def deviation(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation: None of a single value, NaN unless all are finite."""
    if len(values) < 2:
        return None
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def strict_json(value: Any) -> Any:
    """Return `value` as JSON can hold it: arrays as lists, null for what is not finite."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: strict_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def with_nan(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record that `strict_json` made with NaN where it has null."""
    return {key: math.nan if value is None else value for key, value in record.items()}
