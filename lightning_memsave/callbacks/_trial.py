"""Two training steps in a Trainer, on tensors without data."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from lightning_memsave import host
from lightning_memsave.callbacks._base import CallbackBase
from lightning_memsave.core.nesting import map_tensors
from lightning_memsave.planning.fake_models import FakeTensors, fake_tensors
from lightning_memsave.planning.step_profile import Recording, StepProfile

NUM_STEPS = 2
"""In the first step the optimizer makes its state, the second is like all that follow."""
MAX_ACCUMULATED = 2
"""The second batch of a window finds the gradients of the first, as all later ones do."""

# What a Trainer calls before the first batch, and has called already where it runs.
_START_HOOKS = (
    *("prepare_data", "setup", "configure_model", "configure_sharded_model"),
    *("on_fit_start", "on_train_start", "on_train_epoch_start"),
)
# What ends a fit must not write files or send messages for one that never was.
_END_HOOKS = ("on_train_epoch_end", "on_train_end", "on_fit_end", "teardown", "on_exception")


@dataclass(frozen=True)
class ModuleInfo:
    """One module as it was in the trial.

    Args:
        name: Its name in ``named_modules()``.
        class_name: Name of its class.
        num_parameters: Numbers in its own parameters, tied ones with the first owner only.
    """

    name: str
    class_name: str
    num_parameters: int


@dataclass(frozen=True)
class Trial:
    """What a trial showed.

    Args:
        recording: Each change of live memory.
        modules: All modules, in order.
        guesses: What of the data had to be guessed.
    """

    recording: Recording
    modules: tuple[ModuleInfo, ...]
    guesses: tuple[str, ...]


@dataclass(frozen=True)
class TrialSettings:
    """How a trial trains.

    Args:
        package: ``lightning.pytorch`` or ``pytorch_lightning``.
        accumulate_grad_batches: Batches per optimizer step.
        num_batches: In an epoch, for schedules.
        trainer_arguments: More arguments of the Trainer.
        is_running: The module is one of a fit that has begun: hooks from before the first batch
            have been called.
        emulation: Entered around the fit, such as CUDA's choice of kernels.
    """

    package: ModuleType
    accumulate_grad_batches: int = 1
    num_batches: int = 1000
    trainer_arguments: Mapping[str, Any] = field(default_factory=dict)
    is_running: bool = False
    emulation: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


def run_trial(
    build: Callable[[FakeTensors], tuple[Any, Any]],
    callbacks: Sequence[Any],
    settings: TrialSettings,
) -> Trial:
    """Train two optimizer steps on tensors without data and record what is alive.

    Args:
        build: Gives the LightningModule and the batch, both without data.
        callbacks: Callbacks that take part, made for this trial.
        settings: How it trains.

    Returns:
        What was recorded.

    Note:
        Whatever the module raises comes through.
    """
    accumulated = min(settings.accumulate_grad_batches, MAX_ACCUMULATED)
    with host.quiet(), fake_tensors() as fakes:
        pl_module, batch = build(fakes)
        _skip(pl_module, [*(_START_HOOKS if settings.is_running else ()), *_END_HOOKS])
        observer = _Observer(NUM_STEPS * accumulated)
        trainer = settings.package.Trainer(
            **{
                "accelerator": "cpu",
                "devices": 1,
                "max_epochs": 1,
                "logger": host.silent_logger(settings.package),
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
        with settings.emulation():
            trainer.fit(pl_module, _Repeated(batch, settings.num_batches))
        return Trial(observer.take_recording(), _describe(pl_module), fakes.guesses)


class _Repeated:
    """A loader that gives the same batch again and again."""

    def __init__(self, batch: Any, num_batches: int) -> None:
        self.batch = batch
        self.num_batches = num_batches

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.num_batches):
            # Containers of its own for each: steps may take things out of them.
            yield map_tensors(self.batch, lambda tensor: tensor)


class _Observer(CallbackBase):
    """Records from the first batch on, and ends the fit."""

    def __init__(self, num_batches: int) -> None:
        super().__init__()
        self.num_batches = num_batches
        self._profile: StepProfile | None = None

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._profile is None:
            profile = StepProfile(pl_module, trainer.optimizers, torch.device("cpu"))
            profile.__enter__()
            self._profile = profile
        self._profile.track_input(batch)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._profile is not None, "the first batch has begun"
        self._profile.end_batch()
        if batch_idx + 1 == self.num_batches:
            self._profile.__exit__(None, None, None)
            trainer.should_stop = True

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._profile is not None:
            self._profile.__exit__(None, None, None)

    def take_recording(self) -> Recording:
        assert self._profile is not None, "a batch has passed"
        return self._profile.recording


def _skip(pl_module: Any, hooks: Sequence[str]) -> None:
    for hook in hooks:
        if hasattr(pl_module, hook):
            object.__setattr__(pl_module, hook, _do_nothing)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _describe(pl_module: Any) -> tuple[ModuleInfo, ...]:
    seen: set[int] = set()
    infos = []
    for name, part in pl_module.named_modules():
        own = [p for p in part.parameters(recurse=False) if id(p) not in seen]
        seen.update(id(p) for p in own)
        infos.append(ModuleInfo(name, type(part).__name__, sum(p.numel() for p in own)))
    return tuple(infos)
