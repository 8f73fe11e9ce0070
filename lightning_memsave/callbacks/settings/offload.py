"""Offloading to the host, as a setting."""

import dataclasses
from typing import Any

from torch import nn

from lightning_memsave.callbacks.settings.modules import ModuleSetting
from lightning_memsave.callbacks.settings.values import (
    Arguments,
    as_given,
    exactness_limit,
    is_asked,
)
from lightning_memsave.core.memory import is_host
from lightning_memsave.core.technique import Exactness, Handle, Row, Technique
from lightning_memsave.errors import ConfigurationError, IncompatibleError, Problem
from lightning_memsave.measure.storages import tensors_in
from lightning_memsave.techniques.offloading.hooks_of_users import HOOKS, compute_on_device
from lightning_memsave.techniques.offloading.host_budget import (
    SMALLER_FORM,
    host_bytes_per_parameter,
)
from lightning_memsave.techniques.offloading.technique import (
    Offloading,
    OffloadingHandle,
    compiled_problem,
    trains_offloaded,
)
from lightning_memsave.trainer.hooks import has_foreign, owners_of
from lightning_memsave.trainer.trainer import averages_weights, is_compiled_whole

# They run between a step and the next forward pass, where they may read or change weights.
_BETWEEN_STEPS = (
    "optimizer_step",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "on_train_batch_end",
    "on_train_batch_start",
)


