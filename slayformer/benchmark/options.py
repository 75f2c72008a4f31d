"""What scripts/bench_attention.py is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from slayformer.attention.backends import BACKENDS
from slayformer.benchmark.contestants import PEERS, check_names
from slayformer.config import one_of, positive
from slayformer.config_loading import load_config
from slayformer.errors import ConfigError, nearest
from slayformer.presets import preset_names

PASSES = ("forward", "forward_backward", "decode")
LENGTHS = [2**power for power in range(7, 18)]
# what null stands for, and what it stands for with quick=true
DEFAULTS: dict[str, Any] = {
    "mechanisms": preset_names,
    "peers": lambda: [*PEERS],
    "lengths": lambda: LENGTHS,
    "contexts": lambda: [2**power for power in range(7, 15)],
    "rounds": lambda: 7,
    "longest_call_s": lambda: 5.0,
}
QUICK: dict[str, Any] = {
    "mechanisms": lambda: ["slay", "slay_best", "slay_block_quadratic", "linear_elu", "softmax"],
    "peers": lambda: ["torch_sdpa", "naive_softmax"],
    "lengths": lambda: [128, 512, 2048],
    "contexts": lambda: [128, 1024],
    "rounds": lambda: 3,
    "longest_call_s": lambda: 1.0,
}


@dataclass
class BenchAttentionConfig:
    """Everything `scripts/bench_attention.py` is told; null chooses what the YAML says."""

    mechanisms: list[str] | None = None
    peers: list[str] | None = None
    passes: list[str] | None = None
    lengths: list[int] | None = None
    # tokens before the decoded ones
    contexts: list[int] | None = None
    batch: int = positive(1)
    heads: int = positive(8)
    head_dim: int = positive(32)
    dtype: str = one_of("fp32", "bf16", "fp16", default="fp32")
    backend: str = "auto"
    device: str = one_of("auto", "cpu", "cuda", default="auto")
    threads: int | None = positive(None)
    clock: str = one_of("wall", "cpu", default="wall")
    rounds: int | None = positive(None)
    longest_call_s: float | None = positive(None)
    memory_limit_mib: int | None = positive(None)
    time_budget_s: float | None = positive(None)
    quick: bool = False
    directory: str | None = None
    # a folder of an earlier run: write its tables and pictures anew, measure nothing
    redraw: str | None = None


def read_config(composed: DictConfig) -> BenchAttentionConfig:
    """Return the checked configuration, every null but the limits and the folder filled in.

    One value stands for a list of it, `all` for every choice. Raises ConfigError for a value that
    cannot work.
    """
    for key in ("mechanisms", "peers", "passes", "lengths", "contexts"):
        if composed.get(key) == "all" and key in ("mechanisms", "peers", "passes"):
            composed[key] = list(PASSES) if key == "passes" else DEFAULTS[key]()
        elif isinstance(composed.get(key), str | int | float):
            composed[key] = [composed[key]]
    config: BenchAttentionConfig = load_config(composed, BenchAttentionConfig)
    for key, default in (QUICK if config.quick else DEFAULTS).items():
        if getattr(config, key) is None:
            setattr(config, key, default())
    if config.passes is None:
        config.passes = list(PASSES)
    assert config.mechanisms is not None
    assert config.peers is not None
    check_names(config.mechanisms, config.peers)
    if not (config.mechanisms or config.peers):
        raise ConfigError("mechanisms", [], "name at least one, or a peer")
    for key, given, known in (
        ("backend", [config.backend], ("auto", *BACKENDS)),
        ("passes", config.passes, PASSES),
    ):
        for name in given:
            if name not in known:
                raise ConfigError(key, name, nearest(name, known))
    for key in ("lengths", "contexts", "passes"):
        values = getattr(config, key)
        if not values or len(set(values)) < len(values):
            raise ConfigError(key, values, "name at least one, and each once")
    for key in ("lengths", "contexts"):
        values = getattr(config, key)
        if min(values) < 1:
            raise ConfigError(key, min(values), "must be greater than 0")
        setattr(config, key, sorted(values))
    return config
