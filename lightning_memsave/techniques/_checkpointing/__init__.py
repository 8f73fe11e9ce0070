"""How a block runs a second time and gives the same."""