class OffloadSetting(ModuleSetting):
    """What waits on the host, and when it must be up to date."""

    name = Offloading.argument
    technique: Offloading | None
    _handle: OffloadingHandle | None
    _why_no_tables = ""
    why_form = ""
    """Why what is on the host is in another form than the fastest."""
    _limit = Exactness.APPROXIMATE

    @classmethod
    def read(cls, arguments: Arguments) -> "OffloadSetting":
        """Make the setting that the arguments describe."""
        name, own = Offloading.argument, is_asked(arguments, Offloading.argument)
        technique, budget = Offloading.from_value(arguments[name]), arguments["host_budget"]
        if budget is not None:
            if technique is None or isinstance(arguments[name], Offloading):
                raise ConfigurationError(
                    f"`host_budget={budget!r}` is not used with {as_given(arguments, name)}. Use "
                    f'`{name}="optimizer"`, or pass it to `Offloading`.'
                )
            technique = dataclasses.replace(technique, host_budget=budget)
        if technique is None:
            return cls(name, None, "None", own)
        if technique.blocks is None:
            technique = dataclasses.replace(technique, blocks=arguments["blocks"])
        if not isinstance(arguments[name], Offloading):
            in_backward = bool(arguments["optimizer_in_backward"])
            is_half = arguments["low_precision_weights"] is not None
            technique = dataclasses.replace(
                technique,
                bytes_per_parameter=host_bytes_per_parameter(arguments),
                bytes_per_gradient=(2 if is_half else 4) * in_backward,
            )
        setting = cls(name, technique, repr(technique.what), own)
        setting._limit = exactness_limit(arguments)
        return setting

    def check(self, trainer: Any, pl_module: Any) -> list[Problem]:
        """Find conflicts with the Trainer and the module."""
        if self.technique is None:
            return []
        problems = super().check(trainer, pl_module)
        if not self._limit.allows(self._exactness_on(trainer, self.technique)):
            why = "a CPU rounds updates in another way than a GPU: it is rounding, which"
            limit = f"`exactness={self._limit.value!r}` does not allow"
            fix = f'Use `exactness="rounding"`, `{self.name}="activations"` or `None`.'
            problems.append(Problem(self.written, f"{why} {limit}", fix))
        if is_compiled_whole(pl_module):
            problems.append(compiled_problem(type(pl_module).__name__))
        precision = str(trainer.precision)
        if precision.endswith("-true") and precision != "32-true":
            problems.append(
                Problem(
                    self.written,
                    f"`precision={precision!r}` converts the weights, which wait on the host in "
                    "their own type",
                    'Use `precision="bf16-mixed"` with `low_precision_weights="master"`, or set '
                    f"`{self.name}=None`.",
                )
            )
        return problems

    def host_bytes(self, pl_module: Any) -> tuple[int, float]:
        """Reckon the bytes that the host needs for weights, and those that it has."""
        assert self.technique is not None, "asked where it is on"
        return self.technique.host_bytes(pl_module)

    # A preset offloads the rest where a model computes with a whole table.
    def _use(self, technique: Technique[nn.Module], pl_module: nn.Module) -> Handle[nn.Module]:
        assert isinstance(technique, Offloading), "`read` has made it"
        self._why_no_tables = ""
        without = _without_tables(technique)
        try:
            return super()._use(technique, pl_module)
        except IncompatibleError as error:
            if self.is_asked or without is None or without == technique:
                raise
            problem = error.problems[0]
            self._why_no_tables = f"{problem.what}: {problem.why}"
        return super()._use(without, pl_module)

    def start(self, trainer: Any, pl_module: Any) -> None:
        """Let the optimizers update on the host, beside the next step where nobody looks."""
        super().start(trainer, pl_module)
        residence = None if self._handle is None else self._handle.residence
        if self.technique is None or self._handle is None or residence is None:
            return
        watchers = [o for hook in _BETWEEN_STEPS for o in owners_of(trainer, pl_module, hook)]
        watchers += [type(c).__name__ for c in trainer.callbacks if averages_weights(c)]
        if not pl_module.automatic_optimization:
            watchers.append(f"{type(pl_module).__name__}.training_step")
        residence.is_watched = bool(watchers)
        if trainer.strategy.root_device.type == "cuda":
            self._undo += [
                compute_on_device(one, hook)
                for hook in HOOKS
                for one in (pl_module, *trainer.callbacks)
                if has_foreign(one, hook)
            ]
        details = [*self._handle.changes, *self._handle.skipped]
        if self.why_form:
            details.append(f"{SMALLER_FORM}{self.why_form}")
        if self._why_no_tables:
            details.append(f"embeddings are weights as all others: {self._why_no_tables}")
        # With tables alone on the host, others may train what is on the device.
        trained = [o for o in trainer.optimizers if trains_offloaded(o)]
        for optimizer in trained or trainer.optimizers:
            handle = self.technique.update_in_background(optimizer)
            self._undo.append(handle.undo)
        names = ", ".join(f"`{name}`" for name in watchers)
        details.append(
            f"updates end before {names}: it may read weights"
            if watchers
            else "updates run beside the next step"
        )
        exactness = self._exactness_on(trainer, self.technique).value
        self.rows = [Row(self.name, self.value, "on", tuple(details), exactness)]

    @staticmethod
    def _exactness_on(trainer: Any, technique: Offloading) -> Exactness:
        is_moved = technique.has_weights and trainer.strategy.root_device.type == "cuda"
        return Exactness.ROUNDING if is_moved else technique.exactness

    def held_bytes(self, trainer: Any) -> int:
        """Count bytes in host memory, optimizer state with it; 0 without offloading."""
        handle = self._handle
        if handle is None:
            return 0
        states = tensors_in([optimizer.state for optimizer in trainer.optimizers])
        found = [tensor.untyped_storage() for tensor in states]
        storages = {storage.data_ptr(): storage for storage in found}
        of_states = sum(storage.nbytes() for storage in storages.values() if is_host(storage))
        residence = handle.residence
        of_gradients = 0 if residence is None else residence.gradient_bytes
        return of_states + of_gradients + handle.memory.peak_bytes

    def wait(self) -> None:
        """Let all weights be on the host, up to date."""
        if self._handle is not None:
            self._handle.wait()

    def undo(self) -> None:
        """Restore the module on the host, where Lightning moves it; a second call does nothing."""
        handle = self._handle
        if handle is not None and handle.residence is not None:
            handle.residence.stay_on_host()
        super().undo()


def _without_tables(technique: Offloading) -> Offloading | None:
    """Leave embeddings on the device; ``None`` if nothing else is offloaded."""
    kinds = [kind for kind in str(technique.what).split("+") if kind != "embeddings"]
    return dataclasses.replace(technique, what="+".join(kinds)) if kinds else None
