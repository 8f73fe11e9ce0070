"""Optimizers whose state has 8 bits."""
