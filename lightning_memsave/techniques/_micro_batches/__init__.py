"""How parts of a batch add up to the whole."""
