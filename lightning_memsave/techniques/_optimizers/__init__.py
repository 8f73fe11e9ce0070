"""What optimizers keep: their kinds, state, checkpoints and 8-bit forms."""
