"""Weights in bfloat16, with updates that are not lost in rounding."""

import difflib
import sys
import warnings
from collections import Counter
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

from lightning_memsave.core.out_of_memory import is_out_of_memory
from lightning_memsave.core.technique import Exactness, Handle, Offer, Technique
from lightning_memsave.core.trainer_facts import SHARDED, TrainerFacts
from lightning_memsave.errors import (
    ConfigurationError,
    IncompatibleError,
    MemsaveWarning,
    Problem,
)
from lightning_memsave.techniques.low_bit_optimizer.optimizer_kinds import wrapper_problems
from lightning_memsave.techniques.low_bit_optimizer.state_precision import (
    is_norm,
    mark_rounded,
    matches,
)
from lightning_memsave.techniques.low_bit_optimizer.technique import problems_of_patterns
from lightning_memsave.techniques.low_precision_weights.bf16_layers import (
    keep_in_bfloat16,
    sum_in_float32,
)
from lightning_memsave.techniques.low_precision_weights.rounded_updates import (
    RoundedStep,
    install,
)
from lightning_memsave.units import format_bytes

_RULES = ("norm", "vector", "pattern", "shared memory")
_LAYERS = ("recurrent", "bilinear", "embedding bag", "sparse", "parametrized")
_KEPT = (*_RULES, *_LAYERS)


