"""Check a model and its training for traps that cost memory or time."""

import os
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_memsave.analysis.predict import read_settings, with_instances
from lightning_memsave.callbacks.memsave import MemSaveCallback
from lightning_memsave.callbacks.report import installed_versions
from lightning_memsave.doctor.check import FoundProblem, Subject
from lightning_memsave.doctor.registry import run_checks
from lightning_memsave.prediction.fake.tensors import FakeTensors, fake_tensors
from lightning_memsave.prediction.fit_start import FitStart, start_fit
from lightning_memsave.prediction.training_step import MakeOptimizer, TrainingStep
from lightning_memsave.targets.find import load_target
from lightning_memsave.targets.target import Target
from lightning_memsave.trainer.nested_fit import quiet

_PACKAGES = ("torch", "lightning", "pytorch-lightning", "nvidia-ml-py", "nvidia-ml-py3")
_WIDTH = 100


@dataclass(frozen=True)
class TrainingCheck:
    """The problems of a model and its training; ``print`` shows them.

    Args:
        model: Class name of the model.
        problems: The problems, each with its check, what, why, and what to type instead.
        notes: What could not be checked, one line each.
    """

    model: str
    problems: tuple[FoundProblem, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values, for JSON.

        Returns:
            The fields by name.
        """
        return {
            "model": self.model,
            "problems": [problem.to_dict() for problem in self.problems],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        count = len(self.problems)
        found = "no problem found" if not count else f"{count} problem{'s' * (count > 1)}"
        parts = [f"{self.model}: {found}"]
        for problem in self.problems:
            said = (problem.what, f"{problem.why}.", problem.fix)
            parts.append("\n".join([problem.check, *map(_indented, said)]))
        parts += [_wrapped(f"note: {note}") for note in self.notes]
        return "\n\n".join(parts)


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _indented(text: str) -> str:
    return _wrapped(text, "  ")


def check_training(
    model: str | os.PathLike[str] | Target | nn.Module | Callable[[], nn.Module],
    optimizer: MakeOptimizer | None = None,
    settings: Mapping[str, Any] | MemSaveCallback | None = None,
    *,
    trainer_arguments: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> TrainingCheck:
    """Check a model and its training for traps that cost memory or time.

    The model, its optimizers, environment variables and installed packages are looked at, after
    the start of a fit on fake tensors. No batch and no GPU is needed, and no training step runs.

    Args:
        model: A LightningModule, any other module, or a function without arguments that returns
            one; or the name of one, as for ``memsave doctor``.
        optimizer: For modules that are not LightningModules: a class or function that gets the
            parameters. Default: AdamW.
        settings: Arguments of `MemSaveCallback` by name, or a `MemSaveCallback`; in a mapping,
            techniques that are not named are off. Default: those of the YAML file; without a
            callback, its settings are not checked.
        trainer_arguments: Arguments of the Trainer, such as ``precision``, added to those of the
            YAML file.
        environment: Environment variables. Default: those of this process.

    Returns:
        The problems.

    Raises:
        ConfigurationError: If arguments are wrong, or the module cannot be created or copied.

    Note:
        What your code does in a step is not looked at: `GPUMemoryMonitor` finds memory that grows
        while it runs. The hooks of the module up to ``on_fit_start`` run, except for
        ``prepare_data``.

    Example:
        >>> import torch
        >>> check = check_training(nn.Linear(2, 2), environment={"CUDA_LAUNCH_BLOCKING": "1"})
        >>> [problem.check for problem in check.problems]
        ['debug_settings']
    """
    if isinstance(model, str | os.PathLike):
        model = load_target(model)
    trainer_arguments = dict(trainer_arguments or {})
    notes: tuple[str, ...] = ()
    make: Any = model
    if isinstance(model, Target):
        model.module_without_data  # noqa: B018 - says what is missing
        make = model.make
        trainer_arguments = {**model.trainer_arguments, **trainer_arguments}
        if settings is None and model.settings is not None:
            settings = MemSaveCallback(**with_instances(model.settings))
    step = TrainingStep(
        make,
        None,
        MemSaveCallback,
        read_settings(settings),
        optimizer,
        trainer_arguments=trainer_arguments,
    )
    with quiet(), fake_tensors() as fakes:
        start, problems = _start(step, fakes, settings is not None)
        if start.failure:
            notes = (
                f"a fit could not be started without data, so its optimizers were not checked "
                f"({start.failure})",
            )
        module = start.model
        subject = Subject(
            module,
            step.precision,
            trainer_arguments,
            step.effective_settings,
            start.optimizers,
            problems,
            os.environ if environment is None else environment,
            installed_versions(_PACKAGES),
        )
        found = tuple(run_checks(subject))
    return TrainingCheck(type(module).__name__, found, notes)


# The optimizers are those of the user: the callback replaces them.
def _start(
    step: TrainingStep, fakes: FakeTensors, has_callback: bool
) -> tuple[FitStart, tuple[Any, ...]]:
    start = start_fit(step, fakes, with_callback=False)
    if start.failure or not has_callback:
        return start, ()
    return start, start_fit(step, fakes, with_callback=True).problems
