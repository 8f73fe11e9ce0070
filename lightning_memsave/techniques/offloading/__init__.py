"""Keep optimizer state, weights and activations in the memory of the host."""
