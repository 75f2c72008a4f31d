"""SLAYformer: train GPT-2-class language models with linear-time attention and compare."""

from slayformer.huggingface.registration import register_when_loaded

__version__ = "0.1.0"

# transformers' Auto classes know our models from here on
register_when_loaded()
