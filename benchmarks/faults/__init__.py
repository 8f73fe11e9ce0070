"""Memory that runs out anywhere, and processes that are killed anywhere."""
