"""From what scripts/bench_train.py is told to a training configuration for everything it times."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import fields

import torch

from slayformer.benchmark.update_options import BenchTrainConfig
from slayformer.cli import compose
from slayformer.config import TrainConfig
from slayformer.config_loading import load_config
from slayformer.errors import ConfigError, nearest

REFERENCE = "softmax"
PLAIN = "plain"
# the plain loop, and DeepSpeed with each of its ZeRO stages
LOOPS = (PLAIN, "zero0", "zero1", "zero2", "zero3")
# (tokens of an update, lengths, rounds)
CPU_DEFAULTS = {"tokens": 2048, "lengths": [1024], "rounds": 5}
GPU_DEFAULTS = {"tokens": 32_768, "lengths": [1024, 4096], "rounds": 7}
QUICK = {"tokens": 256, "lengths": [64, 128], "rounds": 2}
# what of train.yaml changes an update, and what of that this command sets by itself
TAKEN = [
    *("model", "tokenizer", "optimizer", "engine", "attention", "experiment", "seed"),
    "data.isolate_documents",
]
OWN = {
    "model.context_length": "the command goes over lengths=[...]",
    "engine.zero_stage": "loops=[plain,zero1] says it",
    "engine.context_parallel": "one process is timed",
}


def check(config: BenchTrainConfig) -> BenchTrainConfig:
    """Return `config` with every null but the limits and folders filled in; raises ConfigError."""
    defaults = GPU_DEFAULTS if torch.cuda.is_available() else CPU_DEFAULTS
    for key, value in (QUICK if config.quick else defaults).items():
        if getattr(config, key) is None:
            setattr(config, key, value)
    for key in ("attention", "loops", "lengths"):
        values = getattr(config, key)
        if not values or len(set(values)) < len(values):
            raise ConfigError(key, values, "name at least one, and each once")
    for name in config.loops:
        if name not in LOOPS:
            raise ConfigError("loops", name, nearest(name, LOOPS))
    assert config.lengths is not None
    assert config.tokens is not None
    for length in config.lengths:
        if not 0 < length <= config.tokens:
            hint = f"must be above 0 and at most tokens={config.tokens}"
            raise ConfigError("lengths", length, hint)
    return config


def plan(config: BenchTrainConfig, overrides: Sequence[str]) -> dict[tuple, TrainConfig]:
    """Return the configuration of every mechanism, loop and length; raises UserError."""
    assert config.lengths is not None
    assert config.tokens is not None
    given = list(overrides)
    for override in given:
        key, _, value = override.lstrip("+~").partition("=")
        if key in OWN:
            raise ConfigError(key, value, OWN[key])
        if not any(key == taken or key.startswith(f"{taken}.") for taken in TAKEN):
            known = [*(item.name for item in fields(BenchTrainConfig)), *TAKEN]
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
            hint = f"did you mean {close[0]}?" if close else "does not change what an update takes"
            hint += "; what does: " + ", ".join(TAKEN)
            raise ConfigError(key, value, hint)
    keys = {override.lstrip("+").partition("=")[0] for override in given}
    if "model" not in keys and "experiment" not in keys:
        given.insert(0, "model=gpt2_mini" if config.quick else "model=gpt2_small")
    if "engine.precision" not in keys and torch.cuda.is_available():
        given.append("engine.precision=bf16")
    configs = {}
    for length in config.lengths:
        samples = config.tokens // length
        own = [f"model.context_length={length}", f"batch.micro_samples={samples}"]
        own += ["batch.samples_per_update=null", f"batch.samples_per_device={samples}"]
        own += ["batch.ramp=null"]
        for name in config.attention:
            for loop in config.loops:
                stage = 0 if loop == PLAIN else LOOPS.index(loop) - 1
                options = [*given, *own, f"attention={name}", f"engine.zero_stage={stage}"]
                made = configs[length, name, loop] = load_config(compose("train", options))
                if loop == PLAIN and made.engine.deepspeed:
                    hint = "has no DeepSpeed that engine.deepspeed could set; leave one of them out"
                    raise ConfigError("loops", PLAIN, hint)
    return configs
