"""Simulate two or three training steps in a Trainer, on fake tensors."""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from lightning_memsave.errors import ConfigurationError
from lightning_memsave.prediction.fake.copies import with_parameters_of
from lightning_memsave.prediction.fake.tensors import clone_batch
from lightning_memsave.prediction.peaks import peak_bytes, room_for_gradients
from lightning_memsave.prediction.recording import Recording, StepProfile
from lightning_memsave.techniques.optimizer_in_backward.held_gradients import HeldGradients
from lightning_memsave.techniques.optimizer_in_backward.updates import open_to_keep
from lightning_memsave.trainer.hooks import CallbackBase
from lightning_memsave.trainer.nested_fit import (
    forget_metric_names,
    leave_signals,
    silent_logger,
)
from lightning_memsave.trainer.trainer import PACKAGES, has_configure_optimizers

NUM_STEPS = 2
"""The first step creates the optimizer state; the second is like all later ones."""
MAX_STEPS = 3
"""One more tries how many gradients that wait for their total norm may stay on the device."""

# Called before the first batch: a running Trainer has called them already.
_SETUP_HOOKS = ("prepare_data", "setup", "configure_model")
_START_HOOKS = ("on_fit_start", "on_train_start", "on_train_epoch_start")
# At the end of a simulated fit, no hook may write files or send messages.
_END_HOOKS = ("on_train_epoch_end", "on_train_end", "on_fit_end", "teardown", "on_exception")


@dataclass(frozen=True)
class SimulationSettings:
    package: ModuleType
    accumulate_grad_batches: int = 1
    num_batches: int = 1000
    trainer_arguments: Mapping[str, Any] = field(default_factory=dict)
    is_running: bool = False
    has_started: bool = False
    emulation: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    strategy: str | None = None
    world_size: int = 1
    strategy_arguments: Mapping[str, Any] = field(default_factory=dict)
    deadline_s: float | None = None


def simulate_steps(
    pl_module: Any, batch: Any, callbacks: Sequence[Any], settings: SimulationSettings
) -> Recording:
    """Train two optimizer steps on fake tensors, or `MAX_STEPS`, and record live memory.

    Note:
        Call it inside `fake_tensors`. Exceptions of the module's own code propagate.
    """
    accumulated = settings.accumulate_grad_batches
    # `configure_callbacks` too: the module's own callbacks may write files.
    skipped = [*_END_HOOKS, "configure_callbacks"]
    skipped += _SETUP_HOOKS if settings.is_running else ()
    skipped += _START_HOOKS if settings.has_started else ()
    _skip(pl_module, skipped)
    _train_own_parameters(pl_module)
    forget_metric_names(pl_module)
    observer = _Observer(accumulated, settings.deadline_s)
    try:
        with settings.emulation(), _processes(settings) as processes:
            trainer = _make_trainer([*callbacks, observer], accumulated, settings, processes)
            trainer.fit(pl_module, _Repeated(batch, settings.num_batches))
    finally:
        observer.close()
    return observer.take_recording()


def simulate_start(
    pl_module: Any, callbacks: Sequence[Any], settings: SimulationSettings
) -> list[torch.optim.Optimizer]:
    """Start a fit on fake tensors, and end it before the first batch.

    Note:
        Call it inside `fake_tensors`. Exceptions of the module's own code propagate.
    """
    _skip(pl_module, ["prepare_data", *_END_HOOKS, "configure_callbacks"])
    _train_own_parameters(pl_module)
    observer = _EndAtStart()
    accumulated = settings.accumulate_grad_batches
    trainer = _make_trainer([*callbacks, observer], accumulated, settings)
    trainer.fit(pl_module, _Repeated(None, settings.num_batches))
    return observer.optimizers


def _processes(
    settings: SimulationSettings,
) -> contextlib.AbstractContextManager[Mapping[str, Any]]:
    if settings.strategy is None:
        return contextlib.nullcontext({})
    # FSDP2 takes a second to import.
    processes = importlib.import_module("lightning_memsave.prediction.processes")
    found: contextlib.AbstractContextManager[Mapping[str, Any]] = processes.first_of(
        settings.world_size, settings.strategy, settings.package, settings.strategy_arguments
    )
    return found


class _EndAtStart(CallbackBase):
    def __init__(self) -> None:
        super().__init__()
        self.optimizers: list[torch.optim.Optimizer] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.optimizers = list(trainer.optimizers)
        trainer.should_stop = True


