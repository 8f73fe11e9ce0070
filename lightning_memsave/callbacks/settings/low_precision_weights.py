"""`low_precision_weights` of `MemSaveCallback`."""

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_memsave.callbacks.settings.setting import (
    Arguments,
    ModuleSetting,
    OptimizerTechniqueSetting,
    as_given,
    saves,
)
from lightning_memsave.core.technique import Handle, Technique
from lightning_memsave.errors import ConfigurationError, Problem
from lightning_memsave.techniques.low_precision_weights.fused_steps import describe_missing_kernel
from lightning_memsave.techniques.low_precision_weights.technique import (
    ON_HOST,
    LowPrecisionWeights,
    describe_updates,
    rounds_any,
)
from lightning_memsave.techniques.residences import residence_of
from lightning_memsave.trainer.precision import full_name
from lightning_memsave.trainer.trainer import averages_weights, builds_model_late, prunes_weights
from lightning_memsave.trainer.training_loop import around_backward

_BF16 = "bf16-mixed"
_ALWAYS_SUMMED = (
    "gradients summed in float32, for 4 bytes each: with `automatic_optimization=False` only the "
    "module knows which of its backward passes are parts of a step"
)


class LowPrecisionWeightsSetting(ModuleSetting, OptimizerTechniqueSetting):
    kind = LowPrecisionWeights
    shown = "rounding"
    technique: LowPrecisionWeights
    _sums_in_fp32 = False

    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments)
        precision = arguments["precision"]
        self.sets_precision = precision == "auto" or (
            precision is not None and full_name(precision) == _BF16
        )
        if not self.is_on or precision is None or self.sets_precision:
            return
        if self.is_asked:
            raise ConfigurationError(
                f"{self.written} computes in bfloat16, which conflicts with "
                f"`precision={precision!r}`. Use `precision={_BF16!r}`, or set `{self.name}=None`."
            )
        self.off_reason = f"it computes in bf16-mixed, and `precision={precision!r}` was given"
        self.is_on, self.value = False, "None"

    @property
    def written(self) -> str:
        return as_given(self.arguments, self.name)

    def apply(self, trainer: Any, pl_module: Any) -> None:
        super().apply(trainer, pl_module)
        if self._is_from_master:
            return
        self.enable(pl_module, self.technique, "round_updates")
        context = functools.partial(self._around_backward, pl_module)
        self._undo.append(around_backward(trainer, context))

    def conflicts(self, trainer: Any, pl_module: Any) -> Iterator[Problem]:
        yield from super().conflicts(trainer, pl_module)
        for beside, why, fix in self._reasons_against(trainer, pl_module):
            yield Problem(f"{self.written}{beside}", why, fix)

    def _reasons_against(self, trainer: Any, pl_module: Any) -> Iterator[tuple[str, str, str]]:
        # Where it is asked for, its precision is as well, and is refused if it cannot be set.
        is_set = self.sets_precision and self.is_asked
        off = f"or set `{self.name}=None`."
        if not is_set and str(trainer.precision) != _BF16:
            why = f"the Trainer computes in {trainer.precision}, which does not take weights of"
            yield "", f"{why} several types", f'Use `precision="{_BF16}"`, {off}'
        late = builds_model_late(pl_module)
        residence = residence_of(pl_module)
        are_here = residence is None or not any(part.params for part in residence.parts)
        if not (self.is_asked or late) and self._is_from_master and are_here:
            # What a preset offloads may have stayed off.
            yield "", "no weights are on the host", f"Set `{self.name}` by name."
        # Weights that are made later are converted after every callback's `setup`.
        for name in () if late else _averaging_after(trainer):
            yield (
                f" beside `{name}`",
                f"`{name}` comes after `MemSaveCallback` and would copy the weights in bfloat16: "
                "the average would lose small updates",
                f"Put `{name}` before `MemSaveCallback` in `Trainer(callbacks=[...])`, {off}",
            )
        for name in [type(one).__name__ for one in trainer.callbacks if prunes_weights(one)]:
            yield (
                f" beside `{name}`",
                f"`{name}` puts float32 tensors in place of weights whose gradients are bfloat16",
                f"Remove that callback, {off}",
            )

    def start(self, trainer: Any, pl_module: Any) -> None:
        """Convert weights that were made after ``setup``, and say what becomes of all."""
        if self._is_from_master:
            super().start(trainer, pl_module)
            return
        if self._state is not None and self._state.problems:
            self.yield_to(self._state.problems, trainer, pl_module)
            return
        if self._handle is None or not self._handle.changes:
            self.use(self.technique, pl_module)
        handle = self._handle
        assert handle is not None, "it was made above, or in `apply`"
        optimizers = [one.target for one in self.handles]
        details = [
            *handle.changes,
            *handle.skipped,
            # Only now: layers that are made late are float32 when optimizers are configured.
            *(describe_updates(one, self.technique.rounding) for one in optimizers),
        ]
        device = trainer.strategy.root_device
        if device.type == "cuda":
            missing = [describe_missing_kernel(one, device) for one in optimizers]
            details += filter(None, dict.fromkeys(missing))
        if self._sums_in_fp32:
            details.append(_ALWAYS_SUMMED)
        if handle.changes or any(map(rounds_any, optimizers)):
            self.show("on", *details, exactness=self.technique.exactness.value)
            return
        if self.is_asked:
            self.refuse(handle.skipped)
        self.show("off", *details)

    def undo(self) -> None:
        self._sums_in_fp32 = False
        super().undo()

    def savings(self, pl_module: Any) -> str:
        params = [p for p in pl_module.parameters() if p.dtype is torch.float32 and not is_lazy(p)]
        return saves(2 * sum(p.numel() for p in params), "weights")

    def use(self, technique: Technique[nn.Module], pl_module: Any) -> Handle[nn.Module]:
        handle = super().use(technique, pl_module)
        if not pl_module.automatic_optimization and not self._is_from_master:
            self._sum_in_fp32(pl_module)
        return handle

    # The host updates in float32, and adds gradients up in it.
    @property
    def _is_from_master(self) -> bool:
        return self.technique.rounding in ON_HOST

    # On from the first batch in parts to the end of the fit: others will come.
    def _around_backward(self, pl_module: Any, is_last: bool) -> AbstractContextManager[None]:
        if not is_last:
            self._sum_in_fp32(pl_module)
        return contextlib.nullcontext()

    def _sum_in_fp32(self, pl_module: Any) -> None:
        if not self._sums_in_fp32:
            self._sums_in_fp32 = True
            self._undo.append(self.technique.sum_gradients_in_fp32(pl_module).undo)


def _averaging_after(trainer: Any) -> list[str]:
    """Name the callbacks that copy the module in a ``setup`` that comes after ours."""
    found: list[str] = []
    for callback in trainer.callbacks:
        if any(cls.__name__ == "MemSaveCallback" for cls in type(callback).__mro__):
            found = []
        elif averages_weights(callback):
            found.append(type(callback).__name__)
    return found
