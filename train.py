"""Train a GPT-2 with the attention mechanism of your choice: `python train.py attention=slay`.

`python train.py --help` lists every option; `dry_run=true` prints the plan and stops;
`python train.py run_directory=runs/NAME resume=auto` goes on with a run and its own options;
`python train.py -m attention=slay,softmax seed=1,2` makes a run of every combination.
"""

from __future__ import annotations

import signal
import sys

from slayformer.cli import compose, entry_point, multirun_arguments, own_options


def main() -> None:
    """Compose, check and train."""
    # a cluster's warning that comes before training waits for it instead of ending the process
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    several = multirun_arguments(sys.argv[1:])
    if several is not None:
        from slayformer.evaluation import multirun

        sys.exit(multirun.run(*several))
    composed = own_options(sys.argv[1:]) or compose("train")
    from slayformer.config_loading import load_config

    config = load_config(composed)
    # torch and DeepSpeed, only once there is something to run
    from slayformer.training.run import run

    run(config)


if __name__ == "__main__":
    entry_point(main)
