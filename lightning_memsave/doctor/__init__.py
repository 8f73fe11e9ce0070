"""Checks for traps that cost memory or time, on the code, the model and the environment."""
