"""The configuration of a SLAYformer model among transformers' models."""

from __future__ import annotations

import os
from dataclasses import field, fields
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig

from slayformer.config import AttentionConfig, ModelConfig
from slayformer.config_checks import check_fields
from slayformer.config_loading import load_attention_config, to_plain
from slayformer.errors import ConfigError
from slayformer.presets import load_preset

# the kind of a layer's memory, for which `huggingface.cache` has a class
LAYER_TYPE = "slayformer"
# lets a process that has not imported slayformer find the classes, with trust_remote_code=True
CLASSES_FILE = "slayformer_classes.py"
CLASSES = '''"""The classes of this model, from the installed slayformer package."""

from slayformer.huggingface import SlayformerConfig, SlayformerForCausalLM, SlayformerModel
'''


def _auto_map() -> dict[str, str]:
    module = CLASSES_FILE.removesuffix(".py")
    return {
        "AutoConfig": f"{module}.SlayformerConfig",
        "AutoModel": f"{module}.SlayformerModel",
        "AutoModelForCausalLM": f"{module}.SlayformerForCausalLM",
    }


@strict
class SlayformerConfig(PreTrainedConfig):
    """Shape, mechanism and vocabulary of a GPT-2 with `attention`.

    `attention`: the name of a file in configs/attention, or all options of a mechanism; it is
    always kept, and written to config.json, with all options. The shape is that of `ModelConfig`.
    `seed` draws the initial weights and the mechanism's own randomness.

    Raises ConfigError for a value that cannot work.
    """

    model_type = "slayformer"
    attribute_map = {  # noqa: RUF012, the base class wants it so
        "hidden_size": "width",
        "max_position_embeddings": "context_length",
        "num_attention_heads": "heads",
        "num_hidden_layers": "layers",
    }
    keys_to_ignore_at_inference = ["cache"]  # noqa: RUF012

    attention: str | dict[str, Any]
    vocab_size: int
    layers: int
    heads: int
    width: int
    context_length: int
    mlp_ratio: int = ModelConfig.mlp_ratio
    dropout: float | int = ModelConfig.dropout
    short_convolution: int = ModelConfig.short_convolution
    seed: int = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = True
    auto_map: dict[str, str] = field(default_factory=_auto_map)

    def __post_init__(self, **kwargs: Any) -> None:
        options = self.attention_options()
        self.attention = to_plain(options)
        check_fields(self.shape(), prefix="")
        if self.width % self.heads:
            raise ConfigError("heads", self.heads, f"must divide width={self.width}")
        if self.vocab_size < 1:
            raise ConfigError("vocab_size", self.vocab_size, "must be greater than 0")
        if not self.tie_word_embeddings:
            raise ConfigError("tie_word_embeddings", False, "the head is the token embedding")
        super().__post_init__(**kwargs)

    @property
    def layer_types(self) -> list[str]:
        """The kind of memory each layer has."""
        return [LAYER_TYPE] * self.layers

    def validate_layer_type(self) -> None:
        """Do nothing: transformers' list of kinds is closed, its register of caches is not."""

    def shape(self) -> ModelConfig:
        """Return the shape as `GPT2` takes it, no row of the embedding unused."""
        names = {item.name for item in fields(ModelConfig)} - {"vocabulary_multiple"}
        return ModelConfig(**{name: getattr(self, name) for name in names}, vocabulary_multiple=1)

    def attention_options(self) -> AttentionConfig:
        """Return the mechanism's options as the dataclass that describes them."""
        if isinstance(self.attention, str):
            return load_preset(self.attention)
        return load_attention_config(self.attention)

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Write config.json, and beside it the file its `auto_map` names."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CLASSES_FILE).write_text(CLASSES, encoding="utf-8")
        super().save_pretrained(save_directory, *args, **kwargs)


AutoConfig.register(SlayformerConfig.model_type, SlayformerConfig)
