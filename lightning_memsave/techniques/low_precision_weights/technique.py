"""Keep weights in bfloat16, with updates that are not lost in rounding."""

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_memsave.core.optimizers import parameters_of
from lightning_memsave.core.out_of_memory import is_out_of_memory
from lightning_memsave.core.technique import Exactness, Handle, Offer, Technique
from lightning_memsave.core.trainer_facts import SHARDED, TrainerFacts
from lightning_memsave.errors import ConfigurationError, IncompatibleError, MemsaveWarning, Problem
from lightning_memsave.techniques.host_weight import host_weight_of
from lightning_memsave.techniques.low_precision_weights.bf16_layers import (
    compute_in_autocast,
    keep_in_bfloat16,
    sum_in_float32,
)
from lightning_memsave.techniques.low_precision_weights.rounded_updates import (
    RoundedStep,
    install,
    rounded_step_of,
)
from lightning_memsave.techniques.optimizer_kinds import wrapper_problems
from lightning_memsave.techniques.optimizer_step import mark_rounded
from lightning_memsave.techniques.parameter_names import (
    is_dtensor,
    is_norm,
    matches,
    problems_of_patterns,
    unmatched_patterns,
)
from lightning_memsave.techniques.residences import residence_among, residence_with
from lightning_memsave.techniques.tried import couples_parameters
from lightning_memsave.units import format_bytes

_OWN_TYPE = "in the type that their module says"
_RULES = ("norm", "vector", "pattern", "shared memory")
_LAYERS = ("recurrent", "bilinear", "embedding bag", "sparse", "parametrized", _OWN_TYPE)
_KEPT = (*_RULES, *_LAYERS)


def reasons_to_leave(module: nn.Module, patterns: tuple[str, ...]) -> dict[nn.Parameter, str]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    owned = _owned_by_special_modules(module)
    owned |= {p: "embeddings on the host" for p in names if host_weight_of(p) is not None}
    sharing = Counter(p.untyped_storage()._cdata for p in names if not is_lazy(p))

    def reason(param: nn.Parameter, own: list[str]) -> str:
        if is_lazy(param):
            return "lazy"
        if param.dtype is not torch.float32:
            return str(param.dtype).removeprefix("torch.")
        if matches(own, patterns):
            return "pattern"
        if param in owned:
            return owned[param]
        if param.ndim < 2:
            return "vector"
        return "shared memory" if sharing[param.untyped_storage()._cdata] > 1 else ""

    return {param: reason(param, own) for param, own in names.items()}


def describe_left(reasons: dict[nn.Parameter, str]) -> str:
    counts = sorted(Counter(why for why in reasons.values() if why).items())
    kept = ", ".join(f"{n} {why}" for why, n in counts if why in _KEPT)
    others = ", ".join(f"{n} {why}" for why, n in counts if why not in _KEPT)
    parts = [f"kept float32: {kept}"] if kept else []
    return "; ".join([*parts, f"unchanged: {others}"] if others else parts)


def is_lazy(param: Tensor) -> bool:
    return isinstance(param, UninitializedParameter)


def _owned_by_special_modules(module: nn.Module) -> dict[Tensor, str]:
    found: dict[Tensor, str] = {}
    for child in module.modules():
        if is_norm(child):
            why = "norm"
        elif isinstance(child, nn.RNNBase):
            why = "recurrent"  # cuDNN needs all weights of a layer in one type
        elif isinstance(child, nn.Bilinear):
            why = "bilinear"  # it needs one type, and autocast does not cast it
        elif isinstance(child, nn.EmbeddingBag):
            why = "embedding bag"  # the same, if it has weights per sample
        elif isinstance(child, nn.Embedding) and child.sparse:
            why = "sparse"  # a rounded update would convert the whole table to float32
        elif isinstance(child, ParametrizationList) or _is_reparametrized(child):
            why = "parametrized"  # used by operators that autocast does not cast
        elif vars(child).get("dtype") is torch.float32:  # as routers of transformers
            found.update(dict.fromkeys(child.parameters(), _OWN_TYPE))
            continue
        else:
            continue
        found.update(dict.fromkeys(child.parameters(recurse=False), why))
    return found


# By the older functions of `torch.nn.utils`, before parametrizations.
def _is_reparametrized(module: nn.Module) -> bool:
    hooks = module._forward_pre_hooks.values()
    return any(isinstance(hook, WeightNorm | SpectralNorm) for hook in hooks)


ON_HOST = ("master", "split")
"""For weights that `Offloading` keeps in float32 on the host."""
ROUNDINGS = ("stochastic", "kahan", *ON_HOST)
_HOW = {
    "stochastic": "rounded up or down at random",
    "kahan": "rounded with a bfloat16 compensation",
}


