"""From a checkpoint to a folder that transformers loads: weights, tokenizer, model card."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from rich.console import Console
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from slayformer.config import DataConfig, TrainConfig, one_of
from slayformer.config_loading import to_plain
from slayformer.errors import ConfigError, UserError
from slayformer.huggingface.configuration import SlayformerConfig
from slayformer.huggingface.gpt2_weights import to_gpt2
from slayformer.huggingface.model_card import TRAINING_FILE, model_card
from slayformer.huggingface.modeling import SlayformerForCausalLM
from slayformer.huggingface.tokenizer import fast_tokenizer
from slayformer.training.checkpoint import FOLDER, LoadedModel, find_checkpoint, load_model

UNFINISHED = ".unfinished"


@dataclass
class ExportConfig:
    """Everything `scripts/export_hf.py` is told; `format` gpt2 needs a softmax model."""

    checkpoint: str | None
    # null: exports/<run>
    directory: str | None = None
    format: str = one_of("slayformer", "gpt2", default="slayformer")


def run(config: ExportConfig) -> Path:
    """Export `config.checkpoint` and return the folder made.

    Raises UserError if the checkpoint or the folder cannot be used.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("export_hf.py works in one process: run it without a launcher")
    if config.checkpoint is None:
        hint = "give a run directory or a checkpoint folder: checkpoint=runs/NAME"
        raise ConfigError("checkpoint", None, hint)
    checkpoint = find_checkpoint(Path(config.checkpoint)).absolute()
    inside_run = checkpoint.parent.name == FOLDER
    name = checkpoint.parent.parent.name if inside_run else checkpoint.name
    directory = Path(config.directory or Path("exports") / name)
    if not directory.name:
        raise ConfigError("directory", directory, "name a new folder")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError("directory", directory, "is there already; name a new folder")
    loaded = load_model(checkpoint)
    model = to_gpt2(loaded.model) if config.format == "gpt2" else to_transformers(loaded)
    _set_end_of_text(model, loaded.tokenizer.end_of_text)
    tokenizer = fast_tokenizer(loaded.tokenizer, context_length=loaded.model.context_length)
    card = model_card(directory.name, checkpoint, loaded, model_format=config.format)
    # under another name until it is whole
    unfinished = directory.with_name(directory.name + UNFINISHED)
    # the library imports DeepSpeed, which would warn of its guess
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    transformers_logging.disable_progress_bar()
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        _write_training(unfinished / TRAINING_FILE, loaded.config)
        (unfinished / "README.md").write_text(card, encoding="utf-8")
        for file in unfinished.iterdir():
            # the library lets nobody but the owner read the weights
            file.chmod(unfinished.stat().st_mode & 0o666)
        os.replace(unfinished, directory)
    except OSError as error:
        hint = f"cannot be written: {error.strerror or error}"
        raise ConfigError("directory", directory, hint) from error
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{checkpoint}\nas {config.format} in", markup=False)
    for file in sorted(directory.iterdir()):
        console.print(f"{file}  {file.stat().st_size:,} bytes", markup=False)
    return directory


def to_transformers(loaded: LoadedModel) -> SlayformerForCausalLM:
    """Return the model of a checkpoint as one of transformers', in evaluation mode."""
    model, trained = loaded.model, loaded.config
    shape = to_plain(trained.model)
    del shape["vocabulary_multiple"]
    attention = to_plain(trained.attention)
    # what computes it is for the machine that loads it to choose
    attention.pop("backend", None)
    config = SlayformerConfig(
        attention=attention,
        vocab_size=model.vocabulary_size,
        seed=trained.seed,
        **shape,
    )
    weights = model.state_dict()
    # rows that only fill the matrix up belong to no token
    rows = weights["token_embedding.weight"][: model.vocabulary_size]
    exported = SlayformerForCausalLM(config)
    exported.model.transformer.load_state_dict(weights | {"token_embedding.weight": rows})
    return exported.eval()


def _set_end_of_text(model: PreTrainedModel, end_of_text: int) -> None:
    """Let `model` begin, end and pad texts with `end_of_text`."""
    for settings in (model.config, model.generation_config):
        settings.bos_token_id = settings.eos_token_id = settings.pad_token_id = end_of_text


def _write_training(path: Path, config: TrainConfig) -> None:
    """Write the configuration so that train.py takes it from any folder."""
    plain: dict[str, Any] = to_plain(config)
    plain |= {"run_directory": None, "resume": None, "dry_run": False}
    plain["data"]["cache_directory"] = DataConfig.cache_directory
    defaults = ["train", {"override attention": config.attention.name}, "_self_"]
    OmegaConf.save(OmegaConf.create({"defaults": defaults, **plain}), path)
