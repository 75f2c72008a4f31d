"""Training: plan, objective, DeepSpeed engine, checkpoints and the loop that joins them."""
