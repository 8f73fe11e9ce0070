import json

import torch
from rich.console import Console
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_memsave.core.memory import MemoryBreakdown, emulating_cuda, on_cuda

MIXED = MemoryBreakdown(
    parameter_bytes=300, gradient_bytes=100, activation_bytes=600, host_bytes=4096
)


def test_adds_and_scales_each_category():
    both = MIXED + MemoryBreakdown(parameter_bytes=1, other_bytes=7)
    assert both == MemoryBreakdown(
        parameter_bytes=301,
        gradient_bytes=100,
        activation_bytes=600,
        other_bytes=7,
        host_bytes=4096,
    )
    assert MIXED * 2 == MIXED + MIXED
    assert (MIXED * 0.5).by_category() == {k: v // 2 for k, v in MIXED.by_category().items()}


def test_host_is_no_part_of_the_device():
    assert MIXED.total_bytes == 1000
    assert "host" not in MIXED.by_category()
    assert (MIXED + MIXED).host_bytes == 8192


def test_json_and_back():
    text = json.dumps(MIXED.to_dict())
    assert json.loads(text)["total_bytes"] == 1000
    assert MemoryBreakdown.from_dict(json.loads(text)) == MIXED


def test_rich_draws_what_is_there():
    console = Console(width=60, color_system=None)
    with console.capture() as capture:
        console.print(MIXED)
    lines = [line.split() for line in capture.get().splitlines()]
    assert lines == [
        ["category", "bytes", "share"],
        ["parameter", "300", "B", "30.0%"],
        ["gradient", "100", "B", "10.0%"],
        ["activation", "600", "B", "60.0%"],
        ["total", "1000", "B"],
        ["on", "the", "host", "4.00", "KiB"],
    ]
    with console.capture() as capture:
        console.print(MemoryBreakdown())
    assert capture.get().splitlines()[1].split() == ["total", "0", "B"]


def test_fake_tensors_count_as_cuda_tensors_while_cuda_is_emulated():
    real = torch.ones(2)
    with FakeTensorMode():
        fake = torch.ones(2)
    assert not on_cuda(fake)
    with emulating_cuda(), emulating_cuda():
        assert on_cuda(fake)
        assert not on_cuda(real)
    assert not on_cuda(fake)
