"""Describe a loss of a linear layer, and choose the sizes of its chunks."""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_memsave.core.memory import on_cuda
from lightning_memsave.techniques.host_weight import HostWeight

# N rows of D features, M of them in the loss; V classes; R rows per chunk.

_MIN_CHUNK_BYTES = 2**20

# cuBLAS has its fast kernels for rows that begin at multiples of 16 bytes, and the fastest at
# multiples of 128; vocabularies such as 50,257 have no such factor.
_ALIGNMENT = 64

# On a GPU, large enough that it computes longer than the next kernel takes to launch, unless that
# needs more than the backward pass of a transformer block: gradients of its output and of its wider
# layer, five times the inputs of the head.
_GPU_TILE = 8192
_INPUTS_OF_GPU_TILE = 5


@dataclass(frozen=True)
class LossSettings:
    """The arguments of ``F.cross_entropy``, and the chunk size."""

    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    chunk_size: int | None = None


@dataclass(frozen=True)
class Operands:
    """Operands of ``logits = scale * (sum(inputs[i] @ weights[i].T) + bias) + shift``."""

    inputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    bias: Tensor | None
    autocast_dtype: torch.dtype | None
    scale: float = 1.0
    shift: Tensor | None = None
    host: HostWeight | None = None
    classes: slice | None = None

    @property
    def num_classes(self) -> int:
        if self.classes is not None:
            return int(self.classes.stop - self.classes.start)
        return len(self.weights[0])

    @property
    def wide_dtype(self) -> torch.dtype:
        """Type of sums: 32 bits or more."""
        return functools.reduce(torch.promote_types, self.dtypes, torch.float32)

    @property
    def dtypes(self) -> list[torch.dtype]:
        return [self.autocast_dtype or tensor.dtype for tensor in self.inputs]

    def cast(self, tensor: Tensor, of: Tensor) -> Tensor:
        """Cast a factor to the type of its product, whose input is ``of``."""
        return tensor.to(self.autocast_dtype or of.dtype)


