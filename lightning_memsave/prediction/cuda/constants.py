"""Memory that CUDA needs beside tensors, by compute capability."""

import os
import re

import torch

from lightning_memsave.units import KIB, MIB, format_bytes

# - Contexts, by major compute capability: that of 9 was measured on an H200 with torch 2.11 and
#   CUDA 13.0: 629 MiB, 64 more for the cuBLAS handle of each of two threads, and 10 for cuDNN
#   (benchmarks/results/gpu_nvidia_h200).
#   The others are estimates: published values are 150 to 300 MiB for a T4 and 430 to 500 for an
#   A100, of which these are the upper ends, and 500 MiB where nothing is known.
# - Workspaces: `parseChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp: 8.125 MiB,
#   and 32 MiB for 9 (https://github.com/pytorch/pytorch/pull/91564), 10 and 12
#   (https://github.com/pytorch/pytorch/pull/175344) and 11
#   (https://github.com/pytorch/pytorch/pull/189312).
# - Products with a bias run in cuBLASLt, which has 1 MiB of its own for each thread before torch
#   2.12: `getCUDABlasLtWorkspace` there, and "linear in bf16" of an H200 with torch 2.11
#   (benchmarks/results/gpu_nvidia_h200/fixed_costs.jsonl). Since then it uses that of cuBLAS
#   (https://github.com/pytorch/pytorch/pull/175879).
# - NCCL: a user's measurement on A100s with NVLink, one all-reduce per communicator
#   (https://github.com/NVIDIA/nccl/issues/964). For other GPUs it is an estimate, of which nothing
#   was measured by us: memory grows with the number of channels, so that GPUs without NVLink need
#   less, and hardly with more than two nodes (https://github.com/NVIDIA/nccl/issues/986). Eight
#   H100 use 1.06 GB each beside torch's allocator before the first all-to-all, the context
#   included (https://github.com/NVIDIA/nccl/issues/1685), about 0.4 GiB less the context.
# - The margin is a choice, the same for all GPUs: 3 % is what others report that their predictions
#   of peaks are off by (torchtitan#4636 0.3 %, ProTrain, arXiv:2406.08334, below 4 %; ours of
#   transformers are within 1.4 % on an H200), and 256 MiB what nothing counts: scratch of
#   reductions, other libraries. Large cuDNN workspaces and a desktop (0.3 to 1 GiB) need more.
_SMALL_WORKSPACE, _LARGE_WORKSPACE = 8 * MIB + 128 * KIB, 32 * MIB
_CONTEXTS = {7: 300 * MIB, 9: 768 * MIB, 10: 600 * MIB, 11: 600 * MIB, 12: 600 * MIB}
_OTHER_CONTEXT = 500 * MIB
_LT_WORKSPACE, _HAS_LT_WORKSPACES = MIB, torch.__version__ < "2.12"
_PAIR_OF_NCCL, _MORE_OF_NCCL = 544 * MIB, 688 * MIB
_MARGIN, _LEAST_MARGIN = 0.03, 256 * MIB
_NUM_THREADS = 2  # forward and backward; there is one workspace per handle and stream

DETERMINISTIC_WORKSPACE = ":4096:8"
"""``CUBLAS_WORKSPACE_CONFIG`` as Lightning sets it for ``Trainer(deterministic=True)``."""


def context_bytes(capability: tuple[int, int]) -> int:
    return _CONTEXTS.get(capability[0], _OTHER_CONTEXT)


def distributed_bytes(num_processes: int) -> int:
    return 0 if num_processes < 2 else _PAIR_OF_NCCL if num_processes == 2 else _MORE_OF_NCCL


def margin_bytes(total_bytes: int) -> int:
    """Return the bytes to leave free on a GPU for what a prediction does not know."""
    return max(int(total_bytes * _MARGIN), _LEAST_MARGIN)


def lt_workspaces(num_threads: int) -> tuple[int, ...]:
    """Return those that cuBLASLt holds beside cuBLAS, if threads compute products with a bias."""
    return (_LT_WORKSPACE,) * (num_threads if _HAS_LT_WORKSPACES else 0)


def workspaces(
    capability: tuple[int, int] = (8, 0), config: str | None = None, num_threads: int = _NUM_THREADS
) -> tuple[int, ...]:
    """Return the workspaces that cuBLAS holds in torch's allocator after a matrix product."""
    if config is None:
        config = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    pairs = re.findall(r":(\d+):(\d+)", config)
    size = _LARGE_WORKSPACE if capability[0] >= 9 else _SMALL_WORKSPACE
    if pairs:
        size = sum(int(kib) * KIB * int(count) for kib, count in pairs)
    return (size,) * (num_threads if size else 0)


def constant_assumptions(
    capability: tuple[int, int],
    config: str | None = None,
    num_processes: int = 1,
    num_threads: int = _NUM_THREADS,
) -> tuple[str, ...]:
    sizes = workspaces(capability, config, num_threads)
    nccl_bytes = distributed_bytes(num_processes)
    nccl = (
        f"NCCL needs {format_bytes(nccl_bytes)} in each of {num_processes} processes, as on A100s "
        "with NVLink: an estimate for other GPUs; with more process groups it needs more."
    )
    of_lt = "cuBLASLt uses them, too."
    if _HAS_LT_WORKSPACES:
        of_lt = "cuBLASLt has 1 MiB more for each of them that adds a bias."
    others = "libraries" if nccl_bytes else "NCCL and libraries"
    return (
        f"The CUDA context needs {format_bytes(context_bytes(capability))}: an estimate for "
        f"compute capability {capability[0]}.x, by GPU and driver between 150 MiB and 1 GiB; "
        f"{others} other than torch add to it.",
        *([nccl] if nccl_bytes else ()),
        "No other process uses the GPU, and no display: a desktop needs 0.3 to 1 GiB of it.",
        f"cuBLAS keeps {format_bytes(sum(sizes))} of workspaces for matrix products, one for each "
        "thread that computes some: those of forward, of backward, and of offloaded updates by "
        "Muon; `CUBLAS_WORKSPACE_CONFIG` is respected. " + of_lt,
    )