def reasons_to_leave(module: nn.Module, patterns: tuple[str, ...]) -> dict[nn.Parameter, str]:
    """Decide for each parameter whether it becomes bfloat16.

    Args:
        module: Their owner.
        patterns: Shell patterns over names of parameters that stay float32.

    Returns:
        One word that says why for each parameter that stays, ``""`` for the others; the name of
        its type for one that is not float32.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    owned = _owned_by_special_modules(module)
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
    """Count the parameters that do not become bfloat16.

    Args:
        reasons: What `reasons_to_leave` gave.

    Returns:
        Those that are kept float32 and those of other types, in words; empty if there are none.
    """
    counts = sorted(Counter(why for why in reasons.values() if why).items())
    kept = ", ".join(f"{n} {why}" for why, n in counts if why in _KEPT)
    others = ", ".join(f"{n} {why}" for why, n in counts if why not in _KEPT)
    parts = [f"kept float32: {kept}"] if kept else []
    return "; ".join([*parts, f"left as they are: {others}"] if others else parts)


def is_lazy(param: Tensor) -> bool:
    """Say whether a parameter gets its shape in the first forward pass.

    Args:
        param: Any parameter.

    Returns:
        True if it has none yet.
    """
    return isinstance(param, UninitializedParameter)


def _owned_by_special_modules(module: nn.Module) -> dict[Tensor, str]:
    found: dict[Tensor, str] = {}
    for child in module.modules():
        if is_norm(child):
            why = "norm"
        elif isinstance(child, nn.RNNBase):
            why = "recurrent"  # cuDNN takes all weights of a layer in one type
        elif isinstance(child, nn.Bilinear):
            why = "bilinear"  # autocast leaves it alone, and it takes one type
        elif isinstance(child, nn.EmbeddingBag):
            why = "embedding bag"  # the same, with weights per sample
        elif isinstance(child, nn.Embedding) and child.sparse:
            why = "sparse"  # a rounded update would make the whole table in float32
        elif isinstance(child, ParametrizationList) or _is_reparametrized(child):
            why = "parametrized"  # computed with before autocast sees them
        else:
            continue
        found.update(dict.fromkeys(child.parameters(recurse=False), why))
    return found


# By the functions of `torch.nn.utils` that came before parametrizations.
def _is_reparametrized(module: nn.Module) -> bool:
    hooks = module._forward_pre_hooks.values()
    return any(isinstance(hook, WeightNorm | SpectralNorm) for hook in hooks)


ROUNDINGS = ("stochastic", "kahan")
_HOW = {
    "stochastic": "rounded up or down at random",
    "kahan": "with what rounding loses kept in bfloat16",
}


@dataclass(frozen=True)
class LowPrecisionWeights(Technique[nn.Module]):
    """Keep weights in bfloat16, and their gradients with them.

    Weights and gradients take 2 bytes per parameter in place of 4, and autocast makes no copies of
    weights any more. An update is often smaller than the distance of two bfloat16 numbers and
    would be lost: `round_updates` computes it in float32, tile by tile, and rounds so that it
    counts.

    Args:
        rounding: ``"stochastic"`` rounds up or down at random, right on average, and needs no
            memory. ``"kahan"`` keeps what rounding loses, in 2 more bytes per parameter.
        keep_fp32: Shell patterns (``fnmatch``) over names of parameters that stay float32, beside
            norms and vectors such as biases, which always do: they are small and matter.

    Raises:
        ConfigurationError: If an argument is wrong; the message lists all that are.

    Note:
        Exactness is *approximate*: follow the loss. The forward pass must run under
        ``torch.autocast(device, torch.bfloat16)``, as with Lightning's ``"bf16-mixed"``: outside of
        it layers refuse weights of two types. The output of an embedding is bfloat16, and so is
        that of normalization layers and activations for an input in bfloat16, on CUDA too, where
        autocast alone would widen it: sums of residual connections are bfloat16, unless
        ``keep_fp32`` makes the embeddings float32. Parameters of recurrent and bilinear layers, of
        ``EmbeddingBag`` and ``Embedding(sparse=True)``, of parametrizations, and such as share
        memory without being one parameter stay float32. Not for DTensor. After ``undo`` weights are
        float32 and have the values that they had in bfloat16; where the device has no memory for
        that, they stay bfloat16 and a warning says so. A checkpoint has bfloat16 weights and loads
        everywhere; ``load_state_dict(..., assign=True)`` would replace the weights.

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
    examples: ClassVar[str] = '"stochastic", "kahan"'
    offers: ClassVar[tuple[Offer, ...]] = (
        Offer("weights in bf16", "stochastic", "weights of 8 significant bits, rounded at random"),
    )
    exactness: ClassVar[Exactness] = Exactness.APPROXIMATE
    source: ClassVar[str] = "Zamirai et al. (2020), Revisiting BFloat16 Training, arXiv:2010.06192"

    rounding: str = "stochastic"
    _: KW_ONLY
    keep_fp32: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        problems = problems_of_patterns("keep_fp32", self.keep_fp32)
        if not problems:
            object.__setattr__(self, "keep_fp32", tuple(self.keep_fp32))
        if self.rounding not in ROUNDINGS:
            choices = ", ".join(f'"{word}"' for word in ROUNDINGS)
            problems.append(
                Problem(
                    f"`rounding={self.rounding!r}`",
                    "there is no such rounding",
                    f"Choose one of {choices}.",
                )
            )
        if problems:
            raise ConfigurationError.from_problems(type(self).__name__, problems)

    @classmethod
    def from_value(cls, value: Any) -> Self | None:
        """Read how updates are rounded."""
        is_rounding = isinstance(value, str) and value in ROUNDINGS
        return cls(value) if is_rounding else super().from_value(value)

    def conflicts(self, facts: TrainerFacts, written: str) -> list[Problem]:
        """Refuse strategies that decide the dtype of gradients or weights themselves."""
        problems = []
        if facts.is_strategy("DDPStrategy"):
            problems.append(
                Problem(
                    f"{written} with `{facts.strategy}`",
                    "it fixes the type of gradients, so that those of micro-batches would be "
                    "summed in bfloat16",
                    f"Train on one GPU, or set `{self.argument}=None`.",
                )
            )
        if facts.is_strategy(*SHARDED):
            problems.append(
                Problem(
                    written,
                    f"`{facts.strategy}` decides itself in which type it keeps and gathers weights",
                    f"Set `{self.argument}=None`, and use the strategy's own mixed precision.",
                )
            )
        return problems

    def check(self, target: nn.Module) -> list[Problem]:
        """Find every reason why ``apply`` would be refused; changes nothing.

        Args:
            target: The model.

        Returns:
            All problems.
        """
        names = [name for name, _ in target.named_parameters(remove_duplicate=False)]
        problems = []
        for pattern in self.keep_fp32:
            if pattern == "*" or matches(names, (pattern,)) or not names:
                continue
            close = difflib.get_close_matches(pattern.strip("*"), names, n=1, cutoff=0)
            problems.append(
                Problem(
                    f"`keep_fp32` pattern {pattern!r}",
                    "it matches no parameter",
                    f"Use a pattern over names such as `{close[0]}`.",
                )
            )
        # If nobody has imported it, nothing is one; the import would take a second.
        dtensor = sys.modules.get("torch.distributed.tensor")
        if dtensor is not None and any(isinstance(p, dtensor.DTensor) for p in target.parameters()):
            problems.append(
                Problem(
                    f"`{type(target).__name__}` with DTensor parameters",
                    "their shards are updated by the strategy's own rules",
                    "Set `low_precision_weights=None`, and use FSDP2's `MixedPrecisionPolicy`.",
                )
            )
        return problems

    def round_updates(self, optimizer: Optimizer) -> Handle[Optimizer]:
        """Let an optimizer update bfloat16 parameters in float32, and round as chosen.

        Others are updated as before. Optimizers that compute each number on its own (torch's, but
        for Adafactor, Muon and LBFGS, and those of `LowBitOptimizer`) update parameters of more
        than 1 Mi numbers in tiles of at most 4 Mi, so that only tiles are ever there in float32.
        Their state has the width that it has for a float32 parameter.

        Args:
            optimizer: Before or after its first step. Copies of it update in the same way.

        Returns:
            The same optimizer, and ``undo``.

        Raises:
            IncompatibleError: If the optimizer is LBFGS, rounds its updates already, or is what
                `fabric.setup` gave.
        """
        problems = _problems_of(optimizer)
        if problems:
            raise IncompatibleError(self.name, problems)
        undo = install(optimizer, RoundedStep(self.rounding))
        change = describe_updates(optimizer, self.rounding)
        return Handle(optimizer, (change,), undo=(undo,))

    def sum_gradients_in_fp32(self, module: nn.Module) -> Handle[nn.Module]:
        """Let gradients of several backward passes be summed in float32, for 4 bytes each.

        A sum in bfloat16 stops growing when each part is less than 1/256 of it. Use the handle as a
        context around all micro-batches of a step and the step itself, or leave it on. What is not
        used when it ends becomes bfloat16.

        Args:
            module: All of its bfloat16 parameters are meant.

        Returns:
            The module, and ``undo``.

        Raises:
            IncompatibleError: In a process group, as DDP fixes the type of gradients.
        """
        if dist.is_available() and dist.is_initialized():
            what, why = "`sum_gradients_in_fp32` in a process group", "DDP fixes the type of them"
            fix = "Use float32 weights there: leave `LowPrecisionWeights` out."
            raise IncompatibleError(self.name, [Problem(what, why, fix)])
        return Handle(
            module, ("gradients summed in float32",), undo=sum_in_float32(module.parameters())
        )

    def _apply(self, target: nn.Module) -> Handle[nn.Module]:
        reasons = reasons_to_leave(target, self.keep_fp32)
        chosen = [param for param, why in reasons.items() if not why]
        left = describe_left(reasons)
        # Those that were bfloat16 before are rounded as well.
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
            skipped = f"no tensor is left to convert: {left or 'no parameters'}"
            return Handle(target, (), (skipped,), undo=(undo,))
        change = (
            f"{len(chosen)} of {len(reasons)} tensors in bfloat16: parameters "
            f"{format_bytes(before)} -> {format_bytes(after)}"
        )
        remark = f" ({left})" if left else ""
        return Handle(target, (change + remark,), undo=(undo, *keep_in_bfloat16(target)))


