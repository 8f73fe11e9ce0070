"""Weights in bfloat16, as a setting."""

import contextlib
import functools
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_memsave.callbacks.settings import optimizer as optimizers
from lightning_memsave.callbacks.settings.modules import ModuleSetting
from lightning_memsave.callbacks.settings.setting import saves
from lightning_memsave.callbacks.settings.values import Arguments, as_given, is_asked, why_beyond
from lightning_memsave.core.technique import Handle, Row, Technique
from lightning_memsave.errors import ConfigurationError, IncompatibleError, Problem
from lightning_memsave.techniques.low_precision_weights.fused_steps import (
    describe_missing_kernel,
)
from lightning_memsave.techniques.low_precision_weights.technique import (
    ON_HOST,
    LowPrecisionWeights,
    describe_updates,
    rounds_any,
)
from lightning_memsave.techniques.residences import residence_of
from lightning_memsave.trainer.precision import full_name
from lightning_memsave.trainer.trainer import (
    averages_weights,
    builds_model_late,
    prunes_weights,
)
from lightning_memsave.trainer.training_loop import around_backward

_BF16 = "bf16-mixed"
_ALWAYS_SUMMED = (
    "gradients summed in float32, for 4 bytes each: with `automatic_optimization=False` only the "
    "module knows which of its backward passes are parts of a step"
)


