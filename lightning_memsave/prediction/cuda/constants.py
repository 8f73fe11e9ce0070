"""Memory that CUDA needs beside tensors, by compute capability."""

import os
import re

from lightning_memsave.units import KIB, MIB, format_bytes

# By major compute capability: the CUDA context with the kernels of a training step, and the
# cuBLAS workspace of each thread that runs matrix products.
# - Contexts are estimates, none was measured: published values are 150 to 300 MiB for a T4, 430 to
#   500 for an A100 and 520 to 600 for an H100. These are the upper ends, and 500 MiB where nothing
#   is known. `benchmarks/gpu` measures them.
# - Workspaces: `parseChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp: 8.125 MiB,
#   and 32 MiB for 9 (https://github.com/pytorch/pytorch/pull/91564), 10 and 12
#   (https://github.com/pytorch/pytorch/pull/175344) and 11
#   (https://github.com/pytorch/pytorch/pull/189312).
_SMALL_WORKSPACE, _LARGE_WORKSPACE = 8 * MIB + 128 * KIB, 32 * MIB
_BY_MAJOR = {
    7: (300 * MIB, _SMALL_WORKSPACE),
    8: (500 * MIB, _SMALL_WORKSPACE),
    9: (600 * MIB, _LARGE_WORKSPACE),
    10: (600 * MIB, _LARGE_WORKSPACE),
    11: (600 * MIB, _LARGE_WORKSPACE),
    12: (600 * MIB, _LARGE_WORKSPACE),
}
_UNKNOWN = (500 * MIB, _SMALL_WORKSPACE)
_NUM_THREADS = 2  # forward and backward; there is one workspace per handle and stream

DETERMINISTIC_WORKSPACE = ":4096:8"
"""``CUBLAS_WORKSPACE_CONFIG`` as Lightning sets it for ``Trainer(deterministic=True)``."""


def context_bytes(capability: tuple[int, int]) -> int:
    """Return the bytes of the CUDA context, which are outside of torch's allocator."""
    return _BY_MAJOR.get(capability[0], _UNKNOWN)[0]


def workspaces(capability: tuple[int, int] = (8, 0), config: str | None = None) -> tuple[int, ...]:
    """Return the workspaces that cuBLAS holds in torch's allocator after the first matrix product.

    Args:
        capability: Compute capability of the device.
        config: Value of ``CUBLAS_WORKSPACE_CONFIG``; ``None`` to read it from the environment.

    Returns:
        Bytes for the threads of the forward and the backward pass.

    Example:
        >>> workspaces(config=""), workspaces((9, 0), ""), workspaces(config=":16:8")
        ((8519680, 8519680), (33554432, 33554432), (131072, 131072))
    """
    if config is None:
        config = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    pairs = re.findall(r":(\d+):(\d+)", config)
    default = _BY_MAJOR.get(capability[0], _UNKNOWN)[1]
    size = sum(int(kib) * KIB * int(count) for kib, count in pairs) if pairs else default
    return (size,) * (_NUM_THREADS if size else 0)


def constant_assumptions(capability: tuple[int, int], config: str | None = None) -> tuple[str, ...]:
    """Return the assumptions behind these constants, one line each."""
    sizes = workspaces(capability, config)
    return (
        f"The CUDA context needs {format_bytes(context_bytes(capability))}: an estimate for "
        f"compute capability {capability[0]}.x, by GPU and driver between 150 MiB and 1 GiB; NCCL "
        "and libraries other than torch add to it.",
        "No other process uses the GPU, and no display: a desktop needs 0.3 to 1 GiB of it.",
        f"cuBLAS keeps {format_bytes(sum(sizes))} of workspaces for matrix products, one each for "
        "the threads of the forward and the backward pass; `CUBLAS_WORKSPACE_CONFIG` is respected. "
        "cuBLASLt adds 1 to 2 MiB, which are not counted.",
    )
