"""Make the token shards that training will read: `python scripts/prepare_data.py data=sotu`.

Takes every option of train.py; `data`, `tokenizer` and `experiment` matter here.
"""

from __future__ import annotations

from slayformer.cli import compose, entry_point


def main() -> None:
    """Compose, check, prepare and say what there is."""
    composed = compose("train")
    from rich.console import Console

    from slayformer.config_loading import load_config
    from slayformer.data.parts import PartsMissing
    from slayformer.data.prepare import prepare

    config = load_config(composed)
    console = Console(soft_wrap=True, highlight=False)
    try:
        prepared = prepare(config.data, config.tokenizer)
    except PartsMissing as others:
        console.print(str(others), markup=False)
        return
    tokenizer = prepared.tokenizer
    console.print(f"tokenizer   {tokenizer.name}, {tokenizer.vocabulary_size:,} tokens")
    for side, stream in (("training", prepared.train), ("validation", prepared.validation)):
        console.print(f"{side:11} {stream.documents:,} documents, {len(stream):,} tokens")
    console.print(f"folder      {prepared.directory}", markup=False)


if __name__ == "__main__":
    entry_point(main)
