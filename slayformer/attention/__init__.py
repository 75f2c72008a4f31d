"""The SLAY core: the attention contract, the two engines behind it, and the mechanisms."""
