"""What steps with a gradient of zero do to rows of a table, all of them at once.

Without a gradient, a row still moves: its first moment carries it on, and weight decay shrinks it.
With ``w`` a weight, ``m`` and ``v`` its moments, ``q`` the factor by which a missed step changes
the root of ``v``, and ``a`` its step size, decays included, AdamW does

    w <- D w - m sum over the missed steps of a / (q sqrt(v) + eps)

The sum is one over two steps in place of all, by Gauss's quadrature: exact where ``eps`` does not
matter, and where nothing else does. In between, with a root of ``v`` near ``eps``, the movement is
wrong by up to 1e-6 of itself for ``beta2=0.999``, and 0.2 % for 0.95.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

MAX_MISSED = 1024
"""Steps after which all rows are brought up to date, so that the list of settings ends."""

NUM_FIRST = 100
"""First steps of a training; Adam's correction of its moments changes much in them."""

Settings = Mapping[str, Any]
_ADAM = (torch.optim.Adam, torch.optim.AdamW)


@dataclass(frozen=True)
class Kind:
    """An optimizer that can update rows."""

    state: tuple[str, ...]
    has_count: bool


def kind_of(optimizer: Optimizer, settings: Settings) -> Kind | None:
    """Return how an optimizer updates rows; ``None`` if it cannot."""
    if any(settings.get(name) for name in ("capturable", "differentiable")):
        return None
    if type(optimizer) in _ADAM:
        largest = ("max_exp_avg_sq",) if settings["amsgrad"] else ()
        return Kind(("exp_avg", "exp_avg_sq", *largest), has_count=True)
    if type(optimizer) is torch.optim.SGD and not settings["dampening"]:
        return Kind(("momentum_buffer",) if settings["momentum"] else (), has_count=False)
    return None


def has_closed_form(optimizer: Optimizer, settings: Settings) -> bool:
    """Return whether missed steps need not be done one after the other."""
    if type(optimizer) is torch.optim.SGD:
        return True
    is_decoupled = settings.get("decoupled_weight_decay", type(optimizer) is torch.optim.AdamW)
    beta1, beta2 = settings["betas"]
    return (is_decoupled or not settings["weight_decay"]) and 0 <= beta1 * beta1 < beta2 < 1


def coefficients(optimizer: Optimizer, steps: Sequence[Settings], first: int) -> np.ndarray:
    """Compute what the last steps do together."""
    if type(optimizer) is torch.optim.SGD:
        return _of_sgd(steps)
    return _of_adam(steps, first)


def move(values: Tensor, state: Mapping[str, Tensor], lines: Tensor, settings: Settings) -> None:
    """Move rows and their state by missed steps, in place."""
    columns = lines.to(values.dtype).unsqueeze(2).unbind(1)
    if "exp_avg" in state:
        _move_adam(values, state, columns, settings["eps"])
    elif "momentum_buffer" in state:
        from_weight, from_buffer, buffer_from_weight, buffer_from_buffer = columns
        buffer, before = state["momentum_buffer"], values.clone()
        values.mul_(from_weight).addcmul_(buffer, from_buffer)
        buffer.mul_(buffer_from_buffer).addcmul_(before, buffer_from_weight)
    else:
        values.mul_(columns[0])


def _move_adam(
    values: Tensor, state: Mapping[str, Tensor], columns: Sequence[Tensor], eps: float
) -> None:
    decay, decay1, decay2, size_a, place_a, size_b, place_b = columns
    root = state.get("max_exp_avg_sq", state["exp_avg_sq"]).sqrt()
    values.mul_(decay)
    for size, place in ((size_a, place_a), (size_b, place_b)):
        values.addcdiv_(state["exp_avg"] * size, (root * place).add_(eps), value=-1)
    state["exp_avg"].mul_(decay1)
    state["exp_avg_sq"].mul_(decay2)


# From the last step backwards: a step before the others scales what they do, and adds its own part.
def _of_adam(steps: Sequence[Settings], first: int) -> np.ndarray:
    decay = decay1 = decay2 = 1.0
    inverse = zeroth = linear = square = 0.0  # moments of a: sums of a / q, a, a q and a q q
    lines = [(decay, decay1, decay2, inverse, zeroth, linear, square)]
    for number, settings in reversed(list(enumerate(steps, start=first))):
        beta1, beta2 = settings["betas"]
        kept = 1.0 if settings["amsgrad"] else math.sqrt(beta2)
        place, rate = kept / math.sqrt(1 - beta2**number), float(settings["lr"])
        size = decay * beta1 * rate / (1 - beta1**number)
        inverse = beta1 / kept * inverse + size / place
        zeroth = beta1 * zeroth + size
        linear = beta1 * kept * linear + size * place
        square = beta1 * kept * kept * square + size * place * place
        decay *= 1 - rate * settings["weight_decay"]
        decay1, decay2 = decay1 * beta1, decay2 * beta2
        lines.append((decay, decay1, decay2, inverse, zeroth, linear, square))
    found = np.array(lines)
    return np.concatenate([found[:, :3], _two_steps(found[:, 3:])], axis=1)


def _two_steps(moments: np.ndarray) -> np.ndarray:
    """Find two steps with the same moments of sizes over places, 0 to 3, as all of them."""
    total = np.where(moments[:, 0] > 0, moments[:, 0], 1.0)
    mean, square, cube = (moments[:, i] / total for i in (1, 2, 3))
    mean = np.where(mean > 0, mean, 1.0)
    variance = square - mean**2
    is_one = variance <= 1e-10 * mean**2  # a single step, or as good as that
    variance = np.where(is_one, 1.0, variance)
    skew = np.where(is_one, 0.0, (cube - 3 * mean * square + 2 * mean**3) / variance)
    root = np.sqrt(skew**2 + 4 * variance)
    low = np.where(is_one, mean, mean + (skew - root) / 2)
    high = np.where(is_one, mean, mean + (skew + root) / 2)
    share = np.where(is_one, 1.0, (high - mean) / np.where(is_one, 1.0, high - low))
    size = moments[:, 0]
    return np.stack([share * size * low, low, (1 - share) * size * high, high], axis=1)


# Linear in the weight and its buffer: products of matrices.
def _of_sgd(steps: Sequence[Settings]) -> np.ndarray:
    product = np.eye(2)
    lines = [product.ravel()]
    for settings in reversed(steps):
        rate, decay = float(settings["lr"]), settings["weight_decay"]
        momentum = settings["momentum"]
        buffer = np.array([decay, momentum])  # of the weight, and of the buffer
        moved = np.array([decay, 0.0]) + momentum * buffer if settings["nesterov"] else buffer
        weight = np.array([1.0, 0.0]) - rate * moved
        product = product @ np.stack([weight, buffer])
        lines.append(product.ravel())
    return np.array(lines)
