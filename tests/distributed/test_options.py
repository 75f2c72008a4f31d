"""Options of training, on one and two processes, against the same training in PyTorch alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.cases import RECOMPUTED, SIZES, STAGES, Z_LOSS

pytestmark = pytest.mark.slow

# 3 updates of warm-up to 3e-3, then linearly to 0 in the last of 24
RATES = [3e-3 * ((u + 1) / 3 if u < 3 else (23 - u) / 21) for u in range(24)]
# train_worker.py spoils this one, and starts at this scale
BAD_UPDATE = 6
FIRST_LOSS_SCALE = 2.0**24


@pytest.fixture(scope="module")
def plain(plain_training: Any) -> Any:
    return plain_training(SIZES, RATES)


@pytest.mark.parametrize(
    "case",
    [*(f"ramp-{s}" for s in STAGES), *(f"offload-{s}" for s in STAGES[1:]), "deepspeed-2"]
    + [f"{what}-{stage}" for what, stage in RECOMPUTED],
)
def test_a_ramp_over_20_updates_equals_the_plain_loop(launch: Any, plain: Any, case: str) -> None:
    losses, norms, weights = plain
    written = json.loads((launch.folder / case / "plan.json").read_text())
    passes = [segment["accumulation"] for segment in written["segments"]]
    # of two samples at most
    assert passes == ([1, 2, 3, 4] if launch.world_size == 1 else [1, 1, 2, 2])
    assert launch.metrics(case, "samples") == [sum(SIZES[: n + 1]) for n in range(24)]
    assert launch.metrics(case, "loss") == pytest.approx(losses, rel=0, abs=1e-5)
    # in the last update 3 samples are shared by both ranks; the norm is the same all the same
    assert launch.metrics(case, "gradient_norm") == pytest.approx(norms, rel=1e-4)
    # clipping took part
    assert max(norms) > 1
    for name, tensor in launch.weights(case).items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("stage", [0, 3])
def test_z_loss_equals_the_plain_loop(
    launch: Any, plain: Any, plain_training: Any, stage: int
) -> None:
    case = f"z_loss-{stage}"
    losses, norms, _ = plain_training(SIZES, RATES, z_loss=Z_LOSS)
    # the loss that is told is the cross entropy alone
    assert launch.metrics(case, "loss") == pytest.approx(losses, rel=0, abs=1e-5)
    assert launch.metrics(case, "gradient_norm") == pytest.approx(norms, rel=1e-4)
    assert max(abs(a - b) for a, b in zip(losses, plain[0], strict=True)) > 1e-3
    z = launch.metrics(case, "z_loss")
    # at the start every logit is near 0 and the log-sum-exp near ln 257
    assert z[0] == pytest.approx(Z_LOSS * 5.549**2, rel=0.01)
    assert z[-1] < z[0]


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        *(("nan_loss", s) for s in STAGES),
        *((k, s) for k in ("nan_gradient", "spike") for s in (0, 2)),
    ],
)
def test_a_bad_update_is_skipped_with_nothing_changed(
    launch: Any, plain_training: Any, kind: str, stage: int
) -> None:
    case = f"{kind}-{stage}"
    losses, norms, weights = plain_training(SIZES, RATES, skipped={BAD_UPDATE})
    records = [json.loads(line) for line in (launch.folder / case / "metrics.jsonl").open()]
    bad = next(r for r in records if r["kind"] == "train" and "skipped" in r)
    assert bad["update"] == BAD_UPDATE + 1
    said = {"nan_loss": "the loss became nan", "nan_gradient": "the gradient norm became"}
    assert bad["skipped"].startswith(said.get(kind, "the loss leapt to "))
    assert sum("skipped" in r for r in records) == 1
    good = [n for n in range(24) if n != BAD_UPDATE]
    told, told_norms = launch.metrics(case, "loss"), launch.metrics(case, "gradient_norm")
    assert [told[n] for n in good] == pytest.approx([losses[n] for n in good], rel=0, abs=1e-5)
    assert [told_norms[n] for n in good] == pytest.approx([norms[n] for n in good], rel=1e-4)
    assert told_norms[BAD_UPDATE] is None
    for name, tensor in launch.weights(case).items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-4)


def test_schedule_by_tokens_under_the_ramp(launch: Any, plain_training: Any) -> None:
    seen = [sum(SIZES[: n + 1]) for n in range(24)]
    total, warmup = seen[-1], seen[2]
    rates = [
        3e-3 * (done / warmup if done < warmup else min(1.0, (total - done) / (0.5 * total)))
        for done in seen
    ]
    assert launch.metrics("by_tokens-2", "learning_rate") == pytest.approx(rates)
    losses, _, _ = plain_training(SIZES, rates)
    assert launch.metrics("by_tokens-2", "loss") == pytest.approx(losses, rel=0, abs=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_fp16_skips_overflows_and_then_follows_fp32(
    launch: Any, plain_training: Any, stage: int
) -> None:
    case = f"fp16-{stage}"
    norms = launch.metrics(case, "gradient_norm")
    skipped = norms.index(next(norm for norm in norms if norm is not None))
    assert 1 <= skipped <= 12
    assert None not in norms[skipped:]
    scales = [FIRST_LOSS_SCALE / 2 ** min(update, skipped) for update in range(24)]
    assert launch.metrics(case, "loss_scale") == scales
    losses, expected, weights = plain_training(SIZES, RATES, skipped=range(skipped))
    assert launch.metrics(case, "loss") == pytest.approx(losses, rel=0.005)
    assert launch.metrics(case, "loss") != pytest.approx(losses, rel=0, abs=1e-6)
    assert norms[skipped:] == pytest.approx(expected[skipped:], rel=0.05)
    saved = launch.weights(case)
    assert all(tensor.dtype == torch.float32 for tensor in saved.values())
    head = "token_embedding.weight"
    # AdamW turns rounding of the smallest gradients into whole steps, here and there
    assert (saved[head] - weights[head]).abs().mean() < 2e-4


@pytest.mark.parametrize("stage", [0, 2])
def test_a_bad_update_says_nothing_of_the_loss_scale(launch: Any, stage: int) -> None:
    case = f"nan_loss_fp16-{stage}"
    norms = launch.metrics(case, "gradient_norm")
    dropped = [update for update, norm in enumerate(norms) if norm is None]
    assert BAD_UPDATE in dropped
    assert len(dropped) > 1
    overflows = [update for update in dropped if update != BAD_UPDATE]
    assert launch.metrics(case, "loss_scale") == [
        FIRST_LOSS_SCALE / 2 ** sum(overflow < update for overflow in overflows)
        for update in range(24)
    ]


@pytest.mark.parametrize("case", ["offload-2", "fp16-1"])
def test_resumed_bit_for_bit(launch: Any, case: str) -> None:
    for key in ("update", "loss", "gradient_norm", "learning_rate"):
        assert launch.metrics(f"resumed-{case}", key) == launch.metrics(case, key)
    again = launch.weights(f"resumed-{case}")
    for name, tensor in launch.weights(case).items():
        assert torch.equal(tensor, again[name]), name


def test_recomputed_dropout_is_bit_for_bit_the_same(launch: Any) -> None:
    for key in ("loss", "gradient_norm"):
        assert launch.metrics("dropout_block", key) == launch.metrics("dropout", key)


def test_every_part_of_the_time_is_told(launch: Any) -> None:
    directory: Path = launch.folder / "ramp-2"
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    for record in records:
        parts = ("data", "forward_backward", "optimizer")
        told = [record[f"{part}_milliseconds"] for part in parts]
        assert min(told) > 0
        assert sum(told) == pytest.approx(record["milliseconds"])
        assert record["peak_memory_bytes"] > 2**26
        # nobody knows the peak of a CPU
        assert "mfu" not in record
    # validation takes place after updates 8 and 16, and is told with the next
    validated = [r["update"] for r in records if r["validation_milliseconds"] > 0]
    assert validated == [9, 17]
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["mfu"] is None
    assert min(summary["milliseconds_per_update"].values()) > 0


def wandb_records(written: Path) -> list[bytes]:
    """Return the records of an offline run: LevelDB's log format after a header of 7 bytes."""
    content, place, records = written.read_bytes(), 7, []
    while place + 7 <= len(content):
        left = 2**15 - place % 2**15
        if left < 7:
            # no header begins in the last bytes of a block
            place += left
            continue
        length = int.from_bytes(content[place + 4 : place + 6], "little")
        # whole, first, middle or last piece of a record
        kind, piece = content[place + 6], content[place + 7 : place + 7 + length]
        if kind in (1, 2):
            records.append(piece)
        else:
            records[-1] += piece
        place += 7 + length
    return records


def test_wandb_offline_leaves_one_run_with_every_metric(launch: Any) -> None:
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    (written,) = (launch.folder / "wandb" / "wandb").glob("offline-run-*/run-*.wandb")
    losses = []
    for content in wandb_records(written):
        items = Record.FromString(content).history.item
        values = {item.key or ".".join(item.nested_key): item.value_json for item in items}
        losses += [json.loads(values["train/loss"])] if "train/loss" in values else []
    assert losses == launch.metrics("wandb", "loss")


def test_training_goes_on_with_wandb_broken(launch: Any) -> None:
    assert launch.metrics("broken_wandb", "loss") == launch.metrics("ramp-0", "loss")
    summary = json.loads((launch.folder / "broken_wandb" / "summary.json").read_text())
    assert summary["finished"] is True
