"""Continue a text with a trained model.

  python scripts/generate.py checkpoint=runs/NAME prompt="My fellow citizens"

  checkpoint=PATH    a run directory (its latest checkpoint), one checkpoint folder, an exported
                     folder, or the name of such a model or a GPT-2 on the Hugging Face hub
  prompt=TEXT        what to continue (default: the beginning of a document)
  tokens=100         most new tokens; fewer if the text ends or the context is full
  temperature=0.8    0 takes the likeliest token every time
  top_k=50           draw from this many likeliest tokens (0: from all)
  seed=0             the same seed draws the same text
  cuda_graph=false   true records a token's step once and replays it: faster on a GPU, and only
                     with a linear mechanism, whose state does not grow

The text streams to standard output, the speed goes to standard error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from slayformer.cli import entry_point
from slayformer.errors import ConfigError, UserError, nearest

DEFAULTS: dict[str, str | int | float] = {
    "checkpoint": "", "prompt": "", "tokens": 100, "temperature": 0.8, "top_k": 50, "seed": 0,
    "cuda_graph": False,
}  # fmt: skip


def parse(arguments: list[str]) -> dict[str, Any]:
    """Return the options by name; raises ConfigError for an unknown key or a wrong type."""
    options: dict[str, Any] = dict(DEFAULTS)
    # not Hydra's grammar: a prompt is any text, with commas, quotes and braces
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise UserError(f"{argument}: options are written key=value, --help lists them")
        if key not in options:
            raise ConfigError(key, value, f"unknown key; {nearest(key, options)}")
        kind = type(DEFAULTS[key])
        try:
            options[key] = {"true": True, "false": False}[value] if kind is bool else kind(value)
        except (ValueError, KeyError):
            what = {int: "a whole number", bool: "true or false"}.get(kind, "a number")
            raise ConfigError(key, value, f"must be {what}") from None
    if not options["checkpoint"]:
        raise ConfigError("checkpoint", None, "needs a run directory or a checkpoint folder")
    return options


def main() -> None:
    """Load the model, stream the continuation, and tell the speed."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return
    options = parse(sys.argv[1:])
    import torch

    from slayformer.evaluation.scored_model import load_scored_model
    from slayformer.huggingface.hub import model_folder
    from slayformer.model.generation import generate, stream_text

    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = model_folder("checkpoint", options["checkpoint"])
    loaded = load_scored_model(folder, torch.device(device))
    tokenizer = loaded.tokenizer
    # documents follow an end-of-text, so that is what their beginning looks like to the model
    ids = tokenizer.encode(options["prompt"]) or [tokenizer.end_of_text]
    new_ids = generate(
        loaded.model,
        ids,
        max_new_tokens=options["tokens"],
        temperature=options["temperature"],
        top_k=options["top_k"] or None,
        seed=options["seed"],
        stop_token=tokenizer.end_of_text,
        cuda_graph=options["cuda_graph"],
    )
    times = [time.perf_counter()]

    def timed() -> Iterator[int]:
        for token in new_ids:
            times.append(time.perf_counter())
            yield token

    pieces = stream_text(tokenizer, timed())
    # the first call may have to say what computes it: before the text, not within
    print(options["prompt"] + next(pieces, ""), end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print(flush=True)
    print(f"{speed(times, len(ids))} on {device}", file=sys.stderr)


def speed(times: Sequence[float], prompt_tokens: int) -> str:
    """Return how fast a text came: `times` (s) are the start's and those of each new token.

    The first token waits for the prompt and for what is compiled at the first call.
    """
    told = f"new tokens: {len(times) - 1}"
    if len(times) > 1:
        told += f", the first after {times[1] - times[0]:.2f} s (prompt tokens: {prompt_tokens:,})"
    if len(times) > 2:
        told += f", then {(len(times) - 2) / (times[-1] - times[1]):,.0f} tokens/s"
    return told


if __name__ == "__main__":
    entry_point(main)
