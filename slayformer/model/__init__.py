"""GPT-2 with the attention mechanism of your choice."""
