"""Measure memory: live tensors, the CUDA allocator and NVML."""
