"""Train a GPT-2 with the attention mechanism of your choice: `python train.py attention=slay`.

`python train.py --help` lists every option; `dry_run=true` prints the plan and stops.
"""

from __future__ import annotations

import hydra
from omegaconf import DictConfig

from slayformer.cli import entry_point


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def train(composed: DictConfig) -> None:
    """Compose, check and run."""
    from slayformer.config import load_config
    from slayformer.training.loop import run

    run(load_config(composed))


if __name__ == "__main__":
    entry_point(train)
