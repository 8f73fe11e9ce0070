"""Recognize that memory ran out, and free what can be freed."""

import gc
import re
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

T = TypeVar("T")

# What torch and its libraries raise where `torch.OutOfMemoryError` is not raised. The words without
# "memory" are those of a full GPU too: handles and workspaces are allocated at the first call.
_WORDS = re.compile(
    r"\b(CUDA|HIP|XPU|NPU|MPS backend) out of memory"
    r"|\b(CUDA|HIP)\]?( driver)?( error)?: out of memory"
    r"|Cuda failure (\d+ )?'out of memory'"  # NCCL
    r"|Allocation on device \d* ?would exceed allowed memory"
    r"|\b(CU|HIP|ROC)(BLAS|BLASLT|DNN|SPARSE|SOLVER|FFT)_(STATUS_)?ALLOC_FAILED"
    r"|CUBLAS_STATUS_NOT_INITIALIZED"
    r"|CUDNN_STATUS_(NOT_INITIALIZED|NOT_SUPPORTED|\w*ALLOCATION_FAILED)"
    r"|Unable to find a valid cuDNN algorithm"
    r"|(GET|FIND) was unable to find an engine"
    r"|handles_\.at\(i\) INTERNAL ASSERT"  # expandable segments
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory"
)

# After these nothing works on the device until the process is started again (CUDA runtime API,
# `cudaError`).
_CONTEXT_LOST = re.compile(
    r"illegal memory access|device-side assert triggered|misaligned address"
    r"|unspecified launch failure|launch timed out|illegal instruction|invalid program counter"
    r"|operation not supported on global/shared address space|hardware stack error"
    r"|uncorrectable ECC error"
)


def is_out_of_memory(error: BaseException, outside: BaseException | None = None) -> bool:
    """Say whether an exception means that memory ran out, so that less of it may do.

    Args:
        error: What was raised.
        outside: As for `find_out_of_memory`.

    Returns:
        True for ``torch.OutOfMemoryError``, for what libraries raise in its place, and for errors
        that were raised from one of them or while it was handled. False for errors after which a
        device is lost to the process, such as an illegal memory access.

    Example:
        >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
        True
        >>> is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
        False
        >>> is_out_of_memory(ValueError("dataset out of memory"))
        False
    """
    return find_out_of_memory(error, outside) is not None


def find_out_of_memory(
    error: BaseException, outside: BaseException | None = None
) -> BaseException | None:
    """Find the exception that says that memory ran out.

    Args:
        error: What was raised.
        outside: What was being handled before (``sys.exception()``). It is the context of whatever
            is raised in an ``except`` clause, as by a fit that is started again there, and not its
            reason.

    Returns:
        The error, or the one behind it; ``None`` if something else went wrong, or if the device is
        lost.
    """
    errors = list(errors_behind(error, outside))
    # An interrupt stays one.
    if not isinstance(error, Exception) or any(_CONTEXT_LOST.search(str(e)) for e in errors):
        return None
    return next(filter(_says_it, errors), None)


def errors_behind(
    error: BaseException, outside: BaseException | None = None
) -> Iterator[BaseException]:
    """List an exception and its causes, as Python prints them.

    Args:
        error: What was raised.
        outside: As for `find_out_of_memory`.

    Yields:
        The exception, what it was raised from or what was being handled, and so on.
    """
    seen = {id(outside)}
    current: BaseException | None = error
    while current is not None and id(current) not in seen:  # causes may form a circle
        seen.add(id(current))
        yield current
        hidden = current.__suppress_context__
        current = current.__cause__ or (None if hidden else current.__context__)


def first_line(error: BaseException) -> str:
    """Give what an exception says in one line.

    Args:
        error: What was raised.

    Returns:
        The first line of its message, or its class if it has none.
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def free_unused() -> None:
    """Let go of what only garbage refers to, and give the device what its allocator keeps."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def with_memory_freed(function: Callable[[], T]) -> T:
    """Call a function, and up to twice more with unused memory freed if memory runs out in it.

    Args:
        function: What can be called again after it has failed.

    Returns:
        What it returns.
    """
    outside = sys.exception()
    for _ in range(2):
        try:
            return function()
        except Exception as error:
            if not is_out_of_memory(error, outside):
                raise
        # Outside of the handler, whose traceback keeps tensors alive.
        free_unused()
    return function()


def _says_it(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # Errors of this package quote the one for which they were raised.
    is_ours = type(error).__module__.startswith("lightning_memsave.")
    return isinstance(error, RuntimeError) and not is_ours and bool(_WORDS.search(str(error)))
