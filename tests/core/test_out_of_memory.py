import sys
import threading
import time
import weakref

import pytest
import torch
from torch.distributed import DistBackendError

from lightning_memsave.core.out_of_memory import (
    find_out_of_memory,
    find_what_to_explain,
    free_unused,
    is_out_of_memory,
)
from lightning_memsave.errors import MemoryExhaustedError
from lightning_memsave.oom.message import read_out_of_memory
from tests.oom import messages

# torch's own words for every error of CUDA's runtime, whatever it is.
_TAIL = (
    "\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda/cuda-runtime-api/"
    "group__CUDART__TYPES.html for more information.\nCUDA kernel errors might be asynchronously "
    "reported at some other API call, so the stacktrace below might be incorrect.\nFor debugging "
    "consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable "
    "device-side assertions.\n"
)


class WrappedError(RuntimeError):
    pass


OUT_OF_MEMORY = {
    "torch": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "older torch": RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 15.90 GiB"),
    "pickled": WrappedError("Caught OutOfMemoryError in replica 0: CUDA out of memory. Tried to"),
    "runtime": torch.AcceleratorError("CUDA error: out of memory" + _TAIL),
    "runtime before 2.8": RuntimeError("CUDA error: out of memory" + _TAIL),
    "driver": RuntimeError("CUDA driver error: out of memory"),
    "HIP runtime": torch.AcceleratorError("HIP error: out of memory"),
    "HIP": torch.OutOfMemoryError("HIP out of memory. Tried to allocate 978.00 MiB."),
    "Triton": RuntimeError("Triton Error [CUDA]: out of memory"),
    "cudaMallocAsync": RuntimeError("Allocation on device 0 would exceed allowed memory."),
    "cuBLAS": RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    ),
    "cuBLAS has no handle": RuntimeError(
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
    ),
    "cuBLASLt": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasLtMatmul"),
    "cuDNN allocates": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "cuDNN 9 allocates": RuntimeError(
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
    ),
    "cuDNN has no handle": RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
    "cuDNN finds no algorithm": RuntimeError(
        "Unable to find a valid cuDNN algorithm to run convolution"
    ),
    "cuDNN tries no engine": RuntimeError(
        "FIND was unable to find an engine to execute this computation"
    ),
    "cuDNN gets no engine": RuntimeError(
        "GET was unable to find an engine to execute this computation"
    ),
    "cuDNN 4107": RuntimeError(
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
        "non-contiguous input."
    ),
    "cuSPARSE": RuntimeError("CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparse"),
    "cuSOLVER": RuntimeError(
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"
    ),
    "cuFFT": RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    "NCCL": DistBackendError(
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda "
        "error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclUnhandledCudaError"
        ": Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
    ),
    "expandable segments": RuntimeError(
        '!handles_.at(i) INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp"'
        ":390, please report a bug to PyTorch."
    ),
    "MPS": RuntimeError("MPS backend out of memory (MPS allocated: 5.05 GB, max allowed: 6.80 GB)"),
    "CPU": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 2359296 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "CPU of Windows": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:117] data. DefaultCPUAllocator: not enough memory: you "
        "tried to allocate 911360 bytes."
    ),
    "Python": MemoryError(),
}

LOST = {
    "illegal access": "an illegal memory access was encountered",
    "assert": "device-side assert triggered",
    "misaligned": "misaligned address",
    "launch failure": "unspecified launch failure",
    "time-out": "the launch timed out and was terminated",
    "instruction": "an illegal instruction was encountered",
    "program counter": "invalid program counter",
    "address space": "operation not supported on global/shared address space",
    "stack": "hardware stack error",
    "ECC": "uncorrectable ECC error encountered",
}

SOMETHING_ELSE = {
    "a user's words": ValueError("dataset out of memory"),
    "a user's RuntimeError": RuntimeError("the replay buffer is out of memory"),
    "another class": ValueError("CUDA out of memory"),
    "a user's class": WrappedError("out of memory"),
    "a library's own words": RuntimeError("gloo: out of memory while pairing"),
    "shapes": RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    "cuDNN fails on a GPU that has memory": RuntimeError(
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"
    ),
    "cuBLAS executes": RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling"),
    "ours": MemoryExhaustedError("Out of memory with one sample at once: CUDA out of memory."),
    "interrupt": KeyboardInterrupt(),
}


