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

    Args:
        inputs: Each (N, D).
        weights: Each (V, D).
        bias: (V,), or none.
        autocast_dtype: What to compute products in; ``None`` takes the type of the inputs.
    """

    inputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    bias: Tensor | None
    autocast_dtype: torch.dtype | None

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

    @property
    def chunk_size(self) -> int:
        """How many rows to take at once.

        A chunk is about as large as the inputs or a quarter of the weight in 32 bits. With fewer
        rows, the time would go into reading and writing the gradient of the weight.
        """
        num_rows = len(self.target)
        if self.settings.chunk_size is not None:
            return max(1, min(self.settings.chunk_size, num_rows))
        (num_inputs, width), num_classes = self.operands.inputs[0].shape, self.num_classes
        input_bytes = num_inputs * width * self.operands.inputs[0].element_size()
        size = max(width // 4, max(input_bytes, _MIN_CHUNK_BYTES) // (4 * num_classes), 1)
        num_chunks = max(1, round(num_rows / size))
        # Kernels for low precision like multiples of eight.
        return max(1, min(num_rows, 8 * math.ceil(num_rows / num_chunks / 8)))

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
