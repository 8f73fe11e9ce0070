"""Techniques that change what the module configures as optimizers, as settings."""

import importlib.util
from typing import Any

from torch.optim import Optimizer

from lightning_memsave import host
from lightning_memsave.callbacks import _configure_optimizers as configure_optimizers
from lightning_memsave.callbacks._module_techniques import row_of
from lightning_memsave.callbacks._settings import AS_IT_IS, Row, Setting
from lightning_memsave.core.technique import Technique
from lightning_memsave.errors import Problem


class OptimizerTechnique(Setting):
    """A technique that replaces what ``configure_optimizers`` returns.

    Checkpoints whose optimizer state has another format are converted when they are loaded, with
    and without a technique.

    Args:
        technique: The technique, or ``None`` to leave optimizers as they are.
        value: What the user wrote for it.
        is_auto: The user did not ask for it by name: conflicts switch it off with a reason.
    """

    name = "optimizer"

    def __init__(self, technique: Technique[Optimizer] | None, value: str, is_auto: bool) -> None:
        super().__init__()
        self.technique = technique
        self.value = value
        self.is_auto = is_auto
        self._state: Any = None

    def check(self, trainer: Any, pl_module: Any) -> list[Problem]:
        """Find conflicts with the strategy; the optimizer itself does not exist yet.

        Args:
            trainer: The Trainer.
            pl_module: Its LightningModule.

        Returns:
            All problems; none for a choice of our own, which gives way.
        """
        if self.technique is None or self.is_auto:
            return []
        return self._problems(trainer)

    def apply(self, trainer: Any, pl_module: Any) -> None:
        """Wrap ``configure_optimizers`` and the loading of optimizer states.

        Args:
            trainer: The Trainer.
            pl_module: Its LightningModule.
        """
        self._undo.append(
            host.convert_loaded_optimizer_states(
                trainer, configure_optimizers.load_optimizer_state_dict
            )
        )
        if self.technique is None:
            # A reason that was there from the start stays; what an earlier Trainer left goes.
            given = [row for row in self.rows if row.status == "off"]
            self.rows = given or [Row(self.name, "None", "unchanged", (AS_IT_IS,))]
            return
        self.rows = []
        problems = self._problems(trainer)
        if problems:
            self.rows = [Row(self.name, self.value, "off", (problems[0].why,))]
            return
        self._state, undo = configure_optimizers.enable(pl_module, self.technique)
        self._undo.append(undo)

    def start(self, trainer: Any, pl_module: Any) -> None:
        """Say what became of each optimizer.

        Args:
            trainer: The Trainer.
            pl_module: Its LightningModule.
        """
        if self._state is not None and self.technique is not None:
            exactness = self.technique.exactness.value
            self.rows = [
                row_of(self.name, self.value, handle, exactness) for handle in self._state.handles
            ] or [Row(self.name, self.value, "off", ("the module configures no optimizer",))]

    def undo(self) -> None:
        """Restore module and strategy, and let go of the optimizers; a second call does nothing."""
        self._state = None
        super().undo()

    def _problems(self, trainer: Any) -> list[Problem]:
        assert self.technique is not None, "called with a technique only"
        missing = [p for p in self.technique.requires if importlib.util.find_spec(p) is None]
        what, problems = f"`optimizer={self.value}`", []
        if missing:
            why, install = f"{' and '.join(missing)} is not installed", " ".join(missing)
            fix = f"Run `pip install {install}`, or set `optimizer=None`."
            problems.append(Problem(what, why, fix))
        if host.is_strategy(trainer, "ModelParallelStrategy", "FSDPStrategy"):
            strategy = type(trainer.strategy).__name__
            why = f"`{strategy}` shards parameters, which bitsandbytes' kernels do not take"
            fix = "Set `optimizer=None`; each rank holds only its share of the state anyway."
            problems.append(Problem(what, why, fix))
        return problems
