"""Cross-entropy of a linear layer without its outputs, as one autograd node."""

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.core.label_counts import known_count
from lightning_memsave.core.memory import host_copies, is_fake, mark_as_host, on_cuda
from lightning_memsave.core.patching import own, set_own
from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.techniques.chunked_cross_entropy.call import Call, LossSettings, Operands
from lightning_memsave.techniques.chunked_cross_entropy.chunks import (
    Gradients,
    Results,
    run,
    tiled_gradients,
    tiled_losses,
)
from lightning_memsave.techniques.chunked_cross_entropy.heads import share_gradient

# N rows of D features, M of them with a label; V classes.


class _Counted:
    """Number of rows that counted in the latest call on a head.

    The loss needs it in Python, as it determines shapes. Where nearly all rows count, a call does
    not wait for its own number, but decides by that of the call before, whose work is done.
    """

    def __init__(self) -> None:
        self._num_rows = 1
        self._num_counted: Tensor | int = 0
        self._event: torch.cuda.Event | None = None
        self._largest = 0

    def takes_all(self, num_rows: int) -> bool:
        """Return whether to take all rows without knowing how many count.

        If they are fewer than before, that needs more memory than they would need alone, but no
        more than an earlier call with at least as many rows.
        """
        if num_rows > self._largest:
            return False
        if self._event is not None:
            self._event.synchronize()  # a call ago: the device has more to do by now
        return _is_most(int(self._num_counted), self._num_rows)

    def note(self, counted: Tensor | int, num_rows: int) -> None:
        self._num_rows, self._event = num_rows, None
        if isinstance(counted, int):
            self._num_counted = counted
            self._largest = max(self._largest, num_rows if _is_most(counted, num_rows) else 0)
            return
        number = counted.sum()
        with host_copies():
            landing = torch.empty_like(number, device="cpu", pin_memory=number.is_cuda)
            mark_as_host(landing)
            self._num_counted = landing.copy_(number, non_blocking=True)
        if on_cuda(counted):
            # Of this device, which need not be the current one.
            self._event = torch.cuda.Event(blocking=True)
            self._event.record(torch.cuda.current_stream(counted.device))


def _is_most(num_counted: int, num_rows: int) -> bool:
    """Return whether so many rows count that the others are not worth leaving out."""
    return 8 * num_counted >= 7 * num_rows


# Of a weight, by whether there are gradients: evaluation has other labels, and needs less memory.
COUNTED = "_memsave_counted"


def _choose_rows(operands: Operands, target: Tensor, ignored: int) -> Tensor | None:
    num_rows = len(target)
    counted = target != ignored
    num_counted = known_count(target, ignored)
    if num_counted is not None:
        if _is_most(num_counted, num_rows):
            return None
        return torch.nonzero_static(counted, size=num_counted).squeeze(1)
    tensors = (*operands.inputs, *operands.weights)
    has_backward = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if own(operands.weights[0], COUNTED) is None:
        set_own(operands.weights[0], COUNTED, {True: _Counted(), False: _Counted()})
    latest: _Counted = own(operands.weights[0], COUNTED)[has_backward]
    # What fake tensors know is known at once. What is computed again in backward must choose again
    # what it has chosen before, which only the labels themselves decide: hooks on saved tensors are
    # those of `torch.utils.checkpoint`, around a loss, among others.
    may_be_repeated = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    if not is_fake(target) and not may_be_repeated and latest.takes_all(num_rows):
        latest.note(counted, num_rows)
        return None
    rows = counted.nonzero().squeeze(1)  # waits for the device
    latest.note(len(rows), num_rows)
    return None if _is_most(len(rows), num_rows) else rows