def describe_updates(optimizer: Optimizer, rounding: str) -> str:
    """Say what becomes of the updates of an optimizer.

    Args:
        optimizer: When its parameters are bfloat16.
        rounding: How they are rounded.

    Returns:
        One line.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    num_rounded = sum(map(_is_rounded, params))
    return (
        f"{type(optimizer).__name__}: {num_rounded} of {len(params)} tensors updated in "
        f"float32 and {_HOW[rounding]}"
    )


def rounds_any(optimizer: Optimizer) -> bool:
    """Say whether an optimizer that rounds has anything to round.

    Args:
        optimizer: When its parameters are bfloat16.

    Returns:
        True if it trains a bfloat16 parameter.
    """
    return any(_is_rounded(p) for group in optimizer.param_groups for p in group["params"])


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
                f"{len(params) - index} of {len(params)} weights stay in bfloat16, as there is no "
                "memory for them in float32. Free memory and call `model.float()`.",
                MemsaveWarning,
                stacklevel=3,
            )
            return


def _problems_of(optimizer: Optimizer) -> list[Problem]:
    what, problems = f"`{type(optimizer).__name__}`", wrapper_problems(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        problems.append(
            Problem(
                what,
                "it tries several updates in one step and takes them back",
                "Use another optimizer, or set `low_precision_weights=None`.",
            )
        )
    if isinstance(vars(optimizer).get("memsave_parameter_step"), RoundedStep):
        problems.append(
            Problem(
                what,
                "it rounds its updates already",
                "Undo the handle of the first `round_updates`.",
            )
        )
    return problems
