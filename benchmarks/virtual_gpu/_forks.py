"""Fits in forks of a process that has imported everything and initialized CUDA."""

import torch


def allow_forks() -> None:
    """Let forks use CUDA: the virtual GPU has no context that a fork would lose."""
    torch.cuda.init()
    torch.cuda._is_in_bad_fork = lambda: False