# Of a weight: gradients from forward that wait for backward, weakly, as their graph frees them.
READY = "_memsave_ready"


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
    backward only scales them. Ignored rows are skipped if there are more than an eighth of them.
    """
    num_targets = len(target)
    chosen = _choose_rows(operands, target, settings.ignore_index)
    if chosen is not None:
        target = target.index_select(0, chosen)
        rows = chosen if rows is None else rows.index_select(0, chosen)
    if class_weight is not None:
        class_weight = class_weight.detach().to(operands.wide_dtype)
    tensors = (*operands.inputs, *operands.weights, operands.bias)
    apply: Any = _LinearCrossEntropy.apply  # untyped in torch
    loss: Tensor = apply(
        settings,
        replace(operands, inputs=(), weights=(), bias=None, shift=None),
        chosen is None,
        torch.is_grad_enabled(),
        *(target, rows, class_weight, operands.shift),
        *tensors,
    )
    if settings.reduction == "none" and chosen is not None:
        return loss.new_zeros(num_targets).index_copy(0, chosen, loss)
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss over the rows that were chosen."""

    @staticmethod
    def forward(
        ctx: Any,
        settings: LossSettings,
        form: Operands,
        has_ignored: bool,
        is_grad_enabled: bool,
        *tensors: Tensor | None,
    ) -> Tensor:
        ctx.settings, ctx.form, ctx.has_ignored = settings, form, has_ignored
        ctx.ready = ctx.normalizers = None
        host = form.host
        # Hooks on saved tensors may copy them, and the host's weight is large.
        ctx.save_for_backward(*(None if host and t is host.weight else t for t in tensors))
        ctx.set_materialize_grads(False)
        call = _call_of(ctx, tensors)
        ctx.weights = [weakref.ref(weight) for weight in call.operands.weights]
        needs = ctx.needs_input_grad[_NUM_OTHERS:]
        denominator = call.denominator()
        share, ctx.scale = _share_and_scale(call, denominator)
        has_backward = is_grad_enabled and any(needs)
        is_simple = settings.reduction != "none" and not call.is_tiled and host is None
        if has_backward and is_simple and not _is_ready(call, needs):
            losses, _, ctx.ready = run(call, share.expand(len(call.target)), needs)
            _note(call, needs, ctx.ready)
        else:
            losses, ctx.normalizers, _ = _run(call, needs, has_normalizers=has_backward)
        if settings.reduction == "none":
            return losses
        return losses.sum() if settings.reduction == "sum" else losses.sum() / denominator

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        # Not `once_differentiable`: it raises nothing if the incoming gradient has no graph, as in
        # the first of two passes, and a term of the second derivative would be missing.
        if torch.is_grad_enabled():
            what, why = (
                "gradients of gradients (`create_graph=True`)",
                "the chunked loss only has a first derivative",
            )
            fix = "Set `chunked_cross_entropy=None`."
            raise IncompatibleError("chunked_cross_entropy", [Problem(what, why, fix)])
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
        ctx.normalizers = _run(call, has_normalizers=True).normalizers
    if call.settings.reduction == "none":
        one = torch.ones((), dtype=gradient.dtype, device=gradient.device)
        return tiled_gradients(call, ctx.normalizers, gradient, one, needs=needs)
    share = _share_and_scale(call, call.denominator())[0].expand(len(call.target))
    return tiled_gradients(call, ctx.normalizers, share, gradient * ctx.scale, needs=needs)


# Small probabilities of many classes would be subnormal in half precision.
_LARGER = 64

# Number of arguments of the function before the inputs.
_NUM_OTHERS = 8


def _run(call: Call, needs: tuple[bool, ...] = (), *, has_normalizers: bool) -> Results:
    if call.operands.host is not None:
        return tiled_losses(call)
    return run(call, needs=needs, has_normalizers=has_normalizers)


def _call_of(ctx: Any, tensors: tuple[Any, ...]) -> Call:
    target, rows, class_weight, shift, *rest, bias = tensors
    inputs, weights = tuple(rest[: len(rest) // 2]), tuple(rest[len(rest) // 2 :])
    weights = weights if ctx.form.host is None else (ctx.form.host.weight,)
    operands = replace(ctx.form, inputs=inputs, weights=weights, bias=bias, shift=shift)
    return Call(operands, target, rows, class_weight, ctx.settings, ctx.has_ignored)


# The weight of a row in the loss, as two factors, the second one a power of two. Gradients are
# stored multiplied by the first, which keeps them in the range of half precision; multiplying by
# the second and by a loss scale, usually a power of two as well, is exact.
def _share_and_scale(call: Call, denominator: Tensor) -> tuple[Tensor, Tensor]:
    one = torch.ones((), dtype=call.operands.wide_dtype, device=call.target.device)
    share, scale = one, one
    if call.settings.reduction == "mean" and len(call.target):
        if call.has_ignored:  # perhaps all: then the loss is NaN, and gradients are 0
            is_none = call.target.eq(call.settings.ignore_index).all()
            denominator = denominator.masked_fill(is_none, 1.0)
        share, exponent = torch.frexp(1 / denominator)
        scale = torch.ldexp(one, exponent)
    if call.class_weight is None and torch.float16 in call.operands.dtypes:
        share, scale = share * _LARGER, scale / _LARGER
    return share, scale


def _trained_weights(call: Call, needs: tuple[bool, ...]) -> list[Tensor]:
    weights = call.operands.weights
    return [w for w, need in zip(weights, needs[len(weights) :], strict=False) if need]


# A model that sums many losses would hold a gradient of the weight for each of them.
def _is_ready(call: Call, needs: tuple[bool, ...]) -> bool:
    refs = [own(weight, READY) for weight in _trained_weights(call, needs)]
    return any(ref is not None and ref() is not None for ref in refs)


def _note(call: Call, needs: tuple[bool, ...], ready: Gradients) -> None:
    for weight in _trained_weights(call, needs):
        set_own(weight, READY, weakref.ref(ready))