@dataclass(frozen=True)
class LowPrecisionWeights(Technique[nn.Module]):
    """Keep weights in bfloat16, and their gradients with them.

    Weights and gradients need 2 bytes per parameter instead of 4, and autocast needs no copies of
    weights. An update is often smaller than the spacing of bfloat16 values and would be lost:
    `round_updates` computes it in float32, tile by tile, and rounds it so that it is not lost.

    Args:
        rounding: ``"stochastic"`` rounds up or down at random, unbiased, and needs no memory.
            ``"kahan"`` stores the rounding error, in 2 more bytes per parameter. ``"master"`` is
            for weights that `Offloading` keeps in float32 on the host: they are updated there, and
            the device gets them rounded to nearest. ``"split"`` does so in 4 bytes per parameter
            on the host instead of 6: what the device gets, and the 16 bits that this lacks.
        keep_fp32: Shell patterns (``fnmatch``) over names of parameters that stay float32, in
            addition to norms and vectors such as biases, which are small and sensitive.

    Raises:
        ConfigurationError: If arguments are invalid; the message lists all of them.

    Note:
        Exactness is *approximate*: monitor the loss. The forward pass runs under
        ``torch.autocast(device, torch.bfloat16)``, as with Lightning's ``"bf16-mixed"``; calls of
        modules outside of it enter it. Normalization layers and activations return bfloat16 for
        bfloat16 inputs, also on CUDA, where autocast alone would return float32. After ``undo``
        weights are float32, with their bfloat16 values; if the device has too little memory for
        that, they stay bfloat16, with a warning. More limits are in
        docs/optimizer_and_precision.md.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 64))
        >>> technique = LowPrecisionWeights()
        >>> print(*technique.apply(model).changes)
        2 of 6 tensors in bfloat16: parameters 131.25 KiB -> 67.25 KiB
        (kept float32: 2 norm, 2 vector)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with technique.round_updates(optimizer):
        ...     with torch.autocast("cpu", torch.bfloat16):
        ...         loss = model(torch.ones(8, 64)).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        >>> model[0].weight.dtype, optimizer.state[model[0].weight]["exp_avg"].dtype
        (torch.bfloat16, torch.float32)

    References:
        Zamirai et al. (2020), Revisiting BFloat16 Training, arXiv:2010.06192.
    """

    name: ClassVar[str] = "low_precision_weights"
    argument: ClassVar[str] = "low_precision_weights"
    examples: ClassVar[str] = '"stochastic", "kahan", "master", "split"'
    offers: ClassVar[tuple[Offer, ...]] = (
        Offer(
            "weights in bf16", "stochastic", "weights with 8 significant bits, stochastic rounding"
        ),
    )
    exactness: ClassVar[Exactness] = Exactness.APPROXIMATE

    rounding: str = "stochastic"
    _: KW_ONLY
    keep_fp32: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        problems = problems_of_patterns("keep_fp32", self.keep_fp32)
        if not problems:
            object.__setattr__(self, "keep_fp32", tuple(self.keep_fp32))
        if self.rounding not in ROUNDINGS:
            what, choices = f"`rounding={self.rounding!r}`", ", ".join(f'"{r}"' for r in ROUNDINGS)
            fix = f"Choose one of {choices}."
            problems.append(Problem(what, "there is no such rounding", fix))
        if problems:
            raise ConfigurationError.from_problems(type(self).__name__, problems)

    @classmethod
    def from_value(cls, value: Any) -> Self | None:
        """Convert the name of a rounding."""
        is_rounding = isinstance(value, str) and value in ROUNDINGS
        return cls(value) if is_rounding else super().from_value(value)

    def is_served(self, target: nn.Module) -> bool:
        """Return True: optimizers round weights that are bfloat16 already."""
        return True

    def conflicts(self, facts: TrainerFacts, written: str) -> list[Problem]:
        """Refuse strategies that decide the dtype of gradients or weights themselves."""
        problems = []
        if facts.is_strategy("DDPStrategy") and not facts.is_strategy(*SHARDED):
            why = "it sums gradients of processes in their own type, and would in bfloat16"
            fix = f"Train on one GPU, or set `{self.argument}=None`."
            what = f"{written} with `{facts.strategy}`"
            problems.append(Problem(what, why, fix))
        if facts.is_strategy(*SHARDED):
            why = f"`{facts.strategy}` decides itself in which type it keeps and gathers weights"
            own = "the strategy's own mixed precision"
            if facts.is_strategy("ModelParallelStrategy"):
                own = '`precision="bf16-mixed"`, in which the float32 shard of each process is one '
                own += f"part of {facts.world_size}"
            fix = f"Set `{self.argument}=None`, and use {own}."
            problems.append(Problem(written, why, fix))
        return problems

    def check(self, target: nn.Module) -> list[Problem]:
        """Find every reason why ``apply`` would be refused; changes nothing."""
        names = [name for name, _ in target.named_parameters(remove_duplicate=False)]
        problems = unmatched_patterns("keep_fp32", self.keep_fp32, names) if names else []
        if any(map(is_dtensor, target.parameters())):
            what = f"`{type(target).__name__}` with DTensor parameters"
            why = "their shards are updated by the strategy's own rules"
            fix = "Set `low_precision_weights=None`, and use FSDP2's `MixedPrecisionPolicy`."
            problems.append(Problem(what, why, fix))
        return problems

    def round_updates(self, optimizer: Optimizer) -> Handle[Optimizer]:
        """Let an optimizer update bfloat16 parameters in float32 and round the result.

        Other parameters are updated as before. Elementwise optimizers (torch's except Adafactor,
        Muon and LBFGS, and those of `LowBitOptimizer`) update parameters of more than 1 Mi elements
        in tiles of at most 4 Mi, so that only one tile is in float32. The state has the width that
        it has for a float32 parameter.

        Args:
            optimizer: Before or after its first step. Copies of it update in the same way.

        Returns:
            A handle with the same optimizer and ``undo``.

        Raises:
            IncompatibleError: If the optimizer is LBFGS, rounds its updates already, or is a
                wrapper of `fabric.setup`.
        """
        problems = _problems_of(optimizer)
        if self.rounding in ON_HOST:
            why = "weights that are updated on the host need no rounding"
            problems = [Problem("`round_updates`", why, "Leave it out.")]
        if problems:
            raise IncompatibleError(self.name, problems)
        undo = install(optimizer, RoundedStep(self.rounding))
        change = describe_updates(optimizer, self.rounding)
        return Handle(optimizer, (change,), undo=(undo,))

    def sum_gradients_in_fp32(self, module: nn.Module) -> Handle[nn.Module]:
        """Accumulate gradients in float32, for 4 bytes per element.

        A sum in bfloat16 stops growing when each addend is less than 1/256 of it. Use the handle as
        a context around all micro-batches of a step and the step itself, or leave it on. Gradients
        that exist at its end are rounded to bfloat16.

        Args:
            module: The model; this applies to all of its bfloat16 parameters.

        Returns:
            A handle with the module and ``undo``.

        Raises:
            IncompatibleError: In a process group, as DDP fixes the type of gradients.
        """
        if dist.is_available() and dist.is_initialized():
            what = "`sum_gradients_in_fp32` in a process group"
            why = "DDP fixes the type of gradients"
            fix = "Use float32 weights there: leave `LowPrecisionWeights` out."
            raise IncompatibleError(self.name, [Problem(what, why, fix)])
        return Handle(
            module, ("gradients summed in float32",), undo=sum_in_float32(module.parameters())
        )

    def _apply(self, target: nn.Module) -> Handle[nn.Module]:
        reasons = reasons_to_leave(target, self.keep_fp32)
        chosen = [param for param, why in reasons.items() if not why]
        left = describe_left(reasons)
        if problems := _problems_of_homes(chosen, self.rounding):
            raise IncompatibleError(self.name, problems)
        if self.rounding in ON_HOST:
            return _send_in_bfloat16(target, chosen, left, is_split=self.rounding == "split")
        # Parameters that were bfloat16 before are rounded as well.
        marked = [p for p, why in reasons.items() if why in ("", "bfloat16")]
        known = [p for p in reasons if not is_lazy(p)]
        before = sum(p.nbytes for p in known)
        for param in chosen:
            _cast(param, torch.bfloat16)
        after = sum(p.nbytes for p in known)
        for param in marked:
            mark_rounded(param, is_rounded=True)

        def undo() -> None:
            for param in marked:
                mark_rounded(param, is_rounded=False)
            _widen([param for param in chosen if param.dtype is torch.bfloat16])

        if not chosen:
            return _with_layers_only(target, left, undo, has_bfloat16=bool(marked))
        change = (
            f"{len(chosen)} of {len(reasons)} tensors in bfloat16: parameters "
            f"{format_bytes(before)} -> {format_bytes(after)}"
        )
        remark = f" ({left})" if left else ""
        hooks = (*keep_in_bfloat16(target), *compute_in_autocast(target, chosen))
        return Handle(target, (change + remark,), undo=(undo, *hooks))


