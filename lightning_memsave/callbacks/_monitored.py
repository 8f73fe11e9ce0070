"""A callback that carries a monitor."""

from typing import Any

from lightning_memsave.callbacks._base import CallbackBase
from lightning_memsave.callbacks.memory_monitor import GPUMemoryMonitor


class MonitoredCallback(CallbackBase):
    """Passes hooks on to a monitor that is not among the Trainer's callbacks itself."""

    def __init__(self) -> None:
        super().__init__()
        self._driven: GPUMemoryMonitor | None = None
        """The monitor whose hooks are called."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Pass the hook on to the monitor."""
        if self._driven is not None:
            self._driven.on_train_start(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Pass the hook on to the monitor."""
        if self._driven is not None:
            self._driven.on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Pass the hook on to the monitor."""
        if self._driven is not None:
            self._driven.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Pass the hook on to the monitor."""
        if self._driven is not None:
            self._driven.on_train_epoch_end(trainer, pl_module)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Pass the hook on to the monitor."""
        if self._driven is not None:
            self._driven.on_validation_start(trainer, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Pass the hook on to the monitor."""
        if self._driven is not None:
            self._driven.on_validation_end(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Pass the hook on to the monitor."""
        if self._driven is not None:
            self._driven.on_train_end(trainer, pl_module)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Pass the hook on to the monitor."""
        if self._driven is not None:
            self._driven.on_fit_end(trainer, pl_module)
