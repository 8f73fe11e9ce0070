"""Recognise that memory ran out."""

import torch

# What torch raises as a plain RuntimeError where the allocator itself did not fail: the CPU
# allocator, and CUDA libraries that take memory of their own.
_MESSAGES = (
    "out of memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an exception means that memory ran out, so that less of it may do.

    Args:
        error: What was raised.

    Returns:
        True for ``torch.OutOfMemoryError`` and for what libraries say in its place. False for
        errors after which a device cannot go on, such as an illegal memory access.

    Example:
        >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
        True
        >>> is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
        False
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    is_plain = type(error) is RuntimeError or isinstance(error, MemoryError)
    text = str(error)
    return is_plain and (
        isinstance(error, MemoryError) or any(message in text for message in _MESSAGES)
    )
