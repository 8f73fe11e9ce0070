"""Scratch memory of CUDA's kernels, compared with traces of torch 2.14.1 on a virtual RTX 3060."""

import pytest
import torch

from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.prediction.cuda.kernels import cuda_kernels
from lightning_memsave.prediction.cuda.scratch import Multiprocessors, reduction_scratch
from lightning_memsave.prediction.fake.tensors import fake_tensors

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
