"""Start a fit on fake tensors, without a batch: its optimizers, and what is refused."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_memsave.errors import IncompatibleError, MemsaveError, Problem
from lightning_memsave.prediction.fake.tensors import FakeTensors
from lightning_memsave.prediction.predict import simulated_arguments
from lightning_memsave.prediction.simulate import SimulationSettings, simulate_start
from lightning_memsave.prediction.training_step import TrainingStep
from lightning_memsave.prediction.wrapped_module import inner_of
from lightning_memsave.trainer.trainer import package_of


@dataclass(frozen=True)
class FitStart:
    """What is known before the first batch of a fit."""

    module: Any
    optimizers: Sequence[Optimizer] = ()
    problems: tuple[Problem, ...] = ()
    failure: str = ""

    @property
    def model(self) -> nn.Module:
        return inner_of(self.module)


def start_fit(step: TrainingStep, fakes: FakeTensors, *, with_callback: bool) -> FitStart:
    """Start a fit, and end it before its first batch."""
    module = step.build_module(fakes)
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
    start = FitStart(module)
    try:
        return replace(start, optimizers=tuple(simulate_start(module, callbacks, settings)))
    except IncompatibleError as error:
        return replace(start, problems=error.problems)
    except MemsaveError:
        raise
    except (Exception, SystemExit) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        return replace(start, failure=why)
