import pytest
import torch
from torch import nn

from lightning_memsave.measure.allocator import (
    AllocatorReading,
    pinned_bytes,
    read_allocator,
    read_host_memory,
)
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.measure.peak import PeakMemory


def test_peak_of_a_block():
    model = nn.Linear(100, 10, bias=False)
    batch = torch.zeros(5, 100)
    with PeakMemory(model, device="cpu") as peak:
        peak.track_input(batch)
        torch.zeros(1000)
        assert peak.allocated_bytes == 4000 + 2000 + 4000
    assert peak.allocated_bytes == 10_000
    assert peak.reserved_bytes is None
    assert peak.breakdown is not None
    assert peak.breakdown.input_bytes == 2000


def test_counts_optimizer_state():
    model = nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    with PeakMemory(model, [optimizer]) as peak:
        pass
    assert peak.breakdown is not None
    assert peak.breakdown.optimizer_state_bytes == 400


def test_again_begins_anew():
    with PeakMemory(device="cpu") as peak:
        torch.zeros(1000)
    with peak:
        torch.zeros(10)
    assert peak.allocated_bytes == 40


def test_an_exception_keeps_what_was_measured():
    peak = PeakMemory(device="cpu")

    def fail():
        torch.zeros(1000)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), peak:
        fail()
    assert peak.allocated_bytes == 4000


def test_allocator_without_cuda():
    assert read_allocator("cpu") is None
    if not torch.cuda.is_available():
        assert read_allocator() is None
        assert read_host_memory().pinned_bytes is None


def test_resident_memory_grows_with_what_is_touched():
    before_bytes = read_host_memory().rss_bytes
    touched = torch.ones(2**26)
    assert read_host_memory().rss_bytes - before_bytes > 0.9 * touched.nbytes


@pytest.mark.gpu
def test_peak_on_cuda():
    before_bytes = torch.cuda.memory_allocated()
    with PeakMemory() as peak:
        tensor = torch.zeros(2**20, device="cuda")
        assert peak.allocated_bytes == before_bytes + tensor.nbytes
        del tensor
    torch.zeros(2**22, device="cuda")
    assert peak.allocated_bytes == before_bytes + 2**22
    assert peak.reserved_bytes is not None
    assert peak.reserved_bytes >= peak.allocated_bytes
    assert peak.breakdown is None


@pytest.mark.gpu
def test_live_tensors_agree_with_the_cuda_allocator():
    # Multiplications would bring workspaces of cuBLAS, which are no tensors; sizes are multiples of
    # what the allocator rounds to.
    weight = torch.ones(2**20, device="cuda", requires_grad=True)
    before_bytes = torch.cuda.memory_allocated() - weight.nbytes
    module = nn.ParameterList([weight])
    torch.cuda.reset_peak_memory_stats()
    with LiveTensors(module) as live:
        weight.exp().sin().cos().sum().backward()
    expected = torch.cuda.max_memory_allocated() - before_bytes
    assert live.peak.total_bytes == pytest.approx(expected, abs=4096)


@pytest.mark.gpu
def test_allocator_on_cuda():
    tensor = torch.zeros(2**20, device="cuda")
    pinned = torch.zeros(2**20, pin_memory=True)
    reading = read_allocator()
    assert reading is not None
    assert tensor.nbytes <= reading.allocated_bytes <= reading.reserved_bytes
    assert reading.allocated_bytes == torch.cuda.memory_allocated()
    assert pinned_bytes() >= pinned.nbytes


class FakeCuda:
    """Figures of an allocator; only the hardware is pretended."""

    def __init__(self, monkeypatch):
        self.peak_bytes = 0
        stats = {
            "allocated_bytes": {"all": {"current": 1, "peak": 3}},
            "reserved_bytes": {"all": {"current": 2, "peak": 4}},
            "num_alloc_retries": 5,
        }
        functions = {
            "is_available": lambda: True,
            "memory_stats_as_nested_dict": lambda device: stats,
            "host_memory_stats": lambda: {"allocated_bytes.current": 7},
            "reset_peak_memory_stats": lambda device: setattr(self, "peak_bytes", 0),
            "max_memory_allocated": lambda device: self.peak_bytes,
            "max_memory_reserved": lambda device: 2 * self.peak_bytes,
        }
        for name, function in functions.items():
            monkeypatch.setattr(torch.cuda, name, function, raising=False)


def test_allocator_figures(monkeypatch):
    FakeCuda(monkeypatch)
    # This allocator does not count out-of-memory errors, as cudaMallocAsync's does not.
    assert read_allocator(0) == AllocatorReading(1, 2, 3, 4, 5, 0)
    assert read_allocator("cuda:1") == read_allocator()
    assert pinned_bytes() == 7


def test_peak_where_there_is_cuda(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    peak = PeakMemory()
    assert peak.device.type == "cuda"
    cuda.peak_bytes = 100
    with peak:
        assert peak.allocated_bytes == 0  # the peak before the block does not count
        cuda.peak_bytes = 40
        assert (peak.allocated_bytes, peak.reserved_bytes) == (40, 80)
        peak.track_input(torch.zeros(10))
    cuda.peak_bytes = 1000
    assert (peak.allocated_bytes, peak.reserved_bytes, peak.breakdown) == (40, 80, None)


def test_a_module_on_the_cpu_is_measured_there(monkeypatch):
    FakeCuda(monkeypatch)
    assert PeakMemory(nn.Linear(1, 1)).device.type == "cpu"
