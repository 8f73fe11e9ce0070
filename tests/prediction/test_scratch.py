"""Scratch memory of CUDA's kernels, compared with traces of torch 2.14.1 on a virtual RTX 3060."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.prediction.cuda.kernels import cuda_kernels
from lightning_memsave.prediction.cuda.scratch import Multiprocessors, reduction_scratch
from lightning_memsave.prediction.fake.tensors import fake_tensors
from lightning_memsave.prediction.recording import StepProfile

RTX_3060 = Multiprocessors(28, (8, 6))


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((8192, 768), torch.bfloat16, (22_020_096, 24)),
        ((8192, 3072), torch.bfloat16, (22_020_096, 96)),
        ((4096, 2304), torch.bfloat16, (22_413_312, 72)),
        ((4096, 32_000), torch.float32, (65_536_000, 1000)),
        ((64, 768), torch.float32, ()),  # a single block of threads makes each result
    ],
)
def test_sums_over_rows(shape, dtype, expected):
    grad = torch.empty(shape, dtype=dtype, device="meta")
    assert reduction_scratch(grad, 0, RTX_3060) == expected


def test_another_number_of_multiprocessors_needs_another_size():
    grad = torch.empty(8192, 768, dtype=torch.bfloat16, device="meta")
    (size, _), (other, _) = (
        reduction_scratch(grad, 0, Multiprocessors(number, (8, 6))) for number in (28, 56)
    )
    assert other == 2 * size


@pytest.mark.parametrize("dim", [None, (), 1, -1, (0, 1)])
def test_nothing_to_reduce_and_all_of_it(dim):
    assert reduction_scratch(torch.empty(0, 3, device="meta"), dim, RTX_3060) == ()
    sizes = reduction_scratch(torch.empty(4096, 4096, device="meta"), dim, RTX_3060)
    assert sum(sizes) < 2**20  # results of few threads each


def test_joined_axes_are_one():
    rows = torch.empty(64, 128, 768, device="meta")
    assert reduction_scratch(rows, (0, 1), RTX_3060) == reduction_scratch(
        rows.view(-1, 768), 0, RTX_3060
    )


def test_a_sum_on_cuda_has_its_scratch_memory_for_as_long_as_it_runs():
    with fake_tensors():
        x = torch.empty(8192, 768)
        peaks = []
        for num_multiprocessors in (28, 56):
            with (
                cuda_kernels(capability=(8, 6), num_multiprocessors=num_multiprocessors),
                LiveTensors() as live,
            ):
                total = x.sum(0)
                peaks.append(live.peak.total_bytes)
                assert live.live_bytes == x.nbytes + total.nbytes
    assert peaks[1] - peaks[0] == pytest.approx(22_020_096, abs=200)


def test_a_bias_that_no_product_takes_along_is_added_in_place():
    with fake_tensors(), cuda_kernels():
        layer = torch.nn.Linear(64, 64)
        x = torch.empty(8, 16, 64).transpose(0, 1)  # as of attention with the batch first
        with LiveTensors(layer) as live:
            y = layer(x)
            before = live.breakdown.parameter_bytes + x.nbytes
            # The input in order, and the result: not the product beside it.
            assert live.peak.total_bytes <= before + 2 * y.nbytes


def _scratch_of(call: Any) -> list[int]:
    """Return what an operator allocates, and what it frees as negative sizes."""
    with fake_tensors(), cuda_kernels(capability=(9, 0), num_multiprocessors=132):
        module = nn.Module()
        with StepProfile(module, device="cpu") as profile:
            kept = call()
        del kept
        return [event.change for event in profile.recording.events if event.op == "aten.empty"]


# Recorded on a virtual H100 with torch 2.14.1, of 4,096 indices.
@pytest.mark.parametrize(
    ("num_weights", "dtype", "expected"),
    [
        (2, torch.bfloat16, [16, 16, 8, 3288, 3288, 6144]),
        (64, torch.bfloat16, [512, 512, 8, 3784, 3784, 196_608]),
        (64, torch.float32, [512, 512, 8, 3784, 3784]),
        (512, torch.bfloat16, [4096, 4096, 8, 7368, 2_829_312]),
        (30_000, torch.bfloat16, [32_768, 32_768, 8, 36_040, 13_839_360]),
    ],
)
def test_backward_of_embeddings(num_weights, dtype, expected):
    def backward() -> Any:
        grad = torch.ones(4096, 768, dtype=dtype)
        indices = torch.zeros(4096, dtype=torch.int64)
        return torch.ops.aten.embedding_dense_backward(grad, indices, num_weights, -1, False)

    sizes = [32_768, 32_768, 32_768, 8, *expected]
    assert [size for size in _scratch_of(backward) if size > 0] == sizes


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, [196_608, 12_595_200]),
        # A product, its sums, the same transposed; then both go before the workspace comes.
        (torch.float32, [12_582_912, 196_608, 196_608, -196_608, -12_582_912, 12_595_200]),
    ],
)
def test_backward_of_attention(dtype, expected):
    def backward() -> Any:
        x = torch.ones(32, 12, 128, 64, dtype=dtype)
        rows, seed = torch.ones(32, 12, 128), torch.zeros((), dtype=torch.int64)
        return torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            x, x, x, x, None, x, rows, seed, seed, 0.0, [True, True, True, False]
        )

    assert _scratch_of(backward)[: len(expected)] == expected


@pytest.mark.parametrize(
    ("is_behind", "expected"),
    [
        ([True, True], [196_608, 12_582_912]),
        ([False, True], [6_291_456, 196_608, 12_582_912]),
        ([False, False], [6_291_456, 6_291_456, 196_608, 12_582_912]),
    ],
)
def test_flash_attention_copies_what_has_not_its_heads_behind_its_tokens(is_behind, expected):
    """As the gradient of `nn.MultiheadAttention`, which has the tokens first."""

    def backward() -> Any:
        x = torch.ones(32, 128, 12, 64, dtype=torch.bfloat16).transpose(1, 2)
        other = torch.ones(128, 32, 12, 64, dtype=torch.bfloat16).permute(1, 2, 0, 3)
        grad, out = (x if each else other for each in is_behind)
        rows, seed = torch.ones(32, 12, 128), torch.zeros((), dtype=torch.int64)
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, x, x, x, out, rows, None, None, 128, 128, 0.0, False, seed, seed
        )

    assert _scratch_of(backward)[: len(expected)] == expected


@pytest.mark.parametrize(
    ("name", "factor", "expected"),
    [
        ("mm", torch.empty(4, 8), []),
        ("mm", torch.empty(8, 4).t(), []),
        ("mm", torch.empty(4, 16)[:, :8], []),
        ("mm", torch.empty(4, 16)[:, ::2], [128]),
        ("mm", torch.empty(()).expand(4, 8), [128]),
        ("bmm", torch.empty(4, 8).expand(2, 4, 8), []),
        ("bmm", torch.empty(()).expand(2, 4, 8), [256]),
        ("addmm", torch.empty(()).expand(4, 8), [128]),
    ],
)
def test_products_copy_a_factor_without_rows_or_columns_in_order(name, factor, expected):
    """As the gradient of a sum, which is one number in all places."""
    function = getattr(torch, name)

    def multiply() -> Any:
        shape, strides = factor.shape, factor.stride()
        x = torch.empty_strided(shape, strides, dtype=factor.dtype)
        bias = [torch.zeros(3)] if name == "addmm" else []
        return function(*bias, x, torch.zeros(*shape[:-2], shape[-1], 3))

    assert [size for size in _scratch_of(multiply) if size > 0] == expected
