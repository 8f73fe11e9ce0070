"""Predict, explain and compare memory, from Python."""
