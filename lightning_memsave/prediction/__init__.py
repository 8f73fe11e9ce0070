"""Predict the peak memory of training steps by running them on fake tensors."""
