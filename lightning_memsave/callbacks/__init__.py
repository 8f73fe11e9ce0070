"""Callbacks for the Trainer of either Lightning package."""