# Not in `check`: in a Trainer, all techniques are checked before one is applied.
def _problems_of_homes(params: list[nn.Parameter], rounding: str) -> list[Problem]:
    what = f"`low_precision_weights={rounding!r}`"
    # Frozen weights stay as they are.
    homes = {residence_with(param) is not None for param in params if param.requires_grad}
    if rounding in ON_HOST and homes and True not in homes:
        why = "there is no copy of the weights in float32 on the host"
        fix = 'Set `offload="optimizer"` as well (`Offloading` first), or use "stochastic".'
        return [Problem(what, why, fix)]
    if rounding not in ON_HOST and True in homes:
        why = "the weights are offloaded, and updated in float32 on the host"
        return [Problem(what, why, 'Use `low_precision_weights="master"` or `"split"`.')]
    return []


# Weights that are bfloat16 already, as in the copy that a prediction makes of a converted model.
def _with_layers_only(
    target: nn.Module, left: str, *undo: Callable[[], None], has_bfloat16: bool
) -> Handle[nn.Module]:
    layers = keep_in_bfloat16(target) if has_bfloat16 else []
    change = f"outputs of {len(layers)} norms and activations in bfloat16"
    skipped = f"there is no tensor to convert: {left or 'no parameters'}"
    return Handle(target, (change,) if layers else (), (skipped,), undo=(*undo, *layers))


