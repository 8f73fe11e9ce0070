"""Split batches into micro-batches."""
