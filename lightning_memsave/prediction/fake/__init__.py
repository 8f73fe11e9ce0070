"""Run a model without its data."""
