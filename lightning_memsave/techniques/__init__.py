"""Memory-saving techniques, each usable in a plain PyTorch loop."""
