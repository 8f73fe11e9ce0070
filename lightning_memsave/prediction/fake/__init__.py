"""Run modules on fake tensors."""