class LowPrecisionWeightsSetting(ModuleSetting):
    """Weights are kept in bfloat16, and the optimizer rounds its updates."""

    name = LowPrecisionWeights.argument
    technique: LowPrecisionWeights | None

    def __init__(
        self,
        technique: LowPrecisionWeights | None,
        value: str,
        *,
        sets_precision: bool,
        written: str = "",
        is_asked: bool = True,
        off_reason: str = "",
    ) -> None:
        name = LowPrecisionWeights.name
        super().__init__(name, technique, value, is_asked, off_reason)
        self.sets_precision = sets_precision
        self.written = written or self.written
        self._optimizers: Any = None
        self._sums_in_fp32 = False

    @classmethod
    def read(cls, arguments: Arguments) -> "LowPrecisionWeightsSetting":
        """Make the setting that the arguments describe."""
        name, wanted = "low_precision_weights", arguments["low_precision_weights"]
        technique = LowPrecisionWeights.from_value(wanted)
        own = is_asked(arguments, name)

        def off(why: str = "") -> LowPrecisionWeightsSetting:
            return cls(None, "None", sets_precision=False, is_asked=own, off_reason=why)

        if technique is None:
            return off()
        if why := why_beyond(arguments, name, technique.exactness):
            return off(why)
        precision = arguments["precision"]
        brings = precision == "auto" or (
            precision is not None and full_name(precision) == "bf16-mixed"
        )
        what = as_given(arguments, name)
        if not brings and precision is not None and not own:
            return off(f"it computes in bf16-mixed, and `precision={precision!r}` was given")
        if not brings and precision is not None:
            raise ConfigurationError(
                f"{what} computes in bfloat16, which conflicts with "
                f"`precision={precision!r}`. Use `precision={_BF16!r}`, or set `{name}=None`."
            )
        return cls(
            technique, repr(technique.rounding), sets_precision=brings, written=what, is_asked=own
        )

    def apply(self, trainer: Any, pl_module: Any) -> None:
        """Convert the weights, unless they are made later, and wrap ``configure_optimizers``."""
        super().apply(trainer, pl_module)
        if self.technique is None or self._is_from_master:
            return
        updates = _RoundedUpdates(self.technique)
        yields = not self.is_asked
        self._optimizers, undo = optimizers.enable(pl_module, updates, yields)
        context = functools.partial(self._around_backward, pl_module)
        self._undo += [undo, around_backward(trainer, context)]

    def check(self, trainer: Any, pl_module: Any) -> list[Problem]:
        """Find conflicts with the Trainer, its callbacks, and the module as far as it is built."""
        if self.technique is None:
            return []
        problems = super().check(trainer, pl_module) + self._precision_problems(trainer)
        late = builds_model_late(pl_module)
        residence = residence_of(pl_module)
        are_here = residence is None or not any(part.params for part in residence.parts)
        if not (self.is_asked or late) and self._is_from_master and are_here:
            why = "no weights are on the host"  # what a preset offloads may have stayed off
            problems.append(Problem(self.written, why, f"Set `{self.name}` by name."))
        # Weights that are made later are converted after every callback's `setup`.
        averaging = [] if late else _averaging_after(trainer)
        problems += [
            Problem(
                f"{self.written} beside `{type(callback).__name__}`",
                f"`{type(callback).__name__}` comes after `MemSaveCallback` and would copy the "
                "weights in bfloat16: the average would lose small updates",
                f"Put `{type(callback).__name__}` before `MemSaveCallback` in "
                f"`Trainer(callbacks=[...])`, or set `{self.name}=None`.",
            )
            for callback in averaging
        ]
        problems += [
            Problem(
                f"{self.written} beside `{type(callback).__name__}`",
                f"`{type(callback).__name__}` puts float32 tensors in place of weights whose "
                "gradients are bfloat16",
                f"Remove that callback, or set `{self.name}=None`.",
            )
            for callback in trainer.callbacks
            if prunes_weights(callback)
        ]
        return problems

    def start(self, trainer: Any, pl_module: Any) -> None:
        """Convert weights that were made after ``setup``, and say what becomes of all."""
        if self.technique is None:
            return
        if self._is_from_master:
            super().start(trainer, pl_module)
            return
        if self._optimizers.problems:
            self.yield_to(self._optimizers.problems, trainer, pl_module)
            return
        if self._handle is None or not self._handle.changes:
            self._use(self.technique, pl_module)
        handle = self._handle
        assert handle is not None, "it was made above, or in `apply`"
        optimizers = [one.target for one in self._optimizers.handles]
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
            exactness = self.technique.exactness.value
            self.rows = [Row(self.name, self.value, "on", tuple(details), exactness)]
            return
        if self.is_asked:
            problem = Problem(self.written, "; ".join(handle.skipped), self._advice())
            raise IncompatibleError("MemSaveCallback", [problem])
        self.rows = [Row(self.name, self.value, "off", tuple(details))]

    def undo(self) -> None:
        """Restore module and optimizers; a second call does nothing."""
        self._optimizers = None
        self._sums_in_fp32 = False
        super().undo()

    def savings(self, pl_module: Any) -> str:
        """Say how much smaller the weights would be."""
        return saves(_saved_bytes(pl_module), "weights")

    # Optimizers may round bfloat16 weights even where there is nothing to convert.
    def _is_served(self, pl_module: Any) -> bool:
        return True

    def _use(self, technique: Technique[nn.Module], pl_module: Any) -> Handle[nn.Module]:
        handle = super()._use(technique, pl_module)
        if not pl_module.automatic_optimization and not self._is_from_master:
            self._sum_in_fp32(pl_module)
        return handle

    # The host updates in float32, and adds gradients up in it.
    @property
    def _is_from_master(self) -> bool:
        return self.technique is not None and self.technique.rounding in ON_HOST

    # On from the first batch in parts to the end of the fit: others will come.
    def _around_backward(self, pl_module: Any, is_last: bool) -> AbstractContextManager[None]:
        if not is_last:
            self._sum_in_fp32(pl_module)
        return contextlib.nullcontext()

    def _sum_in_fp32(self, pl_module: Any) -> None:
        if not self._sums_in_fp32 and self.technique is not None:
            self._sums_in_fp32 = True
            self._undo.append(self.technique.sum_gradients_in_fp32(pl_module).undo)

    def _precision_problems(self, trainer: Any) -> list[Problem]:
        what, problems = self.written, []
        # Where it is asked for, its precision is as well, and is refused if it cannot be set.
        is_set = self.sets_precision and self.is_asked
        if not is_set and str(trainer.precision) != "bf16-mixed":
            problems.append(
                Problem(
                    what,
                    f"the Trainer computes in {trainer.precision}, which does not take weights of "
                    "several types",
                    f'Use `precision="bf16-mixed"`, or set `{self.name}=None`.',
                )
            )
        return problems


def _saved_bytes(module: nn.Module) -> int:
    trained = [p for p in module.parameters() if p.dtype is torch.float32 and not is_lazy(p)]
    return 2 * sum(p.numel() for p in trained)


def _averaging_after(trainer: Any) -> list[Any]:
    """Return the callbacks that copy the module in a ``setup`` that comes after ours."""
    found: list[Any] = []
    for callback in trainer.callbacks:
        if any(cls.__name__ == "MemSaveCallback" for cls in type(callback).__mro__):
            found = []
        elif averages_weights(callback):
            found.append(callback)
    return found


@dataclass(frozen=True)
class _RoundedUpdates(Technique[Optimizer]):
    """The part of `LowPrecisionWeights` that is about optimizers."""

    name: ClassVar[str] = LowPrecisionWeights.name
    exactness = LowPrecisionWeights.exactness
    source = LowPrecisionWeights.source

    technique: LowPrecisionWeights

    def check(self, target: Optimizer) -> list[Problem]:
        """Find nothing: what can be known is known before there are optimizers."""
        return []

    def _apply(self, target: Optimizer) -> Handle[Optimizer]:
        return self.technique.round_updates(target)
