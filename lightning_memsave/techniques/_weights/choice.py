"""Which parameters become bfloat16, and why the others do not."""

from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lightning_memsave.techniques._optimizers.state_precision import is_norm, matches

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
