"""Weights in bfloat16, rounded so that small updates count."""
