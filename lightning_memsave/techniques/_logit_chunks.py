"""Losses and gradients of a linear layer with cross-entropy, chunk by chunk of its outputs."""

import math

import torch
from torch import Tensor

from lightning_memsave.techniques._logit_operands import Call

# Of N rows with D numbers, M count; the layer has V classes, and R rows make a chunk.

_NUM_TILES = 16


class Gradients:
    """Sums of gradients over chunks: inputs in the type of the product, weights in the wide type.

    Args:
        call: The loss.
        needs: For inputs, weights and bias in one row, which have a gradient.
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
        """Take a chunk in.

        Args:
            gradient: (R, V) of the logits, in the wide type.
            parts: Of each input, (R, D).
            weights: Each (V, D), in the type of the product.
            place: Which of the rows that count these are.
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
                _add_gradient(total, gradient, narrow, part, is_first=self._is_first)
        if self.bias is not None:
            self.bias += gradient.sum(0)
        self._is_first = False

    def finish(self, factor: Tensor) -> list[Tensor | None]:
        """Multiply all sums and give them away, one after the other.

        Args:
            factor: One number, in the wide type.

        Returns:
            Gradients of inputs, weights and bias, each in the type of its tensor.
        """
        result = []
        for sums, dtypes in zip((self.inputs, self.weights), self._dtypes, strict=True):
            for i, dtype in enumerate(dtypes):
                total, sums[i] = sums[i], None
                result.append(None if total is None else _scaled(total, factor, dtype))
        bias, self.bias = self.bias, None
        result.append(None if bias is None else _scaled(bias, factor, self._bias_dtype))
        return result


def run(
    call: Call, coefficients: Tensor | None = None, needs: tuple[bool, ...] = ()
) -> tuple[Tensor, Gradients | None]:
    """Compute the losses of rows and, with the same products, gradients of their weighted sum.

    Args:
        call: What to compute.
        coefficients: (M,) what to multiply the losses with in the sum; ``None`` for no gradients.
        needs: For inputs, weights and bias in one row, which have a gradient.

    Returns:
        (M,) losses, and the gradients.
    """
    operands, size = call.operands, call.chunk_size
    losses = call.target.new_empty(len(call.target), dtype=operands.wide_dtype)
    row_weights = call.weights_of_rows()
    device_type = call.target.device.type
    with torch.no_grad(), torch.autocast(device_type, enabled=False):
        pairs = list(zip(operands.inputs, operands.weights, strict=True))
        weights = [operands.cast(w, of=x) for x, w in pairs]
        gradients = None if coefficients is None else Gradients(call, needs)
        buffer = losses.new_empty(min(size, len(losses)), call.num_classes)
        for start in range(0, len(losses), size):
            place = slice(start, min(start + size, len(losses)))
            parts = [operands.cast(_chosen(x, call.rows, place), of=x) for x in operands.inputs]
            logits = buffer[: place.stop - start]
            _compute_logits(logits, parts, weights, operands.bias)
            target, counts = call.target[place].unsqueeze(1), row_weights[place]
            losses[place], total = _losses(logits, target, counts, call)
            if coefficients is not None and gradients is not None:
                _to_gradient(logits, total, target, counts, coefficients[place], call=call)
                gradients.add(logits, parts, weights, place)
    return losses, gradients


def _chosen(x: Tensor, rows: Tensor | None, place: slice) -> Tensor:
    return x[place] if rows is None else x.index_select(0, rows[place])


def _compute_logits(
    logits: Tensor, parts: list[Tensor], weights: list[Tensor], bias: Tensor | None
) -> None:
    for i, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        if part.dtype != logits.dtype:
            _add_wide_product(logits, part, weight.t(), is_first=i == 0)
        elif i == 0 and bias is not None:
            torch.addmm(bias.to(logits.dtype), part, weight.t(), out=logits)
            bias = None
        else:
            logits.addmm_(part, weight.t(), beta=min(i, 1))
    if bias is not None:
        logits += bias


# (R, V) becomes exp(logits - their maximum).
def _losses(logits: Tensor, target: Tensor, counts: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    smoothing, class_weight = call.settings.label_smoothing, call.class_weight
    logits -= logits.amax(1, keepdim=True)
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
    return losses, total


# (R, V) becomes the gradient of the logits, for losses that are multiplied with (R,) shares.
def _to_gradient(
    logits: Tensor, total: Tensor, target: Tensor, counts: Tensor, shares: Tensor, *, call: Call
) -> None:
    smoothing, class_weight = call.settings.label_smoothing, call.class_weight
    of_target = shares * counts * (1 - smoothing)
    of_each = shares * (smoothing / call.num_classes)
    of_all = of_target
    if smoothing:
        of_all = of_target + of_each * _sum_of_weights(call)
    logits.mul_((of_all / total).unsqueeze(1))
    logits.scatter_add_(1, target, -of_target.unsqueeze(1))
    if smoothing and class_weight is None:
        logits -= of_each.unsqueeze(1)
    elif smoothing and class_weight is not None:
        logits.addr_(of_each, class_weight, alpha=-1)


def _sum_of_weights(call: Call) -> Tensor | int:
    return call.num_classes if call.class_weight is None else call.class_weight.sum()


# Adds a product of low precision without rounding it: GPUs multiply into 32 bits.
def _add_wide_product(total: Tensor, a: Tensor, b: Tensor, *, is_first: bool) -> None:
    beta = 0 if is_first else 1
    if total.device.type == "cuda":  # pragma: no cover (gpu)
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
        return
    a = a.to(total.dtype)
    size = math.ceil(b.shape[1] / _NUM_TILES)
    for columns, part in zip(total.split(size, 1), b.split(size, 1), strict=True):
        columns.addmm_(a, part.to(total.dtype), beta=beta)


# The product is rounded once, to the type of the result.
def _scaled(value: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    if value.dtype == dtype == factor.dtype:
        return value.mul_(factor)
    result = value if value.dtype == dtype else torch.empty_like(value, dtype=dtype)
    size = max(1, math.ceil(len(value) / _NUM_TILES))
    for old, new in zip(value.split(size), result.split(size), strict=True):
        new.copy_(old.mul_(factor) if old.dtype == factor.dtype else old.to(factor.dtype) * factor)
    return result


def _add_gradient(
    total: Tensor, gradient: Tensor, narrow: Tensor, part: Tensor, *, is_first: bool
) -> None:
    if total.device.type == "cuda" and part.dtype != total.dtype:  # pragma: no cover (gpu)
        _add_wide_product(total, narrow.t(), part, is_first=is_first)
    else:  # no need to round the gradient of the logits
        total.addmm_(gradient.t(), part.to(total.dtype), beta=0 if is_first else 1)
