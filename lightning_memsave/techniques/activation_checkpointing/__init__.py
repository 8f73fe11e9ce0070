"""Recompute the activations of blocks in the backward pass."""