@pytest.mark.parametrize("name", OUT_OF_MEMORY)
def test_memory_ran_out(name):
    error = OUT_OF_MEMORY[name]
    assert is_out_of_memory(error)
    assert find_out_of_memory(error) is error


@pytest.mark.parametrize("name", [name for name in OUT_OF_MEMORY if name != "Python"])
def test_its_text_is_explained(name):
    read_out_of_memory(f"{type(OUT_OF_MEMORY[name]).__name__}: {OUT_OF_MEMORY[name]}")


@pytest.mark.parametrize("name", ["TRITON", "WORKER_KILLED", "BUS_ERROR", "SHM_FULL"])
def test_what_less_memory_cannot_avoid_is_explained_and_not_retried(name):
    error = RuntimeError(getattr(messages, name))
    assert find_what_to_explain(error) is error
    assert not is_out_of_memory(error)


@pytest.mark.parametrize("name", SOMETHING_ELSE)
def test_something_else(name):
    assert not is_out_of_memory(SOMETHING_ELSE[name])
    assert find_what_to_explain(SOMETHING_ELSE[name]) is None


@pytest.mark.parametrize("error_class", [RuntimeError, torch.AcceleratorError])
@pytest.mark.parametrize("name", LOST)
def test_a_lost_context_is_not_tried_again(name, error_class):
    """Also where a handle that cannot be made any more was the first to show it."""
    lost = error_class(f"CUDA error: {LOST[name]}{_TAIL}")
    assert not is_out_of_memory(lost)
    shown = RuntimeError(str(OUT_OF_MEMORY["cuBLAS has no handle"]))
    shown.__context__ = lost
    assert not is_out_of_memory(shown)


def raised(function):
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def wrap(memory, how, error_class=WrappedError):
    def function():
        try:
            raise memory
        except type(memory):
            if how == "cause":
                raise error_class("layer 3 failed") from memory
            if how == "context":
                raise error_class("layer 3 failed")  # noqa: B904 - what is tested
            raise error_class("layer 3 failed") from None

    return raised(function)


@pytest.mark.parametrize("how", ["cause", "context"])
def test_behind_an_error_that_memory_caused(how):
    memory = torch.OutOfMemoryError("CUDA out of memory.")
    for error in (wrap(memory, how), wrap(wrap(memory, how), "cause", KeyError)):
        assert is_out_of_memory(error)
        assert find_out_of_memory(error) is memory


def test_not_behind_one_whose_cause_is_hidden():
    assert not is_out_of_memory(wrap(torch.OutOfMemoryError("CUDA out of memory."), "from None"))


def test_an_interrupt_while_memory_is_handled_stays_one():
    memory = torch.OutOfMemoryError("CUDA out of memory.")
    assert not is_out_of_memory(wrap(memory, "context", KeyboardInterrupt))


def test_causes_may_form_a_circle():
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)


def test_what_was_being_handled_before_says_nothing():
    """`except torch.OutOfMemoryError: trainer.fit(...)` is in the context of whatever it raises."""

    def fit():
        raise ValueError("wrong")

    try:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    except torch.OutOfMemoryError:
        outside = sys.exception()
        error = raised(fit)
    assert is_out_of_memory(error)
    assert not is_out_of_memory(error, outside)


def test_a_real_failed_allocation():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)


def test_collects_what_the_thread_of_a_failed_backward_pass_lets_go(monkeypatch):
    """That thread can only run while this one waits."""
    error = torch.OutOfMemoryError("in backward")
    error.args = (error,)  # a cycle, as of a traceback and a variable of one of its frames
    alive, held, may_run = weakref.ref(error), [error], threading.Event()
    del error

    def let_go():
        may_run.wait()
        held.clear()

    def wait(seconds):
        may_run.set()
        thread.join()

    thread = threading.Thread(target=let_go)
    thread.start()
    monkeypatch.setattr(time, "sleep", wait)
    free_unused()
    may_run.set()
    thread.join()
    assert alive() is None
