"""SLAYformer: train GPT-2-class language models with linear-time attention and compare."""

__version__ = "0.1.0"
