"""Time, memory and differences on a device; on a CPU the same calls in small."""

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MIB = 2**20


def synchronize(device: str) -> None:
    """Wait for all that was launched."""
    if device == "cuda":
        torch.cuda.synchronize()


def time_of(function: Callable[[], object], device: str, *, repeats: int = 10) -> dict[str, float]:
    """Time of a call, and the part of it until the last kernel was launched."""
    repeats = repeats if device == "cuda" else 1
    for _ in range(min(repeats, 3)):
        function()
    synchronize(device)
    start_s = time.perf_counter()
    for _ in range(repeats):
        function()
    host_s = time.perf_counter() - start_s
    synchronize(device)
    wall_s = time.perf_counter() - start_s
    return {"ms": 1e3 * wall_s / repeats, "host_ms": 1e3 * host_s / repeats}


def peak_mib(function: Callable[[], object], device: str) -> float | None:
    """Peak allocated by a call, above what was there before."""
    gc.collect()
    if device != "cuda":
        function()
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    function()
    synchronize(device)
    return (torch.cuda.max_memory_allocated() - before_bytes) / MIB


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm())


def allocated_mib(device: str) -> float:
    """Allocated now; zero without CUDA."""
    return torch.cuda.memory_allocated() / MIB if device == "cuda" else 0.0


def outside_mib() -> float:
    """What the driver has given this GPU's processes beyond torch's allocator in this one."""
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return (total_bytes - free_bytes - torch.cuda.memory_reserved()) / MIB


def limit_to(extra_mib: float) -> None:
    """Let the allocator of this process have so much more than it has reserved."""
    torch.cuda.empty_cache()
    total_bytes: Any = torch.cuda.mem_get_info()[1]
    wanted_bytes = torch.cuda.memory_reserved() + extra_mib * MIB
    torch.cuda.set_per_process_memory_fraction(min(1.0, wanted_bytes / total_bytes))
