"""Peaks that others measured on GPUs and published, beside predictions of the same runs."""
