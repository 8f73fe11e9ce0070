"""Choose settings that fit."""
