"""Cross-entropy of a linear layer without its outputs, as one autograd node."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.techniques.chunked_cross_entropy.chunks import (
    Call,
    Gradients,
    LossSettings,
    Operands,
    Shares,
    run,
    without_autograd,
)
from lightning_memsave.techniques.chunked_cross_entropy.tied_embedding import share_gradient
from lightning_memsave.techniques.chunked_cross_entropy.wide_products import (
    add_product,
    compute_logits,
    scale_and_shift,
    scaled,
)

# N rows of D features, M of them with a label; V classes, T per tile.


class TiledGradients:
    """Gradients of a loss with known normalizers, by tiles of classes.

    Args:
        call: The loss.
        needs: For each input, each weight and the bias, whether it needs a gradient.
        scale: Final factor of the gradients, in the wide type.
    """

    def __init__(self, call: Call, needs: tuple[bool, ...], scale: Tensor) -> None:
        operands, num = call.operands, len(call.operands.inputs)
        self._call, self._scale = call, scale
        self._parts = [operands.cast(_select_rows(x, call.rows), of=x) for x in operands.inputs]
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
        """Compute the gradients.

        Args:
            normalizers: (M,) log(sum(exp(logits))).
            coefficients: (M,) factors of the losses.

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
        normalizers: (M,) log(sum(exp(logits))).
        coefficients: (M,) factors of the losses.
        scale: Factor of the result, in the wide type.
        needs: For each input, each weight and the bias, whether it needs a gradient.

    Returns:
        Gradients of inputs, weights and bias, each in the type of its tensor.
    """
    with without_autograd(call):
        return TiledGradients(call, needs, scale).run(normalizers, coefficients)


def _select_rows(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


# Targets in other tiles subtract nothing.
def _subtract_targets(gradient: Tensor, target: Tensor, of_target: Tensor) -> None:
    width = gradient.shape[1]
    is_here = (target >= 0) & (target < width)
    place = target.clamp(0, width - 1).unsqueeze(1)
    gradient.scatter_add_(1, place, torch.where(is_here, -of_target, 0.0).unsqueeze(1))


# Gradients computed in forward that wait for backward, by weight and weakly referenced.
_READY: Any = WeakIdKeyDictionary()


def linear_cross_entropy(
    operands: Operands,
    target: Tensor,
    *,
    rows: Tensor | None = None,
    class_weight: Tensor | None = None,
    settings: LossSettings,
) -> Tensor:
    """Compute ``F.cross_entropy(logits[rows], target)`` without the logits.

    Chunks of rows are processed one after the other, in 32 bits. If gradients are needed, they are
    computed in forward too, with three matrix products in total as in the ordinary computation, and
    backward only scales them. Ignored rows are skipped.

    Args:
        operands: The linear layer.
        target: (M,) classes.
        rows: (M,) row index of each target; ``None`` if M = N, in order.
        class_weight: (V,), or ``None``.
        settings: As for ``F.cross_entropy``.

    Returns:
        The loss, in 32 bits or more.
    """
    num_targets = len(target)
    # Synchronizes with the device once per call: the number of rows determines shapes of chunks.
    counted = (target != settings.ignore_index).nonzero().squeeze(1)
    if len(counted) < num_targets:
        target = target.index_select(0, counted)
        rows = counted if rows is None else rows.index_select(0, counted)
    if class_weight is not None:
        class_weight = class_weight.detach().to(operands.wide_dtype)
    tensors = (*operands.inputs, *operands.weights, operands.bias)
    apply: Any = _LinearCrossEntropy.apply  # untyped in torch
    loss: Tensor = apply(
        settings,
        (operands.autocast_dtype, operands.scale),
        torch.is_grad_enabled(),
        *(target, rows, class_weight, operands.shift),
        *tensors,
    )
    if settings.reduction == "none" and len(counted) < num_targets:
        return loss.new_zeros(num_targets).index_copy(0, counted, loss)
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss over rows without ignored ones."""

    @staticmethod
    def forward(
        ctx: Any,
        settings: LossSettings,
        kind: tuple[torch.dtype | None, float],
        is_grad_enabled: bool,
        *tensors: Tensor | None,
    ) -> Tensor:
        ctx.settings, ctx.kind = settings, kind
        ctx.ready = ctx.normalizers = None
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        call = _call_of(ctx, tensors)
        ctx.weights = [weakref.ref(weight) for weight in call.operands.weights]
        needs = ctx.needs_input_grad[_NUM_OTHERS:]
        share, ctx.scale = _share_and_scale(call)
        is_simple = settings.reduction != "none" and not call.is_tiled
        if is_grad_enabled and any(needs) and is_simple and not _is_ready(call, needs):
            losses, _, ctx.ready = run(call, share.expand(len(call.target)), needs)
            _note(call, needs, ctx.ready)
        else:
            losses, ctx.normalizers, _ = run(call)
        if settings.reduction == "none":
            return losses
        return losses.sum() if settings.reduction == "sum" else losses.sum() / _denominator(call)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        # Not `once_differentiable`: it raises nothing if the incoming gradient has no graph, as in
        # the first of two passes, and a term of the second derivative would be missing.
        if torch.is_grad_enabled():
            raise IncompatibleError("chunked_cross_entropy", [_twice()])
        (gradient,) = gradients
        needs = ctx.needs_input_grad[_NUM_OTHERS:]
        nothing = (None,) * _NUM_OTHERS
        if gradient is None:
            return *nothing, *(None for _ in needs)
        ready, ctx.ready = ctx.ready, None
        if ready is None:
            found = _computed_now(ctx, gradient, needs)
        else:
            found = ready.finish(gradient * ctx.scale)
        for i, ref in enumerate(ctx.weights, start=len(ctx.weights)):
            weight = ref()
            found[i] = found[i] if weight is None else share_gradient(weight, found[i])
        return *nothing, *found


