"""Host memory of this process."""

from dataclasses import dataclass

import psutil

from lightning_memsave.measure.allocator import pinned_bytes


@dataclass(frozen=True, slots=True)
class HostReading:
    """Host memory of this process.

    Args:
        rss_bytes: Resident memory, including what is shared with other processes.
        pinned_bytes: Page-locked memory that torch holds for copies to the device; ``None`` without
            CUDA or where torch does not say.
    """

    rss_bytes: int
    pinned_bytes: int | None


def read_host_memory() -> HostReading:
    """Read the host memory of this process.

    Returns:
        The reading.

    Example:
        >>> read_host_memory().rss_bytes > 10_000_000
        True
    """
    return HostReading(int(psutil.Process().memory_info().rss), pinned_bytes())
