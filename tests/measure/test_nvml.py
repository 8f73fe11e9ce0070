import ctypes
import os
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from lightning_memsave.measure.nvml import NvmlDevice, read_nvml

GIB = 2**30
UUIDS = [f"{digit * 8}-1111-2222-3333-444444444444" for digit in "abc"]


class NVMLError(Exception):
    pass


class LibraryNotFoundError(NVMLError):
    def __str__(self):
        return "NVML Shared Library Not Found"


class FakeNvml(types.ModuleType):
    """The module ``pynvml`` of either generation over a machine with three GPUs and one slice."""

    NVMLError = NVMLError

    def __init__(self, generation, pid):
        super().__init__("pynvml")
        self.is_old = generation == "nvidia-ml-py3"
        self.num_open = 0
        self.devices = {
            f"GPU-{uuid}": SimpleNamespace(
                used=(10 + i) * GIB, total=80 * GIB, processes=[(pid, (3 + i) * GIB), (1, GIB)]
            )
            for i, uuid in enumerate(UUIDS)
        }
        if not self.is_old:
            self.devices["MIG-d"] = SimpleNamespace(used=GIB, total=10 * GIB, processes=[])
            self.nvmlDeviceIsMigDeviceHandle = lambda h: ctypes.c_uint(h == "MIG-d")

    def nvmlInit(self):  # noqa: N802
        self.num_open += 1

    def nvmlShutdown(self):  # noqa: N802
        self.num_open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        if self.is_old:
            ctypes.c_char_p(uuid)  # as the real one: a TypeError for text
        handle = uuid.decode() if isinstance(uuid, bytes) else uuid
        if handle not in self.devices:
            raise NVMLError("Not Found")
        return handle

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        return self.devices[handle]

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        processes = self.devices[handle].processes
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes]


@pytest.fixture(params=["nvidia-ml-py", "nvidia-ml-py3"])
def nvml(request, monkeypatch):
    fake = FakeNvml(request.param, os.getpid())
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield fake
    assert fake.num_open == 0  # each nvmlInit has its nvmlShutdown


def torch_says(monkeypatch, *uuids):
    """Let torch see GPUs with these UUIDs."""
    devices = [SimpleNamespace(uuid=uuid) for uuid in uuids]
    monkeypatch.setattr(torch.cuda, "get_device_properties", devices.__getitem__)


def test_reads_device_and_process(nvml, monkeypatch):
    torch_says(monkeypatch, UUIDS[0])
    reading = read_nvml("cuda:0", reserved_bytes=2 * GIB)
    assert (reading.used_bytes, reading.total_bytes) == (10 * GIB, 80 * GIB)
    assert (reading.process_bytes, reading.context_bytes) == (3 * GIB, GIB)
    assert reading.reason == ""


def test_context_is_unknown_without_what_torch_reserved(nvml, monkeypatch):
    torch_says(monkeypatch, UUIDS[0])
    reading = read_nvml(0)
    assert (reading.process_bytes, reading.context_bytes) == (3 * GIB, None)


def test_uuid_decides_and_not_the_index(nvml, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    torch_says(monkeypatch, UUIDS[2], UUIDS[0])
    assert [read_nvml(i).used_bytes for i in (0, 1)] == [12 * GIB, 10 * GIB]


def test_a_device_that_torch_does_not_have(nvml, monkeypatch):
    def fail(index):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    reading = read_nvml(0)
    assert reading.used_bytes is None
    assert "NVML does not find CUDA device 0: AssertionError: Torch not" in reading.reason


def test_slice_of_a_gpu(nvml, monkeypatch):
    torch_says(monkeypatch, "d")
    reading = read_nvml(0, reserved_bytes=GIB)
    if nvml.is_old:  # has no slices
        assert reading.used_bytes is None
        assert "does not find CUDA device 0: NVMLError: Not Found" in reading.reason
    else:
        assert (reading.used_bytes, reading.total_bytes) == (GIB, 10 * GIB)
        assert reading.process_bytes is None
        assert "MIG slice" in reading.reason


@pytest.mark.parametrize(
    "processes",
    [[], [(1, GIB)], [("own", None)], [("own", GIB)]],
    ids=["none", "others", "not-told", "other-with-our-number"],
)
def test_container(nvml, monkeypatch, processes):
    torch_says(monkeypatch, UUIDS[0])
    nvml.devices[f"GPU-{UUIDS[0]}"].processes = [
        (os.getpid() if pid == "own" else pid, used) for pid, used in processes
    ]
    reading = read_nvml(0, reserved_bytes=2 * GIB)
    assert reading.used_bytes == 10 * GIB
    assert (reading.process_bytes, reading.context_bytes) == (None, None)
    assert "container" in reading.reason


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses"]
)
def test_functions_that_the_driver_does_not_have(nvml, monkeypatch, function):
    def fail(handle):
        raise NVMLError("Function Not Found")

    torch_says(monkeypatch, UUIDS[0])
    monkeypatch.setattr(nvml, function, fail, raising=False)
    reading = read_nvml(0, reserved_bytes=GIB)
    assert reading.process_bytes is None
    assert reading.reason.endswith("NVMLError: Function Not Found")


def test_a_shutdown_that_fails(nvml, monkeypatch):
    def fail():
        nvml.num_open -= 1
        raise NVMLError("Uninitialized")

    torch_says(monkeypatch, UUIDS[0])
    monkeypatch.setattr(nvml, "nvmlShutdown", fail)
    assert read_nvml(0).used_bytes == 10 * GIB


def test_no_driver(nvml, monkeypatch):
    def fail():
        raise LibraryNotFoundError

    monkeypatch.setattr(nvml, "nvmlInit", fail)
    reading = read_nvml(0)
    assert reading.used_bytes is None
    assert reading.reason.startswith("NVML is not available: LibraryNotFoundError: NVML Shared")


def test_no_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pip install nvidia-ml-py" in read_nvml(0).reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_torch_device_and_no_driver_on_this_machine():
    assert read_nvml(0).reason.startswith("NVML ")


def test_several_readings_with_one_opening(nvml, monkeypatch):
    torch_says(monkeypatch, UUIDS[0])
    with NvmlDevice(0) as gpu:
        assert gpu.read() == gpu.read()
        assert nvml.num_open == 1
    assert gpu.read().reason == "NVML is closed"


@pytest.mark.gpu
def test_real_driver():
    tensor = torch.zeros(2**28, device="cuda", dtype=torch.uint8)
    reading = read_nvml(tensor.device, torch.cuda.memory_reserved())
    assert reading.total_bytes is not None, reading.reason
    assert reading.used_bytes is not None
    assert 2**28 <= reading.used_bytes <= reading.total_bytes
    assert reading.process_bytes is None or reading.process_bytes >= 2**28
