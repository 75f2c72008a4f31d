"""The printed plan holds the numbers a person checks before a long run."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from slayformer.cli import compose
from slayformer.config_loading import load_config
from slayformer.errors import ConfigError
from slayformer.model.gpt2 import GPT2
from slayformer.training.budget import make_plan, parameter_counts
from slayformer.training.plan_table import own_parameters, print_plan
from slayformer.training.run import run


def printed(*overrides: str, world_size: int) -> str:
    config = load_config(compose("train", list(overrides)))
    console = Console(file=io.StringIO(), width=200)
    print_plan(console, make_plan(config, 50257, world_size), config, 50257)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(" ".join(line.split()) for line in text.splitlines())


def test_the_paper_run_on_eight_devices() -> None:
    text = printed("+experiment=gpt2_small_chinchilla", "attention=softmax", world_size=8)
    for expected in (
        "124,439,808 in the softmax model of this shape, 85,056,000 of them outside embeddings",
        "124,439,808 with attention=softmax",
        "2,488,796,160 tokens (20 per total parameter)",
        "2,430,465 samples of 1,024 tokens",
        "9,745 updates",
        "updates 168 to 334 128 samples (131,072 tokens)",
        "updates 501 to 9,745 256 samples (262,144 tokens)",
        "last update 65 samples (66,560 tokens)",
        "peak 1.00e-04 after 500 updates of warm-up, then linear, 0.00e+00 in the last update, "
        "by updates",
        # 2 x (12 layers x 12 x 768² + 50,257 x 768), and in 12 layers and 12 heads 512.5 visible
        # keys of 128 + 2 FLOPs for the score and 128 for the value
        "266,104,464 FLOPs per token forward, 532,208,928 backward",
        "bf16 matrix products",
        "8, ZeRO stage 2",
        # weights 4 bytes each and a bf16 copy, gradients 4 / 8 and a bucket of 4, AdamW 8 / 8
        "weights 712 MiB, gradients 534 MiB, AdamW 119 MiB, activations 3,904 MiB",
        "FLOPs; no estimate of hours: the peak of CPU is not known",
    ):
        assert expected in text


def test_hours_on_a_named_device() -> None:
    paper = ["+experiment=gpt2_small_chinchilla", "attention=softmax"]
    text = printed(*paper, "engine.planned_device=H100", world_size=8)
    # 2,488,796,160 x 798,313,392 FLOPs at 8 x 989 TFLOP/s x 0.4 take 628 s
    assert "about 0.17 hours on 8 x H100 for 1.99e+18 FLOPs, assuming 40 % of 989 TFLOP/s" in text
    slower = ["engine.planned_device=A100", "engine.planned_utilisation=0.2"]
    # 1.98684e18 FLOPs at 8 x 19.5 TFLOP/s x 0.2 take 63,681 s
    text = printed(*paper, *slower, "engine.precision=fp32", world_size=8)
    assert "about 17.69 hours on 8 x A100" in text
    text = printed(*paper, "engine.planned_device=V100", world_size=8)
    assert "no estimate of hours: the peak of V100 is not known" in text


def test_devices_that_share_sequences_are_told() -> None:
    paper = ["+experiment=gpt2_small_chinchilla", "attention=slay_best"]
    text = printed(*paper, "model.context_length=1026", "engine.context_parallel=4", world_size=8)
    for expected in (
        "8, ZeRO stage 2",
        "4 share a sequence, at most 257 of its tokens each; such groups with samples of their "
        "own: 2",
        # 32 samples for each of two groups
        "64 samples (65,664 tokens) each; forward passes per device: 4 of at most 8 samples",
    ):
        assert expected in text
    assert "share a sequence" not in printed(*paper, world_size=8)


def test_wsd_by_tokens_and_offloading_are_told() -> None:
    schedule = ["schedule=wsd", "schedule.unit=tokens", "schedule.warmup_tokens=4096"]
    text = printed(
        *schedule,
        *("schedule.warmup_updates=null", "engine=zero1", "engine.offload_optimizer=true"),
        world_size=1,
    )
    assert (
        "after 4,096 tokens of warm-up, then constant, then linear over the last 20 %, 0.00e+00 in "
        "the last update, by tokens"
    ) in text
    assert "AdamW 0 MiB" in text
    assert re.search(r"host memory about \d+ MiB per device: AdamW", text)


@pytest.mark.parametrize("attention", ["softmax", "linear_elu"])
def test_own_parameters_leave_out_the_padded_vocabulary(attention: str) -> None:
    config = load_config(compose("train", [f"attention={attention}"]))
    model = GPT2(config.model, config.attention, vocabulary_size=50257, seed=0)
    assert model.padded_vocabulary_size > 50257
    # neither mechanism has parameters of its own
    assert own_parameters(model) == parameter_counts(config.model, 50257).total


def test_a_dry_run_touches_nothing(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    arguments = ["data=text", "data.source.path=/nowhere", "dry_run=true"]
    assert run(load_config(compose("train", arguments))) is None
    told = " ".join(capsys.readouterr().out.split())
    assert "WORLD_SIZE is not set: planned for one" in told
    assert told.endswith(
        "would end with: data.source.path=/nowhere: there is no such file or folder"
    )
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert run(load_config(compose("train", arguments))) is None
    assert "4, ZeRO stage 0" in capsys.readouterr().out
    for refused, message in {
        "engine.context_parallel=3": "must divide the 4 processes",
        "engine.context_parallel=8": "needs 8 processes or a multiple, and there are 4",
        "attention=softmax engine.context_parallel=2": "softmax compares all pairs of tokens",
    }.items():
        with pytest.raises(ConfigError, match=message):
            run(load_config(compose("train", [*arguments, *refused.split()])))
    assert list(tmp_path.iterdir()) == []
