"""The blocks of a model at work: what a pass of them changes."""
