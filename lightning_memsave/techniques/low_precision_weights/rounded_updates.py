"""Optimizers that update bfloat16 parameters in float32 and round the result."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memsave.core.patching import patch_method, previous_method
from lightning_memsave.core.technique import undo_all
from lightning_memsave.techniques.low_precision_weights.tiled_steps import (
    Weights,
    is_tiled,
    step_in_tiles,
    step_whole,
)
from lightning_memsave.techniques.optimizer_in_backward.updates import (
    group_of,
    plain_step,
    set_parameter_step,
    step_parameter,
    step_without_hooks,
)

_LOW_BITS = 0xFFFF  # what bfloat16 lacks of float32


def round_stochastically(param: Tensor, values: Tensor, generator: torch.Generator) -> None:
    """Round each number up or down, up with the probability that makes the mean right.

    What bfloat16 can hold already stays as it is, infinities and NaN too.

    Args:
        param: Where the numbers go, in bfloat16.
        values: In float32, contiguous or strided like ``param``; overwritten.
        generator: Of the same device.
    """
    # To a GPU's NaN, which has all bits set, the noise would carry into the sign.
    is_nan = values.isnan()
    bits = values.view(torch.int32)
    bits.add_(_noise(values, generator)).add_(_LOW_BITS // 2 + 1).bitwise_and_(~_LOW_BITS)
    param.copy_(values.masked_fill_(is_nan, math.nan))


def round_with_rest(param: Tensor, values: Tensor, rest: Tensor) -> None:
    """Round to the nearest and keep what was lost, to be added before the next update.

    Args:
        param: Where the numbers go, in bfloat16.
        values: In float32; overwritten.
        rest: Where the rest goes, in bfloat16.
    """
    param.copy_(values)
    rest.copy_(values.sub_(param))


def next_seed(seed: int) -> int:
    """Step to the seed of a parameter's next update.

    Args:
        seed: A number of 32 bits, as many as the generator of a CPU takes.

    Returns:
        Another one; all 2**32 come before one comes again.
    """
    return (seed * 1664525 + 1013904223) % 2**32


def first_seed(index: int) -> int:
    """Choose the seed of a parameter's first update.

    Args:
        index: Position of the parameter in its optimizer.

    Returns:
        A number of 32 bits.
    """
    return (index + 1) * 2654435761 % 2**32


# Four numbers of 16 bits from each draw of 64, from -2**15 to 2**15 - 1.
def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    numel = like.numel()
    drawn = torch.empty(-(-numel // 4), dtype=torch.int64, device=like.device)
    drawn.random_(-(2**63), None, generator=generator)
    return drawn.view(torch.int16)[:numel].view(like.shape)


COMPENSATION = "compensation"
SEED = "rounding_seed"
OWN_STATE = (COMPENSATION, SEED)
"""What is kept beside the optimizer's own state, whatever the width of that."""
_PATCHED = ("step", "load_state_dict", "__reduce_ex__")
# Where torch's own optimizers keep 16 bits, it is because the parameter has 16.
_TORCH = "torch.optim."


@dataclass(frozen=True)
class RoundedStep:
    """Updates one parameter; those in bfloat16 in float32.

    Args:
        rounding: ``"stochastic"`` or ``"kahan"``.
    """

    rounding: str

    @torch.no_grad()
    def __call__(self, optimizer: Optimizer, param: nn.Parameter) -> None:
        """Update a parameter.

        Args:
            optimizer: Its owner.
            param: The parameter, with a gradient.
        """
        if param.dtype is not torch.bfloat16:
            plain_step(optimizer, param)
            return
        state = optimizer.state[param]
        # Optimizers take a state that is not empty for one of theirs.
        own = {key: state.pop(key) for key in OWN_STATE if key in state}
        try:
            _prepare_state(optimizer, param)
            is_cut = is_tiled(optimizer, param)
            weights = self._weights(optimizer, param, own, is_flat=is_cut)
            step = step_in_tiles if is_cut else step_whole
            step(optimizer, group_of(optimizer, param), param, weights)
        finally:
            state.update(own)

    def allocate(self, optimizer: Optimizer, param: nn.Parameter) -> None:
        """Give what the optimizer keeps the width that it has from the first update on.

        Args:
            optimizer: Its owner, which has made its state as for a bfloat16 parameter.
            param: The parameter.
        """
        if param.dtype is not torch.bfloat16:
            return
        _widen_state(optimizer, param)
        if self.rounding == "kahan":
            optimizer.state[param].setdefault(COMPENSATION, torch.zeros_like(param))

    def _weights(
        self, optimizer: Optimizer, param: nn.Parameter, own: dict[str, Any], *, is_flat: bool
    ) -> Weights:
        data = param.detach().view(-1) if is_flat else param.detach()
        if self.rounding == "kahan":
            if COMPENSATION not in own:
                own[COMPENSATION] = torch.zeros_like(param)
            rest: Tensor = own[COMPENSATION].view(-1) if is_flat else own[COMPENSATION]
            return Weights(
                lambda part: data[part].float().add_(rest[part]),
                lambda part, new: round_with_rest(data[part], new, rest[part]),
            )
        # By position and number of updates alone: the same in each process, after a resume, and
        # whatever order backward has; dropout and the order of data are left alone.
        seed = own.get(SEED)
        if seed is None:
            seed = first_seed(_position(optimizer, param))
        own[SEED] = next_seed(seed)
        random = torch.Generator(param.device).manual_seed(seed)
        return Weights(
            lambda part: data[part].float(),
            lambda part, new: round_stochastically(data[part], new, random),
        )


