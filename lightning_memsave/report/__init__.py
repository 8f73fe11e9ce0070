"""How predictions are shown: as text, as a tree, as a page."""
