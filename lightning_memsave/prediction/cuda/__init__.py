"""What CUDA's kernels and its allocator would do with a step."""
