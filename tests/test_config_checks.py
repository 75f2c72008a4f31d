"""Settings that cannot work together are refused with the reason, and old ones are still read."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from slayformer.cli import COMMANDS, compose
from slayformer.config_commands import RecallConfig
from slayformer.config_loading import load_config, to_plain
from slayformer.errors import ConfigError
from slayformer.paper.tasks_command import TasksConfig
from slayformer.paper.xmc_command import XmcConfig
from slayformer.training.deepspeed_settings import deepspeed_settings

REDRAWN = ["attention=performer", "attention.redraw_every=5"]
RAMP = "start_samples: 8, increment_samples: 8"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["batch.ramp={" + RAMP + "}"],
            r"batch.ramp=nothing: set exactly one: use batch.ramp.updates=NUMBER, or",
        ),
        (
            ["batch.ramp={" + RAMP + ", updates: 9, samples: 99}"],
            r"batch.ramp=updates and samples: .* batch.ramp.updates=null batch.ramp.samples=99",
        ),
        (
            ["engine.offload_optimizer=true"],
            r"engine.offload_optimizer=true: .* from engine.zero_stage=1 on",
        ),
        (
            ["engine.deepspeed={bf16: {enabled: true}}"],
            r"engine.deepspeed.bf16=.*without ZeRO .* wrong; engine.precision=bf16 keeps them",
        ),
        (
            ["engine.deepspeed={bfloat16: {enabled: true}}"],
            r"engine.deepspeed.bfloat16=.*use engine.precision=bf16",
        ),
        (
            ["engine.deepspeed={zero_optimization: {stage: 3}}"],
            r"engine.deepspeed.zero_optimization.stage=3: use engine.zero_stage",
        ),
        (
            ["engine.deepspeed={gradient_accumulation_steps: 4}"],
            r"gradient_accumulation_steps=4: it follows from the group batch",
        ),
        (["engine.deepspeed=3"], r"engine.deepspeed"),
        (["engine.context_parallel=0"], r"engine.context_parallel=0: must be greater than 0"),
        (
            [*REDRAWN, "engine.activation_checkpointing=block"],
            r"engine.activation_checkpointing=block: .* draws that change in training; use none",
        ),
        ([*REDRAWN, "engine.context_parallel=2"], r"engine.context_parallel=2: .*change.*; use 1"),
        (["schedule=wsd", "schedule.decay_share=0"], r"decay_share=0.0: must be above 0"),
        (
            ["+data.source.path=FOLDER"],
            r"data.source.path=FOLDER: has no effect with data.source.kind=sotu, but with text or",
        ),
        (
            ["data=text", "data.source.path=a", "+data.source.text_field=body"],
            r"data.source.text_field=body: has no effect with data.source.kind=text, but with hugg",
        ),
        (
            ["data.validation_source={kind: text, path: FOLDER, split: validation}"],
            r"data.validation_source.split=validation: has no effect with .*kind=text, but with",
        ),
        (["optimizer.z_loss=-1"], r"optimizer.z_loss=-1.0: must be 0 or greater"),
        *(
            ([f"model.short_convolution={width}"], rf"short_convolution={width}: must be 0 .none.")
            for width in (-1, 1)
        ),
    ],
)
def test_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(compose("train", overrides))


@pytest.mark.parametrize("seed", [-1, 2**31])
@pytest.mark.parametrize(
    ("command", "schema", "others"),
    [("xmc", XmcConfig, ["train=a", "test=b"]), ("tasks", TasksConfig, [])],
)
def test_a_list_of_seeds_is_one_of_seeds(
    command: str, schema: type, others: list[str], seed: int
) -> None:
    composed = compose(command, [f"seeds=[0,{seed}]", *others], COMMANDS)
    with pytest.raises(ConfigError, match=r"seeds=\[0, .*each must be at least 0"):
        load_config(composed, schema)


def test_redrawing_alone_is_taken() -> None:
    load_config(compose("train", REDRAWN))
    load_config(compose("train", ["attention=performer", "engine.activation_checkpointing=block"]))


def test_recall_refuses_what_it_does_not_do() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.z_loss=0.1: this training is on the plain"):
        load_config(compose("recall", ["optimizer.z_loss=0.1"]), RecallConfig)


def test_settings_of_deepspeed_come_back_as_they_were_given() -> None:
    given = "{zero_optimization: {overlap_comm: true}, wall_clock_breakdown: true}"
    config = load_config(compose("train", [f"engine.deepspeed={given}"]))
    again = load_config(OmegaConf.create(to_plain(config)))
    assert again.engine.deepspeed == {
        "zero_optimization": {"overlap_comm": True},
        "wall_clock_breakdown": True,
    }


@pytest.mark.parametrize("value", [None, 3, [1]])
def test_settings_of_deepspeed_take_nothing_of_ours_away(value: Any) -> None:
    config = load_config(compose("train", ["engine=zero2", "engine.precision=fp32"]))
    config.engine.deepspeed = {"zero_optimization": value}
    with pytest.raises(ConfigError, match=r"engine\.deepspeed\.zero_optimization=.*must be a mapp"):
        deepspeed_settings(config, 100)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "wrong", "told"),
    [
        (
            "zero1",
            "{zero_optimization: {overlap_coms: true}}",
            r"engine.deepspeed=\{'zero_optim.*: DeepSpeed says of overlap_coms: Extra inputs are",
        ),
        # it would ignore these
        (
            "zero3",
            "{wall_clock_breakdown: true, gradient_cliping: 1}",
            r"engine.deepspeed.gradient_cliping=1: .*ignore it; use optimizer.gradient_clipping$",
        ),
        ("local", "{a: 1}", r"engine.deepspeed.a=1: .* would ignore it; its documentation"),
        ("zero1", "{dump_sate: 1}", r"engine.deepspeed.dump_sate=1: .* did you mean dump_state\?"),
        # it raises errors of its own kinds for what it refuses
        ("local", "{sparse_attention: {mode: fixed}}", r"engine.deepspeed=.*: DeepSpeed says: "),
    ],
)
def test_what_deepspeed_does_not_know_is_told_in_a_sentence(
    engine: str, wrong: str, told: str, run_command: Any, tmp_path: Path
) -> None:
    command = ["train.py", "tokenizer=bytes", f"engine={engine}", f"engine.deepspeed={wrong}"]
    finished = run_command(command, cwd=tmp_path)
    assert finished.code == 2
    assert re.match(f"error: {told}", finished.stderr.splitlines()[-1])


def test_a_configuration_of_before_these_options_is_read() -> None:
    plain = to_plain(load_config(compose("train", ["batch.ramp={" + RAMP + ", updates: 9}"])))
    later = {
        "schedule": ["unit", "warmup_tokens", "decay_share"],
        "optimizer": ["decay_embeddings", "decay_vectors", "z_loss"],
        "engine": [
            *("offload_optimizer", "deepspeed", "planned_device", "planned_utilisation"),
            "context_parallel",
        ],
        "logging": ["tensorboard"],
    }
    old = copy.deepcopy(plain)
    for group, keys in later.items():
        for key in keys:
            del old[group][key]
    del old["batch"]["ramp"]["samples"]
    assert to_plain(load_config(OmegaConf.create(old))) == plain
