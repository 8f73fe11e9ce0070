"""Update bfloat16 parameters on a GPU with one kernel each: dequantize, Adam, quantize, round."""

import functools
import importlib.util
import inspect
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memsave.core.memory import is_fake, on_cuda
from lightning_memsave.techniques.optimizer_kinds import BLOCKSIZE, KIND_BY_WORD, is_low_bit

_MASK_32 = 0xFFFFFFFF
_LOW_BITS = 0xFFFF  # the bits of float32 that bfloat16 lacks
_PLAIN_ADAM = ("amsgrad", "maximize", "capturable", "differentiable")
# Of this module before it was reloaded: nothing else holds it, and its end frees the namespace.
globals().pop("_LIBRARY", None)
_LIBRARY = torch.library.Library("lightning_memsave", "DEF")
for _name in ("rounded_adam", "rounded_adam_8bit"):
    _LIBRARY.define(
        f"{_name}(Tensor(a!) param, Tensor grad, Tensor(b!)[] state, Tensor(c!)? rest, "
        "float decay, float coupled, float beta1, float beta2, float step_size, float correction, "
        "float eps, int seed) -> ()"
    )


class Numbers(NamedTuple):
    decay: float
    coupled: float
    beta1: float
    beta2: float
    step_size: float
    correction: float
    eps: float
    seed: int


def random_bits(index: Tensor, seed: int) -> Tensor:
    """Return 16 pseudo-random bits for each index, by two rounds of a 32-bit integer hash.

    References:
        The finalizer of MurmurHash3, by Austin Appleby.
    """
    bits = _mixed(index & _MASK_32)
    return _mixed(bits ^ seed) & _LOW_BITS


def _mixed(bits: Tensor) -> Tensor:
    # The constants have 32 bits: in halves, the products stay below 2**63.
    bits = bits ^ (bits >> 16)
    bits = _times(bits, 0x85EBCA6B)
    bits = bits ^ (bits >> 13)
    bits = _times(bits, 0xC2B2AE35)
    return bits ^ (bits >> 16)


def _times(bits: Tensor, factor: int) -> Tensor:
    high = ((bits * (factor >> 16)) & _LOW_BITS) << 16
    return (high + bits * (factor & _LOW_BITS)) & _MASK_32


def _rounded(values: Tensor, index: Tensor, seed: int) -> Tensor:
    bits = values.view(torch.int32).to(torch.int64) + random_bits(index, seed)
    rounded = (bits & ~_LOW_BITS).to(torch.int32).view(torch.float32)
    return torch.where(values.isnan(), values, rounded).to(torch.bfloat16)


def _adam(
    value: Tensor, grad: Tensor, first: Tensor, second: Tensor, numbers: Numbers
) -> tuple[Tensor, Tensor, Tensor]:
    if numbers.coupled:
        grad = grad + numbers.coupled * value
    first = first * numbers.beta1 + grad * (1 - numbers.beta1)
    second = second * numbers.beta2 + grad * grad * (1 - numbers.beta2)
    denominator = second.sqrt() / numbers.correction + numbers.eps
    return value * numbers.decay - numbers.step_size * (first / denominator), first, second


def _load(param: Tensor, rest: Tensor | None) -> Tensor:
    return param.float() if rest is None else param.float() + rest


def _store(value: Tensor, param: Tensor, rest: Tensor | None, start: int, seed: int) -> None:
    if rest is None:
        index = torch.arange(param.numel(), device=param.device).view(param.shape) + start
        param.copy_(_rounded(value, index, seed))
    else:
        rounded = value.to(torch.bfloat16)
        param.copy_(rounded)
        rest.copy_(value - rounded)


def adam(
    param: Tensor, grad: Tensor, state: list[Tensor], rest: Tensor | None, numbers: Numbers
) -> None:
    """Update flat tensors of one length."""
    value, first, second = _adam(_load(param, rest), grad.float(), state[0], state[1], numbers)
    state[0].copy_(first)
    state[1].copy_(second)
    _store(value, param, rest, 0, numbers.seed)


def adam_8bit(
    param: Tensor,
    grad: Tensor,
    state: list[Tensor],
    rest: Tensor | None,
    numbers: Numbers,
    *,
    start: int = 0,
) -> None:
    """Update tensors of shape (blocks, numbers in a block)."""
    codes1, codes2, absmax1, absmax2, qmap1, qmap2, bounds1, bounds2 = state
    if codes1.size(1) == BLOCKSIZE:  # as a constant, so that the compiled form keeps whole blocks
        codes1, codes2 = (codes.view(-1, BLOCKSIZE) for codes in (codes1, codes2))
    first = qmap1[codes1.int()] * absmax1.unsqueeze(1)
    second = qmap2[codes2.int()] * absmax2.unsqueeze(1)
    value, first, second = _adam(_load(param, rest), grad.float(), first, second, numbers)
    _quantize(first, codes1, absmax1, bounds1)
    _quantize(second, codes2, absmax2, bounds2)
    _store(value, param, rest, start, numbers.seed)


