"""Logits that are not computed: what stands for them, and the loss without them."""
