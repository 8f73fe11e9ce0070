import pytest
import torch

from lightning_memsave.core.out_of_memory import is_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 15.90 GiB total)"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("MPS backend out of memory (MPS allocated: 5.05 GB, max allowed: 6.80 GB)"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."),
        MemoryError(),
    ],
    ids=lambda e: f"{type(e).__name__}-{str(e)[:20]}",
)
def test_memory_ran_out(error):
    assert is_out_of_memory(error)


class WrappedError(RuntimeError):
    pass


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("out of memory"),
        WrappedError("out of memory"),
        KeyboardInterrupt(),
    ],
    ids=lambda e: f"{type(e).__name__}-{str(e)[:20]}",
)
def test_something_else(error):
    assert not is_out_of_memory(error)


def test_a_real_failed_allocation():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)
