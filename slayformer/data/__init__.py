"""From text to batches: tokenizer, corpus, shards, preparation and loader."""
