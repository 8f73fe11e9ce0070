"""Compute losses and gradients of a linear layer with cross-entropy, by rows or by classes."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_memsave.core.memory import each_part, on_cuda
from lightning_memsave.techniques.chunked_cross_entropy.call import Call
from lightning_memsave.techniques.chunked_cross_entropy.wide_products import (
    add_product,
    compute_logits,
    scale_and_shift,
    scaled,
)

# As in `Call`: N rows of D features, M of them in the loss; V classes; R rows per chunk.


class Gradients:
    """Sums of gradients over chunks: inputs in the product's type, weights in the wide one."""

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

    def add(self, chunk: "Chunk", factors: Tensor | None) -> None:
        narrow = None
        if chunk.narrow is not None:
            narrow = self._to_narrow(chunk, chunk.narrow, factors)
        elif factors is not None:
            chunk.padded.mul_(factors.unsqueeze(1))
        rows = None if self._rows is None else self._rows[chunk.place]
        for i, (part, weight) in enumerate(zip(chunk.parts, chunk.weights, strict=True)):
            if narrow is None or narrow.dtype != weight.dtype:
                narrow = chunk.logits.to(weight.dtype)
            if (total := self.inputs[i]) is not None:
                if rows is None:
                    torch.mm(narrow, weight, out=total[chunk.place])
                else:
                    total.index_add_(0, rows, torch.mm(narrow, weight))
            if (total := self.weights[i]) is not None:
                pair = (chunk.logits.t(), narrow.t())
                add_product(total, pair, part, is_first=self._is_first)
        if self.bias is not None:
            self.bias += chunk.logits.sum(0)
        self._is_first = False

    # CUDA's products need the gradient only in the type of the weights: one kernel makes it.
    def _to_narrow(self, chunk: "Chunk", narrow: Tensor, factors: Tensor | None) -> Tensor:
        padded = chunk.padded
        if factors is None:
            narrow.copy_(padded)
        elif self.bias is None:
            torch.mul(padded, factors.unsqueeze(1), out=narrow)
        else:
            narrow.copy_(padded.mul_(factors.unsqueeze(1)))
        return narrow[:, : chunk.logits.shape[1]]

    def finish(self, factor: Tensor) -> list[Tensor | None]:
        """Scale the sums and release them."""
        result = []
        for sums, dtypes in zip((self.inputs, self.weights), self._dtypes, strict=True):
            for i, dtype in enumerate(dtypes):
                total, sums[i] = sums[i], None
                result.append(None if total is None else scaled(total, factor, dtype))
        bias, self.bias = self.bias, None
        result.append(None if bias is None else scaled(bias, factor, self._bias_dtype))
        return result


class Results(NamedTuple):
    losses: Tensor
    """(M,)."""
    normalizers: Tensor | None
    """log(sum(exp(logits))) of each row (M,), if asked for."""
    gradients: Gradients | None
    """Gradients of the weighted sum of the losses, if asked for."""


def run(
    call: Call,
    coefficients: Tensor | None = None,
    needs: tuple[bool, ...] = (),
    *,
    has_normalizers: bool = False,
) -> Results:
    """Compute the losses of rows and, with the same products, gradients of their weighted sum."""
    losses = call.target.new_empty(len(call.target), dtype=call.operands.wide_dtype)
    normalizers = torch.empty_like(losses) if has_normalizers else None
    totals, sums = torch.empty_like(losses), None
    with without_autograd(call):
        counted = call.counted()
        counts = call.weights_of_rows(counted)
        shares = None if coefficients is None else Shares(call, coefficients, counts)
        gradients = None if shares is None else Gradients(call, needs)
        if call.settings.label_smoothing:
            sums = torch.empty_like(losses)

        def add(chunk: Chunk) -> None:
            place = chunk.place
            target = _classes(call, counted, place).unsqueeze(1)
            chosen = chunk.logits.gather(1, target).squeeze(1)
            if sums is not None:
                weight = call.class_weight
                sums[place] = chunk.logits.sum(1) if weight is None else chunk.logits.mv(weight)
            largest = _take_softmax(chunk, totals[place], is_normalized=shares is not None)
            torch.sub(largest, chosen, out=losses[place])
            if sums is not None:
                sums[place] -= largest * sum_of_weights(call)
            if normalizers is not None:
                normalizers[place] = largest
            if shares is not None and gradients is not None:
                gradients.add(chunk, shares.subtract_targets(chunk, target))

        each_chunk(call, add, has_gradients=gradients is not None, needs=needs)
        log_totals = totals.log_().neg_() if on_cuda(totals) else totals.log_()
        finish_losses(call, losses, log_totals, sums)
        if normalizers is not None:
            normalizers += log_totals
    return Results(losses, normalizers, gradients)


def finish_losses(call: Call, losses: Tensor, log_totals: Tensor, sums: Tensor | None) -> None:
    counted = call.counted()
    losses += log_totals
    losses *= call.weights_of_rows(counted)
    if sums is not None:
        smoothing = call.settings.label_smoothing
        losses *= 1 - smoothing
        losses += (log_totals * sum_of_weights(call) - sums) * (smoothing / call.num_classes)
    if counted is not None:  # also where logits are not finite
        losses.masked_fill_(~counted, 0.0)


