"""Models to score or to go on with: from a checkpoint or a folder of transformers, any length."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch import nn

from slayformer.data.tokenizer import Tokenizer
from slayformer.errors import CheckpointError, ConfigError
from slayformer.model.gpt2 import GPT2
from slayformer.training.checkpoint import MANIFEST, LoadedModel, find_checkpoint, load_model

HUGGING_FACE_CONFIG = "config.json"


@dataclass(frozen=True)
class ScoredModel:
    """A model in evaluation mode and how it reads text; `loaded` is its checkpoint, if it has one.

    `context_length` is the length it was trained with.
    """

    path: Path
    model: GPT2
    tokenizer: Tokenizer
    mechanism: str
    context_length: int
    precision: str
    isolate_documents: bool
    loaded: LoadedModel | None = None


def load_scored_model(path: Path, device: torch.device) -> ScoredModel:
    """Return the model of a run, a checkpoint, or a folder that `scripts/export_hf.py` wrote.

    GPT-2 in transformers' own format is read too. Raises UserError if `path` is none of these, or
    a GPT-2 with settings that ours does not have.
    """
    if (path / HUGGING_FACE_CONFIG).is_file() and not (path / MANIFEST).exists():
        return _load_exported(path, device)
    path = find_checkpoint(path)
    loaded = load_model(path, device)
    return ScoredModel(
        path,
        loaded.model,
        loaded.tokenizer,
        loaded.config.attention.name,
        loaded.model.context_length,
        loaded.config.engine.precision,
        loaded.config.data.isolate_documents,
        loaded,
    )


def _load_exported(path: Path, device: torch.device) -> ScoredModel:
    from transformers import GPT2LMHeadModel

    from slayformer.huggingface import SlayformerForCausalLM
    from slayformer.huggingface.gpt2_weights import load_gpt2_weights, shape_of_gpt2
    from slayformer.huggingface.model_card import TRAINING_FILE
    from slayformer.huggingface.tokenizer import ExportedTokenizer
    from slayformer.presets import load_preset

    try:
        kind = json.loads((path / HUGGING_FACE_CONFIG).read_bytes()).get("model_type")
        if kind == "slayformer":
            model = SlayformerForCausalLM.from_pretrained(path).model.transformer
        elif kind == "gpt2":
            theirs = GPT2LMHeadModel.from_pretrained(path)
            model = GPT2(
                shape_of_gpt2(theirs.config.to_dict()),
                load_preset("softmax"),
                vocabulary_size=theirs.config.vocab_size,
                seed=0,
            )
            load_gpt2_weights(model, theirs.state_dict())
        else:
            raise CheckpointError(f"{path} holds a model of type {kind}, not slayformer or gpt2")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be loaded: {' '.join(str(error).split())}") from error
    trained = OmegaConf.create()
    if (path / TRAINING_FILE).is_file():
        trained = OmegaConf.load(path / TRAINING_FILE)  # type: ignore[assignment]
    return ScoredModel(
        path,
        model.to(device=device, dtype=torch.float32).eval(),
        ExportedTokenizer.load(path),
        model.blocks[0].attention.config.name,
        model.context_length,
        OmegaConf.select(trained, "engine.precision", default="fp32"),
        OmegaConf.select(trained, "data.isolate_documents", default=False),
    )


@torch.no_grad()
def extend_context(model: GPT2, length: int, positions: str | None) -> None:
    """Let `model` read `length` tokens; beyond the trained ones `positions` says what they add.

    `repeat`: the trained position embeddings again from the start. `interpolate`: the trained
    ones, spread evenly over the length (Chen et al., 2023, "Extending context window of large
    language models via positional interpolation", for embeddings that are learned).

    Raises ConfigError if `positions` is missing or has no effect, or the mechanism has an end.
    """
    trained = model.context_length
    if length <= trained:
        if positions is not None:
            hint = f"has no effect up to the {trained} tokens the model was made for; leave it out"
            raise ConfigError("positions", positions, hint)
        return
    if positions is None:
        hint = (
            f"the model was made for at most {trained} tokens and has learned that many position "
            f"embeddings; positions=repeat or positions=interpolate goes on with them"
        )
        raise ConfigError("context_length", length, hint)
    attention = model.blocks[0].attention
    if attention.bounded_length:  # type: ignore[union-attr]
        name = attention.config.name  # type: ignore[union-attr]
        hint = f"{name} is defined for the {trained} tokens it was made for, and not beyond"
        raise ConfigError("context_length", length, hint)
    table_TC = model.position_embedding.weight
    place = torch.arange(length, device=table_TC.device)
    if positions == "repeat":
        longer = table_TC[place % trained]
    else:
        where = place * ((trained - 1) / (length - 1))
        before = where.floor().long().clamp(max=max(0, trained - 2))
        after = (before + 1).clamp(max=trained - 1)
        longer = torch.lerp(table_TC[before], table_TC[after], (where - before)[:, None])
    model.position_embedding = nn.Embedding.from_pretrained(longer)
    model.context_length = length
