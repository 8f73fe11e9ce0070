"""Compute the loss of a language model without materializing its logits."""