class Chunk(NamedTuple):
    place: slice
    """Slice of the M rows."""
    logits: Tensor
    """(R, V), in the wide type; overwritten by the next chunk."""
    padded: Tensor
    """The same with columns of -inf up to an aligned width, contiguous."""
    narrow: Tensor | None
    """As large, in the type of the weights, for the gradient on CUDA; ``None`` elsewhere."""
    parts: list[Tensor]
    """Rows of each input, (R, D)."""
    weights: list[Tensor]
    """Each (V, D), in the type of its part."""


def each_chunk(
    call: Call,
    use: Callable[[Chunk], None],
    *,
    has_gradients: bool = False,
    needs: tuple[bool, ...] = (),
) -> None:
    """Compute logits chunk by chunk; call it inside `without_autograd`."""
    operands, num_rows, width = call.operands, len(call.target), call.num_classes
    size = call.chunk_size(has_gradients=has_gradients, needs=needs)
    pairs = list(zip(operands.inputs, operands.weights, strict=True))
    weights = [operands.cast(w, of=x) for x, w in pairs]
    shape, narrow = (min(size, num_rows), call.num_columns), None
    buffer = torch.empty(shape, dtype=operands.wide_dtype, device=call.target.device)
    dtypes = {weight.dtype for weight in weights}
    if has_gradients and on_cuda(call.target) and len(dtypes) == 1 and buffer.dtype not in dtypes:
        narrow = torch.empty_like(buffer, dtype=weights[0].dtype)

    def compute(place: slice) -> None:
        parts = [operands.cast(_chosen(x, call.rows, place), of=x) for x in operands.inputs]
        num = place.stop - place.start
        padded = buffer[:num]
        logits = padded[:, :width]
        if call.num_columns > width:
            padded[:, width:].fill_(-math.inf)
        compute_logits(logits, parts, weights, operands.bias)
        scale_and_shift(logits, operands.scale, operands.shift)
        use(Chunk(place, logits, padded, None if narrow is None else narrow[:num], parts, weights))

    each_part(operands.inputs[0], num_rows, size, compute)


@contextmanager
def without_autograd(call: Call) -> Iterator[None]:
    with torch.no_grad(), torch.autocast(call.target.device.type, enabled=False):
        yield


class Shares:
    """Coefficients of probabilities, targets and smoothing in the gradient of the logits."""

    def __init__(self, call: Call, coefficients: Tensor, counts: Tensor) -> None:
        smoothing = call.settings.label_smoothing
        self._class_weight = call.class_weight
        self.of_target = self.of_all = coefficients * counts
        self._of_each = None
        self._minus_one = self.of_target.new_full((), -1.0)
        if call.operands.scale != 1.0:
            self.of_target *= call.operands.scale
        if smoothing:
            each = coefficients * (call.operands.scale * smoothing / call.num_classes)
            # Rows that do not count have no part in the smoothing, either.
            counted = call.counted()
            self._of_each = each if counted is None else each.mul_(counted)
            self.of_target *= 1 - smoothing
            self.of_all = self.of_target + self._of_each * sum_of_weights(call)

    def subtract_targets(self, chunk: Chunk, target: Tensor) -> Tensor | None:
        """Turn probabilities into the gradient of the logits."""
        of_target = self.of_target[chunk.place]
        if self._of_each is None:
            # Before the multiplication: 1 is subtracted exactly from a probability near 1.
            chunk.logits.scatter_add_(1, target, self._minus_one.expand(target.shape))
            return of_target
        chunk.padded.mul_(self.of_all[chunk.place].unsqueeze(1))
        chunk.logits.scatter_add_(1, target, -of_target.unsqueeze(1))
        self.subtract_smoothing(chunk.logits, chunk.place, self._class_weight)
        return None

    def subtract_smoothing(
        self, gradient: Tensor, place: slice, class_weight: Tensor | None
    ) -> None:
        """Subtract the term of label smoothing from the gradient (R, classes) of the logits."""
        if self._of_each is None:
            return
        each = self._of_each[place]
        if class_weight is None:
            gradient -= each.unsqueeze(1)
        else:
            gradient.addr_(each, class_weight, alpha=-1)


# Ignored targets are of any class.
def _classes(call: Call, counted: Tensor | None, place: slice) -> Tensor:
    target = call.target[place]
    return target if counted is None else target * counted[place]


def _chosen(x: Tensor, rows: Tensor | None, place: slice) -> Tensor:
    return x[place] if rows is None else x.index_select(0, rows[place])


# Returns the largest logit of each row; `totals` becomes the sum of exp(logits - largest), or on
# CUDA its reciprocal, the largest probability.
def _take_softmax(chunk: Chunk, totals: Tensor, *, is_normalized: bool) -> Tensor:
    logits = chunk.padded
    if on_cuda(logits):
        largest, place = logits.max(1)
        # In place: the kernel reads the maximum and the sum of a row before it writes it, and each
        # element in the thread that writes it (aten/native/cuda/SoftMax.cu).
        torch.softmax(logits, 1, out=logits)
        torch.gather(logits, 1, place.unsqueeze(1), out=totals.unsqueeze(1))
        return largest
    # The CPU's kernel approximates exp.
    largest = logits.amax(1)
    torch.sum(logits.sub_(largest.unsqueeze(1)).exp_(), 1, out=totals)
    if is_normalized:
        logits.div_(totals.unsqueeze(1))
    return largest


def sum_of_weights(call: Call) -> Tensor | int:
    return call.num_classes if call.class_weight is None else call.class_weight.sum()


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
