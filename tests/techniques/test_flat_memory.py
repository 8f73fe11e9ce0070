"""Tensors that lie one behind the other are copied at once."""

import pytest
import torch
from torch import Tensor

from lightning_memsave.techniques.offloading.flat_memory import (
    ALIGNMENT_BYTES,
    empty_like_all,
    in_order,
    joined,
)
from lightning_memsave.techniques.offloading.host_memory import HostMemory

SHAPES = [(3, 5), (7,), (4, 4), (0, 3), (), (200, 3)]
HERE = torch.device("cpu")


def on_host(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    forms = [torch.empty(shape, dtype=dtype) for shape in SHAPES]
    forms[2] = forms[2].t()
    return HostMemory().tensors_like(forms)


def dtypes_of(tensors: list[Tensor]) -> list[torch.dtype]:
    return [tensor.dtype for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_are_copied_at_once(dtype):
    sources = [each for each in on_host(dtype) if each.numel()]
    for number, source in enumerate(sources):
        source.fill_(number)
    _, targets = empty_like_all(sources, dtypes_of(sources), HERE)
    pairs = joined(targets, sources)
    assert len(pairs) == 1
    pairs[0][0].copy_(pairs[0][1])
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source)
        assert target.stride() == source.stride()
        assert target.storage_offset() * target.element_size() % ALIGNMENT_BYTES == 0


def test_another_type_or_order_has_no_common_distances():
    sources = on_host()[:3]
    _, half = empty_like_all(sources, [torch.bfloat16] * 3, HERE)
    assert dtypes_of(half) == [torch.bfloat16] * 3
    _, targets = empty_like_all(sources[::-1], dtypes_of(sources), HERE)
    pairs = joined(targets, sources[::-1])
    assert len(pairs) == 3
    for target, source in pairs:
        target.copy_(source.fill_(2))
    assert all(target.eq(2).all() for target in targets)
    assert in_order(sources[::-1]) == [2, 1, 0]


def test_bytes_are_those_of_torchs_allocator():
    """Which rounds each tensor on its own to the same size."""
    sources = on_host()
    piece, _ = empty_like_all(sources, dtypes_of(sources), HERE)
    alone = [-(-each.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for each in sources]
    assert piece.nbytes == sum(alone)
