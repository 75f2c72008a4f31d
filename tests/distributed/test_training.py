"""One and two processes, every ZeRO stage: the same training as a plain PyTorch loop, and resumed.

Each world size is one launch of `train_worker.py`, which trains all cases one after another.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from slayformer.cli import compose
from slayformer.config_loading import load_config
from slayformer.data.loader import WindowLoader
from slayformer.data.prepare import prepare
from slayformer.model.gpt2 import GPT2
from tests.distributed.cases import RESHAPED, RESHAPED_AT, RESUMED, SIZES, STAGES

pytestmark = pytest.mark.slow

# 3 updates of warm-up to 3e-3, then linearly to 0 in the last of 24
RATES = [3e-3 * ((u + 1) / 3 if u < 3 else (23 - u) / 21) for u in range(24)]

Curve = tuple[list[float], list[float], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def clipped(plain_training: Any) -> Curve:
    return plain_training(SIZES, RATES)


@pytest.fixture(scope="module")
def unclipped(plain_training: Any) -> Curve:
    return plain_training(SIZES, RATES, clipping=float("inf"))


@pytest.mark.parametrize("stage", [0, 2])
def test_clipping_can_be_turned_off(
    launch: Any, clipped: Curve, unclipped: Curve, stage: int
) -> None:
    case = f"unclipped-{stage}"
    assert launch.metrics(case, "loss") == pytest.approx(unclipped[0], rel=0, abs=1e-5)
    assert launch.metrics(case, "gradient_norm") == pytest.approx(unclipped[1], rel=1e-4)
    assert max(abs(a - b) for a, b in zip(clipped[0], unclipped[0], strict=True)) > 1e-3


def test_mechanism_parameters_learn_alike_in_every_stage(launch: Any) -> None:
    losses = launch.metrics("learned-0", "loss")
    assert launch.metrics("learned-2", "loss") == pytest.approx(losses, rel=0, abs=1e-5)
    saved = launch.weights("learned-2")
    name = "blocks.0.attention.log_far_scale"
    torch.testing.assert_close(saved[name], launch.weights("learned-0")[name], rtol=0, atol=1e-4)
    # it started at 0, and 24 AdamW steps of 5 times the rate move it by up to 5 · Σ rate
    rates = launch.metrics("learned-0", "learning_rate")
    assert float(saved[name].abs().max()) > 2 * sum(rates) / 5
    assert float(saved[name].abs().max()) < 5 * sum(rates) * 1.1


def test_guarded_rows_are_counted(launch: Any) -> None:
    shares = launch.metrics("signed", "guarded_share")
    assert len(shares) == 24
    # a signed map at the start: some rows, not all
    assert 0.05 < sum(shares) / 24 < 0.95
    records = (launch.folder / "ramp-0" / "metrics.jsonl").read_text()
    assert "guarded_share" not in records


def test_the_summary_says_where_in_the_context_the_loss_is(launch: Any) -> None:
    summary = json.loads((launch.folder / "ramp-0" / "summary.json").read_text())
    stretches = summary["loss_by_position"]
    assert [(s["first"], s["last"]) for s in stretches] == [(0, 0), (1, 1), (2, 3), (4, 7), (8, 15)]
    # ten windows of 16 tokens
    assert [s["tokens"] for s in stretches] == [10, 10, 20, 40, 80]
    mean = sum(s["tokens"] * s["loss"] for s in stretches) / 160
    assert mean == pytest.approx(summary["validation_loss"], rel=1e-9)
    # two layers, two heads, 3 · 8 · 16 features and values of 16 with their normaliser, fp32
    assert summary["state_bytes"] == 2 * 2 * 384 * 17 * 4
    assert summary["control"] is False


def test_bf16_stays_near_fp32(launch: Any, clipped: Curve) -> None:
    losses = launch.metrics("bf16-2", "loss")
    assert losses == pytest.approx(clipped[0], rel=0.01)
    assert losses != pytest.approx(clipped[0], rel=0, abs=1e-6)
    assert all(tensor.dtype == torch.float32 for tensor in launch.weights("bf16-2").values())


@pytest.mark.parametrize(("stage", "passes"), RESUMED)
def test_six_updates_and_six_resumed_are_twelve_bit_for_bit(
    launch: Any, stage: int, passes: int
) -> None:
    whole, resumed = (f"{kind}-{stage}-{passes}" for kind in ("whole", "resumed"))
    plan = json.loads((launch.folder / whole / "plan.json").read_text())
    assert [segment["accumulation"] for segment in plan["segments"]] == [passes]
    for key in ("update", "tokens", "samples", "loss", "gradient_norm", "learning_rate"):
        values = launch.metrics(whole, key)
        assert len(values) == 12
        assert launch.metrics(resumed, key) == values
    weights, again = launch.weights(whole), launch.weights(resumed)
    for name, tensor in weights.items():
        assert torch.equal(tensor, again[name]), name
    head = "token_embedding.weight"
    assert not torch.equal(weights[head], launch.weights(whole, update=6)[head])


@pytest.mark.parametrize(("was", "now"), RESHAPED)
def test_other_processes_and_stages_go_on_in_the_middle_of_a_ramp(
    reshaped: Any, was: int, now: int
) -> None:
    source, other = reshaped
    whole, case = f"ramp-{was}", f"{was}-to-{now}"
    for key in ("update", "samples", "tokens", "learning_rate"):
        assert other.metrics(case, key) == source.metrics(whole, key)
    # the first are the metrics of the run it went on from
    losses = source.metrics(whole, "loss")
    assert other.metrics(case, "loss")[:RESHAPED_AT] == losses[:RESHAPED_AT]
    assert other.metrics(case, "loss") == pytest.approx(losses, rel=0, abs=1e-5)
    weights = other.weights(case)
    for name, tensor in source.weights(whole).items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-4)


def test_a_branch_off_a_finished_run_scores_the_same(launch: Any) -> None:
    summaries = [
        json.loads((launch.folder / case / "summary.json").read_text())
        for case in ("whole-2-4", "finished")
    ]
    for key in ("validation_loss", "unigram_loss", "updates", "tokens", "parameters"):
        assert summaries[0][key] == summaries[1][key]
    assert launch.metrics("finished", "loss") == launch.metrics("whole-2-4", "loss")
    before, after = (launch.weights(case) for case in ("whole-2-4", "finished"))
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.parametrize("stage", STAGES)
def test_validation_and_samples_on_the_way(
    launch: Any, clipped: Curve, tiny: list[str], stage: int
) -> None:
    config = load_config(compose("train", tiny))
    data = prepare(config.data, config.tokenizer)
    model = GPT2(config.model, config.attention, vocabulary_size=257, seed=0)
    model.load_state_dict(clipped[2])
    tokens = torch.from_numpy(data.validation.read(0, 161))
    with torch.no_grad():
        logits = model.logits(model(tokens[:-1].view(10, 16))[0])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[1:]).item()
    directory = launch.folder / f"ramp-{stage}"
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    validations = [record for record in records if record["kind"] == "validation"]
    assert [record["update"] for record in validations] == [8, 16, 24]
    assert [record["scored_tokens"] for record in validations] == [160] * 3
    assert validations[-1]["loss"] == pytest.approx(loss, abs=1e-5)
    samples = (directory / "samples.txt").read_text()
    # the prompt is cut to half a context
    assert re.findall(r"^--- after update (\d+) ---\ncitizens", samples, re.M) == ["8", "16", "24"]


def test_dropout_took_part(launch: Any, tiny: list[str]) -> None:
    # the first loss of the same batch without dropout is another
    config = load_config(compose("train", tiny))
    data = prepare(config.data, config.tokenizer)
    loader = WindowLoader(data.train, context_length=16, seed=0, end_of_text=256)
    model = GPT2(config.model, config.attention, vocabulary_size=257, seed=0)
    batch = loader.batch(range(8))
    logits = model.logits(model(batch.ids_BT)[0])
    loss = F.cross_entropy(logits.flatten(0, 1), batch.targets_BT.flatten()).item()
    assert 1e-4 < abs(launch.metrics("whole-0-1", "loss")[0] - loss) < 0.5


def test_ranks_hold_the_same_features_and_weights(launch: Any) -> None:
    first, *others = launch.digests("ramp-2")
    assert any("attention" in name for name in first)
    assert any("weight" in name for name in first)
    assert all(other == first for other in others)
    first, *others = launch.digests("ramp-3")
    assert first
    assert all(other == first for other in others)
