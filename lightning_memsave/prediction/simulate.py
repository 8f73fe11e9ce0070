"""Two training steps in a Trainer, on tensors without data."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from lightning_memsave.errors import ConfigurationError
from lightning_memsave.prediction.fake.copies import with_parameters_of
from lightning_memsave.prediction.fake.tensors import again
from lightning_memsave.prediction.recording import Recording, StepProfile
from lightning_memsave.trainer.hooks import CallbackBase
from lightning_memsave.trainer.nested_fit import (
    forget_metric_names,
    leave_signals,
    silent_logger,
)
from lightning_memsave.trainer.trainer import PACKAGES, has_configure_optimizers

NUM_STEPS = 2
"""In the first step the optimizer makes its state, the second is like all that follow."""
MAX_ACCUMULATED = 2
"""The second batch of a window finds the gradients of the first, as all later ones do."""

# What a Trainer calls before the first batch, and has called already where it runs.
_START_HOOKS = (
    *("prepare_data", "setup", "configure_model"),
    *("on_fit_start", "on_train_start", "on_train_epoch_start"),
)
# What ends a fit must not write files or send messages for one that never was.
_END_HOOKS = ("on_train_epoch_end", "on_train_end", "on_fit_end", "teardown", "on_exception")


@dataclass(frozen=True)
class SimulationSettings:
    """How a trial trains.

    Args:
        package: ``lightning.pytorch`` or ``pytorch_lightning``.
        accumulate_grad_batches: Batches per optimizer step.
        num_batches: In an epoch, for schedules.
        trainer_arguments: More arguments of the Trainer.
        is_running: The module is one of a fit that has begun: hooks from before the first batch
            have been called.
        emulation: Entered around the fit, such as CUDA's choice of kernels.
        deadline_s: On the clock of ``time.monotonic``, when to give up.
    """

    package: ModuleType
    accumulate_grad_batches: int = 1
    num_batches: int = 1000
    trainer_arguments: Mapping[str, Any] = field(default_factory=dict)
    is_running: bool = False
    emulation: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    deadline_s: float | None = None


def simulate_steps(
    pl_module: Any, batch: Any, callbacks: Sequence[Any], settings: SimulationSettings
) -> Recording:
    """Train two optimizer steps on tensors without data and record what is alive.

    Args:
        pl_module: A LightningModule without data, made for this trial.
        batch: A batch without data.
        callbacks: Callbacks that take part, made for this trial.
        settings: How it trains.

    Returns:
        What was recorded.

    Raises:
        ConfigurationError: If no batch is trained on, or what the optimizer keeps depends on data.
        TimeoutError: If it goes on after the deadline.

    Note:
        To be called inside `fake_tensors`. Whatever the module raises comes through.
    """
    accumulated = min(settings.accumulate_grad_batches, MAX_ACCUMULATED)
    # Callbacks that the module brings would write their files for a fit that never was.
    skipped = [*(_START_HOOKS if settings.is_running else ()), *_END_HOOKS, "configure_callbacks"]
    _skip(pl_module, skipped)
    _train_own_parameters(pl_module)
    forget_metric_names(pl_module)
    observer = _Observer(NUM_STEPS * accumulated, settings.deadline_s)
    trainer = settings.package.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": silent_logger(settings.package),
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "limit_val_batches": 0,
            "use_distributed_sampler": False,
            "accumulate_grad_batches": accumulated,
            "callbacks": [*callbacks, observer],
        }
        | dict(settings.trainer_arguments)
    )
    leave_signals(trainer)
    try:
        with settings.emulation():
            trainer.fit(pl_module, _Repeated(batch, settings.num_batches))
    finally:
        observer.close()
    return observer.take_recording()


class _Repeated:
    """A loader that gives the same batch again and again."""

    def __init__(self, batch: Any, num_batches: int) -> None:
        self.batch = batch
        self.num_batches = num_batches

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.num_batches):
            # Each is new, as in training: what converts it frees the old one, and steps may take
            # things out of it or change it.
            yield again(self.batch)


class _Observer(CallbackBase):
    """Records from the first batch on, and ends the fit."""

    def __init__(self, num_batches: int, deadline_s: float | None) -> None:
        super().__init__()
        self.num_batches = num_batches
        self.deadline_s = deadline_s
        self._profile: StepProfile | None = None
        self._is_open = False

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._profile is None:
            _check_optimizers(trainer.optimizers)
            device = torch.device("cpu")
            profile = StepProfile(pl_module, trainer.optimizers, device, deadline_s=self.deadline_s)
            profile.__enter__()
            self._profile, self._is_open = profile, True
        self._profile.track_input(batch)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._profile is not None, "the first batch has begun"
        self._profile.end_batch()
        # Lightning makes an empty mapping of None.
        if not outputs and pl_module.automatic_optimization:
            self._profile.recording.has_loss = False
        if batch_idx + 1 == self.num_batches:
            self.close()
            trainer.should_stop = True

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.close()

    def close(self) -> None:
        """Stop recording; also where the module broke off the epoch; harmless at any time."""
        if self._profile is not None and self._is_open:
            self._is_open = False
            self._profile.__exit__(None, None, None)

    def take_recording(self) -> Recording:
        if self._profile is None or not self._profile.recording.batch_ends:
            raise ConfigurationError(
                "No batch was trained on, as the module skips the first one. Predict with a batch "
                "that it takes."
            )
        return self._profile.recording


def _check_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            size = optimizer.param_groups[0]["history_size"]
            raise ConfigurationError(
                "The memory of `torch.optim.LBFGS` cannot be predicted: how often it asks for "
                f"gradients, and how many of `history_size={size}` pairs it keeps, depends on the "
                "loss. Predict with another optimizer, and add those pairs of the size of the "
                "gradients."
            )


def _skip(pl_module: Any, hooks: Sequence[str]) -> None:
    for hook in hooks:
        # Lightning takes a module that has it for one that was written for it.
        if not getattr(type(pl_module), hook, _do_nothing).__module__.startswith(PACKAGES):
            object.__setattr__(pl_module, hook, _do_nothing)


# A function that was set on the instance may give an optimizer of the module that was copied.
def _train_own_parameters(pl_module: Any) -> None:
    if has_configure_optimizers(pl_module):
        configure = pl_module.configure_optimizers

        def configure_optimizers() -> Any:
            return with_parameters_of(pl_module, configure())

        object.__setattr__(pl_module, "configure_optimizers", configure_optimizers)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass
