"""A run that starts from weights alone: of a checkpoint of ours, a Hugging Face folder or the hub.

Shapes, names and vocabulary are compared from headers before any tensor is read, and nothing but
safetensors and JSON is opened.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slayformer.config import ModelConfig, TrainConfig
from slayformer.config_loading import to_plain
from slayformer.data.tokenizer import END_OF_TEXT, Tokenizer, load_tokenizer
from slayformer.errors import CheckpointError, ConfigError
from slayformer.huggingface.gpt2_weights import gpt2_names, shape_of_gpt2, turned
from slayformer.huggingface.hub import model_folder
from slayformer.model.gpt2 import GPT2
from slayformer.training.checkpoint import (
    CONFIG,
    TOKENIZER,
    WEIGHTS,
    branched_from,
    find_checkpoint,
    has_checkpoint,
    read_config,
    read_state,
    verify_checkpoint,
)

RECORD = "initial_weights.json"
# more than any configuration or tokenizer file holds
MAXIMUM_JSON_BYTES = 64 * 2**20
# what every model of a shape has
SHAPE = ("layers", "heads", "width", "context_length", "mlp_ratio", "short_convolution")


@dataclass(frozen=True)
class InitialWeights:
    """Where the weights are. `files` has the file of every tensor by its name there.

    `names` has that name by ours; `keeps` are ours that stay at their initial values.
    """

    path: Path
    # checkpoint, slayformer (an export of ours) or gpt2
    kind: str
    files: dict[str, Path]
    names: dict[str, str]
    keeps: tuple[str, ...]
    # identity of the tokenizer, where it is known
    tokenizer: str | None


def find_initial_weights(config: TrainConfig, vocabulary_size: int) -> InitialWeights | None:
    """Return the weights a run of `config` starts from, checked; None if there are none to take.

    Raises ConfigError or CheckpointError if they are missing, damaged or of another shape.
    """
    wanted = recorded_path(config)
    if wanted is None:
        return None
    path = model_folder("initial_weights", wanted)
    if (path / "config.json").is_file():
        return _of_transformers(path, config, vocabulary_size)
    try:
        checkpoint = find_checkpoint(path)
    except CheckpointError as error:
        hint = f"{error}; nor is there a config.json"
        raise ConfigError("initial_weights", wanted, hint) from error
    return _of_checkpoint(checkpoint, config, vocabulary_size)


def recorded_path(config: TrainConfig) -> str | None:
    """Return the path of the initial weights: the one given, or that of the run to go on with.

    None for a run that goes on from a checkpoint: it has its own weights.
    """
    if config.resume is None:
        return config.initial_weights
    if config.resume != "auto" or has_checkpoint(Path(config.run_directory or "")):
        return None
    # killed before its first checkpoint
    record = Path(config.run_directory or "") / CONFIG
    if branched_from(record.parent) is not None:
        return None
    if config.initial_weights is not None or not record.is_file():
        return config.initial_weights
    return read_config(record.parent).initial_weights


def check_tokenizer(weights: InitialWeights, tokenizer: Tokenizer) -> str | None:
    """Return a warning if nothing tells which tokenizer the weights are for.

    Raises ConfigError if it is another than `tokenizer`.
    """
    known = weights.tokenizer == tokenizer.identity
    if weights.tokenizer is None:
        vocabulary = _vocabulary(weights.path)
        if vocabulary is None:
            return (
                f"{weights.path} does not say what its tokens are; only their number was compared"
            )
        # end-of-text is listed with the others or apart
        known = {**vocabulary, END_OF_TEXT: tokenizer.end_of_text} == tokenizer.written()
    if not known:
        hint = f"its tokens are not those of the {tokenizer.name} tokenizer of this text"
        raise ConfigError("initial_weights", weights.path, hint)
    return None


@torch.no_grad()
def load_initial_weights(weights: InitialWeights, model: GPT2) -> list[str]:
    """Give `model` the weights and return what to tell of it.

    Raises ConfigError if a file is damaged.
    """
    state = model.state_dict()
    try:
        with ExitStack() as stack:
            opened = {
                file: stack.enter_context(safe_open(file, framework="pt"))
                for file in set(weights.files.values())
            }
            for ours, theirs in weights.names.items():
                source: Tensor = opened[weights.files[theirs]].get_tensor(theirs)
                source = turned(ours, source) if weights.kind == "gpt2" else source
                target = state[ours]
                if ours == "token_embedding.weight":
                    source, target = (t[: model.vocabulary_size] for t in (source, target))
                if source.is_floating_point() != target.is_floating_point():
                    hint = f"{theirs} is {source.dtype}, not {target.dtype}"
                    raise ConfigError("initial_weights", weights.path, hint)
                target.copy_(source)
    except (SafetensorError, OSError) as error:
        raise ConfigError("initial_weights", weights.path, f"cannot be read: {error}") from error
    told = [f"initial weights: {len(weights.names):,} tensors of {weights.path} ({weights.kind})"]
    if weights.keeps:
        numbers = sum(state[name].numel() for name in weights.keeps)
        parts = sorted({name.split(".")[2] for name in weights.keeps})
        told.append(
            f"kept as drawn from the seed: {len(weights.keeps):,} tensors ({numbers:,} numbers) of "
            f"{' and '.join(parts)} in every block, which those weights do not have"
        )
    return told


def write_record(directory: Path, weights: InitialWeights) -> None:
    """Write initial_weights.json: where the weights came from, what they were, what was kept."""
    digests = {}
    for file in sorted(set(weights.files.values())):
        with file.open("rb") as opened:
            digests[file.name] = hashlib.file_digest(opened, "sha256").hexdigest()
    record = {
        "path": str(weights.path),
        "kind": weights.kind,
        "sha256": digests,
        "kept_as_drawn": weights.keeps,
    }
    (directory / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def recorded_identity(directory: Path) -> str | None:
    """Return what the weights that the run in `directory` started from are, wherever they were.

    None without a record; raises OSError, ValueError or KeyError for one that cannot be read.
    """
    if not (directory / RECORD).is_file():
        return None
    record = json.loads((directory / RECORD).read_text(encoding="utf-8"))
    digests = sorted(record["sha256"].values())
    if len(digests) > 1:
        digests = [hashlib.sha256("".join(digests).encode()).hexdigest()]
    return f"sha256 {digests[0][:12]}"


def keep_record(home: Path, directory: Path) -> None:
    """Let a run that branches off the run in `home` have its record, if there is one."""
    if (home / RECORD).is_file():
        shutil.copyfile(home / RECORD, directory / RECORD)


def _of_checkpoint(path: Path, config: TrainConfig, vocabulary_size: int) -> InitialWeights:
    verify_checkpoint(path)
    saved = read_config(path)
    there = load_tokenizer(path / TOKENIZER)
    _compare_shapes(path, to_plain(saved.model), there.vocabulary_size, config, vocabulary_size)
    headers, files = _headers(path, [path / WEIGHTS])
    names = {name: name for name in headers}
    same = _options(to_plain(saved.attention)) == _options(to_plain(config.attention))
    names, keeps = _fit(path, names, headers, config, vocabulary_size, same_mechanism=same)
    identity = read_state(path).get("tokenizer")
    return InitialWeights(path, "checkpoint", files, names, keeps, identity)


def _of_transformers(path: Path, config: TrainConfig, vocabulary_size: int) -> InitialWeights:
    settings = _json(path / "config.json")
    kind = settings.get("model_type")
    if kind not in ("slayformer", "gpt2"):
        hint = f"its model_type is {kind}; slayformer and gpt2 can be started from"
        raise ConfigError("initial_weights", path, hint)
    same = False
    if kind == "gpt2":
        try:
            shape = to_plain(shape_of_gpt2(settings))
        except ValueError as error:
            raise ConfigError("initial_weights", path, str(error)) from error
    else:
        shape = {name: settings.get(name) for name in SHAPE}
        shape["mlp_ratio"] = shape["mlp_ratio"] or ModelConfig.mlp_ratio
        shape["short_convolution"] = shape["short_convolution"] or ModelConfig.short_convolution
        attention = settings.get("attention")
        same = isinstance(attention, dict) and _options(attention) == _options(
            to_plain(config.attention)
        )
    _compare_shapes(path, shape, settings.get("vocab_size"), config, vocabulary_size)
    headers, files = _headers(path, _weight_files(path))
    stem = "transformer." if kind == "gpt2" else "model.transformer."
    # files of the hub may leave the stem out
    stem = stem if any(name.startswith(stem) for name in headers) else ""
    if kind == "gpt2":
        lead = "" if stem else "transformer."
        names = {
            ours: theirs.removeprefix(lead)
            for theirs, ours in gpt2_names(config.model.layers).items()
        }
    else:
        names = {name.removeprefix(stem): name for name in headers if name != "lm_head.weight"}
    names, keeps = _fit(
        path, names, headers, config, vocabulary_size, same_mechanism=same, gpt2=kind == "gpt2"
    )
    return InitialWeights(path, kind, files, names, keeps, None)


def _compare_shapes(
    path: Path, shape: dict[str, Any], tokens: Any, config: TrainConfig, vocabulary_size: int
) -> None:
    """Raise ConfigError, naming the field to set, unless both models have the same shape."""
    if tokens != vocabulary_size:
        hint = f"has {vocabulary_size:,} tokens; the initial weights in {path} are for {tokens}"
        raise ConfigError("tokenizer", config.tokenizer.name, hint)
    for name in SHAPE:
        here, there = getattr(config.model, name), shape[name]
        # a convolution that is not there is one that changes nothing
        if here != there and not (name == "short_convolution" and there == 0):
            hint = f"the initial weights in {path} have {there}: set model.{name}={there}"
            raise ConfigError(f"model.{name}", here, hint)


def _fit(
    path: Path,
    names: dict[str, str],
    headers: dict[str, tuple[int, ...]],
    config: TrainConfig,
    vocabulary_size: int,
    *,
    same_mechanism: bool,
    gpt2: bool = False,
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the name there of each tensor of ours to take, and those of ours to keep.

    `names` are all there by ours, `headers` their shapes. The mechanism's own tensors are taken
    from the `same_mechanism` alone. Raises ConfigError for one that is missing or does not fit.
    """
    with torch.device("meta"):
        model = GPT2(
            config.model, config.attention, vocabulary_size=vocabulary_size, seed=config.seed
        )
    taken, keeps = {}, []
    for ours, target in model.state_dict().items():
        part = ours.split(".")[2] if ours.startswith("blocks.") else ""
        theirs = names.get(ours)
        if (part == "attention" and not same_mechanism) or (
            part == "convolution" and theirs not in headers
        ):
            keeps.append(ours)
            continue
        if theirs is None or theirs not in headers:
            raise ConfigError("initial_weights", path, f"it lacks {theirs or ours}")
        shape, wanted = headers[theirs], tuple(target.shape)
        is_matrix = len(shape) == 2 and "embedding" not in ours
        shape = shape[::-1] if gpt2 and is_matrix else shape
        if ours == "token_embedding.weight" and shape[:1] >= (vocabulary_size,):
            # rows that fill the matrix up are no tokens
            shape, wanted = shape[1:], wanted[1:]
        if shape != wanted:
            raise ConfigError("initial_weights", path, f"{theirs} is {shape}, not {wanted}")
        taken[ours] = theirs
    return taken, tuple(keeps)


