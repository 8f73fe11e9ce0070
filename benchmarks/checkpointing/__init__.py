"""Peak bytes of a training step with and without activation checkpointing, counted twice."""
