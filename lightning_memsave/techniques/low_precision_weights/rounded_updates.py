"""Let optimizers update bfloat16 parameters in float32 and round the result."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten_with_path, tree_map_with_path

from lightning_memsave.core.optimizers import parameters_of
from lightning_memsave.core.patching import patch_method, previous_method
from lightning_memsave.core.technique import undo_all
from lightning_memsave.techniques.low_precision_weights.fused_steps import is_fused, step_fused
from lightning_memsave.techniques.optimizer_kinds import (
    STATE_LIKE_WEIGHTS,
    is_made_here,
    is_of_torch,
)
from lightning_memsave.techniques.optimizer_step import (
    COMPENSATION,
    OWN_STATE,
    SEED,
    StepOwner,
    bring,
    group_of,
    initialize_state,
    own_step,
    owners_of,
)
from lightning_memsave.techniques.tiled_steps import Weights, is_tiled, step_in_tiles, step_whole

_LOW_BITS = 0xFFFF  # the bits of float32 that bfloat16 lacks


def round_stochastically(param: Tensor, values: Tensor, generator: torch.Generator) -> None:
    """Round each value up or down at random, unbiased.

    Values that bfloat16 represents exactly are unchanged, including infinities and NaN.
    """
    # A GPU's NaN has all bits set: noise would overflow into the sign.
    is_nan = values.isnan()
    bits = values.view(torch.int32)
    bits.add_(_noise(values, generator)).add_(_LOW_BITS // 2 + 1).bitwise_and_(~_LOW_BITS)
    param.copy_(values.masked_fill_(is_nan, math.nan))


def round_with_rest(param: Tensor, values: Tensor, rest: Tensor) -> None:
    """Round to nearest and store the rounding error, to be added before the next update."""
    param.copy_(values)
    rest.copy_(values.sub_(param))


def next_seed(seed: int) -> int:
    """Return the seed of a parameter's next update: 32 bits, with a period of 2**32."""
    return (seed * 1664525 + 1013904223) % 2**32


def first_seed(index: int) -> int:
    return (index + 1) * 2654435761 % 2**32


