"""Checks for traps that cost memory or time, in the model, its settings and the environment."""
