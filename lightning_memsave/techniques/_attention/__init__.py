"""Attention kernels, and the models that have them."""
