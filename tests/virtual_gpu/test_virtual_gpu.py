"""The virtual GPU is what it says it is: its cards, its memory, its numbers."""

import pytest
import torch

from tests.virtual_gpu import counters
from tests.virtual_gpu.processes import run_python

pytestmark = pytest.mark.gpu

CARDS = {"t4": 75, "rtx3060": 86, "rtx4090": 89, "a100": 80, "h100": 90}


@pytest.mark.parametrize(("card", "capability"), CARDS.items())
def test_two_of_each_card(card, capability):
    found = run_python(
        """
        import json, torch
        one, other = (torch.full((3,), i, device=f"cuda:{i}", dtype=torch.float32) for i in (0, 1))
        moved = one.to("cuda:1") + other
        print(json.dumps({
            "capability": torch.cuda.get_device_capability(1),
            "has_bf16": torch.cuda.is_bf16_supported(including_emulation=False),
            "moved": moved.tolist(),
            "devices": [str(moved.device), str(one.device)],
            "allocated": [torch.cuda.memory_allocated(i) for i in (0, 1)],
            "free": [torch.cuda.mem_get_info(i)[0] for i in (0, 1)],
        }))
        """,
        card=card,
        VGPU_DEVICES="2",
        VGPU_COMPUTE="1",
        VGPU_MEMORY="1GiB",
    )
    # A segment of 2 MiB each, beside 500 MiB of the driver.
    assert found == {
        "capability": [capability // 10, capability % 10],
        "has_bf16": capability >= 80,
        "moved": [1.0, 1.0, 1.0],
        "devices": ["cuda:1", "cuda:0"],
        "allocated": [512, 1024],
        "free": [522 * 2**20] * 2,
    }


def test_an_operator_computes_launches_and_allocates():
    torch.cuda.empty_cache()
    counters.reset()
    before = torch.cuda.memory_allocated()
    x = torch.arange(4.0).to("cuda")
    y = x * 2
    assert torch.cuda.memory_allocated() - before == 1024
    assert y.tolist() == [0.0, 2.0, 4.0, 6.0]
    found = counters.report()
    assert found["launches"] == 1
    # Pageable memory: the host waits for both.
    assert found["copies"] == {"d2h pageable async": [1, 16], "h2d pageable async": [1, 16]}


def test_an_operator_that_writes_through_others_computes_once():
    rows, values = torch.tensor([1, 3], device="cuda"), torch.ones(2, 4, device="cuda")
    total = torch.zeros(5, 4, device="cuda").index_add_(0, rows, values)
    assert total.sum(1).tolist() == [0.0, 4.0, 0.0, 4.0, 0.0]


def test_a_copy_to_another_shape_computes():
    """One to the same shape is a transfer."""
    row = torch.arange(3.0, device="cuda")
    assert torch.full((2, 3), 7.0, device="cuda").copy_(row).tolist() == [[0, 1, 2]] * 2


def test_an_operator_without_a_key_of_cuda_computes():
    exponent = torch.tensor(7, device="cuda", dtype=torch.int32)
    assert torch.ldexp(torch.ones((), device="cuda"), exponent).item() == 128.0


def test_what_cannot_compute_says_so():
    weight = torch.ones(4, 1, 3, 3, device="cuda")
    with pytest.raises(NotImplementedError, match="no CPU kernel has this form"):
        torch.nn.functional.conv2d(torch.ones(1, 4, 8, 8, device="cuda"), weight, groups=4)


def test_random_numbers_follow_seed_and_offset():
    torch.cuda.manual_seed(3)
    first, state = torch.rand(8, device="cuda"), torch.cuda.get_rng_state()
    second = torch.rand(8, device="cuda")
    assert not torch.equal(first, second)
    torch.cuda.set_rng_state(state)
    assert torch.equal(second, torch.rand(8, device="cuda"))


def test_memory_ends_and_comes_back():
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 64\.00 GiB"):
        torch.empty(2**36, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    try:
        counters.set_memory(total - free + 2**30)
        with pytest.raises(torch.OutOfMemoryError, match=r"1024\.00 MiB is free"):
            torch.empty(2**30 + 1, dtype=torch.uint8, device="cuda")
    finally:
        counters.set_memory(total)
    assert torch.empty(2**30 + 1, dtype=torch.uint8, device="cuda").numel() == 2**30 + 1


def test_norms_have_statistics_of_32_bits():
    x = torch.randn(4, 8, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(8, device="cuda", dtype=torch.bfloat16)
    _, mean, _ = torch.ops.aten.native_layer_norm(x, [8], weight, None, 1e-5)
    assert mean.dtype is torch.float32
    torch.testing.assert_close(mean, x.float().mean(1, keepdim=True))


def test_tensors_are_compared_by_their_values():
    x = torch.arange(3.0, device="cuda")
    assert torch.equal(x, x.clone())
    assert not torch.equal(x, x + 1)
