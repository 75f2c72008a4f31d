"""Score a checkpoint: `python eval.py checkpoint=runs/NAME [data=FILE_OR_FOLDER]`."""

from __future__ import annotations

from pathlib import Path

from slayformer.cli import compose, entry_point


def main() -> None:
    """Compose, check and score."""
    # not in configs/, where `data` is a group and takes no path
    composed = compose("eval", folder=Path(__file__).resolve().parent / "scripts")
    from slayformer.config import EvalConfig, load_config

    config = load_config(composed, EvalConfig)
    from slayformer.evaluation.perplexity import run

    run(config)


if __name__ == "__main__":
    entry_point(main)
