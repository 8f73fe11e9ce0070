"""Peak bytes by what torch.profiler saw of the CPU allocator, scratch of kernels included."""

from types import TracebackType
from typing import Any, Self

import torch


class AllocationPeak:
    """Most bytes that the CPU allocator had given out at once, of those made in the block.

    A second opinion on `LiveTensors`. It sees what kernels allocate inside, such as the copies of a
    parameter that bitsandbytes' 32-bit step makes on a CPU.

    Note:
        Keeps each operator's record in memory until the block ends: for a few steps only.
    """

    _MARK = "AllocationPeak.start"

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )

    def start(self) -> None:
        """Look for the peak from now on, and not from the beginning of the block."""
        with torch.profiler.record_function(self._MARK):
            pass

    def __enter__(self) -> Self:
        self._profile.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._profile.__exit__(exc_type, exc, traceback)
        profiler: Any = self._profile.profiler
        events = profiler.kineto_results.events()
        start_ns = max((e.start_ns() for e in events if e.name() == self._MARK), default=0)
        live_bytes = 0
        for when_ns, num_bytes in sorted(
            (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
        ):
            live_bytes += num_bytes
            if when_ns >= start_ns:
                self.peak_bytes = max(self.peak_bytes, live_bytes)
