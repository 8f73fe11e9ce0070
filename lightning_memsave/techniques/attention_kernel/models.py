"""Hugging Face models inside of a module, and whether their attention can run another kernel."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_memsave.errors import Problem
from lightning_memsave.techniques.attention_kernel.chunked import CHUNKED, register
from lightning_memsave.units import format_bytes


@dataclass
class ModelPart:
    """What shares one configuration, and so one kind of attention.

    Args:
        name: Name of the outermost module with this configuration.
        config: The configuration.
        root: The Hugging Face model that it is in, which is in no other one.
        models: The Hugging Face models whose attention reads it.
    """

    name: str
    config: Any
    root: Any
    models: list[Any] = field(default_factory=list)

    @property
    def kernel(self) -> str | None:
        """The kind of attention now, such as ``"eager"``."""
        kernel: str | None = self.config._attn_implementation_internal
        return kernel

    def __str__(self) -> str:
        kind = f"`{type(self.models[0]).__name__}`"
        return f"{kind} at `{self.name}`" if self.name else kind


def find_parts(module: nn.Module) -> list[ModelPart]:
    """Find the Hugging Face models in a module.

    Args:
        module: A model, or what one is in: a wrapper of PEFT, a LightningModule.

    Returns:
        One part for each configuration, since sub-models can have their own.
    """
    parts: dict[int, ModelPart] = {}
    # For each module the innermost and the outermost Hugging Face model around it.
    around: dict[str, tuple[Any, Any]] = {}
    for name, inner in module.named_modules():
        model, root = around.get(name.rpartition(".")[0] if name else "", (None, None))
        if _is_model(inner):
            model, root = inner, root or inner
        around[name] = (model, root)
        config = getattr(inner, "config", None)
        if model is None or not hasattr(config, "_attn_implementation_internal"):
            continue
        part = parts.setdefault(id(config), ModelPart(name, config, root))
        if not any(model is other for other in part.models):
            part.models.append(model)
    return list(parts.values())


def _is_model(module: nn.Module) -> bool:
    # Where transformers was never imported there can be no instance of its classes.
    transformers = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def why_left_alone(part: ModelPart, parts: list[ModelPart], kernel: str) -> str | None:
    """Say what speaks against another kernel.

    Args:
        part: What would change.
        parts: All parts of the module.
        kernel: The new kernel.

    Returns:
        The reason, as a clause; ``None`` if there is none.
    """
    if part.kernel == kernel:
        return f"its attention is `{kernel}` already"
    if has_kernel(part, kernel):
        return f"its attention is `{part.kernel}`, not `eager`"
    same_root = [other.config for other in parts if other.root is part.root]
    if any(getattr(config, "output_attentions", False) for config in same_root):
        return "it returns attention weights (`output_attentions=True`), as only `eager` can"
    if getattr(part.config, "reorder_and_upcast_attn", False):  # GPT-2's
        return "it computes attention in float32 (`reorder_and_upcast_attn`), as only `eager` can"
    reasons = (_why_unsupported(model, kernel) for model in part.models)
    return next((reason for reason in reasons if reason is not None), None)


def has_kernel(part: ModelPart, kernel: str) -> bool:
    """Say whether a model needs no change for a kernel: any that is fused serves as ``"sdpa"``."""
    return part.kernel == kernel or (kernel == "sdpa" and part.kernel != "eager")


def _why_unsupported(model: Any, kernel: str) -> str | None:
    if not _can_change(model):
        return f"the attention of `{type(model).__name__}` cannot be changed"
    if not _supports(model, kernel):
        return f"`{type(model).__name__}` does not support `{kernel}`"
    return None


def _can_change(model: Any) -> bool:
    # Not in old versions of transformers, whose attention classes are chosen when a model is built.
    can_change = getattr(model, "_can_set_attn_implementation", None)
    return can_change is not None and bool(can_change())


def _supports(model: Any, kernel: str) -> bool:
    if kernel in ("sdpa", CHUNKED):
        return bool(model._supports_sdpa)
    if kernel == "flex_attention":
        return bool(model._supports_flex_attn)
    if kernel.startswith("flash_attention"):
        return bool(model._supports_flash_attn)
    return bool(getattr(model, "_supports_attention_backend", False))


def resolve(part: ModelPart, kernel: str) -> str:
    """Find the kernel that takes the place of what was asked for, as transformers does.

    Args:
        part: Of which all models support the kernel.
        kernel: What was asked for.

    Returns:
        The name to be set: another one for a kernel that comes from the hub.

    Raises:
        ValueError: If the machine does not have what it needs.
        ImportError: If a package is not installed.
    """
    if kernel == "sdpa":
        return kernel
    if kernel == CHUNKED:
        register()
        return kernel
    if _has_fake_parameters(part.root):
        # Flash and flex attention need their packages and a GPU, and a prediction has neither; like
        # them, sdpa's kernels keep no scores.
        return "sdpa" if _supports(part.root, "sdpa") else kernel
    resolved = {model._check_and_adjust_attn_implementation(kernel) for model in part.models}
    if len(resolved) > 1:
        raise ValueError(f"its parts would use different kernels, {sorted(resolved)}")
    name: str = resolved.pop()
    return name


def problems_of_flex(part: ModelPart, device: torch.device | None) -> list[Problem]:
    """Find what would end the first training step with flex attention.

    Args:
        part: Of which all models support it.
        device: Where it will be trained; ``None`` for where its parameters are.

    Returns:
        All problems.
    """
    other = '`attention="sdpa"`'
    problems = [
        Problem(
            '`attention="flex_attention"`',
            f"it has no dropout, and `{type(part.config).__name__}.{name}={rate}`",
            f"Build the model with `{name}=0.0`, or use {other}.",
        )
        for name, rate in _attention_dropouts(part)
    ]
    if not _has_fake_parameters(part.root) and _is_on_cpu(part.root, device):
        problems.append(
            Problem(
                '`attention="flex_attention"`',
                "torch has no backward pass of it on a CPU",
                f"Train on a GPU, or use {other}.",
            )
        )
    return problems


def scores_left_out(part: ModelPart, kernel: str, device: torch.device | None) -> str:
    """Say how much memory the scores take that eager attention keeps and a kernel does not.

    Args:
        part: Before it is changed.
        kernel: The new kernel.
        device: Where it will be trained; ``None`` for where its parameters are.

    Returns:
        As a clause; empty if the attention is not eager, or the configuration does not say it.
    """
    if part.kernel != "eager":
        return ""
    if kernel == "sdpa" and _attention_dropouts(part) and _is_on_cpu(part.root, device):
        return 'scores are kept, as by all of sdpa with dropout on a CPU; not by "chunked_sdpa"'
    names = ("num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    sizes: list[Any] = [getattr(part.config, name, None) for name in names]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return ""
    num_layers, num_heads, length = sizes
    saved = format_bytes(4 * num_layers * num_heads * length**2)
    return f"no scores: at least {saved} less for a sample of {length:,} tokens in float32"


# Encoders and decoders of the T5 family have one rate for all of their dropout.
def _attention_dropouts(part: ModelPart) -> list[tuple[str, float]]:
    config = vars(part.config)
    names = [name for name in config if "att" in name and "drop" in name]
    if not names and "dropout_rate" in config:
        names = ["dropout_rate"]
    rates = [(name, config[name]) for name in names]
    return [(name, rate) for name, rate in rates if isinstance(rate, float) and rate > 0]


def _is_on_cpu(module: nn.Module, device: torch.device | None) -> bool:
    devices = {p.device for p in module.parameters()} if device is None else {device}
    return any(found.type == "cpu" for found in devices)


def _has_fake_parameters(module: nn.Module) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor  # noqa: PLC0415 (private in torch)

    tensors: Iterator[torch.Tensor] = module.parameters()
    return any(isinstance(tensor, FakeTensor) for tensor in tensors)
