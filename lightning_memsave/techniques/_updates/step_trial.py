"""Whether an optimizer treats each parameter on its own, found out by trying."""

import contextlib
import copy
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memsave.errors import Problem
from lightning_memsave.techniques._updates.parameter_steps import run_step, step_without_hooks

_STEPS = 3
# Bounds on the norm of all gradients act on large ones alone, and some rules on small ones.
_SCALES = (1.0, 1e-3, 1e6)
_LONGEST = 8
_NUM_ALIKE = 2
# Instances of their own class for all, and what others have put over methods.
_SHARED = ("mng", "page_mng")
_LEFT_OUT = ("step", "zero_grad", "add_param_group", "memsave_parameter_step")

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


def find_coupling(optimizer: Optimizer) -> list[Problem]:
    """Try whether one parameter at a time gives what all at once give.

    Two twins of the optimizer train a few tiny parameters for three steps, with gradients of
    ordinary size, then two other twins with small ones, and two with large ones. Neither the
    optimizer nor random numbers are touched.

    Args:
        optimizer: Any optimizer.

    Returns:
        What stands against updating its parameters one by one.
    """
    name = type(optimizer).__name__
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return [
            Problem(
                f"`{name}(differentiable=True)`",
                "the graph of a step would hold all the gradients",
                "Set `differentiable=False`.",
            )
        ]
    try:
        with _disable_current_modes(), _random_numbers_kept(optimizer), torch.no_grad():
            tried = (_try(optimizer, scale) for scale in _SCALES)
            difference = next((found for found in tried if found), None)
    except Exception as error:  # somebody's optimizer may raise anything
        return [
            Problem(
                f"`{name}`",
                "a trial step without a closure, on tiny parameters, fails "
                f"({type(error).__name__}: {error})",
                "Use an optimizer such as AdamW, or leave optimizer_in_backward out.",
            )
        ]
    if difference is None:
        return []
    return [
        Problem(
            f"`{name}`",
            f"it does not treat each parameter on its own: {difference} after three steps that "
            "take one parameter at a time",
            "Use an optimizer such as AdamW, or leave optimizer_in_backward out.",
        )
    ]


def _try(optimizer: Optimizer, scale: float) -> str | None:
    whole, single = _twin(optimizer), _twin(optimizer)
    for step in range(_STEPS):
        _give_gradients(whole, step, scale)
        step_without_hooks(whole)
        _give_gradients(single, step, scale)
        params = [(group, p) for group in single.param_groups for p in group["params"]]
        gradients = [p.grad for _, p in params]
        _drop_gradients(single)
        for (group, param), gradient in reversed(list(zip(params, gradients, strict=True))):
            param.grad = gradient
            run_step(single, group, param)
            param.grad = None
        step_without_hooks(single)
        _drop_gradients(whole)
    return _difference(whole, single)


def _twin(optimizer: OptimizerT) -> OptimizerT:
    """Return an optimizer of the same class and settings over tiny parameters."""
    twin = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): twin, id(optimizer.state): defaultdict(dict)}
    groups = [_tiny_group(group, memo) for group in optimizer.param_groups]
    memo[id(optimizer.param_groups)] = groups
    memo.update({id(vars(optimizer).get(key)): vars(optimizer).get(key) for key in _SHARED})
    # No hooks: they are for steps of the real one.
    ours = {
        key: type(value)() if key.startswith("_optimizer_") else value
        for key, value in vars(optimizer).items()
        if key not in _LEFT_OUT
    }
    vars(twin).update(copy.deepcopy(ours, memo))
    return twin


def _tiny_group(group: dict[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    """Return a copy with a few parameters: two for each number of dimensions."""
    by_ndim: dict[int, list[nn.Parameter]] = {}
    for param in group["params"]:
        if param.is_floating_point() or param.is_complex():
            alike = by_ndim.setdefault(param.ndim, [])
            if len(alike) < _NUM_ALIKE:
                alike.append(nn.Parameter(_random(param, len(memo))))
            memo.setdefault(id(param), alike[-1])
    tiny = [param for alike in by_ndim.values() for param in alike]
    if len(tiny) == 1:
        tiny.append(nn.Parameter(_random(tiny[0], len(memo))))
    settings = {key: value for key, value in group.items() if key != "params"}
    return {**copy.deepcopy(settings, memo), "params": tiny}


def _random(like: Tensor, seed: int) -> Tensor:
    shape = [min(size, _LONGEST) for size in like.shape]
    generator = torch.Generator().manual_seed(seed)
    device = "cpu" if isinstance(like, FakeTensor) else like.device
    return torch.randn(shape, generator=generator).to(device, like.dtype)


def _give_gradients(optimizer: Optimizer, step: int, scale: float) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for index, param in enumerate(params):
        # Its square has to be a number too: of float16, whose largest is 65504.
        largest = torch.finfo(param.dtype).max ** 0.25
        gradient = _random(param, 1000 * (step + 1) + index) * min(scale, largest)
        is_sparse = isinstance(optimizer, torch.optim.SparseAdam)
        param.grad = gradient.to_sparse(1) if is_sparse else gradient


def _drop_gradients(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = None


def _difference(whole: Optimizer, single: Optimizer) -> str | None:
    for ours, theirs in zip(single.param_groups, whole.param_groups, strict=True):
        for key in theirs:
            if key != "params" and not _equal(ours[key], theirs[key]):
                return f'`group["{key}"]` is not what it should be'
        for mine, other in zip(ours["params"], theirs["params"], strict=True):
            if not _equal(mine.detach(), other.detach()):
                return "parameters are not what they should be"
    for key, value in vars(whole).items():
        if isinstance(value, int | float | Tensor) and not _equal(vars(single)[key], value):
            return f"`optimizer.{key}` is not what it should be"
    return None


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        # What is not a number in both does not tell them apart.
        if a.shape != b.shape:
            return False
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    return bool(a == b)


@contextlib.contextmanager
def _random_numbers_kept(optimizer: Optimizer) -> Iterator[None]:
    python, numpy = random.getstate(), sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    devices = {p.device for p in params if p.device.type == "cuda" and torch.cuda.is_available()}
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(state)
