"""`precision` of `MemSaveCallback`."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lightning_memsave.callbacks.settings.setting import (
    Arguments,
    Setting,
    as_given,
    is_asked,
    why_beyond,
)
from lightning_memsave.core.technique import Exactness
from lightning_memsave.trainer.precision import (
    BF16_CAPABILITY,
    EMULATED,
    full_name,
    overflows_in_float16,
    precision_state,
    set_precision,
)
from lightning_memsave.trainer.trainer import is_strategy

_NOT_FLOAT16 = (
    "kept: this GPU has no native bfloat16, and in float16 the activations of some models overflow "
    '(T5, mT5, Gemma); pass `precision="16-mixed"` where they do not'
)
_WAY_OUT = '`precision="16-mixed"` is fast on it, for models that do not overflow in float16'


class PrecisionSetting(Setting):
    """The Trainer's precision, as if its constructor had been given it.

    Lightning's own connector builds the plugin, so the gradient scaler is the one that it picks.
    """

    name = "precision"
    is_for_evaluation = True
    runs_in_stages = True

    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments)
        weights = "low_precision_weights"
        self.is_of_weights = arguments[weights] is not None
        wanted, self._why = arguments[self.name], ""
        if wanted == "auto" and self.is_of_weights:
            self._why = f"as `{weights}={arguments[weights]!r}` computes in it"
            wanted = "bf16-mixed"  # or layers would get weights and inputs of different types
        if wanted not in (None, "auto"):
            wanted = full_name(wanted)
        # "32-true" is what Lightning does by itself; it cannot be told from no choice.
        exactness = Exactness.BITWISE if wanted == "32-true" else Exactness.APPROXIMATE
        if wanted is not None:
            self.off_reason = why_beyond(arguments, self.name, exactness)
            self.is_asked |= self.is_of_weights and is_asked(arguments, weights)
        self.precision = None if self.off_reason else wanted
        self.value, self.is_on = repr(self.precision), self.precision is not None

    @property
    def written(self) -> str:
        return as_given({**self.arguments, self.name: self.precision}, self.name)

    def reasons(self, trainer: Any, pl_module: Any) -> Iterator[tuple[str, str]]:
        """Find what conflicts with the precision; ``"auto"`` chooses one that goes."""
        wanted = self.precision
        if wanted is None or wanted == "auto":
            return
        yield from _reasons_against(trainer, pl_module, wanted, self.is_of_weights)
        if not self.is_asked and wanted != str(trainer.precision) and _emulates(trainer, wanted):
            why = f"{EMULATED}; {overflows_in_float16(pl_module) or _WAY_OUT}"
            yield why, f"Set `precision={wanted!r}`."

    def savings(self, pl_module: Any) -> str:
        return "it would halve the activations of matrix products"

    def apply(self, trainer: Any, pl_module: Any) -> None:
        current = precision_state(trainer).current
        wanted, reason = self.precision, self._why
        if self.precision == "auto":
            wanted, reason = _choose(trainer, pl_module)
        if wanted is None:
            self.value = current
            self.show("unchanged", reason)
            return
        if wanted != current:
            self._undo.append(set_precision(trainer, wanted))
        got = precision_state(trainer).current
        details = [reason]
        if _emulates(trainer, wanted):
            details.append(EMULATED)
        if got in ("16-mixed", "16-true") and (overflow := overflows_in_float16(pl_module)):
            details.append(f"{overflow}: watch for a loss that is not finite")
        if got != wanted:
            details.append(f"Lightning replaced {wanted} on this device")
        exactness = "" if got in ("32-true", "64-true") else "approximate"
        self.value = got
        self.show("on", *details, exactness=exactness)


def _reasons_against(
    trainer: Any, pl_module: nn.Module, wanted: str, is_of_weights: bool = False
) -> Iterator[tuple[str, str]]:
    state = precision_state(trainer)
    # What the Trainer computes in is as good as ours, if it is the same.
    must_go_too = is_of_weights and state.current != wanted
    both = "`precision=None` and `low_precision_weights=None`"
    leave = f"or set {both if must_go_too else '`precision=None`'} here to leave it to the Trainer."
    if state.plugin is not None:
        why = f"the Trainer was given the plugin `{state.plugin}`, which decides the precision"
        yield why, f"Remove that plugin, {leave}"
    elif state.current not in ("32-true", wanted) and not state.is_ours:
        why = f"the Trainer was given `precision={state.current!r}`"
        yield why, f"Remove one of the two, {leave}"
    if state.has_own_mixed_precision:
        why = "`FSDPStrategy(mixed_precision=...)` wins over it, so that it would hold in part"
        yield why, f"Remove `mixed_precision` from the strategy, {leave}"
    if is_strategy(trainer, "ModelParallelStrategy") and wanted == "16-mixed":
        why = "`ModelParallelStrategy` has no gradient scaler for it"
        yield why, 'Use `precision="bf16-mixed"`.'
    if is_strategy(trainer, "ModelParallelStrategy") and wanted == "64-true":
        yield "`ModelParallelStrategy` does not support it", 'Use `precision="32-true"`.'
    if state.is_frozen and wanted != state.current:
        why = f"DeepSpeed was started with {state.current} and keeps it"
        yield why, "Make a new Trainer with a new strategy."
    on_xla = is_strategy(trainer, "XLAStrategy", "SingleDeviceXLAStrategy")
    if on_xla and wanted not in ("32-true", "16-true", "bf16-true"):
        yield "XLA devices run in one precision", 'Use `precision="bf16-true"` or "32-true".'
    # Under these precisions Lightning leaves parameters as they are, so ones that are half already
    # stay half: rounding is lost for good, and fp16 gradients cannot be unscaled.
    keeps = wanted in ("32-true", "16-mixed", "bf16-mixed")
    trained = {p.dtype for p in pl_module.parameters() if p.requires_grad}
    for dtype in [half for half in (torch.bfloat16, torch.float16) if keeps and half in trained]:
        use = "set `low_precision_weights=None` and" if is_of_weights else "use"
        other = "16-true" if dtype is torch.float16 else "bf16-true"
        load = "Load the model in float32 (Hugging Face: `dtype=torch.float32`)"
        why = f"trainable parameters are {dtype} already and would stay so"
        yield why, f'{load}, or {use} `precision="{other}"`.'


def _choose(trainer: Any, pl_module: nn.Module) -> tuple[str | None, str]:
    state = precision_state(trainer)
    device = trainer.strategy.root_device
    if state.plugin is not None:
        return None, f"kept: the plugin `{state.plugin}` decides it"
    if state.current != "32-true" and not state.is_ours:
        return None, "kept: the Trainer was given it"
    if device.type != "cuda":
        return None, f"kept on {device.type}; set `precision=` to change it"
    wanted = "bf16-mixed"
    if _emulates(trainer, wanted):
        overflow = overflows_in_float16(pl_module)
        none = "kept: this GPU has no native bfloat16"
        return None, f"{none}, and {overflow}" if overflow else _NOT_FLOAT16
    for why, _ in _reasons_against(trainer, pl_module, wanted):
        return None, f"kept: `precision={wanted!r}` is not possible, as {why}"
    return wanted, ""


def _emulates(trainer: Any, precision: str) -> bool:
    device = trainer.strategy.root_device
    if device.type != "cuda" or not precision.startswith("bf16"):
        return False
    return torch.cuda.get_device_capability(device) < BF16_CAPABILITY
