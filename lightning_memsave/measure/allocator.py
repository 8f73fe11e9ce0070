"""Read the statistics of torch's CUDA allocators and the host memory of this process."""

from dataclasses import dataclass
from typing import Any

import psutil
import torch


@dataclass(frozen=True, slots=True)
class AllocatorReading:
    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    num_alloc_retries: int
    num_ooms: int


def read_allocator(device: torch.device | int | str | None = None) -> AllocatorReading | None:
    if not torch.cuda.is_available() or torch.device(device or "cuda").type != "cuda":
        return None
    # Not `memory_stats`, which writes and sorts a hundred names for it.
    stats = torch.cuda.memory_stats_as_nested_dict(device)

    def stat(name: str) -> int:
        found: Any = stats
        for part in name.split("."):
            found = found.get(part, {})
        return int(found or 0)  # other allocator backends do not have all

    return AllocatorReading(
        allocated_bytes=stat("allocated_bytes.all.current"),
        reserved_bytes=stat("reserved_bytes.all.current"),
        peak_allocated_bytes=stat("allocated_bytes.all.peak"),
        peak_reserved_bytes=stat("reserved_bytes.all.peak"),
        num_alloc_retries=stat("num_alloc_retries"),
        num_ooms=stat("num_ooms"),
    )


def pinned_bytes() -> int | None:
    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def allocated_bytes(device: torch.device) -> int:
    """Read what torch has allocated, or outside CUDA what this process has; in microseconds."""
    if device.type == "cuda":
        stats: Any = torch.cuda.memory_stats_as_nested_dict(device)
        return int(stats["allocated_bytes"]["all"]["current"]) if stats else 0
    return int(psutil.Process().memory_info().rss)


@dataclass(frozen=True, slots=True)
class HostReading:
    rss_bytes: int
    pinned_bytes: int | None


def read_host_memory() -> HostReading:
    return HostReading(int(psutil.Process().memory_info().rss), pinned_bytes())
