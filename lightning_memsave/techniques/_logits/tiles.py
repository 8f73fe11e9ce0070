"""Gradients of a linear layer with cross-entropy, some classes at a time.

Logits are computed a second time. In return nothing is held from the forward pass on, and the
gradient of the weight is never there in a type wider than its own.
"""

import torch
from torch import Tensor

from lightning_memsave.techniques._logits.chunks import Shares, plain_numbers
from lightning_memsave.techniques._logits.operands import Call
from lightning_memsave.techniques._logits.wide_products import (
    add_product,
    compute_logits,
    scale_and_shift,
    scaled,
)

# Of N rows with D numbers, M count; the layer has V classes, of which T make a tile.


class TiledGradients:
    """Gradients of a loss whose normalizers are known.

    Args:
        call: The loss.
        needs: For inputs, weights and bias in one row, which have a gradient.
        scale: What the gradients are multiplied with in the end, in the wide type.
    """

    def __init__(self, call: Call, needs: tuple[bool, ...], scale: Tensor) -> None:
        operands, num = call.operands, len(call.operands.inputs)
        self._call, self._scale = call, scale
        self._parts = [operands.cast(_counted(x, call.rows), of=x) for x in operands.inputs]
        self._inputs = [
            torch.zeros(part.shape, dtype=operands.wide_dtype, device=part.device) if need else None
            for part, need in zip(self._parts, needs, strict=False)
        ]
        self._weights = [
            torch.empty_like(w) if need else None
            for w, need in zip(operands.weights, needs[num:], strict=False)
        ]
        bias = operands.bias
        self._bias = None if bias is None or not needs[-1] else torch.empty_like(bias)

    def run(self, normalizers: Tensor, coefficients: Tensor) -> list[Tensor | None]:
        """Compute them.

        Args:
            normalizers: (M,) logarithms of the sum of exp(logits).
            coefficients: (M,) what to multiply the losses with.

        Returns:
            Gradients of inputs, weights and bias, each in the type of its tensor.
        """
        call = self._call
        shares = Shares(call, coefficients, call.weights_of_rows())
        size = call.tile_size
        buffer = normalizers.new_empty(len(normalizers) * min(size, call.num_classes))
        for start in range(0, call.num_classes, size):
            tile = slice(start, min(start + size, call.num_classes))
            width = tile.stop - start
            logits = buffer[: len(normalizers) * width].view(len(normalizers), width)
            weights = [
                call.operands.cast(w[tile], of=x)
                for x, w in zip(call.operands.inputs, call.operands.weights, strict=True)
            ]
            bias = None if call.operands.bias is None else call.operands.bias[tile]
            compute_logits(logits, self._parts, weights, bias)
            shift = None if call.operands.shift is None else call.operands.shift[tile]
            scale_and_shift(logits, call.operands.scale, shift)
            logits.sub_(normalizers.unsqueeze(1)).exp_().mul_(shares.of_all.unsqueeze(1))
            _subtract_targets(logits, call.target - start, shares.of_target)
            class_weight = None if call.class_weight is None else call.class_weight[tile]
            shares.subtract_from(logits, class_weight)
            self._add(logits, weights, tile)
        return [*self._finished_inputs(), *self._weights, self._bias]

    def _add(self, gradient: Tensor, weights: list[Tensor], tile: slice) -> None:
        for i, (part, weight) in enumerate(zip(self._parts, weights, strict=True)):
            is_narrow = part.dtype != gradient.dtype and part.device.type == "cuda"
            narrow = gradient.to(part.dtype) if is_narrow else gradient
            if (total := self._inputs[i]) is not None:
                add_product(total, (gradient, narrow), weight, is_first=False)
            if (result := self._weights[i]) is not None:
                total = gradient.new_empty(len(weight), part.shape[1])
                add_product(total, (gradient.t(), narrow.t()), part, is_first=True)
                result[tile] = total.mul_(self._scale)
        if self._bias is not None:
            self._bias[tile] = gradient.sum(0).mul_(self._scale)

    def _finished_inputs(self) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for i, x in enumerate(self._call.operands.inputs):
            total, self._inputs[i] = self._inputs[i], None
            if total is not None:
                total = scaled(total, self._scale, x.dtype)
                if self._call.rows is not None:
                    total = torch.zeros_like(x).index_add_(0, self._call.rows, total)
            found.append(total)
        return found


def tiled_gradients(
    call: Call,
    normalizers: Tensor,
    coefficients: Tensor,
    scale: Tensor,
    *,
    needs: tuple[bool, ...],
) -> list[Tensor | None]:
    """Compute the gradients of a weighted sum of losses, tile by tile of the classes.

    Args:
        call: The loss.
        normalizers: (M,) logarithms of the sum of exp(logits).
        coefficients: (M,) what to multiply the losses with.
        scale: What to multiply the result with, in the wide type.
        needs: For inputs, weights and bias in one row, which have a gradient.

    Returns:
        Gradients of inputs, weights and bias, each in the type of its tensor.
    """
    with plain_numbers(call):
        return TiledGradients(call, needs, scale).run(normalizers, coefficients)


def _counted(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


# Targets in other tiles take nothing away.
def _subtract_targets(gradient: Tensor, target: Tensor, of_target: Tensor) -> None:
    width = gradient.shape[1]
    is_here = (target >= 0) & (target < width)
    place = target.clamp(0, width - 1).unsqueeze(1)
    gradient.scatter_add_(1, place, torch.where(is_here, -of_target, 0.0).unsqueeze(1))