def _computed_now(ctx: Any, gradient: Tensor, needs: tuple[bool, ...]) -> list[Tensor | None]:
    call = _call_of(ctx, ctx.saved_tensors)
    if ctx.normalizers is None:  # the gradients from forward have been used
        _, ctx.normalizers, _ = run(call)
    if call.settings.reduction == "none":
        one = torch.ones((), dtype=gradient.dtype, device=gradient.device)
        return tiled_gradients(call, ctx.normalizers, gradient, one, needs=needs)
    share = _share_and_scale(call)[0].expand(len(call.target))
    return tiled_gradients(call, ctx.normalizers, share, gradient * ctx.scale, needs=needs)


# Small probabilities of many classes would be subnormal in half precision.
_LARGER = 64

# Number of arguments of the function before the inputs.
_NUM_OTHERS = 7


def _call_of(ctx: Any, tensors: tuple[Any, ...]) -> Call:
    target, rows, class_weight, shift, *rest, bias = tensors
    inputs, weights = tuple(rest[: len(rest) // 2]), tuple(rest[len(rest) // 2 :])
    autocast_dtype, scale = ctx.kind
    operands = Operands(inputs, weights, bias, autocast_dtype, scale, shift)
    return Call(operands, target, rows, class_weight, ctx.settings)


def _denominator(call: Call) -> Tensor:
    return call.weights_of_rows().sum()


# The weight of a row in the loss, as two factors, the second one a power of two. Gradients are
# stored multiplied by the first, which keeps them in the range of half precision; multiplying by
# the second and by a loss scale, usually a power of two as well, is exact.
def _share_and_scale(call: Call) -> tuple[Tensor, Tensor]:
    one = torch.ones((), dtype=call.operands.wide_dtype, device=call.target.device)
    share, scale = one, one
    if call.settings.reduction == "mean" and len(call.target):
        share, exponent = torch.frexp(1 / _denominator(call))
        scale = torch.ldexp(one, exponent)
    if call.class_weight is None and torch.float16 in call.operands.dtypes:
        share, scale = share * _LARGER, scale / _LARGER
    return share, scale


def _trained_weights(call: Call, needs: tuple[bool, ...]) -> list[Tensor]:
    weights = call.operands.weights
    return [w for w, need in zip(weights, needs[len(weights) :], strict=False) if need]


# A model that sums many losses would hold a gradient of the weight for each of them.
def _is_ready(call: Call, needs: tuple[bool, ...]) -> bool:
    refs = [_READY.get(weight) for weight in _trained_weights(call, needs)]
    return any(ref is not None and ref() is not None for ref in refs)


def _note(call: Call, needs: tuple[bool, ...], ready: Gradients) -> None:
    for weight in _trained_weights(call, needs):
        _READY[weight] = weakref.ref(ready)


def _twice() -> Problem:
    return Problem(
        "gradients of gradients (`create_graph=True`)",
        "the chunked loss only has a first derivative",
        "Set `chunked_cross_entropy=None`.",
    )
