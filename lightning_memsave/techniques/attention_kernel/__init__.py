"""Attention kernels that do not save the scores for backward."""
