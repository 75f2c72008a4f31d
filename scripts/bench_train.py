"""Time whole updates: `python scripts/bench_train.py attention=[softmax,slay] lengths=[1024]`.

What of train.py changes an update can be given as well: model, optimizer, engine, tokenizer.
"""

from __future__ import annotations

import sys

from slayformer.cli import COMMANDS, compose, entry_point


def main() -> None:
    """Give Hydra the benchmark's own arguments, and the others to the training's configuration."""
    from slayformer.benchmark.update_options import BenchTrainConfig, split_arguments

    own, overrides = split_arguments(sys.argv[1:])
    composed = compose("bench_train", own, folder=COMMANDS)
    from slayformer.benchmark.command import run_updates
    from slayformer.config_loading import load_config

    run_updates(load_config(composed, BenchTrainConfig), overrides)


if __name__ == "__main__":
    entry_point(main)
