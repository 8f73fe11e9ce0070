"""Base of all techniques: protocol, blocks, patching, nested batches, memory."""
