"""What a loss on a linear layer is computed from."""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Of N rows with D numbers, M count; the layer has V classes, and R rows make a chunk.

_MIN_CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class LossSettings:
    """The arguments of ``F.cross_entropy``, and how many rows to take at once.

    Args:
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        ignore_index: Rows with this target do not count.
        label_smoothing: As for ``F.cross_entropy``.
        chunk_size: Rows at once; ``None`` chooses.
    """

    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    chunk_size: int | None = None


@dataclass(frozen=True)
class Operands:
    """A linear layer and what goes in: ``logits = sum(inputs[i] @ weights[i].T) + bias``.

    The logits are multiplied with a number and added to a vector then.

    Args:
        inputs: Each (N, D).
        weights: Each (V, D).
        bias: (V,), or none.
        autocast_dtype: What to compute products in; ``None`` takes the type of the inputs.
        scale: The number.
        shift: (V,), or none.
    """

    inputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    bias: Tensor | None
    autocast_dtype: torch.dtype | None
    scale: float = 1.0
    shift: Tensor | None = None

    @property
    def wide_dtype(self) -> torch.dtype:
        """What sums are computed in: 32 bits or more."""
        return functools.reduce(torch.promote_types, self.dtypes, torch.float32)

    @property
    def dtypes(self) -> list[torch.dtype]:
        """What products are computed in."""
        return [self.autocast_dtype or tensor.dtype for tensor in self.inputs]

    def cast(self, tensor: Tensor, of: Tensor) -> Tensor:
        """Give a factor of a product in the type that the product is computed in.

        Args:
            tensor: The factor.
            of: The input of the product.

        Returns:
            The same numbers.
        """
        return tensor.to(self.autocast_dtype or of.dtype)


@dataclass(frozen=True)
class Call:
    """One loss to compute.

    Args:
        operands: The linear layer.
        target: (M,) classes.
        rows: (M,) which of the N rows the targets are for; ``None`` if M = N and in order.
        class_weight: (V,), in the wide type, or none.
        settings: As for ``F.cross_entropy``.
    """

    operands: Operands
    target: Tensor
    rows: Tensor | None
    class_weight: Tensor | None
    settings: LossSettings

    def chunk_size(self, *, has_gradients: bool) -> int:
        """Choose how many rows to take at once.

        A chunk is about as large as the inputs, or a share of the weight in 32 bits. With fewer
        rows, the time would go into reading the weight and writing its gradient.

        Args:
            has_gradients: Whether gradients are computed too.

        Returns:
            R.
        """
        num_rows = len(self.target)
        if self.settings.chunk_size is not None:
            return max(1, min(self.settings.chunk_size, num_rows))
        x = self.operands.inputs[0]
        input_bytes = x.numel() * x.element_size()
        least = x.shape[1] // (4 if has_gradients else 8)
        size = max(least, max(input_bytes, _MIN_CHUNK_BYTES) // (4 * self.num_classes), 1)
        num_chunks = max(1, round(num_rows / size))
        # Kernels for low precision like multiples of eight.
        return max(1, min(num_rows, 8 * math.ceil(num_rows / num_chunks / 8)))

    @property
    def tile_size(self) -> int:
        """How many classes to take at once: at most as many logits as in a chunk of rows."""
        width = self.operands.inputs[0].shape[1]
        chunk = self.chunk_size(has_gradients=True) * self.num_classes
        size = min(2 * width, chunk // max(1, len(self.target)))
        return 8 * math.ceil(max(size, 1) / 8)

    @property
    def is_tiled(self) -> bool:
        """Whether gradients wait for the backward pass, and are computed by tiles of classes.

        With low precision that takes half the memory. Logits are computed twice then, which is no
        slower than the ordinary computation if a quarter of the rows does not count.
        """
        has_low_precision = any(d.itemsize < 4 for d in self.operands.dtypes)
        return has_low_precision and 4 * len(self.target) <= 3 * len(self.operands.inputs[0])

    @property
    def num_classes(self) -> int:
        """V."""
        return len(self.operands.weights[0])

    def weights_of_rows(self) -> Tensor:
        """Give what each row counts.

        Returns:
            (M,), the weight of its class, or 1.
        """
        if self.class_weight is not None:
            return self.class_weight.index_select(0, self.target)
        return self.target.new_ones(len(self.target), dtype=self.operands.wide_dtype)
