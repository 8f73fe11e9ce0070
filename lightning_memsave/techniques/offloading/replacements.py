"""What is replaced in torch and bitsandbytes, for all, while weights wait on the host."""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from lightning_memsave.core.optimizers import parameters_of
from lightning_memsave.core.patching import PROCESS_WIDE
from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.techniques.residences import residence_with


def replace_while_offloaded() -> list[Callable[[], None]]:
    """Replace what does not work with weights on the host; the last undo restores it."""
    # Without this module there is no weight of 4 bits.
    bitsandbytes = sys.modules.get("bitsandbytes.autograd._functions")
    products = [] if bitsandbytes is None else [_SAVING.on(bitsandbytes.MatMul4Bit)]
    return [_LANDED.on(GradScaler), _SEEN.on(torch.autograd), *products]


class Replacement:
    """Functions that take the place of an owner's own as long as somebody needs them."""

    def __init__(self, **functions: Any) -> None:
        self._functions, self._num_users = functions, 0
        self.own: dict[str, Any] = {}

    def on(self, owner: Any) -> Callable[[], None]:
        with PROCESS_WIDE:
            if not self._num_users:
                self.own = {name: vars(owner)[name] for name in self._functions}
                self._set(owner, self._functions)
            self._num_users += 1
        return functools.partial(self._leave, owner)

    def _leave(self, owner: Any) -> None:
        with PROCESS_WIDE:
            self._num_users -= 1
            if not self._num_users:
                self._set(owner, self.own)

    @staticmethod
    def _set(owner: Any, functions: dict[str, Any]) -> None:
        for name, function in functions.items():
            setattr(owner, name, function)


# torch copies the scale from the GPU to the host without a wait, into memory that may hold any
# value, as it does with the zero that gradients which are not finite replace. For FSDP it is
# mended in https://github.com/pytorch/pytorch/pull/176429; until it is here, too.
def _unscale_landed(
    self: GradScaler, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
) -> dict[torch.device, Tensor]:
    gradients = (p.grad for p in parameters_of(optimizer))
    if inv_scale.is_cuda and any(each is not None and each.is_cpu for each in gradients):
        inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
    unscale: Any = _LANDED.own["_unscale_grads_"]
    found: dict[torch.device, Tensor] = unscale(self, optimizer, inv_scale, found_inf, allow_fp16)
    return found


_LANDED = Replacement(_unscale_grads_=_unscale_landed)


# bitsandbytes keeps weights of 4 bits in an attribute of the node, which recomputation cannot free:
# all blocks would stay on the device. They are saved as autograd saves all others.
def _forward(ctx: Any, *args: Any) -> Any:
    result = _SAVING.own["forward"](ctx, *args)
    kept = getattr(ctx, "tensors", None)
    if kept is not None and isinstance(kept[1], Tensor):
        ctx.save_for_backward(kept[1])
        ctx.tensors = None
    return result


def _backward(ctx: Any, gradient: Tensor) -> Any:
    saved, backward = ctx.saved_tensors, _SAVING.own["backward"]  # recomputation gives them once
    if not saved:
        return backward(ctx, gradient)
    ctx.tensors = (None, *saved)
    try:
        return backward(ctx, gradient)
    finally:
        ctx.tensors = None


_SAVING = Replacement(forward=staticmethod(_forward), backward=staticmethod(_backward))


# Autograd gives a weight another node on another device, and with another type. It would find no
# gradient: with `allow_unused=True` a `None`, with `materialize_grads=True` zeros, and
# `backward(inputs=...)` would leave the weight as it is.
def _run_engine(
    outputs: Any, gradients: Any, keep: bool, create: bool, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    if kwargs["accumulate_grad"]:
        _refuse(inputs)
    run = _SEEN.own["_engine_run_backward"]
    found = run(outputs, gradients, keep, create, inputs, *args, **kwargs)
    if not kwargs["accumulate_grad"]:
        _refuse([weight for weight, each in zip(inputs, found, strict=True) if each is None])
    return found


_SEEN = Replacement(_engine_run_backward=_run_engine)


def _refuse(weights: Sequence[Any]) -> None:
    for weight in weights:
        residence: Any = residence_with(weight) if isinstance(weight, nn.Parameter) else None
        part = None if residence is None else residence.part_of(weight)
        if part is None or part.is_on_device or part not in residence.parts:
            continue
        if (weight.device, weight.dtype) != (residence.device, part.device_dtype_of(weight)):
            raise IncompatibleError("offload", [_OUTSIDE])


_OUTSIDE = Problem(
    "`torch.autograd.grad` or `backward(inputs=...)` of a weight that waits on the host",
    "the graph holds its copy on the device, and finds no gradient of the weight",
    'Use `backward` and the gradient of the weight, or `offload="optimizer"` or "activations".',
)
