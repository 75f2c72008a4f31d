"""Text samples on the way: what the model makes of the prompt so far."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

import torch

from slayformer.config import TrainConfig
from slayformer.data.shards import write_atomically
from slayformer.model.generation import generate
from slayformer.model.gpt2 import GPT2
from slayformer.training import distributed
from slayformer.training.engine import TrainingEngine
from slayformer.training.inputs import Inputs

SAMPLES_FILE = "samples.txt"
HEADING = re.compile(rb"^--- after update ([\d,]+) ---$", re.MULTILINE)


def keep_samples(directory: Path, *, before_update: int) -> None:
    """Cut samples.txt to those before `before_update`: what a resumed run will not write again."""
    path = directory / SAMPLES_FILE
    # a pipe that somebody reads along has nothing to cut
    if not path.is_file():
        return
    # what was cut off may end within a character
    text = path.read_bytes()
    for heading in HEADING.finditer(text):
        if int(heading[1].replace(b",", b"")) >= before_update:
            write_atomically(path, [text[: heading.start()]])
            return


def write_sample(
    directory: Path, engine: TrainingEngine, inputs: Inputs, config: TrainConfig, update: int
) -> str | None:
    """Continue the prompt on rank 0, append it to samples.txt, and return the whole text there.

    Every rank must call it. None on other ranks and without a prompt.
    """
    if not inputs.prompt:
        return None
    model = _whole_model(engine, config)
    if not distributed.is_main():
        return None
    tokenizer = inputs.data.tokenizer
    # every length would be compiled anew
    eager = torch.compiler.set_stance("force_eager") if config.engine.compile else nullcontext()
    with eager:
        continuation = generate(
            model,
            inputs.prompt,
            max_new_tokens=config.logging.sample_tokens,
            seed=config.seed,
            stop_token=tokenizer.end_of_text,
        )
    text = tokenizer.decode([*inputs.prompt, *continuation])
    with (directory / SAMPLES_FILE).open("a", encoding="utf-8") as file:
        file.write(f"--- after update {update:,} ---\n{text}\n\n")
    return text


def _whole_model(engine: TrainingEngine, config: TrainConfig) -> GPT2:
    """Return a model that rank 0 can run alone.

    Sharded weights (ZeRO stage 3) need all ranks at every token, so there it is a copy.
    """
    model: GPT2 = engine.objective.model
    if engine.zero_stage < 3:
        return model
    weights = engine.consolidated_weights()
    if weights is None:
        return model
    # drawing initial weights must not move the random state of the training
    with torch.random.fork_rng(devices=[]):
        copy = GPT2(
            config.model,
            config.attention,
            vocabulary_size=model.vocabulary_size,
            seed=config.seed,
        )
    copy.load_state_dict(weights)
    return copy.to(engine.device)
