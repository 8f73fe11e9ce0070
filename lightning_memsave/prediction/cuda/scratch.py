"""Sizes of the scratch memory that CUDA's kernels take from torch's allocator while they run."""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_memsave.prediction.cuda.allocator import rounded_up
from lightning_memsave.prediction.cuda.dispatch import Overrides

_MAX_THREADS, _WARP = 512, 32  # of a block in Reduce.cuh
_VALUES_PER_THREAD = (16, 256)  # between these, a reduction is split over more blocks
_SIZE_OF_INT, _SIZE_OF_FLOAT = 4, 4
# Of a multiprocessor (CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability"); 2,048 elsewhere.
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536}


@dataclass(frozen=True, slots=True)
class Multiprocessors:
    number: int
    capability: tuple[int, int]

    def blocks_of(self, num_threads: int) -> int:
        return self.number * (_THREADS.get(self.capability, 2048) // num_threads)


def add_scratch(overrides: Overrides, processors: Multiprocessors) -> None:
    overrides.add_scratch("_scaled_dot_product_flash_attention_backward", _flash, _flash_copies)
    overrides.add_scratch("_scaled_dot_product_efficient_attention_backward", _efficient)
    overrides.add_scratch("embedding_dense_backward", functools.partial(_embedding, processors))
    for name in ("mm", "bmm", "addmm", "baddbmm"):
        overrides.add_scratch(name, _nothing, _product_copies)

    def of_sum(input: Tensor, dim: Any = None, *_: Any, **__: Any) -> Sequence[int]:
        return reduction_scratch(input, dim, processors)

    def of_norm(input: Tensor, _: Any = 2, dim: Any = None, *__: Any, **___: Any) -> Sequence[int]:
        return reduction_scratch(input, dim, processors)

    for name in ("sum", "sum.dim_IntList", "mean", "mean.dim"):
        overrides.add_scratch(name, of_sum)
    overrides.add_scratch("linalg_vector_norm", of_norm)


def reduction_scratch(
    input: Tensor, dim: int | Iterable[int] | None, processors: Multiprocessors
) -> tuple[int, ...]:
    """Return what a sum, mean or norm needs where several blocks of threads share a result.

    As ``setReduceConfig`` in Reduce.cuh: partial results, and a counter for each group of blocks.
    """
    reduced, kept = _split_axes(input, dim)
    num_inputs, num_outputs = (math.prod(size for size, _ in axes) for axes in (reduced, kept))
    if not reduced or not num_inputs * num_outputs:
        return ()
    along_rows = not kept or reduced[0][1] < kept[0][1]
    first, stride = (reduced if along_rows else kept)[0]
    others, vector = (num_outputs, 1) if along_rows else (num_inputs, 1)
    if stride == 1 and along_rows and first > 4 * _WARP and len(reduced) == 1:
        first //= 4
    elif stride == 1 and not along_rows:
        strides = [s for _, s in (*reduced, *kept[1:])]
        vector = math.gcd(4, first, *strides)
        first //= vector
    limit = _MAX_THREADS // vector
    most_x, most_y = (min(_power_of_2(n), limit) for n in (first, others))
    height = min(most_y, limit // min(most_x, _WARP))
    width = min(most_x, limit // height)
    per_step, per_block = (width, 1) if along_rows else (1, width)
    least, most = _VALUES_PER_THREAD
    values = _divided_up(num_inputs, per_step)
    if values < least * height and values < most:
        return ()
    per_step *= height
    values = _divided_up(num_inputs, per_step)
    num_groups = _divided_up(num_outputs // vector, per_block)
    num_blocks = processors.blocks_of(width * height)
    if values < most or num_groups > num_blocks:
        return ()
    share = max(
        min(_divided_up(num_blocks, num_groups), _divided_up(values, least)),
        _divided_up(values, most),
    )
    if share < 2:
        return ()
    element = max(input.element_size(), _SIZE_OF_FLOAT)
    size = element * num_outputs * share * (1 if along_rows else width * vector)
    return size, _SIZE_OF_INT * num_groups


# As TensorIterator: reduced axes first, by stride, neighbours joined.
def _split_axes(
    input: Tensor, dim: int | Iterable[int] | None
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    chosen = {d % input.dim() for d in dims} if dims else set(range(input.dim()))
    found: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    axes = sorted(enumerate(zip(input.shape, input.stride(), strict=True)), key=lambda a: a[1][1])
    for axis, (size, stride) in axes:
        part = found[axis not in chosen]
        if part and part[-1][0] * part[-1][1] == stride:
            part[-1] = (size * part[-1][0], part[-1][1])
        elif size > 1:
            part.append((size, stride))
    return found


def _nothing(*_: Any, **__: Any) -> tuple[int, ...]:
    return ()


# `prepare_matrix_for_cublas` in Blas.cpp copies a factor without rows or columns in order, such as
# the expanded gradient of a sum.
def _product_copies(*tensors: Tensor, **_: Any) -> list[int]:
    return [_copy_bytes(factor) for factor in tensors[-2:] if not _has_order(factor)]


def _has_order(factor: Tensor) -> bool:
    (num_rows, num_columns), (row, column) = factor.shape[-2:], factor.stride()[-2:]
    return (column == 1 and row >= max(1, num_columns)) or (row == 1 and column >= max(1, num_rows))


def _copy_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# `_flash_attention_backward` in attention_backward.cu copies the output and its gradient, if heads
# are not behind tokens in memory.
def _flash_copies(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *_: Any, **__: Any
) -> list[int]:
    return [t.nbytes for t in (grad_out, out) if not t.transpose(1, 2).is_contiguous()]


# `mha_bwd` in flash_api.cpp: row sums, float32 sums of the query's gradient, and with grouped-query
# attention gradients of keys and values per query head.
def _flash(grad_out: Tensor, query: Tensor, key: Tensor, *_: Any, **__: Any) -> list[int]:
    batch, heads, tokens, size = query.shape
    rows = batch * heads * rounded_up(tokens, 128)
    blocks = [4 * rows, 4 * rows * rounded_up(size, 32)]
    if key.size(1) != heads:
        blocks += [batch * key.size(2) * heads * size * query.element_size()] * 2
    return blocks


# The row sums ("delta"), and `workspace_size` in mem_eff_attention/kernel_backward.h: for each 64
# tokens a tile of the query's gradient in float32 and a lock of 16 bytes. In float32 the sums are
# not the kernel's: a product of the size of the output is summed, and the sums are transposed.
def _efficient(grad_out: Tensor, query: Tensor, *_: Any, **__: Any) -> list[int]:
    batch, heads, tokens, size = query.shape
    num_rows, num_tiles = batch * heads * tokens, batch * heads * _divided_up(tokens, 64)
    sums, workspace = 4 * num_rows, num_tiles * (16 + 4 * 64 * rounded_up(size, 64))
    if grad_out.element_size() < _SIZE_OF_FLOAT:
        return [sums, workspace]
    product = 4 * num_rows * grad_out.size(-1)
    return [product, sums, sums, -2, -1, workspace]


# `embedding_dense_backward_cuda` in Embedding.cu and EmbeddingBackwardKernel.cu: sorted indices,
# and float32 partial sums over at most ten rows of each index. Where few indices occur often, sums
# of each index, if the gradient is not in float32 itself; when that is was found by trying.
def _embedding(
    processors: Multiprocessors,
    grad: Tensor,
    indices: Tensor,
    num_weights: int,
    _: int,
    scale_grad_by_freq: bool,
) -> list[int]:
    num_indices = indices.numel()
    if num_indices <= 3072 and not scale_grad_by_freq:
        return []
    num_segments = min(num_indices, num_weights)
    num_parts = num_indices // 10 + num_segments
    is_dense = num_segments < 4 * processors.number and num_parts >= 4 * num_segments
    sums = _SIZE_OF_FLOAT * grad.size(-1) * (num_segments if is_dense else num_parts)
    of_parts = [8 * num_parts, 8 * num_parts] if is_dense else [8 * num_parts]
    if not is_dense or grad.element_size() < _SIZE_OF_FLOAT:
        of_parts.append(sums)
    return [*[8 * num_indices] * 3, 8, *[8 * num_segments] * 2, 8, *of_parts]


def _power_of_2(number: int) -> int:
    return 1 << (number.bit_length() - 1)


def _divided_up(value: int, by: int) -> int:
    return -(-value // by)