def _send_in_bfloat16(
    target: nn.Module, params: list[nn.Parameter], left: str, *, is_split: bool
) -> Handle[nn.Module]:
    homes = [param for param in params if residence_with(param) is not None]
    residence = residence_among(homes)

    # Also what stays on the device, as it may come to wait on the host.
    def send_as(dtype: torch.dtype, *, is_split: bool = False) -> None:
        for param in params if homes else ():
            residence.set_device_dtype(param, dtype, is_split=is_split)

    send_as(torch.bfloat16, is_split=is_split)
    if not homes:
        has_bfloat16 = any(p.dtype is torch.bfloat16 for p in target.parameters())
        return _with_layers_only(target, left, has_bfloat16=has_bfloat16)
    num_bytes = sum(p.nbytes for p in homes)
    change = (
        f"{len(homes)} tensors in bfloat16 on the device, in float32 on the host"
        f"{' (in two halves)' if is_split else ''}: "
        f"{format_bytes(num_bytes)} -> {format_bytes(num_bytes // 2)}"
    )
    hooks = (*keep_in_bfloat16(target), *compute_in_autocast(target, homes))
    undo = (lambda: send_as(torch.float32), *hooks)
    return Handle(target, (change + (f" ({left})" if left else ""),), undo=undo)


def describe_updates(optimizer: Optimizer, rounding: str) -> str:
    params = parameters_of(optimizer)
    num_rounded = sum(map(_is_rounded, params))
    return (
        f"{type(optimizer).__name__}: {num_rounded} of {len(params)} tensors updated in "
        f"float32 and {_HOW[rounding]}"
    )


def rounds_any(optimizer: Optimizer) -> bool:
    return any(_is_rounded(p) for p in parameters_of(optimizer))


def _is_rounded(param: nn.Parameter) -> bool:
    return param.dtype is torch.bfloat16 and param.requires_grad


def _cast(param: nn.Parameter, dtype: torch.dtype) -> None:
    data, grad = param.data.to(dtype), None if param.grad is None else param.grad.to(dtype)
    param.grad = None
    param.data = data
    param.grad_dtype = dtype
    param.grad = grad


def _widen(params: list[nn.Parameter]) -> None:
    outside = sys.exception()
    for index, param in enumerate(params):
        try:
            _cast(param, torch.float32)
        except Exception as error:
            if not is_out_of_memory(error, outside):
                raise
            warnings.warn(
                f"{len(params) - index} of {len(params)} weights stay in bfloat16, as there is not "
                "enough memory for them in float32. Free memory and call `model.float()`.",
                MemsaveWarning,
                stacklevel=3,
            )
            return


def _why_not_rounded(optimizer: Optimizer) -> str:
    own = {k: v for k, v in vars(optimizer).items() if k not in ("param_groups", "state")}
    inner = next((v for v in tree_leaves(own) if isinstance(v, Optimizer)), None)
    if inner is not None:
        return f"it steps through the `{type(inner).__name__}` that it holds, and may do so twice"
    if all(callable(getattr(optimizer, name, None)) for name in ("train", "eval")):
        return "its `train` and `eval` mix weights with state, which nothing rounds"
    if couples_parameters(optimizer):
        return "it was not found to update each parameter alone, as rounded updates do"
    return ""


def _problems_of(optimizer: Optimizer) -> list[Problem]:
    what, problems = f"`{type(optimizer).__name__}`", wrapper_problems(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        why = "it tries several updates in one step and reverts them"
        fix = "Use another optimizer, or set `low_precision_weights=None`."
        problems.append(Problem(what, why, fix))
    elif why := _why_not_rounded(optimizer):
        fix = "Use an optimizer such as AdamW, or set `low_precision_weights=None`."
        problems.append(Problem(what, why, fix))
    if rounded_step_of(optimizer) is not None:
        fix = "Undo the handle of the first `round_updates`."
        problems.append(Problem(what, "it rounds its updates already", fix))
    return problems
