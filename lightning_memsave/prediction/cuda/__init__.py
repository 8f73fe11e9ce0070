"""Emulate CUDA's kernels and its caching allocator."""
