"""SLAYformer among transformers: Auto classes, generation, tokenizers, GPT-2's weights in and out.

Importing slayformer is enough for `AutoModelForCausalLM.from_pretrained`; the classes here are for
those who name them. Nothing is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "SlayformerConfig": "configuration",
    "SlayformerModel": "modeling",
    "SlayformerForCausalLM": "modeling",
    "load_gpt2_weights": "gpt2_weights",
    "to_gpt2": "gpt2_weights",
    "fast_tokenizer": "tokenizer",
    "swap_attention": "swap",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
