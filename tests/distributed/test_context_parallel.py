"""Sequences shared by processes: the same attention and the same run as one process makes alone.

Each launch compares attention and trains all its runs one after another: see `context_worker.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

# a ramp, and one sample for two groups of processes in the last update
SIZES = [2, 2, 2, 4, 4, 4, 1]
# in the middle of the ramp's plan
SAVED_AT = 3
SHAPE = [
    # of 65 tokens one of two processes has 33; five windows are not even for two groups
    *("model.context_length=65", "data.isolate_documents=true", "validation.tokens=325"),
    *("batch.samples_per_update=4", "batch.micro_samples=1", "validation.every_updates=0"),
    "batch.ramp={start_samples: 2, increment_samples: 2, updates: 3}",
    *("budget=samples", f"budget.samples={sum(SIZES)}"),
    # beside gradients near zero AdamW would turn their rounding into whole steps
    *("optimizer.epsilon=1e-4", "optimizer.gradient_clipping=0.5"),
    f"checkpoint.every_updates={SAVED_AT}",
]
BEST = ["attention=slay_best", "attention.local_size=8", "model.short_convolution=3"]
CASES: dict[str, list[str]] = {
    "slay": [],
    "best": BEST,
    "elu": ["attention=linear_elu", "data.isolate_documents=false"],
    "signed": ["attention=slay_random_maclaurin"],
    "bf16": [*BEST, "engine.precision=bf16"],
}


def saved(folder: Path, case: str) -> str:
    return f"resume={folder / case / 'checkpoints' / f'update_{SAVED_AT:07d}'}"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, start_launch: Any, tiny: list[str]) -> Any:
    folder = tmp_path_factory.mktemp("two")
    runs = {
        **CASES,
        **{f"best-{stage}": [*BEST, f"engine.zero_stage={stage}"] for stage in (1, 2)},
        "elu-2": [*CASES["elu"], "engine.zero_stage=2"],
        "block": [*BEST, "engine.activation_checkpointing=block"],
        "attention": [*BEST, "engine.zero_stage=2", "engine.activation_checkpointing=attention"],
        "dropout": ["model.dropout=0.1", "engine.zero_stage=2"],
        "resumed": ["model.dropout=0.1", "engine.zero_stage=2", saved(folder, "dropout")],
        # last: from then on DeepSpeed has its own linear layer for the whole process
        "best-3": [*BEST, "engine.zero_stage=3"],
    }
    shared = [*tiny, *SHAPE, "engine.context_parallel=2"]
    runs = {name: [*shared, *options] for name, options in runs.items()}
    return start_launch(2, folder, runs, "context_worker.py")


@pytest.fixture(scope="module")
def one(
    tmp_path_factory: pytest.TempPathFactory, start_launch: Any, tiny: list[str], two: Any
) -> Any:
    """Return the runs of one process, one of which goes on from what two had saved."""
    runs = {**CASES, "from-two": [*BEST, saved(two.folder, "best-2")]}
    runs = {name: [*tiny, *SHAPE, *options] for name, options in runs.items()}
    return start_launch(1, tmp_path_factory.mktemp("one"), runs)


@pytest.fixture(scope="module")
def four(
    tmp_path_factory: pytest.TempPathFactory, start_launch: Any, tiny: list[str], one: Any
) -> Any:
    """Return the runs of two groups of two processes, and one of a group of four."""
    pairs, stage = "engine.context_parallel=2", "engine.zero_stage=2"
    runs = {
        "best": [*BEST, pairs, stage],
        "from-one": [*BEST, pairs, stage, saved(one.folder, "best")],
        "slay": ["engine.context_parallel=4"],
    }
    runs = {name: [*tiny, *SHAPE, *options] for name, options in runs.items()}
    return start_launch(4, tmp_path_factory.mktemp("four"), runs, "context_worker.py")


def summary(launch: Any, case: str) -> Any:
    return json.loads((launch.folder / case / "summary.json").read_text())


def same(launch: Any, case: str, alone: Any, reference: str) -> None:
    """Compare losses, gradient norms, validation by position and weights of two runs."""
    for key in ("update", "samples", "tokens", "learning_rate"):
        assert launch.metrics(case, key) == alone.metrics(reference, key)
    losses, norms = (alone.metrics(reference, key) for key in ("loss", "gradient_norm"))
    assert len(losses) == len(SIZES)
    # clipping took part
    assert min(norms) > 0.5
    assert launch.metrics(case, "loss") == pytest.approx(losses, rel=0, abs=1e-5)
    found = launch.metrics(case, "gradient_norm")
    assert found[0] == pytest.approx(norms[0], rel=1e-5)
    # from then on the weights are not the same to the bit, and updates make more of it
    assert found == pytest.approx(norms, rel=3e-5)
    ours, theirs = summary(launch, case), summary(alone, reference)
    for key in ("validation_loss", "bits_per_byte"):
        assert ours[key] == pytest.approx(theirs[key], rel=0, abs=1e-5)
    places = [
        [(s["first"], s["last"], s["tokens"]) for s in told["loss_by_position"]]
        for told in (ours, theirs)
    ]
    # five windows, each token once
    assert places[0] == places[1]
    assert sum(tokens for _, _, tokens in places[0]) == 325
    curves = [[s["loss"] for s in told["loss_by_position"]] for told in (ours, theirs)]
    assert curves[0] == pytest.approx(curves[1], rel=0, abs=1e-5)
    weights = alone.weights(reference, len(SIZES))
    for name, tensor in launch.weights(case, len(SIZES)).items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-5, msg=f"{case} {name}")


def test_stretches_are_exact_on_two_and_four_processes(two: Any, four: Any) -> None:
    for launch in (two, four):
        compared = sorted(path.name for path in launch.folder.glob("compared-*"))
        assert compared == [f"compared-{rank}" for rank in range(launch.world_size)]


@pytest.mark.parametrize(
    ("case", "reference"),
    [
        *((name, name) for name in ("slay", "best", "elu")),
        *((f"best-{stage}", "best") for stage in (1, 2, 3)),
        ("elu-2", "elu"),
    ],
)
def test_two_processes_that_share_sequences_equal_one(
    one: Any, two: Any, case: str, reference: str
) -> None:
    same(two, case, one, reference)


@pytest.mark.parametrize(
    ("case", "reference"), [("best", "best"), ("from-one", "best"), ("slay", "slay")]
)
def test_four_processes_equal_one(one: Any, four: Any, case: str, reference: str) -> None:
    plan = json.loads((four.folder / case / "plan.json").read_text())
    assert (plan["world_size"], plan["context_parallel"]) == (4, 4 if case == "slay" else 2)
    same(four, case, one, reference)


def test_one_process_goes_on_where_two_had_shared_sequences(one: Any, two: Any) -> None:
    same(one, "from-two", one, "best")
    # the first updates are those of the run before
    assert one.metrics("from-two", "loss")[:SAVED_AT] == two.metrics("best-2", "loss")[:SAVED_AT]


def test_resumed_bit_for_bit_with_dropout_of_its_own_for_every_stretch(two: Any) -> None:
    for key in ("loss", "gradient_norm"):
        assert two.metrics("resumed", key) == two.metrics("dropout", key)
    again = two.weights("resumed", len(SIZES))
    for name, tensor in two.weights("dropout", len(SIZES)).items():
        assert torch.equal(tensor, again[name]), name
    folder = two.folder / "dropout" / "checkpoints" / f"update_{SAVED_AT:07d}"
    draws = [load_file(folder / f"rng_rank_{rank:05d}.safetensors")["cpu"] for rank in range(2)]
    assert not torch.equal(*draws)
    dropped = abs(two.metrics("dropout", "loss")[0] - two.metrics("slay", "loss")[0])
    assert 1e-4 < dropped < 0.5


@pytest.mark.parametrize(("case", "reference"), [("block", "best"), ("attention", "best-2")])
def test_recomputed_activations_change_nothing(two: Any, case: str, reference: str) -> None:
    for key in ("loss", "gradient_norm"):
        assert two.metrics(case, key) == two.metrics(reference, key)
    weights = two.weights(reference)
    for name, tensor in two.weights(case).items():
        assert torch.equal(tensor, weights[name]), name


def test_guarded_rows_of_every_stretch_are_counted(one: Any, two: Any) -> None:
    # later a row near its floor may fall on its other side
    first, expected = (launch.metrics("signed", "guarded_share")[0] for launch in (two, one))
    assert 0.05 < first < 0.95
    # a share is fp32
    assert first == pytest.approx(expected, abs=1e-6)
    losses = [launch.metrics("signed", "loss")[0] for launch in (one, two)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_half_precision_stays_near_that_of_one_process(one: Any, two: Any) -> None:
    for key, tolerance in (("loss", 1e-3), ("gradient_norm", 5e-3)):
        expected = one.metrics("bf16", key)
        assert two.metrics("bf16", key) == pytest.approx(expected, rel=tolerance)
    assert two.metrics("bf16", "loss") != two.metrics("best", "loss")


def test_the_sample_is_written_by_the_first_process_alone(one: Any, two: Any) -> None:
    texts = [(launch.folder / "slay" / "samples.txt").read_text() for launch in (one, two)]
    assert texts[0].count("--- after update") == 1
    assert texts[0] == texts[1]
