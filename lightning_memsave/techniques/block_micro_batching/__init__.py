"""Run each block on a few samples at a time."""
