"""Recognize out-of-memory errors, and free unused memory."""

import gc
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Words:
    """What torch, a library or the system writes when memory ran out, without white space."""

    pattern: str
    device: str = "cuda"
    cause: str = ""
    """Why, where the words alone tell: a key of `oom.diagnosis.CAUSES`."""
    library: str = ""
    counts: Literal["always", "if full", "to explain", "in logs"] = "always"
    """Whether an exception with these words is an out-of-memory error, so that a step is retried
    with less. Words that count only "if full" have other reasons, too (seen on an H100 for
    convolutions, LSTMs and Fourier transforms); those "to explain" get advice only."""


# At the same place in a text the first one is taken. Those without "memory" also come from a full
# GPU: handles and workspaces are allocated at the first call.
WORDS = (
    Words(r"[Aa]llocationondevice(?P<index>\d*)wouldexceedallowedmemory\.?(?:\(outofmemory\))?"),
    Words(r"DefaultCPUAllocator:(?:can.tallocatememory|notenoughmemory)", "cpu", "host"),
    Words(
        r"(?P<library>(?:CU|HIP|ROC)(?:BLAS(?:LT)?|DNN|SPARSE|SOLVER|FFT))_(?:STATUS_)?ALLOC_FAILED",
        cause="library",
    ),
    Words(r"CUBLAS_STATUS_NOT_INITIALIZED", cause="library", library="CUBLAS"),
    Words(
        r"CUDNN_STATUS_(?:NOT_INITIALIZED|NOT_SUPPORTED|\w*ALLOCATION_FAILED)"
        r"|UnabletofindavalidcuDNNalgorithm|(?:GET|FIND)wasunabletofindanengine",
        cause="library",
        library="CUDNN",
    ),
    Words(r"CUDNN_STATUS_INTERNAL_ERROR", cause="library", library="CUDNN", counts="if full"),
    Words(r"CUFFT_EXEC_FAILED", cause="library", library="CUFFT", counts="if full"),
    Words(r"Cudafailure(?:\d+)?'outofmemory'", cause="nccl", library="NCCL"),
    Words(r"Erroroutofmemoryatline", cause="bitsandbytes", library="bitsandbytes"),
    Words(r"outofresource:sharedmemory", cause="kernel", counts="to explain"),
    Words(r"handles_\.at\(i\)INTERNALASSERT"),  # expandable segments
    Words(r"MPSbackendoutofmemory", "mps", "mps"),
    Words(r"XPUoutofmemory(?!error)", "xpu"),
    Words(r"NPUoutofmemory(?!error)", "npu"),
    Words(
        r"(?:CUDA|HIP)outofmemory(?!error)|(?:CUDA|HIP)\]?(?:driver)?(?:error)?:outofmemory(?!error)"
    ),
    # Of the host: a process that is killed says nothing itself.
    Words(
        r"killedbysignal:Buserror|Buserror\(coredumped\)|[Uu]nexpectedbuserror"
        r"|unableto(?:writetofile|opensharedmemoryobject|allocatesharedmemory)",
        "cpu",
        "shared_memory",
        counts="to explain",
    ),
    Words(
        r"killedbysignal:Killed|Signal9\(SIGKILL\)|exitcode:-9(?!\d)|Signals\.SIGKILL"
        r"|signalSIGKILL|oom[-_]kill|OOMKilled|outofmemory:Killedprocess",
        "cpu",
        "killed",
        counts="to explain",
    ),
    Words(
        r"(?<!OutOf)MemoryError|Unabletoallocate[\d.]+\w+foranarray",
        "cpu",
        "host",
        counts="to explain",
    ),
    # Words of this package, and of a log that has lost what was before them.
    Words(
        r"[:\]]outofmemory(?!error)|outofmemory(?:error:|withonesample|inthestep)",
        "",
        counts="in logs",
    ),
)


def _any_of(counts: str) -> re.Pattern[str]:
    return re.compile("|".join(words.pattern for words in WORDS if words.counts == counts))


_ALWAYS, _IF_FULL, _TO_EXPLAIN = map(_any_of, ("always", "if full", "to explain"))
_FULL_BYTES = 64 * 2**20

# After these, the device cannot be used until the process is restarted (CUDA runtime API,
# `cudaError`).
CONTEXT_LOST = re.compile(
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
    return _find(error, outside, _says_it)


def find_what_to_explain(
    error: BaseException, outside: BaseException | None = None
) -> BaseException | None:
    """Find an out-of-memory error, or what no retry with less can avoid, such as a killed worker.

    Example:
        >>> killed = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
        >>> find_what_to_explain(killed) is killed, is_out_of_memory(killed)
        (True, False)
    """
    return find_out_of_memory(error, outside) or _find(error, outside, _explains_it)


def _find(
    error: BaseException, outside: BaseException | None, is_it: Callable[[BaseException], bool]
) -> BaseException | None:
    errors = list(errors_behind(error, outside))
    # Not for KeyboardInterrupt and the like.
    if not isinstance(error, Exception) or any(CONTEXT_LOST.search(str(e)) for e in errors):
        return None
    return next(filter(is_it, errors), None)


def _dense(text: str) -> str:
    return "".join(text.split())


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
    if _is_ours(error) or not isinstance(error, RuntimeError):
        return False
    said = _dense(str(error))
    return bool(_ALWAYS.search(said)) or (bool(_IF_FULL.search(said)) and _is_gpu_full())


def _explains_it(error: BaseException) -> bool:
    return not _is_ours(error) and bool(_TO_EXPLAIN.search(_dense(str(error))))


# Errors of this package quote the original message.
def _is_ours(error: BaseException) -> bool:
    return type(error).__module__.startswith("lightning_memsave.")


def _is_gpu_full() -> bool:
    if not torch.cuda.is_initialized():
        return False
    said = ""
    for _ in range(2):
        try:
            return torch.cuda.mem_get_info()[0] < _FULL_BYTES
        except RuntimeError as error:  # also of what failed before, which it is the first to tell
            said = str(error)
    return bool(_ALWAYS.search(_dense(said)))