def install(optimizer: Optimizer, step: RoundedStep) -> Callable[[], None]:
    """Let an optimizer step this way, as a whole and parameter by parameter; its copies too.

    Args:
        optimizer: The optimizer.
        step: The way.

    Returns:
        A function that restores it.
    """
    undo = [set_parameter_step(optimizer, step)]
    undo += [patch_method(optimizer, globals()[name]) for name in _PATCHED]

    return functools.partial(undo_all, undo)


# Not after `undo`, where a scheduler or somebody else has wrapped the method and still calls it.
def _rounds(optimizer: Optimizer) -> bool:
    return isinstance(vars(optimizer).get("memsave_parameter_step"), RoundedStep)


def _made_again(make: Callable[..., Optimizer], args: Any, parameter_step: RoundedStep) -> Any:
    optimizer = make(*args)
    install(optimizer, parameter_step)
    return optimizer


def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """Update all parameters; the name is that of the method that it replaces.

    Args:
        self: The optimizer.
        closure: Computes loss and gradients.

    Returns:
        What the closure gives.
    """
    if not _rounds(self):
        return previous_method(self, "step")(closure)
    self._opt_called = True  # type: ignore[attr-defined] # for schedulers
    return _step_with_hooks(self) if closure is None else _step_with_hooks(self, closure)


# Schedulers that come later would wrap the method in a closure, which cannot be copied.
step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


@Optimizer.profile_hook_step
@torch.no_grad()
def _step_with_hooks(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    params = [p for group in self.param_groups for p in group["params"]]
    held = [(p, p.grad) for p in params if p.dtype is torch.bfloat16 and p.grad is not None]
    for param, _ in held:
        param.grad = None
    try:
        step_without_hooks(self)
    finally:
        for param, grad in held:
            param.grad = grad
    for param, _ in held:
        step_parameter(self, param)
    return loss


# torch casts the state of a bfloat16 parameter to bfloat16 when it is loaded.
def load_state_dict(self: Optimizer, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    """Load a state; the name is that of the method that it replaces.

    Args:
        self: The optimizer.
        state_dict: What ``state_dict`` gave, with this technique or without.
        args: Of the method.
        kwargs: Of the method.
    """
    previous_method(self, "load_state_dict")(state_dict, *args, **kwargs)
    if not _rounds(self):
        return
    saved_groups = state_dict["param_groups"]
    for group, saved_group in zip(self.param_groups, saved_groups, strict=True):
        for param, key in zip(group["params"], saved_group["params"], strict=True):
            _restore(self.state.get(param, {}), state_dict["state"].get(key, {}), param)


def __reduce_ex__(self: Optimizer, protocol: Any) -> Any:  # noqa: N807 - replaces that method
    """Say how to copy or pickle it; the name is that of the method that it replaces.

    Args:
        self: The optimizer.
        protocol: Of pickle.

    Returns:
        What pickle asks for.
    """
    reduced: tuple[Any, ...] = previous_method(self, "__reduce_ex__")(protocol)
    own = vars(self).get("memsave_parameter_step")
    if not isinstance(own, RoundedStep):
        return reduced
    make, args, state, *rest = reduced
    # Some keep all attributes in their pickles, ours among them.
    state = {k: v for k, v in state.items() if k not in _PATCHED and "memsave_p" not in k}
    return _made_again, (make, args, own), state, *rest


def _restore(state: dict[str, Any], saved: Mapping[str, Any], param: Tensor) -> None:
    for key, value in saved.items():
        loaded = state.get(key)
        if not isinstance(value, Tensor) or not isinstance(loaded, Tensor):
            continue
        if value.dtype is torch.float32 and loaded.dtype is torch.bfloat16:
            state[key] = value.to(param.device, copy=True)


def _prepare_state(optimizer: Any, param: nn.Parameter) -> None:
    """Let state that comes from a bfloat16 parameter be as for a float32 one."""
    state = optimizer.state[param]
    if hasattr(optimizer, "init_state"):  # bitsandbytes chooses the bits by the parameter
        if not state:
            groups = [g["params"] for g in optimizer.param_groups]
            index = next(i for i, params in enumerate(groups) if any(p is param for p in params))
            place = next(i for i, p in enumerate(groups[index]) if p is param)
            optimizer.init_state(optimizer.param_groups[index], param, index, place)
        if getattr(optimizer, "is_paged", False):
            optimizer.prefetch_state(param)
    else:
        _widen_state(optimizer, param)


def _widen_state(optimizer: Optimizer, param: nn.Parameter) -> None:
    state = optimizer.state[param]
    if not type(optimizer).__module__.startswith(_TORCH):
        return
    for key, value in state.items():
        if key not in OWN_STATE and isinstance(value, Tensor) and value.dtype is torch.bfloat16:
            state[key] = value.float()


def _position(optimizer: Optimizer, param: nn.Parameter) -> int:
    params = (p for group in optimizer.param_groups for p in group["params"])
    return next(i for i, p in enumerate(params) if p is param)
