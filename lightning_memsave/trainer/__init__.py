"""Reach into a Trainer of either Lightning package."""