def _make_trainer(
    callbacks: Sequence[Any],
    accumulated: int,
    settings: SimulationSettings,
    processes: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    given = dict(settings.trainer_arguments)
    plugins = [*given.pop("plugins", ()), *processes.get("plugins", ())]
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
            "callbacks": [*callbacks],
        }
        | given
        | dict(processes)
        | {"plugins": plugins}
    )
    leave_signals(trainer)
    return trainer


class _Repeated:
    def __init__(self, batch: Any, num_batches: int) -> None:
        self.batch = batch
        self.num_batches = num_batches

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.num_batches):
            # Steps may change the batch, and converting it must free the original, as in training.
            yield clone_batch(self.batch)


class _Observer(CallbackBase):
    def __init__(self, accumulated: int, deadline_s: float | None) -> None:
        super().__init__()
        self.accumulated = accumulated
        self.num_batches = NUM_STEPS * accumulated
        self.deadline_s = deadline_s
        self._before = Recording()
        self._held: list[HeldGradients] = []
        self._taken: list[tuple[int, int]] = []
        self._profile: StepProfile | None = None
        self._is_open = False

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._profile is None:
            _check_optimizers(trainer.optimizers)
            _switch_to_training(trainer.optimizers)
            device = torch.device("cpu")
            profile = StepProfile(pl_module, trainer.optimizers, device, deadline_s=self.deadline_s)
            profile.__enter__()
            self._profile, self._is_open = profile, True
            self._held = open_to_keep(trainer.optimizers)
            for held in self._held:
                held.on_take = self._note_taken
        if batch_idx % self.accumulated == 0:
            self._taken.clear()
            self._profile.start_step()
        self._profile.track_input(batch)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._profile is not None, "the first batch has begun"
        self._profile.end_batch()
        # Lightning turns None into an empty mapping.
        if not outputs and pl_module.automatic_optimization:
            self._profile.recording.has_loss = False
        if batch_idx + 1 == self.num_batches and self._held:
            self._keep_gradients(self._profile)
        if batch_idx + 1 == self.num_batches:
            self.close()
            trainer.should_stop = True

    def _note_taken(self, num_bytes: int) -> None:
        assert self._profile is not None, "there are no gradients before the first batch"
        self._taken.append((len(self._profile.recording.events), num_bytes))

    # Tried in one more step, as the updates after backward need memory, too.
    def _keep_gradients(self, profile: StepProfile) -> None:
        recording = profile.recording
        if recording.kept_gradient_bytes:
            if peak_bytes(recording) > peak_bytes(self._before):
                profile.recording = self._before
            return
        num_bytes = room_for_gradients(recording, self._taken)
        if not num_bytes:
            return
        self._before = recording.copy()
        for held in self._held:
            held.keep(num_bytes)
        profile.reset_host_peak()
        recording.kept_gradient_bytes = num_bytes
        self.num_batches += self.accumulated

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.close()

    def close(self) -> None:
        """Stop recording, also if the module ended the epoch early; idempotent."""
        if self._profile is not None and self._is_open:
            self._is_open = False
            self._profile.__exit__(None, None, None)

    def take_recording(self) -> Recording:
        if self._profile is None or not self._profile.recording.batch_ends:
            raise ConfigurationError(
                "No batch was trained on, because the module skips the first one. Predict with a "
                "batch that it trains on."
            )
        return self._profile.recording


def _check_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            size = optimizer.param_groups[0]["history_size"]
            raise ConfigurationError(
                "The memory of `torch.optim.LBFGS` cannot be predicted: how often it evaluates the "
                f"loss, and how many of its `history_size={size}` pairs it keeps, depends on the "
                "loss. Predict with another optimizer, and add two tensors of the size of all "
                "gradients for each pair."
            )


# Schedule-free optimizers refuse to step until `train` is called, as start hooks do, which a
# simulation does not run.
def _switch_to_training(optimizers: Sequence[Any]) -> None:
    for optimizer in optimizers:
        if all(callable(getattr(optimizer, name, None)) for name in ("train", "eval")):
            optimizer.train()


def _skip(pl_module: Any, hooks: Sequence[str]) -> None:
    for hook in hooks:
        # Lightning's own hooks stay: it checks which ones a module overrides.
        if not getattr(type(pl_module), hook, _do_nothing).__module__.startswith(PACKAGES):
            object.__setattr__(pl_module, hook, _do_nothing)


# `configure_optimizers` set on the instance may return an optimizer of the original module.
def _train_own_parameters(pl_module: Any) -> None:
    if has_configure_optimizers(pl_module):
        configure = pl_module.configure_optimizers

        def configure_optimizers() -> Any:
            return with_parameters_of(pl_module, configure())

        object.__setattr__(pl_module, "configure_optimizers", configure_optimizers)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass
