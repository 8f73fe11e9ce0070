"""Read GPU memory from NVIDIA's driver (NVML), of the GPU and of this process.

Works with ``nvidia-ml-py`` and with ``nvidia-ml-py3`` of 2017: the same module name, but the old
one uses bytes, and has neither MIG nor ``_v2`` functions. All exceptions of either are caught: a
value for a log must not end training.
"""

import contextlib
import importlib
import os
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class NvmlReading:
    """Memory of one GPU (or MIG slice) as reported by the driver; ``None`` if not reported."""

    used_bytes: int | None = None
    total_bytes: int | None = None
    process_bytes: int | None = None
    context_bytes: int | None = None
    reason: str = ""


class NvmlDevice:
    """One GPU in NVML; a context manager that opens and closes the library.

    Never raises if the driver, a GPU or permission is missing: readings have the reason.
    """

    def __init__(self, device: torch.device | int | str = 0) -> None:
        # A bare "cuda" is the current device, known once CUDA is initialized.
        index: int | None = device if isinstance(device, int) else torch.device(device).index
        if index is None:
            index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
        self.index: int = index
        self._nvml: Any = None
        self._handle: Any = None
        self._reason = ""

    def __enter__(self) -> "NvmlDevice":
        try:
            pynvml: Any = importlib.import_module("pynvml")  # not needed without a GPU
            pynvml.nvmlInit()
        except ImportError as error:
            self._reason = f"NVML is not available: {error}. Run `pip install nvidia-ml-py`."
            return self
        except Exception as error:
            self._reason = f"NVML is not available: {_describe(error)}"
            return self
        self._nvml = pynvml
        try:
            self._handle = _find_handle(pynvml, self.index)
        except Exception as error:
            self._reason = f"NVML does not find CUDA device {self.index}: {_describe(error)}"
        return self

    def __exit__(self, *exc_info: object) -> None:
        nvml, self._nvml, self._handle = self._nvml, None, None
        if nvml is not None:
            with contextlib.suppress(Exception):
                nvml.nvmlShutdown()

    def read(self, reserved_bytes: int | None = None) -> NvmlReading:
        if self._handle is None:
            return NvmlReading(reason=self._reason or "NVML is closed")
        try:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
            used_bytes, total_bytes = int(memory.used), int(memory.total)
        except Exception as error:
            return NvmlReading(reason=f"NVML does not report memory: {_describe(error)}")
        try:
            process_bytes = self._process_bytes(reserved_bytes or 0)
        except Exception as error:
            reason = f"NVML does not report the memory of processes: {_describe(error)}"
            return NvmlReading(used_bytes, total_bytes, reason=reason)
        if process_bytes is None:
            where = "a MIG slice" if self._is_mig() else "a container"
            reason = f"NVML does not report the memory of this process, as usual in {where}"
            return NvmlReading(used_bytes, total_bytes, reason=reason)
        context_bytes = None if reserved_bytes is None else process_bytes - reserved_bytes
        return NvmlReading(used_bytes, total_bytes, process_bytes, context_bytes)

    def _process_bytes(self, at_least: int) -> int | None:
        pid = os.getpid()
        processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        used = [p.usedGpuMemory for p in processes if p.pid == pid]
        # In a container another process may have our pid by chance: a value less than torch has
        # reserved is not ours.
        if not used or used[0] is None or used[0] < at_least:
            return None
        return int(used[0])

    def _is_mig(self) -> bool:
        try:
            found = self._nvml.nvmlDeviceIsMigDeviceHandle(self._handle)
            return bool(getattr(found, "value", found))  # a ctypes integer in some versions
        except Exception:  # an old library or driver without MIG
            return False


def read_nvml(
    device: torch.device | int | str = 0, reserved_bytes: int | None = None
) -> NvmlReading:
    with NvmlDevice(device) as gpu:
        return gpu.read(reserved_bytes)


def _find_handle(nvml: Any, index: int) -> Any:
    uuid = torch.cuda.get_device_properties(index).uuid
    # It may be that of a slice, which torch does not say. The old library does not accept str.
    with contextlib.suppress(nvml.NVMLError):
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
    return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}".encode())


def _describe(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