def _options(attention: dict[str, Any]) -> dict[str, Any]:
    """Return what the mechanism's tensors depend on: not what computes it, nor its label."""
    ignored = {"backend", "name", "mechanism"}
    kind = attention.get("mechanism") or attention["name"]
    return {"kind": kind, **{k: v for k, v in attention.items() if k not in ignored}}


def _weight_files(path: Path) -> list[Path]:
    whole, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        hint = "it has no model.safetensors; files of other kinds would have to be unpickled"
        raise ConfigError("initial_weights", path, hint)
    pieces = _json(index).get("weight_map")
    names = sorted(set(pieces.values())) if isinstance(pieces, dict) else []
    if not names or any(Path(str(name)).name != name for name in names):
        raise ConfigError("initial_weights", index, "it does not list files of its folder")
    return [path / name for name in names]


def _headers(path: Path, files: list[Path]) -> tuple[dict[str, tuple[int, ...]], dict[str, Path]]:
    """Return the shape and the file of every tensor; the library compares header and file size."""
    shapes: dict[str, tuple[int, ...]] = {}
    places: dict[str, Path] = {}
    try:
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118, it is no dictionary
                    shapes[name] = tuple(opened.get_slice(name).get_shape())
                    places[name] = file
    except (SafetensorError, OSError) as error:
        raise ConfigError("initial_weights", path, f"{file.name} is damaged: {error}") from error
    return shapes, places


def _vocabulary(path: Path) -> dict[str, int] | None:
    """Return the tokens of a Hugging Face folder as they are written, by id; None: not told."""
    if (path / "tokenizer.json").is_file():
        model = _json(path / "tokenizer.json").get("model")
        tokens = model.get("vocab") if isinstance(model, dict) else None
    elif (path / "vocab.json").is_file():
        tokens = _json(path / "vocab.json")
    else:
        return None
    return tokens if isinstance(tokens, dict) else {}


def _json(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MAXIMUM_JSON_BYTES:
            raise ValueError(f"larger than {MAXIMUM_JSON_BYTES:,} bytes")
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("initial_weights", file, f"cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError("initial_weights", file, "is not a JSON object")
    return content
