"""Memory that runs out anywhere, processes that are killed, environments that fail."""
