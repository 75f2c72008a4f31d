"""The texts `eval.py` scores: a run's validation tokens, files, Parquet folders, data sets."""

from __future__ import annotations

import math
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from slayformer.cli import CONFIGURATIONS
from slayformer.config import SOURCE_FIELDS, SourceConfig
from slayformer.config_commands import EvalConfig
from slayformer.data.corpus import TEXT_SUFFIXES, open_source
from slayformer.data.prepare import open_prepared, prepare
from slayformer.data.shards import TokenStream
from slayformer.data.tokenizer import Tokenizer
from slayformer.errors import ConfigError, DataError
from slayformer.evaluation.progress import progress_bar
from slayformer.evaluation.scored_model import ScoredModel
from slayformer.evaluation.windows import Text
from slayformer.training import distributed

DOCUMENTS_AT_A_TIME = 256
DATASET_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".arrow")


def validation_text(model: ScoredModel, tokens: int | None) -> Text:
    """Return what training validated `model` on, or another number of `tokens` of its text.

    Raises ConfigError if no run belongs to the model, DataError if its documents have changed.
    """
    loaded = model.loaded
    if loaded is None:
        hint = f"{model.path} comes without its run's validation tokens: data=FILE_OR_FOLDER"
        raise ConfigError("data", None, hint)
    trained = loaded.config
    directory = distributed.run_on_main(lambda: prepare(trained.data, trained.tokenizer).directory)
    # rank 0 has verified it
    prepared = open_prepared(directory, verify=False)
    if prepared.tokenizer.identity != loaded.tokenizer.identity:
        raise DataError(
            f"{prepared.directory} has another tokenizer than {model.path}: the documents "
            f"have changed since; score a text with data=FILE_OR_FOLDER"
        )
    trained_on = loaded.state.get("data")
    if prepared.directory.name != trained_on:
        raise DataError(
            f"{model.path} was validated on {trained_on}, but its documents have changed "
            f"and now give {prepared.directory.name}; score a text with data=FILE_OR_FOLDER"
        )
    there = len(prepared.validation) - 1
    if tokens is None:
        # whole windows of the trained context, whatever the context here
        length = trained.model.context_length
        tokens = max(1, min(trained.validation.tokens, there) // length) * length
    return Text(
        prepared.validation,
        min(tokens, there) + 1,
        loaded.tokenizer.end_of_text,
        f"validation tokens of the run ({prepared.directory.name})",
    )


def named_text(config: EvalConfig, tokenizer: Tokenizer) -> Text:
    """Return the documents that `config.data` names, each followed by an end-of-text.

    Rank 0 reads and tokenizes. Raises UserError if there is no such text.
    """
    ids, label = distributed.run_on_main(lambda: _read(config, tokenizer))
    return Text(TokenStream([ids]), len(ids), tokenizer.end_of_text, label)


def _read(config: EvalConfig, tokenizer: Tokenizer) -> tuple[np.ndarray, str]:
    """Return the token ids of `config.data`, and what they are in words."""
    assert config.data is not None
    source = find_source(config)
    where = f"data={config.data}" if source.path == config.data else None
    opened = open_source(source, "source", where)
    documents = opened.documents()
    most_tokens = math.inf if config.tokens is None else config.tokens + 1
    end = np.array([tokenizer.end_of_text], dtype=np.uint32)
    pieces: list[np.ndarray] = []
    count = 0
    with progress_bar() as progress:
        task = progress.add_task("tokenizing", total=opened.total)
        while count < most_tokens:
            texts = [document.text for document in islice(documents, DOCUMENTS_AT_A_TIME)]
            if not texts:
                break
            for ids in tokenizer.encode_batch(texts):
                pieces += [np.asarray(ids, dtype=np.uint32), end]
                count += len(ids) + 1
            done = len(pieces) // 2
            progress.update(task, completed=done, description=f"tokenizing: {count:,} tokens")
    details = [source.path, source.name]
    if source.kind == "huggingface":
        details.append(f"split {source.split}")
    told = ", ".join(detail for detail in details if detail and detail != config.data)
    label = f"{config.data}: {told}" if told else config.data
    found = np.concatenate(pieces)[: int(min(count, most_tokens))]
    if not (found[1:] != tokenizer.end_of_text).any():
        raise DataError(f"{opened.where}: one token of text, which nothing predicts; score more")
    return found, label


def find_source(config: EvalConfig) -> SourceConfig:
    """Return the source that `config.data` names, with what `config.source` changes.

    A name from configs/data stands for the documents it holds out as a split of their own, or else
    for all of them. Raises ConfigError if there is no such text, or it may have no end.
    """
    values = _named_source(str(config.data))
    changes = {item.name: getattr(config.source, item.name) for item in fields(config.source)}
    changes = {name: value for name, value in changes.items() if value is not None}
    kind = values["kind"]
    for name, value in changes.items():
        if name not in SOURCE_FIELDS[kind]:
            hint = f"data={config.data} is of kind {kind}, which has no such field"
            raise ConfigError(f"source.{name}", value, hint)
    if "path" in changes:
        values["name"] = None
    source = SourceConfig(**values | changes)
    if source.kind != "sotu" and source.path in (None, "???"):
        hint = f"data={config.data} needs source.path=FOLDER"
        raise ConfigError("source.path", None, hint)
    local = Path(source.path or "").expanduser().exists()
    if source.kind == "huggingface" and source.streaming and not local and config.tokens is None:
        hint = f"say how much of {source.path}, which may have no end: tokens=1000000"
        raise ConfigError("tokens", None, hint)
    return source


def _named_source(data: str) -> dict[str, Any]:
    """Return the fields of the SourceConfig that `data`, a path or a name, stands for."""
    path = Path(data).expanduser()
    if path.exists():
        return {"kind": _kind_of(data), "path": data, "streaming": False}
    presets = {file.stem: file for file in sorted((CONFIGURATIONS / "data").glob("*.yaml"))}
    if data not in presets:
        hint = f"there is no such file or folder; data sets by name: {', '.join(presets)}"
        raise ConfigError("data", data, hint)
    preset: Any = OmegaConf.to_container(OmegaConf.load(presets[data]))
    source, held_out = preset["source"], preset.get("validation_source")
    if held_out and held_out["path"] == source["path"]:
        return held_out
    return source


def _kind_of(data: str) -> str:
    """Return what `data`, a file or folder, is: `text`, or `huggingface` for files of a data set.

    Raises ConfigError for what holds both, or is a file of a data set without its folder.
    """
    path = Path(data).expanduser()
    if path.is_file():
        if path.suffix.lower() in DATASET_SUFFIXES:
            hint = "is a file of a data set: name its folder, or score it as it stands with "
            raise ConfigError("data", data, f"{hint}data=text source.path={data}")
        return "text"
    # a data set comes with a README
    names = [p.relative_to(path) for p in path.rglob("*") if p.is_file() and p.stem != "README"]
    hidden = {name for name in names if any(part.startswith(".") for part in name.parts)}
    suffixes = {name.suffix.lower() for name in {*names} - hidden}
    of_text, of_dataset = (
        sorted(suffixes & {*known}) for known in (TEXT_SUFFIXES, DATASET_SUFFIXES)
    )
    if of_text and of_dataset:
        hint = f"holds texts ({of_text[0]}) and files of a data set ({of_dataset[0]}): say which, "
        hint += f"data=text source.path={data} or data=huggingface source.path={data}"
        raise ConfigError("data", data, hint)
    return "huggingface" if of_dataset else "text"
