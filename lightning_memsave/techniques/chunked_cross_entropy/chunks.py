"""Compute losses and gradients of a linear layer with cross-entropy, in chunks of rows."""

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_memsave.techniques.chunked_cross_entropy.wide_products import (
    add_product,
    compute_logits,
    scale_and_shift,
    scaled,
)

# N rows of D features, M of them with a label; V classes; R rows per chunk.

_MIN_CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class LossSettings:
    """The arguments of ``F.cross_entropy``, and the chunk size.

    Args:
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        ignore_index: Rows with this target are ignored.
        label_smoothing: As for ``F.cross_entropy``.
        chunk_size: Rows per chunk; ``None`` for automatic.
    """

    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    chunk_size: int | None = None


@dataclass(frozen=True)
class Operands:
    """Operands of ``logits = scale * (sum(inputs[i] @ weights[i].T) + bias) + shift``.

    Args:
        inputs: Each (N, D).
        weights: Each (V, D).
        bias: (V,), or ``None``.
        autocast_dtype: Type in which products are computed; ``None`` for that of the inputs.
        scale: Factor of the logits.
        shift: (V,), or ``None``.
    """

    inputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    bias: Tensor | None
    autocast_dtype: torch.dtype | None
    scale: float = 1.0
    shift: Tensor | None = None

    @property
    def wide_dtype(self) -> torch.dtype:
        """Type of sums: 32 bits or more."""
        return functools.reduce(torch.promote_types, self.dtypes, torch.float32)

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Types of the products."""
        return [self.autocast_dtype or tensor.dtype for tensor in self.inputs]

    def cast(self, tensor: Tensor, of: Tensor) -> Tensor:
        """Cast a factor to the type of its product, whose input is ``of``."""
        return tensor.to(self.autocast_dtype or of.dtype)


@dataclass(frozen=True)
class Call:
    """One loss to compute.

    Args:
        operands: The linear layer.
        target: (M,) classes.
        rows: (M,) row index of each target; ``None`` if M = N, in order.
        class_weight: (V,), in the wide type, or ``None``.
        settings: As for ``F.cross_entropy``.
    """

    operands: Operands
    target: Tensor
    rows: Tensor | None
    class_weight: Tensor | None
    settings: LossSettings

    def chunk_size(self, *, has_gradients: bool) -> int:
        """Choose the number of rows per chunk, R.

        A chunk is about as large as the inputs, or a share of the weight in 32 bits. With fewer
        rows, reading the weight and writing its gradient would dominate.

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
        # Low-precision kernels are faster with multiples of eight.
        return max(1, min(num_rows, 8 * math.ceil(num_rows / num_chunks / 8)))

    @property
    def tile_size(self) -> int:
        """Classes per tile: at most as many logits as in a chunk of rows."""
        width = self.operands.inputs[0].shape[1]
        chunk = self.chunk_size(has_gradients=True) * self.num_classes
        size = min(2 * width, chunk // max(1, len(self.target)))
        return 8 * math.ceil(max(size, 1) / 8)

    @property
    def is_tiled(self) -> bool:
        """Whether gradients are computed in backward, by tiles of classes.

        With low precision that needs half the memory. Logits are computed twice, which is no slower
        than the ordinary computation if a quarter of the rows is ignored.
        """
        has_low_precision = any(d.itemsize < 4 for d in self.operands.dtypes)
        return has_low_precision and 4 * len(self.target) <= 3 * len(self.operands.inputs[0])

    @property
    def num_classes(self) -> int:
        """Number of classes, V."""
        return len(self.operands.weights[0])

    def weights_of_rows(self) -> Tensor:
        """Return the weight of each row (M,): that of its class, or 1."""
        if self.class_weight is not None:
            return self.class_weight.index_select(0, self.target)
        return self.target.new_ones(len(self.target), dtype=self.operands.wide_dtype)


class Gradients:
    """Sums of gradients over chunks: inputs in the type of the product, weights in the wide type.

    Args:
        call: The loss.
        needs: For each input, each weight and the bias, whether it needs a gradient.
    """

    def __init__(self, call: Call, needs: tuple[bool, ...]) -> None:
        operands, num = call.operands, len(call.operands.inputs)
        wide = operands.wide_dtype
        self._rows = call.rows
        self._dtypes = [x.dtype for x in operands.inputs], [w.dtype for w in operands.weights]
        self._bias_dtype = wide if operands.bias is None else operands.bias.dtype
        self._is_first = True
        self.inputs: list[Tensor | None] = [None] * num
        self.weights: list[Tensor | None] = [None] * num
        self.bias: Tensor | None = None
        for i, (x, w) in enumerate(zip(operands.inputs, operands.weights, strict=True)):
            if needs[i]:
                make = torch.empty if call.rows is None else torch.zeros
                dtype = operands.autocast_dtype or x.dtype
                self.inputs[i] = make(x.shape, dtype=dtype, device=x.device)
            if needs[num + i]:
                make = torch.empty if len(call.target) else torch.zeros
                self.weights[i] = make(w.shape, dtype=wide, device=w.device)
        if operands.bias is not None and needs[-1]:
            self.bias = operands.bias.new_zeros(operands.bias.shape, dtype=wide)

    def add(
        self, gradient: Tensor, parts: list[Tensor], weights: list[Tensor], place: slice
    ) -> None:
        """Add the gradients of a chunk.

        Args:
            gradient: (R, V) gradient of the logits, in the wide type.
            parts: Rows of each input, (R, D).
            weights: Each (V, D), in the type of the product.
            place: Slice of the M rows.
        """
        rows = None if self._rows is None else self._rows[place]
        for i, (part, weight) in enumerate(zip(parts, weights, strict=True)):
            narrow = gradient.to(weight.dtype)
            if (total := self.inputs[i]) is not None:
                if rows is None:
                    torch.mm(narrow, weight, out=total[place])
                else:
                    total.index_add_(0, rows, torch.mm(narrow, weight))
            if (total := self.weights[i]) is not None:
                factors = (gradient.t(), narrow.t())
                add_product(total, factors, part, is_first=self._is_first)
        if self.bias is not None:
            self.bias += gradient.sum(0)
        self._is_first = False

    def finish(self, factor: Tensor) -> list[Tensor | None]:
        """Scale the sums and release them.

        Args:
            factor: A scalar in the wide type.

        Returns:
            Gradients of inputs, weights and bias, each in the type of its tensor.
        """
        result = []
        for sums, dtypes in zip((self.inputs, self.weights), self._dtypes, strict=True):
            for i, dtype in enumerate(dtypes):
                total, sums[i] = sums[i], None
                result.append(None if total is None else scaled(total, factor, dtype))
        bias, self.bias = self.bias, None
        result.append(None if bias is None else scaled(bias, factor, self._bias_dtype))
        return result


def run(
    call: Call, coefficients: Tensor | None = None, needs: tuple[bool, ...] = ()
) -> tuple[Tensor, Tensor, Gradients | None]:
    """Compute the losses of rows and, with the same products, gradients of their weighted sum.

    Args:
        call: The loss.
        coefficients: (M,) factors of the losses in the sum; ``None`` for no gradients.
        needs: For each input, each weight and the bias, whether it needs a gradient.

    Returns:
        Losses (M,), normalizers log(sum(exp(logits))) (M,), and the gradients.
    """
    operands = call.operands
    losses = call.target.new_empty(len(call.target), dtype=operands.wide_dtype)
    normalizers, row_weights = torch.empty_like(losses), call.weights_of_rows()
    with without_autograd(call):
        gradients = None if coefficients is None else Gradients(call, needs)
        for chunk in chunks_of_logits(call, has_gradients=gradients is not None):
            logits, place = chunk.logits, chunk.place
            target, counts = call.target[place].unsqueeze(1), row_weights[place]
            losses[place], normalizers[place], total = _losses(logits, target, counts, call)
            if coefficients is not None and gradients is not None:
                shares = Shares(call, coefficients[place], counts)
                logits.mul_((shares.of_all / total).unsqueeze(1))
                logits.scatter_add_(1, target, -shares.of_target.unsqueeze(1))
                shares.subtract_from(logits, call.class_weight)
                gradients.add(logits, chunk.parts, chunk.weights, place)
    return losses, normalizers, gradients


class Chunk(NamedTuple):
    """A chunk of rows of logits."""

    place: slice
    """Slice of the M rows."""
    logits: Tensor
    """(R, V), in the wide type; overwritten by the next chunk."""
    parts: list[Tensor]
    """Rows of each input, (R, D)."""
    weights: list[Tensor]
    """Each (V, D), in the type of its part."""


def chunks_of_logits(call: Call, *, has_gradients: bool = False) -> Iterator[Chunk]:
    """Compute logits chunk by chunk; call it inside `without_autograd`.

    Args:
        call: The loss.
        has_gradients: Whether gradients will be computed.

    Yields:
        The chunks, in order.
    """
    operands, num_rows = call.operands, len(call.target)
    size = call.chunk_size(has_gradients=has_gradients)
    pairs = list(zip(operands.inputs, operands.weights, strict=True))
    weights = [operands.cast(w, of=x) for x, w in pairs]
    shape = min(size, num_rows), call.num_classes
    buffer = torch.empty(shape, dtype=operands.wide_dtype, device=call.target.device)
    for start in range(0, num_rows, size):
        place = slice(start, min(start + size, num_rows))
        parts = [operands.cast(_chosen(x, call.rows, place), of=x) for x in operands.inputs]
        logits = buffer[: place.stop - start]
        compute_logits(logits, parts, weights, operands.bias)
        scale_and_shift(logits, operands.scale, operands.shift)
        yield Chunk(place, logits, parts, weights)


@contextmanager
def without_autograd(call: Call) -> Iterator[None]:
    """Disable autograd and autocast on the device of a call."""
    with torch.no_grad(), torch.autocast(call.target.device.type, enabled=False):
        yield


class Shares:
    """Coefficients of probabilities, targets and smoothing in the gradient of the logits.

    Args:
        call: The loss.
        coefficients: (R,) factors of the losses of the rows.
        counts: (R,) weights of their targets.
    """

    def __init__(self, call: Call, coefficients: Tensor, counts: Tensor) -> None:
        smoothing = call.settings.label_smoothing
        coefficients = coefficients * call.operands.scale
        self.of_target = self.of_all = coefficients * counts * (1 - smoothing)
        self._of_each = None
        if smoothing:
            self._of_each = coefficients * (smoothing / call.num_classes)
            self.of_all = self.of_target + self._of_each * _sum_of_weights(call)

    def subtract_from(self, gradient: Tensor, class_weight: Tensor | None) -> None:
        """Subtract the term of label smoothing from the gradient (R, classes) of the logits."""
        if self._of_each is None:
            return
        if class_weight is None:
            gradient -= self._of_each.unsqueeze(1)
        else:
            gradient.addr_(self._of_each, class_weight, alpha=-1)


def _chosen(x: Tensor, rows: Tensor | None, place: slice) -> Tensor:
    return x[place] if rows is None else x.index_select(0, rows[place])


# (R, V) becomes exp(logits - their maximum).
def _losses(
    logits: Tensor, target: Tensor, counts: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    smoothing, class_weight = call.settings.label_smoothing, call.class_weight
    maximum = logits.amax(1, keepdim=True)
    logits -= maximum
    chosen = logits.gather(1, target).squeeze(1)
    of_all = chosen
    if smoothing:
        of_all = logits.sum(1) if class_weight is None else logits.mv(class_weight)
    total = logits.exp_().sum(1)
    log_total = total.log()
    losses = (log_total - chosen) * counts
    if smoothing:
        losses *= 1 - smoothing
        losses += (log_total * _sum_of_weights(call) - of_all) * (smoothing / call.num_classes)
    return losses, log_total + maximum.squeeze(1), total


def _sum_of_weights(call: Call) -> Tensor | int:
    return call.num_classes if call.class_weight is None else call.class_weight.sum()
