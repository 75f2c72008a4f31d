"""Score a checkpoint: `python eval.py checkpoint=runs/NAME [data=FILE_OR_FOLDER]`."""

from __future__ import annotations

import hydra
from omegaconf import DictConfig

from slayformer.cli import entry_point


@hydra.main(version_base="1.3", config_path="configs", config_name="eval")
def evaluate(composed: DictConfig) -> None:
    """Compose, check and run."""
    from slayformer.config import EvalConfig, load_config
    from slayformer.evaluation.perplexity import run

    run(load_config(composed, EvalConfig))


if __name__ == "__main__":
    entry_point(evaluate)
