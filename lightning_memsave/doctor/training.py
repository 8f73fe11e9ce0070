"""The checks, and what they find wrong with a model and its training: `check_training`."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from torch.optim import Optimizer

from lightning_memsave.core.plain_text import wrapped
from lightning_memsave.core.versions import installed_versions
from lightning_memsave.doctor import checks
from lightning_memsave.doctor.checks import Subject
from lightning_memsave.errors import IncompatibleError, MemsaveError, Problem
from lightning_memsave.prediction.fake.tensors import fake_tensors
from lightning_memsave.prediction.predict import simulated_arguments
from lightning_memsave.prediction.simulate import SimulationSettings, simulate_start
from lightning_memsave.prediction.training_step import TrainingStep
from lightning_memsave.prediction.wrapped_module import inner_of
from lightning_memsave.trainer.nested_fit import quiet
from lightning_memsave.trainer.trainer import package_of

_PACKAGES = ("torch", "lightning", "pytorch-lightning", "nvidia-ml-py", "nvidia-ml-py3")
_WIDTH = 100


@dataclass(frozen=True, slots=True)
class FoundProblem(Problem):
    check: str = ""


def find_conflicts(subject: Subject) -> Iterable[Problem]:
    """Settings of `MemSaveCallback` that it will refuse at the start of fit."""
    return subject.conflicts


CHECKS: Mapping[str, Callable[[Subject], Iterable[Problem]]] = MappingProxyType(
    {
        "batch_statistics": checks.find_batch_statistics,
        "growing_metric": checks.find_growing_metrics,
        "8bit_embedding": checks.find_8bit_embeddings,
        "8bit_small_tensors": checks.find_ineffective_8bit,
        "float16_overflow": checks.find_float16_overflow,
        "refused_clipping": checks.find_refused_clipping,
        "memsave_conflict": find_conflicts,
        "allocator_settings": checks.find_allocator_settings,
        "debug_settings": checks.find_debug_settings,
        "broken_packages": checks.find_broken_packages,
    }
)
"""In the order of their output; their docstrings say what they find."""


def run_checks(subject: Subject) -> list[FoundProblem]:
    found = (
        FoundProblem(problem.what, problem.why, problem.fix, name)
        for name, find in CHECKS.items()
        for problem in find(subject)
    )
    return list(dict.fromkeys(found))


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
            "problems": [asdict(problem) for problem in self.problems],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        count = len(self.problems)
        found = "no problem found" if not count else f"{count} problem{'s' * (count > 1)}"
        parts = [f"{self.model}: {found}"]
        for problem in self.problems:
            said = (problem.what, f"{problem.why}.", problem.fix)
            lines = (wrapped(text, width=_WIDTH, first="  ", indent="  ") for text in said)
            parts.append("\n".join([problem.check, *lines]))
        parts += [wrapped(f"note: {note}", width=_WIDTH) for note in self.notes]
        return "\n\n".join(parts)


def check_step(
    step: TrainingStep, *, has_callback: bool, environment: Mapping[str, str] | None = None
) -> TrainingCheck:
    """Check a step without its batch; without a callback its settings are not checked."""
    notes: tuple[str, ...] = ()
    conflicts: Sequence[Problem] = ()
    with quiet(), fake_tensors() as fakes:
        module = step.build_module(fakes)
        # The optimizers are those of the user: the callback replaces them.
        optimizers, _, failure = _start(step, module, with_callback=False)
        if failure:
            why = f"so its optimizers were not checked ({failure})"
            notes = (f"a fit could not be started without data, {why}",)
        elif has_callback:
            _, conflicts, _ = _start(step, step.build_module(fakes), with_callback=True)
        subject = Subject(
            inner_of(module),
            step.precision,
            step.trainer_arguments,
            step.effective_settings,
            optimizers,
            conflicts,
            os.environ if environment is None else environment,
            installed_versions(_PACKAGES),
        )
        found = tuple(run_checks(subject))
    return TrainingCheck(type(subject.module).__name__, found, notes)


# Starts a fit, and ends it before its first batch: its optimizers, what is refused, and why it
# failed.
def _start(
    step: TrainingStep, module: Any, *, with_callback: bool
) -> tuple[Sequence[Optimizer], Sequence[Problem], str]:
    package = package_of(module)
    arguments, trainer_arguments, _ = simulated_arguments(step, package)
    # No batch is accumulated, so the real numbers need no time.
    arguments["accumulate_grad_batches"] = step.arguments["accumulate_grad_batches"]
    callbacks = [step.make_callback(**arguments)] if with_callback else []
    settings = SimulationSettings(
        package,
        accumulate_grad_batches=trainer_arguments.pop("accumulate_grad_batches", 1),
        trainer_arguments=trainer_arguments,
    )
    try:
        return simulate_start(module, callbacks, settings), (), ""
    except IncompatibleError as error:
        return (), error.problems, ""
    except MemsaveError:
        raise
    except (Exception, SystemExit) as error:
        return (), (), " ".join(f"{type(error).__name__}: {error}".split())
