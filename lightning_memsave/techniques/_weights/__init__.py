"""Weights of 16 bits: casts, rounding, steps by tiles."""
