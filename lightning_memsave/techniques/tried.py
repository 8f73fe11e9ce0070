"""What is not known of an optimizer of another package is found by trying it on small parameters.

Whether it updates each parameter alone, and how large its state is.
"""

import itertools
import types
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten

from lightning_memsave.techniques.group_settings import apply_written, are_same, settings_of
from lightning_memsave.techniques.optimizer_kinds import EACH_ALONE
from lightning_memsave.techniques.optimizer_step import (
    double_of,
    step_without_hooks,
    updates_each_alone,
)
from lightning_memsave.techniques.tiled_steps import step_values

_MAX_SIZE = 8  # of a dimension
_NUM_OF_A_KIND = 2  # of each number of dimensions in a group
_SCALES = (1.0, 1e3, 1e-3)
"""Of gradients, another one in each step: some optimizers clip the norm of all."""
_LR = 1e-2
_WIDTH = 64  # of a matrix

Make = Callable[[list[dict[str, Any]]], Optimizer]
_T = TypeVar("_T")


def is_each_alone(make: Make, like: Optimizer) -> bool:
    """Return whether steps of one parameter at a time have the bits of steps of all.

    Tried in the groups of an optimizer, with parameters of as many dimensions as its own. A class
    that draws random numbers, or keeps numbers of its own beside groups and state, does not.
    """
    found = _try(
        lambda: are_same(_after_steps_of_all(make, like), _after_steps_one_by_one(make, like))
    )
    return bool(found)


def couples_parameters(optimizer: Optimizer) -> bool:
    """Return whether steps of one parameter at a time are found to differ from steps of all.

    ``False`` too where that is not known: of an optimizer with attributes that a try might change.
    """
    if EACH_ALONE in vars(optimizer) or updates_each_alone(optimizer):
        return vars(optimizer).get(EACH_ALONE) is False
    own = [v for k, v in vars(optimizer).items() if k not in _OF_ALL]
    if not all(isinstance(value, _PLAIN) for value in own):
        return False

    def make(groups: list[dict[str, Any]]) -> Optimizer:
        return double_of(optimizer, groups, defaultdict(dict))

    return not is_each_alone(make, optimizer)


def state_bytes_of_matrix(make: Make) -> int | None:
    """Give the bytes of state for an element of a float32 matrix; ``None`` if a step fails."""

    def step() -> int:
        weight = nn.Parameter(torch.randn(_WIDTH, _WIDTH, device="cpu"))
        weight.grad = torch.randn_like(weight)
        optimizer = _made(make, [{"params": [weight]}])
        step_without_hooks(optimizer)
        leaves = tree_flatten(dict(optimizer.state[weight]))[0]
        return round(sum(v.nbytes for v in leaves if isinstance(v, Tensor)) / weight.numel())

    return _try(step)


def _try(function: Callable[[], _T]) -> _T | None:
    """Run what changes nothing here; ``None`` if it raises, as code of others may do anything."""
    with (
        _disable_current_modes(),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
        torch.inference_mode(mode=False),
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),  # compiling takes longer than all else
    ):
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(0)  # not those of GPUs, which go on
        try:
            return function()
        except Exception:
            return None


_OF_ALL = {*vars(Optimizer([torch.zeros(1, device="cpu")], {})), "step", "zero_grad"}
_PLAIN = (bool, int, float, str, tuple, type, types.FunctionType, types.NoneType)

_Found = tuple[list[tuple[Tensor, Any]], list[dict[str, Any]]]
"""Weights with their states, and groups without them."""


def _after_steps_of_all(make: Make, like: Optimizer) -> _Found | None:
    """Give what steps have made; ``None`` if they write numbers elsewhere."""
    params, optimizer = _small(make, like)
    numbers = _numbers_of(optimizer)
    for number in range(len(_SCALES)):
        for param, grad in zip(params, _gradients(params, number), strict=True):
            param.grad = grad
        step_without_hooks(optimizer)
    if _numbers_of(optimizer) != numbers or optimizer.state.keys() - {*params}:
        return None
    states = [(param.data, optimizer.state[param]) for param in params]
    return states, [settings_of(group) for group in optimizer.param_groups]


def _after_steps_one_by_one(make: Make, like: Optimizer) -> _Found:
    params, made = _small(make, like)
    optimizer = double_of(made, made.param_groups, defaultdict(dict))
    owners = {param: group for group in optimizer.param_groups for param in group["params"]}
    states: dict[Tensor, Any] = {param: {} for param in params}
    for number in range(len(_SCALES)):
        # In another order, and with other objects in their place, as on the host.
        for param, grad in reversed([*zip(params, _gradients(params, number), strict=True)]):
            values = nn.Parameter(param.data)
            states[param] = step_values(optimizer, owners[param], values, grad, states[param])
        apply_written(optimizer)
    found = [(param.data, states[param]) for param in params]
    return found, [settings_of(group) for group in optimizer.param_groups]


def _small(make: Make, like: Optimizer) -> tuple[list[nn.Parameter], Optimizer]:
    torch.default_generator.manual_seed(0)  # for each way the same
    params: list[nn.Parameter] = []
    groups = []
    for group in like.param_groups:
        own, counts = [], defaultdict[int, Any](itertools.count)
        for param in group["params"]:
            if next(counts[param.ndim]) < _NUM_OF_A_KIND:
                shape = [min(size, _MAX_SIZE) for size in param.shape]
                own.append(nn.Parameter(torch.randn(shape, device="cpu")))
        params += own
        groups.append({**group, "lr": _LR, "fused": None, "params": own})
    return params, _made(make, groups)


def _made(make: Make, groups: list[dict[str, Any]]) -> Optimizer:
    optimizer: Any = make(groups)
    if hasattr(optimizer, "train"):  # as schedule-free ones have, which make no steps before it
        optimizer.train()
    made: Optimizer = optimizer
    return made


def _gradients(params: list[nn.Parameter], number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [
        _SCALES[(index + number) % len(_SCALES)]
        * torch.randn(param.shape, generator=generator, device="cpu")
        for index, param in enumerate(params)
    ]


def _numbers_of(optimizer: Optimizer) -> list[Any]:
    own = {k: v for k, v in vars(optimizer).items() if k not in ("param_groups", "state")}
    leaves = [v.tolist() if isinstance(v, Tensor) else v for v in tree_flatten(own)[0]]
    return [v for v in leaves if isinstance(v, int | float | str | list)]
