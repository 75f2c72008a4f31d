"""Compare mechanisms: `python scripts/compare.py attention=[softmax,slay] seeds=[1,2,3]`.

Every other key=value is an override of train.py and goes to every run.
"""

from __future__ import annotations

import sys

from slayformer.cli import COMMANDS, compose, entry_point


def main() -> None:
    """Give Hydra the comparison's own arguments, and the others to every run."""
    from slayformer.evaluation.compare import read_config, run, split_arguments

    own, overrides = split_arguments(sys.argv[1:])
    composed = compose("compare", own, folder=COMMANDS)
    sys.exit(run(read_config(composed), overrides))


if __name__ == "__main__":
    entry_point(main)
