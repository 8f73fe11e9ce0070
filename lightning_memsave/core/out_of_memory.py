"""Recognize out-of-memory errors, and free unused memory."""

import gc
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

T = TypeVar("T")

# Messages of torch and its libraries for other errors than `torch.OutOfMemoryError`. Those without
# "memory" also come from a full GPU: handles and workspaces are allocated at the first call.
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

# These have other reasons too: they count only if the driver has nothing left to give (seen on an
# H100 for convolutions, LSTMs and Fourier transforms).
_WORDS_IF_FULL = re.compile(r"CUDNN_STATUS_INTERNAL_ERROR|CUFFT_EXEC_FAILED")
_FULL_BYTES = 64 * 2**20

# After these, the device cannot be used until the process is restarted (CUDA runtime API,
# `cudaError`).
_CONTEXT_LOST = re.compile(
    r"illegal memory access|device-side assert triggered|misaligned address"
    r"|unspecified launch failure|launch timed out|illegal instruction|invalid program counter"
    r"|operation not supported on global/shared address space|hardware stack error"
    r"|uncorrectable ECC error"
)

_LET_GO_S = 0.01

# Lines of tracebacks as Python, IPython and Jupyter write them.
_FRAME = re.compile(r"([^\s\"]+\.py)\b[^\n]*?\bin (?:[\w<>]+\.)*(\w+)")
_FORWARD = frozenset(
    {"forward", "training_step", "validation_step", "test_step", "predict_step", "_call_impl"}
)


def is_out_of_memory(error: BaseException, outside: BaseException | None = None) -> bool:
    """Return whether an exception is an out-of-memory error, so that a retry with less may succeed.

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
    """Find the out-of-memory error in the causes of an exception."""
    errors = list(errors_behind(error, outside))
    # Not for KeyboardInterrupt and the like.
    if not isinstance(error, Exception) or any(_CONTEXT_LOST.search(str(e)) for e in errors):
        return None
    return next(filter(_says_it, errors), None)


def errors_behind(
    error: BaseException, outside: BaseException | None = None
) -> Iterator[BaseException]:
    """Iterate over an exception and its causes, as Python prints them."""
    seen = {id(outside)}
    current: BaseException | None = error
    while current is not None and id(current) not in seen:  # causes may form a cycle
        seen.add(id(current))
        yield current
        hidden = current.__suppress_context__
        current = current.__cause__ or (None if hidden else current.__context__)


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its class if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def phase_in(text: str) -> str:
    """Tell from the lines of a traceback which part of the step ran."""
    phase = ""
    for path, function in _FRAME.findall(text):
        if re.search(r"[\\/](torch|bitsandbytes)[\\/]optim[\\/]", path):
            phase = "optimizer"  # also around the closure, whose frames follow
        elif function in {"backward", "_engine_run_backward"}:
            phase = "backward"
        elif function in _FORWARD and phase != "backward":  # recomputation is part of backward
            phase = "forward"
        elif function == "_apply" and not phase:  # of `nn.Module.to`
            phase = "setup"
    return phase


def free_unused() -> None:
    """Collect garbage, and return cached blocks of the allocator to the device."""
    # A backward pass on a GPU fails in a thread of autograd, which can only drop the error, and the
    # tensors of its frames with it, while this one does not hold the interpreter.
    time.sleep(_LET_GO_S)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def with_memory_freed(function: Callable[[], T]) -> T:
    """Call a function, and up to twice again after an OOM, with unused memory freed."""
    outside = sys.exception()
    for _ in range(2):
        try:
            return function()
        except Exception as error:
            if not is_out_of_memory(error, outside):
                raise
        # Outside of the except block, whose traceback keeps tensors alive.
        free_unused()
    return function()


def _says_it(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # Errors of this package quote the original message.
    is_ours = type(error).__module__.startswith("lightning_memsave.")
    if is_ours or not isinstance(error, RuntimeError):
        return False
    said = str(error)
    return bool(_WORDS.search(said)) or (bool(_WORDS_IF_FULL.search(said)) and _is_gpu_full())


def _is_gpu_full() -> bool:
    if not torch.cuda.is_initialized():
        return False
    said = ""
    for _ in range(2):
        try:
            return torch.cuda.mem_get_info()[0] < _FULL_BYTES
        except RuntimeError as error:  # also of what failed before, which it is the first to tell
            said = str(error)
    return bool(_WORDS.search(said))
