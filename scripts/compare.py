"""Compare mechanisms: `python scripts/compare.py attention=[softmax,slay] seeds=[1,2,3]`.

Every other key=value is an override of train.py and goes to every run.
"""

from __future__ import annotations

import sys

from slayformer.cli import COMMANDS, compose, entry_point


def main() -> None:
    """Give Hydra the comparison's own arguments, and the others to every run."""
    from slayformer.config_commands import CompareConfig
    from slayformer.config_loading import load_config
    from slayformer.evaluation.compare import run, split_arguments

    own, overrides = split_arguments(sys.argv[1:])
    composed = compose("compare", own, folder=COMMANDS)
    sys.exit(run(load_config(composed, CompareConfig), overrides))


if __name__ == "__main__":
    entry_point(main)