# As bitsandbytes' `quantize_blockwise`.
def _quantize(values: Tensor, codes: Tensor, absmax: Tensor, bounds: Tensor) -> None:
    largest = values.abs().amax(1)
    scaled = (values / largest.clamp(min=1e-38).unsqueeze(1)).clamp(-1, 1)
    codes.copy_(torch.bucketize(scaled, bounds, out_int32=True))
    absmax.copy_(largest)


# After as many versions (types, one element, weight decay or none, ...) torch would silently run
# the eager form, in much memory. Its own limit is 8; before torch 2.13 a function has no other one.
_MOST_VERSIONS = 128


@functools.cache
def compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Compile one of the functions above for tensors of any size."""
    limit: dict[str, Any] = {"recompile_limit": _MOST_VERSIONS}
    known = inspect.signature(torch.compile).parameters
    options = {name: value for name, value in limit.items() if name in known}
    return torch.compile(function, dynamic=True, **options)


# On a CPU only tests come here.
def _form_for(param: Tensor, function: Callable[..., None]) -> Callable[..., None]:
    return compiled(function) if param.is_cuda else function


def _run_adam(
    param: Tensor, grad: Tensor, state: list[Tensor], rest: Tensor | None, *numbers: Any
) -> None:
    _form_for(param, adam)(param, grad, state, rest, Numbers(*numbers))


def _run_adam_8bit(
    param: Tensor, grad: Tensor, state: list[Tensor], rest: Tensor | None, *numbers: Any
) -> None:
    update = _form_for(param, adam_8bit)
    codes, absmax, tables = state[:2], state[2:4], state[4:]
    num_blocks, left = divmod(len(param), BLOCKSIZE)
    end = num_blocks * BLOCKSIZE
    # The last block may be shorter.
    for part, rows in ((slice(end), num_blocks), (slice(end, None), int(left > 0))):
        if rows:
            blocks = slice(rows) if part.start is None else slice(num_blocks, None)
            cut = [t if t is None else t[part].view(rows, -1) for t in (param, grad, *codes, rest)]
            own = [*cut[2:4], *(each[blocks] for each in absmax), *tables]
            update(*cut[:2], own, cut[4], Numbers(*numbers), start=part.start or 0)


for _name, _run in (("rounded_adam", _run_adam), ("rounded_adam_8bit", _run_adam_8bit)):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _run, _key)
    _LIBRARY.impl(_name, lambda *args: None, "Meta")


_BOUNDS, _COUNT = "_memsave_bounds", "_memsave_count"  # of storages, which no checkpoint has


def bounds_of(qmap: Tensor) -> Tensor:
    """Return the bounds (255,) between the values (256,) of a table, computed once per table."""
    storage = qmap.untyped_storage()
    if not hasattr(storage, _BOUNDS):
        setattr(storage, _BOUNDS, (qmap[:-1] + qmap[1:]) / 2)
    bounds: Tensor = getattr(storage, _BOUNDS)
    return bounds


def step_fused(
    optimizer: Any, group: Mapping[str, Any], param: nn.Parameter, *, rest: Tensor | None, seed: int
) -> None:
    """Update a parameter for which `is_fused` is true."""
    state = optimizer.state[param]
    assert param.grad is not None, "only parameters with a gradient are updated"
    if isinstance(state["step"], Tensor):
        step = _count_step(state["step"])
    else:
        state["step"] = step = state["step"] + 1
    numbers = _numbers(optimizer, group, step, seed)
    flat = [None if t is None else t.view(-1) for t in (param.detach(), param.grad, rest)]
    keys = ("state1", "state2") if is_low_bit(optimizer) else ("exp_avg", "exp_avg_sq")
    used = [state[key].view(-1) for key in keys]
    update = torch.ops.lightning_memsave.rounded_adam
    if "absmax1" in state:
        update = torch.ops.lightning_memsave.rounded_adam_8bit
        qmaps = [state["qmap1"], state["qmap2"]]
        used += [state["absmax1"], state["absmax2"], *qmaps, *map(bounds_of, qmaps)]
    update(*flat[:2], used, flat[2], *numbers)


def _count_step(step: Tensor) -> int:
    """Count a step. Fused optimizers count on the GPU: reading that makes the host wait."""
    storage = step.untyped_storage()
    before, version = getattr(storage, _COUNT, (0, None))
    count = 1 + int(step if version != step._version else before)
    step += 1
    setattr(storage, _COUNT, (count, step._version))
    return count


def _numbers(optimizer: Any, group: Mapping[str, Any], step: int, seed: int) -> Numbers:
    (beta1, beta2), lr, decay = group["betas"], float(group["lr"]), group["weight_decay"]
    is_coupled = _couples(optimizer, group)
    return Numbers(
        decay=1.0 if is_coupled else 1 - lr * decay,
        coupled=decay if is_coupled else 0.0,
        beta1=beta1,
        beta2=beta2,
        step_size=lr / (1 - beta1**step),
        correction=math.sqrt(1 - beta2**step),
        eps=group["eps"],
        seed=seed,
    )


def _couples(optimizer: Any, group: Mapping[str, Any]) -> bool:
    own = optimizer.couples_weight_decay if is_low_bit(optimizer) else _is_adam(optimizer)
    return bool(own) and not group.get("decoupled_weight_decay", False)


def _is_adam(optimizer: Optimizer) -> bool:
    return type(optimizer) is torch.optim.Adam


def is_fused(optimizer: Any, group: Mapping[str, Any], param: nn.Parameter) -> bool:
    if not on_cuda(param):
        return False
    state, grad = optimizer.state[param], param.grad
    keys = ("state1", "state2") if is_low_bit(optimizer) else ("exp_avg", "exp_avg_sq")
    is_known = _has_kernel(optimizer) and not any(group.get(flag) for flag in _PLAIN_ADAM)
    if not is_known or any(key not in state for key in keys) or isinstance(group["lr"], Tensor):
        return False
    tensors = (param, grad, *(state[key] for key in keys))
    is_dense = grad is not None and grad.layout == torch.strided
    return is_dense and all(t.is_contiguous() for t in tensors) and _works_on(param)


def _has_kernel(optimizer: Any) -> bool:
    if is_low_bit(optimizer):
        is_adam = KIND_BY_WORD[optimizer.memsave_kind].family == "adam"
        return is_adam and not optimizer.is_paged
    return _is_adam(optimizer) or type(optimizer) is torch.optim.AdamW


def describe_missing_kernel(optimizer: Any, device: torch.device) -> str:
    """Say what is done where a kernel for an optimizer does not work; empty where it does."""
    if not _has_kernel(optimizer) or _works_on(torch.empty(0, device=device)):
        return ""
    return (
        "updated operator by operator, which takes more memory and time: `torch.compile` (Triton) "
        "does not work here"
    )


def _works_on(param: Tensor) -> bool:
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":  # the eager form would need much memory
        return False
    if is_fake(param) and torch.cuda.is_initialized():  # a fit predicts what it will use
        with _disable_current_modes():
            return _is_proven(torch.device("cuda", torch.cuda.current_device()))
    if is_fake(param):  # without a GPU here, the one that is predicted for is taken to have it
        return not torch.cuda.is_available() or importlib.util.find_spec("triton") is not None
    return _is_proven(param.device)


@functools.cache
def _is_proven(device: torch.device) -> bool:  # pragma: no cover (gpu)
    """Compare both compiled functions with their eager form, once per device."""
    return importlib.util.find_spec("triton") is not None and all(
        matches_eager(function, device) for function in (adam, adam_8bit)
    )


def matches_eager(function: Callable[..., None], device: torch.device) -> bool:
    """Return whether the compiled form of a function gives the values of the eager one."""
    results = []
    for form in (function, compiled(function)):
        *tensors, state, numbers = _example(function, device)
        try:
            form(*tensors, state, None, numbers)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # no compiler, no Triton, or a version that cannot do it
            return False
        results.append([*tensors, *state])
    # A product and a sum may be fused: one bit of bfloat16, and one code of the state.
    return all(
        torch.allclose(
            a.float(), b.float(), rtol=2**-7, atol=1.0 if a.dtype is torch.uint8 else 1e-6
        )
        for a, b in zip(*results, strict=True)
    )


def _example(function: Callable[..., None], device: torch.device) -> list[Any]:
    shape = (3, BLOCKSIZE) if function is adam_8bit else (3 * BLOCKSIZE,)
    wave = torch.arange(3 * BLOCKSIZE, device=device, dtype=torch.float32).sin().view(shape)
    numbers = Numbers(0.99, 0.01, 0.9, 0.99, 0.1, 0.3, 1e-8, 12345)
    param, grad = wave.bfloat16(), wave.cos().bfloat16()
    if function is adam:
        return [param, grad, [wave.clone(), wave.square()], numbers]
    codes = (wave.abs() * 255).to(torch.uint8)
    qmap = torch.linspace(-1, 1, 256, device=device)
    tables = [qmap, qmap.abs(), bounds_of(qmap), bounds_of(qmap)]
    absmax = [wave.new_ones(3), wave.new_ones(3)]
    return [param, grad, [codes, codes.clone(), *absmax, *tables], numbers]