@dataclass(frozen=True)
class Call:
    operands: Operands
    target: Tensor
    rows: Tensor | None
    class_weight: Tensor | None
    settings: LossSettings
    has_ignored: bool = False

    def chunk_size(self, *, has_gradients: bool, needs: tuple[bool, ...] = ()) -> int:
        """Choose the number of rows per chunk, R.

        A chunk is about as large as the inputs, or a share of the weight in 32 bits. With fewer
        rows, reading the weight and writing its gradient would dominate.
        """
        num_rows = len(self.target)
        if self.settings.chunk_size is not None:
            return max(1, min(self.settings.chunk_size, num_rows))
        x = self.operands.inputs[0]
        input_bytes = x.numel() * x.element_size()
        least = x.shape[1] // (4 if has_gradients else 8)
        size = max(least, max(input_bytes, _MIN_CHUNK_BYTES) // (4 * self.num_classes), 1)
        num_chunks = max(1, round(num_rows / size))
        if any(needs) and on_cuda(x):
            rows = self._rows_for_gpu(needs, has_gradients=has_gradients)
            num_chunks = max(1, min(num_chunks, math.ceil(num_rows / max(8, 8 * (rows // 8)))))
        # Low-precision kernels are faster with multiples of eight.
        return max(1, min(num_rows, 8 * math.ceil(num_rows / num_chunks / 8)))

    # A GPU is done with a small chunk before the next is launched. A chunk that is as large as what
    # backward allocates in its place leaves the peak of a step as it is.
    def _rows_for_gpu(self, needs: tuple[bool, ...], *, has_gradients: bool) -> int:
        operands, num = self.operands, len(self.operands.inputs)
        x, weight, wide = operands.inputs[0], operands.weights[0], operands.wide_dtype
        product = operands.autocast_dtype or x.dtype
        num_bytes = self.num_columns * wide.itemsize
        if has_gradients and product != wide:
            num_bytes += self.num_columns * product.itemsize
        num_bytes += x.shape[1] * product.itemsize + 32  # the row of the input, and its numbers
        if not needs[num]:
            return 0
        if not has_gradients:  # the gradient of the weight, but for its copy, which is there now
            copy_bytes = product.itemsize if product != weight.dtype else 0
            return weight.numel() * (weight.element_size() - copy_bytes) // num_bytes
        # Its gradient in its own type, beside that in 32 bits, if these are two.
        own_bytes = weight.element_size() if weight.dtype != wide else 0
        return weight.numel() * own_bytes // num_bytes

    @property
    def tile_size(self) -> int:
        """Classes per tile: at most as many logits as in a chunk of rows; more on a GPU."""
        x, num_rows = self.operands.inputs[0], max(1, len(self.target))
        chunk = self.chunk_size(has_gradients=True) * self.num_classes
        size = min(2 * x.shape[1], chunk // num_rows)
        if on_cuda(x):
            room = _INPUTS_OF_GPU_TILE * x.numel() * x.element_size()
            size = max(size, min(_GPU_TILE, room // self._bytes_of_class))
        return 8 * math.ceil(max(size, 1) / 8)

    # Of a tile: logits and their gradient, the weight in the type of the product, and its gradient.
    @property
    def _bytes_of_class(self) -> int:
        operands, num_features = self.operands, self.operands.inputs[0].shape[1]
        (product, *_), weight, wide = operands.dtypes, operands.weights[0], operands.wide_dtype
        num_bytes = max(1, len(self.target)) * (wide.itemsize + product.itemsize)
        if weight.dtype != product:
            num_bytes += num_features * product.itemsize
        if not (self.sums_in_low_precision or weight.dtype == wide):
            num_bytes += num_features * wide.itemsize
        return num_bytes

    @property
    def sums_in_low_precision(self) -> bool:
        """Whether a tile of a weight's gradient is one product, made in the type of the weight.

        So it is in the ordinary computation. bfloat16 has the range of float32, so that gradients
        may be scaled before the product.
        """
        operands = self.operands
        weights = {weight.dtype for weight in operands.weights}
        return on_cuda(operands.inputs[0]) and {*weights, *operands.dtypes} == {torch.bfloat16}

    @property
    def is_tiled(self) -> bool:
        """Whether gradients are computed in backward, by tiles of classes.

        With low precision that needs half the memory. Logits are computed twice, which is no slower
        than the ordinary computation if a quarter of the rows is ignored.
        """
        has_low_precision = any(d.itemsize < 4 for d in self.operands.dtypes)
        return has_low_precision and 4 * len(self.target) <= 3 * len(self.operands.inputs[0])

    @property
    def tiles(self) -> list[slice]:
        size, num = self.tile_size, self.num_classes
        return [slice(start, min(start + size, num)) for start in range(0, num, size)]

    def weight_tiles(self, tiles: Sequence[slice]) -> Iterator[list[Tensor]]:
        host = self.operands.host
        if host is None:
            yield from ([w[tile] for w in self.operands.weights] for tile in tiles)
            return
        places = [self._on_host(tile) for tile in tiles]
        yield from ([tile] for tile in host.tiles(places, self.target.device))

    def add_to_host(self, tile: slice, gradient: Tensor) -> None:
        assert self.operands.host is not None, "others are gathered on the device"
        self.operands.host.add_gradient(self._on_host(tile), gradient)

    def _on_host(self, tile: slice) -> slice:
        start = 0 if self.operands.classes is None else self.operands.classes.start
        return slice(start + tile.start, start + tile.stop)

    @property
    def num_classes(self) -> int:
        return self.operands.num_classes

    @property
    def num_columns(self) -> int:
        """Columns of buffers for chunks: V, aligned where that makes products faster."""
        alignment = _ALIGNMENT if on_cuda(self.operands.inputs[0]) else 1
        return alignment * math.ceil(self.num_classes / alignment)

    def counted(self) -> Tensor | None:
        """Return which rows count (M,); ``None`` if all do."""
        return self.target != self.settings.ignore_index if self.has_ignored else None

    def weights_of_rows(self, counted: Tensor | None) -> Tensor:
        """Return the weight of each row (M,): that of its class, or 1; 0 if it does not count."""
        if self.class_weight is None:
            if counted is not None:
                return counted
            one = self.target.new_ones((), dtype=self.operands.wide_dtype)
            return one.expand(len(self.target))
        if counted is None:
            return self.class_weight.index_select(0, self.target)
        return self.class_weight.index_select(0, self.target * counted).mul_(counted)

    def denominator(self) -> Tensor:
        return self.weights_of_rows(self.counted()).sum(dtype=self.operands.wide_dtype)
