"""The registry of techniques, in the order in which they are applied."""
