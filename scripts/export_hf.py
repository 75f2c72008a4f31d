"""Turn a checkpoint into a folder that transformers loads.

`python scripts/export_hf.py checkpoint=runs/NAME`; `--help` lists the options.
"""

from __future__ import annotations

from slayformer.cli import COMMANDS, compose, entry_point


def main() -> None:
    """Compose, check and export."""
    composed = compose("export_hf", folder=COMMANDS)
    from slayformer.config_loading import load_config
    from slayformer.huggingface.export import ExportConfig, run

    run(load_config(composed, ExportConfig))


if __name__ == "__main__":
    entry_point(main)
