"""What is found wrong with a model and its training: the result of `check_training`."""

import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_memsave.core.versions import installed_versions
from lightning_memsave.doctor.check import FoundProblem, Subject
from lightning_memsave.doctor.registry import run_checks
from lightning_memsave.prediction.fake.tensors import FakeTensors, fake_tensors
from lightning_memsave.prediction.fit_start import FitStart, start_fit
from lightning_memsave.prediction.training_step import TrainingStep
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


def check_step(
    step: TrainingStep, *, has_callback: bool, environment: Mapping[str, str] | None = None
) -> TrainingCheck:
    """Check a step without its batch; without a callback its settings are not checked."""
    notes: tuple[str, ...] = ()
    with quiet(), fake_tensors() as fakes:
        start, problems = _start(step, fakes, has_callback)
        if start.failure:
            notes = (
                f"a fit could not be started without data, so its optimizers were not checked "
                f"({start.failure})",
            )
        module = start.model
        subject = Subject(
            module,
            step.precision,
            step.trainer_arguments,
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
