"""Training with sequences shared by processes: the same run as one process makes alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

# 65 tokens leave one of two processes a token more; a ramp, and a last update with padding
SIZES = [2, 2, 2, 4, 4, 4, 1]
SHAPE = [
    *("model.context_length=65", "data.isolate_documents=true", "validation.tokens=325"),
    *("batch.samples_per_update=4", "batch.micro_samples=1", "validation.every_updates=0"),
    "batch.ramp={start_samples: 2, increment_samples: 2, updates: 3}",
    *("budget=samples", f"budget.samples={sum(SIZES)}"),
    # far from zero gradients, whose rounding AdamW would turn into whole steps
    *("optimizer.epsilon=1e-4", "optimizer.gradient_clipping=0.5"),
]
BEST = ["attention=slay_best", "attention.local_size=8", "model.short_convolution=3"]
CASES: dict[str, list[str]] = {
    "slay": [],
    "best": BEST,
    "elu": ["attention=linear_elu", "data.isolate_documents=false"],
    "signed": ["attention=slay_random_maclaurin"],
    "bf16": [*BEST, "engine.precision=bf16"],
}
SAVED_AT = 3


def runs(tiny: list[str], folder: Path, ranks: int) -> dict[str, list[str]]:
    """Return every run of a launch in which `ranks` processes share their sequences."""
    shared = [*tiny, *SHAPE, f"engine.context_parallel={ranks}"]
    found = {name: [*shared, *options] for name, options in CASES.items()}
    found["best"] += [f"checkpoint.every_updates={SAVED_AT}"]
    if ranks > 1:
        for stage in (1, 2, 3):
            found[f"best-{stage}"] = [*shared, *BEST, f"engine.zero_stage={stage}"]
        found["elu-2"] = [*found["elu"], "engine.zero_stage=2"]
        dropout = [*shared, "model.dropout=0.1", "engine.zero_stage=2"]
        saved = folder / "dropout" / "checkpoints" / f"update_{SAVED_AT:07d}"
        found["dropout"] = [*dropout, f"checkpoint.every_updates={SAVED_AT}"]
        found["resumed"] = [*dropout, f"resume={saved}"]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, start_launch: Any, tiny: list[str]) -> Any:
    folder = tmp_path_factory.mktemp("alone")
    return start_launch(1, folder, runs(tiny, folder, 1))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, start_launch: Any, tiny: list[str]) -> Any:
    folder = tmp_path_factory.mktemp("shared")
    return start_launch(2, folder, runs(tiny, folder, 2))


def summary(launch: Any, case: str) -> Any:
    return json.loads((launch.folder / case / "summary.json").read_text())


def same(one: Any, case: str, other: Any, reference: str) -> None:
    """Compare two runs: losses, gradient norms, validation by position and final weights."""
    for key in ("update", "samples", "tokens", "learning_rate"):
        assert one.metrics(case, key) == other.metrics(reference, key)
    losses, norms = (other.metrics(reference, key) for key in ("loss", "gradient_norm"))
    assert len(losses) == len(SIZES)
    assert one.metrics(case, "loss") == pytest.approx(losses, rel=0, abs=1e-5)
    assert one.metrics(case, "gradient_norm") == pytest.approx(norms, rel=1e-5)
    ours, theirs = (summary(*which) for which in ((one, case), (other, reference)))
    assert ours["validation_loss"] == pytest.approx(theirs["validation_loss"], rel=0, abs=1e-5)
    for key in ("first", "last", "tokens"):
        assert [s[key] for s in ours["loss_by_position"]] == [
            s[key] for s in theirs["loss_by_position"]
        ]
    assert [s["loss"] for s in ours["loss_by_position"]] == pytest.approx(
        [s["loss"] for s in theirs["loss_by_position"]], rel=0, abs=1e-5
    )
    assert ours["bits_per_byte"] == pytest.approx(theirs["bits_per_byte"], rel=1e-5)
    weights = other.weights(reference, len(SIZES))
    saved = one.weights(case, len(SIZES))
    assert saved.keys() == weights.keys()
    for name, tensor in saved.items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-5, msg=f"{case} {name}")


@pytest.mark.parametrize(
    ("case", "reference"),
    [
        *((name, name) for name in ("slay", "best", "elu", "signed")),
        *((f"best-{stage}", "best") for stage in (1, 2, 3)),
        ("elu-2", "elu"),
    ],
)
def test_two_processes_that_share_sequences_equal_one(
    alone: Any, shared: Any, case: str, reference: str
) -> None:
    same(shared, case, alone, reference)
