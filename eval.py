"""Score checkpoints: `python eval.py checkpoint=runs/NAME [data=FILE_OR_FOLDER_OR_NAME]`."""

from __future__ import annotations

from slayformer.cli import COMMANDS, compose, entry_point


def main() -> None:
    """Compose, check and score."""
    composed = compose("eval", folder=COMMANDS)
    from slayformer.config_commands import EvalConfig
    from slayformer.config_loading import load_config

    config = load_config(composed, EvalConfig)
    from slayformer.evaluation.perplexity import run

    run(config)


if __name__ == "__main__":
    entry_point(main)
