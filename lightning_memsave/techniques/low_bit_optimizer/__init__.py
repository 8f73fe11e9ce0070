"""Optimizers with 8-bit state."""
