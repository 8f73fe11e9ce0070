"""Read and change the precision of a Trainer."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from lightning_memsave.errors import ConfigurationError

PRECISIONS = (
    "32-true",
    "64-true",
    "bf16-mixed",
    "16-mixed",
    "bf16-true",
    "16-true",
    "transformer-engine",
    "transformer-engine-float16",
)
_SHORT = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}

BF16_CAPABILITY = (8, 0)
"""Lowest compute capability with native bfloat16."""
EMULATED = "this GPU has no bfloat16 of its own and emulates it, which is slow"
"""Reason shown for GPUs without native bfloat16."""

# On the Trainer: the precision that this package set, so that a second fit may set another one.
_OURS = "_memsave_precision"


def full_name(precision: str | int) -> str:
    name = _SHORT.get(str(precision), str(precision))
    if name not in PRECISIONS or isinstance(precision, bool):
        raise ConfigurationError(
            f"`precision={precision!r}` is not a precision that Lightning supports. Use "
            f'"auto", `None` or one of {", ".join(PRECISIONS)}.'
        )
    return name


@dataclass(frozen=True, slots=True)
class PrecisionState:
    current: str
    is_ours: bool
    plugin: str | None
    is_frozen: bool
    has_own_mixed_precision: bool


def precision_state(trainer: Any) -> PrecisionState:
    flag = trainer._accelerator_connector._precision_plugin_flag
    return PrecisionState(
        current=str(trainer.precision),
        is_ours=vars(trainer).get(_OURS) == str(trainer.precision),
        plugin=None if flag is None else type(flag).__name__,
        is_frozen=getattr(trainer.strategy, "_config_initialized", False),
        has_own_mixed_precision=getattr(trainer.strategy, "mixed_precision", None) is not None,
    )


def set_precision(trainer: Any, precision: str) -> Callable[[], None]:
    """Change the precision of a Trainer as if it was passed to the constructor."""
    connector = trainer._accelerator_connector
    before, plugin_before = connector._precision_flag, trainer.strategy.precision_plugin
    step_before = trainer.global_step
    connector._precision_flag = precision
    try:
        plugin = connector._check_and_init_precision()
    except Exception:
        connector._precision_flag = before
        raise
    trainer.strategy.precision_plugin = connector.precision_plugin = plugin
    vars(trainer)[_OURS] = str(trainer.precision)

    def undo() -> None:
        if trainer.global_step != step_before or precision_state(trainer).is_frozen:
            return
        connector._precision_flag = before
        trainer.strategy.precision_plugin = connector.precision_plugin = plugin_before

    return undo


# Families whose activations exceed 65504, float16's largest value: T5 and mT5 in their feed-forward
# parts, Gemma in its residual stream.
_OVERFLOWING = ("t5", "mt5", "umt5", "longt5", "switch_transformers", "gemma", "paligemma")


def overflows_in_float16(module: nn.Module) -> str:
    if why := overflows_certainly(module):
        return why
    for part in module.modules():
        config = getattr(part, "config", None)
        is_model = bool(getattr(config, "model_type", ""))
        if is_model and getattr(config, "dtype", None) in (torch.bfloat16, "bfloat16"):
            return f"the config of `{type(part).__name__}` says that it was made for bfloat16"
    return ""


def overflows_certainly(module: nn.Module) -> str:
    """Return why activations overflow in float16, only for families that are known for it."""
    for part in module.modules():
        family = str(getattr(getattr(part, "config", None), "model_type", ""))
        if family.startswith(_OVERFLOWING):
            return f"activations of `{type(part).__name__}` overflow in float16"
    return ""


def half_precision_on_cpu(package: ModuleType) -> Any:
    plugins = importlib.import_module(f"{package.__name__}.plugins.precision")
    return plugins.MixedPrecision("16-mixed", "cpu")


def gradient_scaler(trainer: Any) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)
