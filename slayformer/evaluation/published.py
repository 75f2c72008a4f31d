"""The paper's own losses, to stand beside ours where the setting is the paper's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from slayformer.config_differences import ABSENT, value_of
from slayformer.evaluation.runs import Run, changed_options, own_mechanism


@dataclass(frozen=True)
class Published:
    """Validation losses in nats/token by mechanism, and where they were published."""

    source: str
    losses: dict[str, float]

    def loss_of(self, run: Run) -> float | None:
        """Return the loss of the mechanism of `run`, None if it has other options here."""
        return None if changed_options(run) else self.losses.get(own_mechanism(run))

    @property
    def statement(self) -> str:
        """Say what the column is."""
        return (
            f"Published: {self.source}; GPT-2 small on 2.5 billion tokens of FineWeb, validated on "
            "WikiText-2. Its training code is another and its seeds are not told: the order of "
            "mechanisms can be compared, not the last digits."
        )


def published_losses(runs: Sequence[Run]) -> Published | None:
    """Return the published losses if all `runs` have the paper's model, text and budget."""
    file = resources.files(__package__) / "assets" / "published_losses.json"
    record = json.loads(file.read_text(encoding="utf-8"))
    tokens, tolerance = record["training_tokens"], record["training_tokens_tolerance"]
    setting = record["setting"]
    same = all(
        run.config
        and all(value_of(run.config, key) in (told, ABSENT) for key, told in setting.items())
        and abs(run.summary["tokens"] / tokens - 1) <= tolerance
        for run in runs
    )
    return Published(record["source"], record["validation_loss"]) if same else None
