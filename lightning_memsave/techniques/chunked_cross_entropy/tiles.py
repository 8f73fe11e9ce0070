"""Compute losses and gradients of a linear layer with cross-entropy, in tiles of classes."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lightning_memsave.core.memory import on_cuda
from lightning_memsave.techniques.chunked_cross_entropy.call import Call
from lightning_memsave.techniques.chunked_cross_entropy.chunks import (
    Results,
    Shares,
    finish_losses,
    sum_of_weights,
    without_autograd,
)
from lightning_memsave.techniques.chunked_cross_entropy.wide_products import (
    add_product,
    compute_logits,
    scale_and_shift,
    scaled,
)

# N rows of D features, M of them with a label; V classes, T per tile.


def tiled_losses(call: Call) -> Results:
    # A target that is no class leaves NaN.
    losses = call.target.new_full((len(call.target),), math.nan, dtype=call.operands.wide_dtype)
    largest, totals = torch.full_like(losses, -math.inf), torch.zeros_like(losses)
    sums = torch.zeros_like(losses) if call.settings.label_smoothing else None
    with without_autograd(call):
        for tile, logits, _ in _tiles_of_logits(call, _parts_of(call)):
            target = call.target - tile.start
            place = target.clamp(0, logits.shape[1] - 1)
            chosen = logits.gather(1, place.unsqueeze(1)).squeeze(1)
            losses = torch.where(place == target, chosen, losses)
            if sums is not None:
                weight = call.class_weight
                sums += logits.sum(1) if weight is None else logits.mv(weight[tile])
            before, largest = largest, torch.maximum(largest, logits.amax(1))
            totals *= before.sub_(largest).exp_()
            totals += logits.sub_(largest.unsqueeze(1)).exp_().sum(1)
        torch.sub(largest, losses, out=losses)
        if sums is not None:
            sums -= largest * sum_of_weights(call)
        finish_losses(call, losses, totals.log_(), sums)
    return Results(losses, largest.add_(totals), None)


def tiled_argmax(call: Call, convert: Callable[[Tensor], Tensor]) -> Tensor:
    """Find the class of the largest logit of each row, the first one of several."""
    found = torch.zeros_like(call.target)
    largest: Tensor | None = None
    with without_autograd(call):
        for tile, logits, _ in _tiles_of_logits(call, _parts_of(call)):
            values, places = convert(logits).max(1)
            if largest is None:
                largest, found = values, places
            else:
                is_larger = values > largest
                largest = torch.where(is_larger, values, largest)
                found = torch.where(is_larger, places + tile.start, found)
    return found


class TiledGradients:
    def __init__(self, call: Call, needs: tuple[bool, ...], scale: Tensor) -> None:
        operands, num = call.operands, len(call.operands.inputs)
        # What is scaled first needs neither a copy of its sum nor a pass over it.
        self._call, self._is_scaled = call, call.sums_in_low_precision
        self._scale = scale
        self._parts = _parts_of(call)
        self._inputs = [
            torch.zeros(part.shape, dtype=operands.wide_dtype, device=part.device) if need else None
            for part, need in zip(self._parts, needs, strict=False)
        ]
        self._needs_weights = needs[num : 2 * num]
        self._weights = [
            torch.empty_like(w) if need and operands.host is None else None
            for w, need in zip(operands.weights, self._needs_weights, strict=True)
        ]
        bias = operands.bias
        self._bias = None if bias is None or not needs[-1] else torch.empty_like(bias)

    def run(self, normalizers: Tensor, coefficients: Tensor) -> list[Tensor | None]:
        call = self._call
        if self._is_scaled:
            coefficients = coefficients * self._scale
        shares = Shares(call, coefficients, call.weights_of_rows(call.counted()))
        of_target = -shares.of_target
        for tile, logits, weights in _tiles_of_logits(call, self._parts):
            logits.sub_(normalizers.unsqueeze(1)).exp_().mul_(shares.of_all.unsqueeze(1))
            _add_at_targets(logits, call.target - tile.start, of_target)
            class_weight = None if call.class_weight is None else call.class_weight[tile]
            shares.subtract_smoothing(logits, slice(None), class_weight)
            self._add(logits, weights, tile)
        del logits, weights  # before the gradients of the inputs
        # Gradients on the host are there already.
        return [*self._finished_inputs(), *self._weights, self._bias]

    def _add(self, gradient: Tensor, weights: list[Tensor], tile: slice) -> None:
        for i, (part, weight) in enumerate(zip(self._parts, weights, strict=True)):
            is_narrow = part.dtype != gradient.dtype and on_cuda(part)
            narrow = gradient.to(part.dtype) if is_narrow else gradient
            if (total := self._inputs[i]) is not None:
                add_product(total, (gradient, narrow), weight, is_first=False)
            if not self._needs_weights[i]:
                continue
            result = self._weights[i]
            if self._is_scaled and result is not None:
                torch.mm(narrow.t(), part, out=result[tile])
                continue
            is_wide = result is not None and result.dtype == gradient.dtype
            if is_wide and result is not None:
                total = result[tile]
            else:
                total = gradient.new_empty(len(weight), part.shape[1])
            add_product(total, (gradient.t(), narrow.t()), part, is_first=True)
            total.mul_(self._scale)
            if result is None:
                self._call.add_to_host(tile, total)
            elif not is_wide:
                result[tile] = total
        if self._bias is not None:
            total = gradient.sum(0)
            self._bias[tile] = total if self._is_scaled else total.mul_(self._scale)

    def _finished_inputs(self) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for i, x in enumerate(self._call.operands.inputs):
            total, self._inputs[i] = self._inputs[i], None
            if total is not None:
                if self._is_scaled:
                    total = total.to(x.dtype)
                else:
                    total = scaled(total, self._scale, x.dtype)
                if self._call.rows is not None:
                    total = torch.zeros_like(x).index_add_(0, self._call.rows, total)
            found.append(total)
        return found


def tiled_gradients(
    call: Call, normalizers: Tensor, coefficients: Tensor, scale: Tensor, *, needs: tuple[bool, ...]
) -> list[Tensor | None]:
    """Compute the gradients of a weighted sum of losses, tile by tile of the classes."""
    with without_autograd(call):
        return TiledGradients(call, needs, scale).run(normalizers, coefficients)


def _parts_of(call: Call) -> list[Tensor]:
    chosen = [
        x if call.rows is None else x.index_select(0, call.rows) for x in call.operands.inputs
    ]
    return [call.operands.cast(x, of=x) for x in chosen]


# The logits (M, T) are overwritten by the next tile.
def _tiles_of_logits(
    call: Call, parts: list[Tensor]
) -> Iterator[tuple[slice, Tensor, list[Tensor]]]:
    operands, tiles = call.operands, call.tiles
    dtype, device = operands.wide_dtype, call.target.device
    buffer = torch.empty(len(call.target), tiles[0].stop, dtype=dtype, device=device)
    for tile, whole in zip(tiles, call.weight_tiles(tiles), strict=True):
        logits = buffer[:, : tile.stop - tile.start]
        weights = [operands.cast(w, of=x) for x, w in zip(operands.inputs, whole, strict=True)]
        bias = None if operands.bias is None else operands.bias[tile]
        compute_logits(logits, parts, weights, bias)
        shift = None if operands.shift is None else operands.shift[tile]
        scale_and_shift(logits, operands.scale, shift)
        yield tile, logits, weights


# Targets in other tiles add nothing.
def _add_at_targets(gradient: Tensor, target: Tensor, values: Tensor) -> None:
    place = target.clamp(0, gradient.shape[1] - 1)
    values = values * (place == target)
    gradient.scatter_add_(1, place.unsqueeze(1), values.unsqueeze(1))
