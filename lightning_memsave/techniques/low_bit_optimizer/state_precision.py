"""Choose the parameters that keep 32-bit optimizer state, and compute bytes of state."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_memsave.techniques.optimizer_kinds import BLOCKSIZE, KIND_BY_TYPE, Kind
from lightning_memsave.techniques.optimizer_step import is_marked_rounded
from lightning_memsave.techniques.parameter_names import is_norm, matches

_QMAP_BYTES = 256 * 4


def parameter_names(
    optimizer: torch.optim.Optimizer, module: nn.Module | None
) -> dict[torch.Tensor, tuple[str, ...]]:
    names: dict[torch.Tensor, tuple[str, ...]] = {}
    if module is not None:
        for name, param in module.named_parameters(remove_duplicate=False):
            names[param] = (*names.get(param, ()), name)
    for group in optimizer.param_groups:
        for param, name in zip(group["params"], group.get("param_names", ()), strict=False):
            if name not in names.get(param, ()):
                names[param] = (*names.get(param, ()), name)
    return names


def reasons_for_32bit(
    optimizer: torch.optim.Optimizer,
    module: nn.Module | None,
    *,
    keep_32bit: Sequence[str],
    force_8bit: Sequence[str],
) -> dict[torch.Tensor, str]:
    names = parameter_names(optimizer, module)
    kinds = _special_parameters(module)
    params = dict.fromkeys([*names, *(p for g in optimizer.param_groups for p in g["params"])])
    reasons = {}
    for param in params:
        own = names.get(param, ("",))  # "*" also fits a parameter without a name
        if matches(own, keep_32bit):
            reasons[param] = "pattern"
        elif matches(own, force_8bit):
            reasons[param] = ""
        elif param in kinds:
            reasons[param] = kinds[param]
        elif any(name.rpartition(".")[2].endswith("bias") for name in own):
            reasons[param] = "bias"
        else:
            reasons[param] = "vector" if param.ndim <= 1 else ""
    return reasons


def count_tensors(
    reasons: Mapping[torch.Tensor, str], trained: Sequence[torch.Tensor], min_8bit_size: int
) -> Counter[str]:
    return Counter(reasons[p] or ("small" if p.numel() < min_8bit_size else "") for p in trained)


def trained_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]


def frozen_parameters(
    reasons: Mapping[torch.Tensor, str], module: nn.Module | None
) -> list[torch.Tensor]:
    """Return the parameters that may be trained later; under PEFT the base stays frozen."""
    if module is not None and any(hasattr(child, "peft_config") for child in module.modules()):
        return []
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return [p for p in reasons if not p.requires_grad and p.dtype in dtypes and not is_lazy(p)]


def why_unsuitable(optimizer: torch.optim.Optimizer, module: nn.Module | None) -> str | None:
    trained = set(trained_parameters(optimizer))
    if any(is_lazy(param) for param in trained):
        return "it has lazy parameters, whose size is not known before the first forward"
    for name, child in module.named_modules() if module is not None else ():
        is_table = isinstance(child, nn.Embedding | nn.EmbeddingBag)
        if is_table and child.sparse and child.weight in trained:
            return f"`{name}` has sparse gradients, which bitsandbytes does not support"
    return None


def torch_state_bytes(optimizer: torch.optim.Optimizer) -> int | None:
    kind = KIND_BY_TYPE.get(type(optimizer))
    if kind is None:
        return None
    num_bytes = 0
    for group in optimizer.param_groups:
        num_moments = len(kind.state_keys) + bool(group.get("amsgrad"))
        if kind.word == "sgd" and not group["momentum"]:
            num_moments = 0
        elif kind.word == "rmsprop":
            num_moments += bool(group["centered"]) + bool(group["momentum"])
        for param in group["params"]:
            if param.requires_grad:
                num_bytes += num_moments * param.numel() * _state_width(param)
                num_bytes += 4 * kind.has_step_tensor
    return num_bytes


def low_bit_state_bytes(
    kind: Kind,
    trained: Sequence[torch.Tensor],
    in_8bit: Iterable[torch.Tensor],
    matrices: Set[torch.Tensor] = frozenset(),
) -> int:
    """Compute bytes of state; ``matrices`` have one moment, that of Muon."""
    quantized = set(in_8bit)
    numbers = {param: 1 if param in matrices else kind.num_moments for param in trained}
    num_bytes = max((numbers[param] for param in quantized), default=0) * _QMAP_BYTES
    for param, num_moments in numbers.items():
        numel = param.numel()
        if param in quantized:
            num_bytes += num_moments * (numel + 4 * -(-numel // BLOCKSIZE))
        else:
            num_bytes += num_moments * 4 * numel
    return num_bytes


def _state_width(param: torch.Tensor) -> int:
    is_rounded = is_marked_rounded(param) and param.dtype is torch.bfloat16
    return 4 if is_rounded else param.element_size()


def _special_parameters(module: nn.Module | None) -> dict[torch.Tensor, str]:
    """Return the weights of embeddings and norms, tied ones too."""
    found: dict[torch.Tensor, str] = {}
    for child in module.modules() if module is not None else ():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag):
            found[child.weight] = "embedding"
        elif is_norm(child):
            for param in child.parameters(recurse=False):
                found.setdefault(param, "norm")
    return found