# Four 16-bit integers from each 64-bit draw, from -2**15 to 2**15 - 1.
def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    numel = like.numel()
    drawn = torch.empty(-(-numel // 4), dtype=torch.int64, device=like.device)
    drawn.random_(-(2**63), None, generator=generator)
    return drawn.view(torch.int16)[:numel].view(like.shape)


_PATCHED = ("load_state_dict", "__reduce_ex__")


@dataclass(frozen=True)
class RoundedStep(StepOwner):
    rounding: str
    order: ClassVar[int] = 2

    def update(self, optimizer: Optimizer, done: set[int]) -> set[int]:
        params = parameters_of(optimizer)
        own = [p for p in params if id(p) not in done and p.grad is not None and _is_rounded(p)]
        for param in own:
            bring(optimizer, [param])
            self._update(optimizer, param)
        return {id(param) for param in own}

    @torch.no_grad()
    def update_some(self, optimizer: Optimizer, params: list[nn.Parameter]) -> list[nn.Parameter]:
        for param in filter(_is_rounded, params):
            self._update(optimizer, param)
        return [param for param in params if not _is_rounded(param)]

    def _update(self, optimizer: Optimizer, param: nn.Parameter) -> None:
        state = optimizer.state[param]
        # Optimizers initialize their state only if it is empty.
        own = {key: state.pop(key) for key in OWN_STATE if key in state}
        try:
            _prepare_state(optimizer, param)
            group = group_of(optimizer, param)
            rest, seed = self._own_state(optimizer, param, own)
            if is_fused(optimizer, group, param):
                step_fused(optimizer, group, param, rest=rest, seed=seed)
                return
            is_cut = is_tiled(optimizer, param)
            weights = _weights(param, rest, seed, is_flat=is_cut)
            step = step_in_tiles if is_cut else step_whole
            step(optimizer, group, param, weights)
        finally:
            state.update(own)

    def allocate(self, optimizer: Optimizer, param: nn.Parameter) -> None:
        """Convert newly allocated state of a parameter to the width that updates need."""
        if not _is_rounded(param):
            return
        _widen_state(optimizer, param)
        if self.rounding == "kahan":
            optimizer.state[param].setdefault(COMPENSATION, torch.zeros_like(param))

    def _own_state(
        self, optimizer: Optimizer, param: nn.Parameter, own: dict[str, Any]
    ) -> tuple[Tensor | None, int]:
        """Return the rounding error (Kahan) and the seed of this update (stochastic)."""
        if self.rounding == "kahan":
            if COMPENSATION not in own:
                own[COMPENSATION] = torch.zeros_like(param)
            return own[COMPENSATION], 0
        # Seeds depend on position and number of updates only: they are the same in each process,
        # after a resume and for any order of backward, and global random states are not used.
        seed = own.get(SEED)
        if seed is None:
            seed = first_seed(_position(optimizer, param))
        own[SEED] = next_seed(seed)
        return None, seed


def _weights(param: nn.Parameter, rest: Tensor | None, seed: int, *, is_flat: bool) -> Weights:
    data = param.detach().view(-1) if is_flat else param.detach()
    if rest is not None:
        rest = rest.view(-1) if is_flat else rest
        return Weights(
            lambda part: data[part].float().add_(rest[part]),
            lambda part, new: round_with_rest(data[part], new, rest[part]),
        )
    random = torch.Generator(param.device).manual_seed(seed)
    return Weights(
        lambda part: data[part].float(),
        lambda part, new: round_stochastically(data[part], new, random),
    )


def install(optimizer: Optimizer, owner: RoundedStep) -> Callable[[], None]:
    undo = [own_step(optimizer, owner)]
    undo += [patch_method(optimizer, globals()[name]) for name in _PATCHED]
    return functools.partial(undo_all, undo)


def _is_rounded(param: nn.Parameter) -> bool:
    return param.dtype is torch.bfloat16


def rounded_step_of(optimizer: Optimizer) -> RoundedStep | None:
    owners = owners_of(optimizer)
    return next((each for each in owners if isinstance(each, RoundedStep)), None)


def _reconstruct(make: Callable[..., Optimizer], args: Any, owner: RoundedStep) -> Any:
    optimizer = make(*args)
    install(optimizer, owner)
    return optimizer


# torch casts the state of a bfloat16 parameter to bfloat16 when it is loaded.
def load_state_dict(self: Optimizer, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    """Load a state, saved with this technique or without; replaces the method of this name."""
    previous_method(self, "load_state_dict")(state_dict, *args, **kwargs)
    if rounded_step_of(self) is None:  # after `undo`
        return
    saved_groups = state_dict["param_groups"]
    for group, saved_group in zip(self.param_groups, saved_groups, strict=True):
        for param, key in zip(group["params"], saved_group["params"], strict=True):
            _restore(self.state.get(param, {}), state_dict["state"].get(key, {}), param)


def __reduce_ex__(self: Optimizer, protocol: Any) -> Any:  # noqa: N807 - replaces that method
    """Reduce the optimizer for copies and pickles; replaces the method of this name."""
    reduced: tuple[Any, ...] = previous_method(self, "__reduce_ex__")(protocol)
    own = rounded_step_of(self)
    if own is None:
        return reduced
    make, args, state, *rest = reduced
    # Some optimizers pickle all attributes, including those of this package.
    patched = (*_PATCHED, "step", "zero_grad")
    state = {k: v for k, v in state.items() if k not in patched and "memsave_" not in k}
    return _reconstruct, (make, args, own), state, *rest


def _restore(state: dict[str, Any], saved: Mapping[str, Any], param: Tensor) -> None:
    """Give back the float32 numbers of a state, which may be nested."""
    before = dict(tree_flatten_with_path(dict(saved))[0])

    def restore(path: Any, loaded: Any) -> Any:
        value = before.get(path)
        if not isinstance(value, Tensor) or not isinstance(loaded, Tensor):
            return loaded
        is_rounded = value.dtype is torch.float32 and loaded.dtype is torch.bfloat16
        return value.to(param.device, copy=True) if is_rounded else loaded

    state.update(tree_map_with_path(restore, dict(state)))


def _prepare_state(optimizer: Any, param: nn.Parameter) -> None:
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
        if is_made_here(optimizer) and not state:  # it knows the parameter, not what stands in
            initialize_state(optimizer, group_of(optimizer, param), [param])
        _widen_state(optimizer, param)


def _widen_state(optimizer: Optimizer, param: nn.Parameter) -> None:
    state = optimizer.state[param]
    # torch's own optimizers keep state in the type of the parameter.
    if not getattr(optimizer, STATE_LIKE_WEIGHTS, is_of_torch(optimizer)):
        return
    for key, value in state.items():
        if key not in OWN_STATE and isinstance(value, Tensor) and value.dtype is torch.bfloat16:
            state[key] = value.float()


def _position(optimizer: Optimizer, param: nn.Parameter) -> int:
    params = parameters_of(optimizer)
    return next(i for i, p in enumerate(params) if p is param)
