"""`optimizer` of `MemSaveCallback`: state in 8 bits, also that of checkpoints; or another one."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_memsave.callbacks.settings import setting as _setting
from lightning_memsave.callbacks.settings.setting import (
    OptimizerTechniqueSetting,
    saves,
    trained_parameters,
)
from lightning_memsave.core.patching import previous_method
from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.techniques.low_bit_optimizer.state import convert_state_dict
from lightning_memsave.techniques.low_bit_optimizer.technique import LowBitOptimizer
from lightning_memsave.techniques.named_optimizer.technique import NamedOptimizer
from lightning_memsave.techniques.offloading.host_updates import trains_offloaded
from lightning_memsave.techniques.optimizer_kinds import is_low_bit
from lightning_memsave.trainer.trainer import convert_loaded_optimizer_states, unfreezes_later

_SLOW_ON_CPU = "its steps are slower on a CPU; `optimizer=None` leaves it out"


class OptimizerSetting(OptimizerTechniqueSetting):
    """State in 8 bits, or another optimizer.

    Checkpoints whose optimizer state has another format are converted when they are loaded, with
    and without a technique.
    """

    kind = LowBitOptimizer
    runs_in_stages = True
    shown = "optimizer"
    technique: LowBitOptimizer | NamedOptimizer

    def read(self) -> LowBitOptimizer | NamedOptimizer | None:
        named = NamedOptimizer.from_value(self.arguments[self.name])
        if named is None:
            return super().read()  # type: ignore[no-any-return]
        blocks = self.arguments["blocks"] if named.blocks is None else named.blocks
        return dataclasses.replace(named, blocks=blocks)

    def apply(self, trainer: Any, pl_module: Any) -> None:
        self._convert_loaded_states(trainer)
        technique = self.technique
        saves_all = self.arguments["preset"] == "single_gpu"
        # Those that are unfrozen later count, too.
        is_left = not (self.is_asked or saves_all or unfreezes_later(trainer))
        if is_left and isinstance(technique, LowBitOptimizer):
            least = _setting.SMALLEST_SAVING_BYTES
            technique = dataclasses.replace(technique, min_saved_bytes=least)
        self.enable(pl_module, technique)

    def start(self, trainer: Any, pl_module: Any) -> None:
        super().start(trainer, pl_module)
        is_on = any(handle.changes for handle in self.handles)
        modules = [type(handle.target).__module__ for handle in self.handles]
        is_served = any(module.startswith("bitsandbytes.") for module in modules)
        if self.is_asked and self.handles and not is_on and not is_served:
            why = "; ".join(reason for handle in self.handles for reason in handle.skipped)
            fix = "Use another optimizer, or set `optimizer=None`."
            raise IncompatibleError("MemSaveCallback", [Problem(self.written, why, fix)])
        if is_on and not self.is_asked and trainer.strategy.root_device.type == "cpu":
            self.add_details(_SLOW_ON_CPU)

    def stay_off(self, trainer: Any, pl_module: Any) -> None:
        super().stay_off(trainer, pl_module)
        self._convert_loaded_states(trainer)

    def yield_to(self, problems: Sequence[Problem], trainer: Any, pl_module: Any) -> None:
        super().yield_to(problems, trainer, pl_module)
        self._convert_loaded_states(trainer)

    def savings(self, pl_module: Any) -> str:
        least = LowBitOptimizer.min_8bit_size
        sizes = [p.numel() for p in trained_parameters(pl_module) if p.numel() >= least]
        return saves(6 * sum(sizes), "optimizer state")

    def _convert_loaded_states(self, trainer: Any) -> None:
        self._undo.append(convert_loaded_optimizer_states(trainer, load_optimizer_state_dict))


def load_optimizer_state_dict(self: Any, checkpoint: Mapping[str, Any]) -> None:
    """Load optimizer states as the strategy does, after translating them between 32 and 8 bits."""
    states = checkpoint.get("optimizer_states", [])
    translated = [
        convert_state_dict(state, optimizer)
        for state, optimizer in zip(states, self.optimizers, strict=False)
    ]
    paged = [
        (optimizer, state)
        for state, optimizer in zip(translated, self.optimizers, strict=False)
        if (is_low_bit(optimizer) and optimizer.is_paged) or trains_offloaded(optimizer)
    ]
    # Lightning moves what it has loaded to the GPU. State that may not fit there comes afterwards.
    shown = [
        {**state, "state": {}} if any(state is one for _, one in paged) else state
        for state in translated
    ]
    if any(new is not old for new, old in zip(shown, states, strict=False)):
        checkpoint = {**checkpoint, "optimizer_states": shown}
    previous_method(self, "load_optimizer_state_dict")(checkpoint)
    for optimizer, state in paged:
        optimizer.load_state_dict(state)
