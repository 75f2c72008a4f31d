"""How fast mechanisms are, beside others' implementations: alone, decoding, and in training."""
