"""A GPU that is not there, and its driver, which can be lost."""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml  # type: ignore[import-untyped]
import torch

from lightning_memsave.callbacks import memory_monitor, memory_probes
from lightning_memsave.callbacks.memory_probes import CudaProbe
from lightning_memsave.measure.allocator import AllocatorReading
from lightning_memsave.units import GIB


class FakeDriver:
    """Lets a monitor measure a GPU; NVML's functions fail when they are told to.

    Args:
        replace: Sets an attribute, such as ``setattr``; a test has one that takes it back.
    """

    def __init__(self, replace: Callable[[Any, str, Any], Any]) -> None:
        self._error: Exception | None = None
        self._calls_left = 0
        process = SimpleNamespace(pid=0, usedGpuMemory=GIB)
        replies = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetHandleByUUID": "handle",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=10 * GIB, total=80 * GIB),
            "nvmlDeviceGetComputeRunningProcesses": [process],
        }
        for name, reply in replies.items():
            replace(pynvml, name, self._function(reply, process))
        replace(torch.cuda, "reset_peak_memory_stats", lambda device: None)
        replace(torch.cuda, "synchronize", lambda device: None)
        replace(torch.cuda, "get_device_name", lambda device: "Some GPU")
        replace(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a"))
        reading = AllocatorReading(4, 6, 5, 7, 0, 0)
        replace(memory_probes, "read_allocator", lambda device: reading)
        replace(memory_monitor, "LiveTensorsProbe", lambda *_: CudaProbe(torch.device("cuda", 0)))

    def fail(self, error: Exception, num_calls: int = 0) -> None:
        """Raise an error from now on, after so many calls more."""
        self._error, self._calls_left = error, num_calls

    def _function(self, reply: Any, process: Any) -> Callable[..., Any]:
        def call(*_: Any) -> Any:
            if self._error is not None:
                if self._calls_left == 0:
                    raise self._error
                self._calls_left -= 1
            process.pid = os.getpid()  # a fork has a number of its own
            return reply

        return call
