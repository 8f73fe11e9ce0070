"""Techniques that change what the module configures as optimizers, as settings."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_memsave import host
from lightning_memsave.callbacks import _configure_optimizers as configure_optimizers
from lightning_memsave.callbacks import _settings
from lightning_memsave.callbacks._settings import Setting, off_rows, row_of, saves
from lightning_memsave.core.technique import Row, Technique
from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.techniques._optimizers.bitsandbytes_optimizers import find_obstacle
from lightning_memsave.techniques.low_bit_optimizer import LowBitOptimizer

_SLOW_ON_CPU = "its steps are slower on a CPU; `optimizer=None` leaves it out"


class OptimizerTechnique(Setting):
    """A technique that replaces what ``configure_optimizers`` returns.

    Checkpoints whose optimizer state has another format are converted when they are loaded, with
    and without a technique.

    Args:
        technique: The technique, or ``None`` to leave optimizers as they are.
        value: What the user wrote for it.
        is_asked: The user wrote it by name: it is set, or refused.
        off_reason: Why there is no technique, where it is not the user's ``None``.
    """

    name = "optimizer"

    def __init__(
        self,
        technique: Technique[Optimizer] | None,
        value: str,
        is_asked: bool,
        off_reason: str = "",
    ) -> None:
        super().__init__()
        self.technique = technique
        self.value = value
        self.is_asked = is_asked
        self.off_reason = off_reason
        self._state: Any = None

    def check(self, trainer: Any, pl_module: Any) -> list[Problem]:
        """Find conflicts with the strategy; the optimizer itself does not exist yet."""
        return [] if self.technique is None else self._problems(trainer)

    def apply(self, trainer: Any, pl_module: Any) -> None:
        """Wrap ``configure_optimizers`` and the loading of optimizer states.

        Args:
            trainer: The Trainer.
            pl_module: Its LightningModule.
        """
        self._convert_loaded_states(trainer)
        self.rows = []
        if self.technique is None:
            self.rows = off_rows(self)
            return
        yields = not self.is_asked
        technique = self.technique
        # Those that are unfrozen later count, too.
        if yields and isinstance(technique, LowBitOptimizer) and not host.unfreezes_later(trainer):
            technique = dataclasses.replace(
                technique, min_saved_bytes=_settings.SMALLEST_SAVING_BYTES
            )
        self._state, undo = configure_optimizers.enable(pl_module, technique, yields)
        self._undo.append(undo)

    def start(self, trainer: Any, pl_module: Any) -> None:
        """Say what became of each optimizer."""
        if self._state is None or self.technique is None:
            return
        if self._state.problems:
            self.yield_to(self._state.problems, trainer, pl_module)
            return
        handles, exactness = self._state.handles, self.technique.exactness.value
        self.rows = [row_of(self.name, self.value, handle, exactness) for handle in handles] or [
            Row(self.name, self.value, "off", ("the module configures no optimizer",))
        ]
        is_on = any(handle.changes for handle in handles)
        is_served = any(_is_8bit(handle.target) for handle in handles)
        if self.is_asked and handles and not is_on and not is_served:
            what = f"`{self.name}={self.value}`"
            why = "; ".join(reason for handle in handles for reason in handle.skipped)
            fix = "Use another optimizer, or set `optimizer=None`."
            raise IncompatibleError("MemSaveCallback", [Problem(what, why, fix)])
        if is_on and not self.is_asked and trainer.strategy.root_device.type == "cpu":
            self.rows = [
                dataclasses.replace(row, details=(*row.details, _SLOW_ON_CPU)) for row in self.rows
            ]

    def yield_to(self, problems: Sequence[Problem], trainer: Any, pl_module: Any) -> None:
        """Stay off, but load optimizer states of every format."""
        super().yield_to(problems, trainer, pl_module)
        self._convert_loaded_states(trainer)

    def savings(self, pl_module: Any) -> str:
        """Say how much state AdamW would keep less."""
        sizes = [p.numel() for p in pl_module.parameters() if p.requires_grad and not is_lazy(p)]
        large = [size for size in sizes if size >= LowBitOptimizer.min_8bit_size]
        return saves(6 * sum(large), "optimizer state")

    def _convert_loaded_states(self, trainer: Any) -> None:
        self._undo.append(
            host.convert_loaded_optimizer_states(
                trainer, configure_optimizers.load_optimizer_state_dict
            )
        )

    def undo(self) -> None:
        """Restore module and strategy, and let go of the optimizers; a second call does nothing."""
        self._state = None
        super().undo()

    def _problems(self, trainer: Any) -> list[Problem]:
        assert self.technique is not None, "called with a technique only"
        what, problems = f"`optimizer={self.value}`", []
        obstacle = find_obstacle(trainer.strategy.root_device)
        if obstacle is not None:
            why, fix = obstacle
            problems.append(Problem(what, why, fix))
        if host.is_strategy(trainer, "ModelParallelStrategy", "FSDPStrategy"):
            strategy = type(trainer.strategy).__name__
            why = f"`{strategy}` shards parameters, which bitsandbytes' kernels do not take"
            fix = "Set `optimizer=None`; each rank holds only its share of the state anyway."
            problems.append(Problem(what, why, fix))
        return problems


def _is_8bit(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("bitsandbytes.")
