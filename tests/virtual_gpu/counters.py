"""What the virtual GPU has counted: launches, library calls, waits, copies and bytes."""

import ctypes
import json
from typing import Any

_library = ctypes.CDLL(None)
is_on = hasattr(_library, "vgpu_report")
"""Whether this process runs on the virtual GPU: not on a real one, and not on none."""
if is_on:
    _library.vgpu_report.restype = ctypes.c_char_p
    _library.vgpu_set_memory.argtypes = [ctypes.c_ulonglong]
    _library.vgpu_before_kernel.argtypes = [ctypes.c_void_p]


def report() -> dict[str, Any]:
    """All counters since the last `reset`, kernels by name and copies by direction."""
    return json.loads(_library.vgpu_report())


def reset() -> None:
    _library.vgpu_reset()


def set_memory(num_bytes: int) -> None:
    """Change the capacity, as if another job on the GPU took or gave back memory."""
    _library.vgpu_set_memory(int(num_bytes))


def finish_stream(stream: int) -> None:
    """Do the copies that are queued in a stream: a kernel of that stream is about to run."""
    _library.vgpu_before_kernel(stream)


def summary() -> dict[str, Any]:
    """The figures of a step in a few lines."""
    r = report()
    calls = r["calls"]
    return {
        "launches": r["launches"],
        "library": sum(n for name, n in calls.items() if name.startswith("library: ")),
        "waits": {name[6:]: n for name, n in calls.items() if name.startswith("wait: ")},
        "copies": r["copies"],
        "calls": {name: n for name, n in calls.items() if name.startswith(("cuda", "cuMem"))},
        "pinned_mib": round(r["pinned_bytes"] / 2**20, 1),
        "device_mib": round(r["device_bytes"] / 2**20, 1),
    }
