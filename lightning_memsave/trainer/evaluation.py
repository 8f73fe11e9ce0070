"""Run batches of validation, test and prediction as micro-batches."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from lightning_memsave.core.patching import patch_method, previous_method
from lightning_memsave.core.technique import undo_all
from lightning_memsave.trainer.distributed import broadcast_buffers
from lightning_memsave.trainer.logged_values import LoggedValues

RunStep = Callable[[Any], Any]
RunBatch = Callable[[Any, Any, RunStep, LoggedValues, tuple[Any, ...]], Any]
"""Returns the output of a batch, from the Trainer, the batch, the step of a micro-batch, the logged
values, and the name of the step with the DataLoader index, if there are several."""

# Attribute of a strategy whose steps are replaced: its Trainer and the function that runs batches.
_RUNS = "_memsave_run_evaluation_batch"


def split_evaluation_batches(trainer: Any, run_batch: RunBatch) -> Callable[[], None]:
    strategy = trainer.strategy
    vars(strategy)[_RUNS] = (trainer, run_batch)
    undo = [patch_method(strategy, f) for f in (validation_step, test_step, predict_step)]

    undo.append(lambda: vars(strategy).pop(_RUNS, None))
    return functools.partial(undo_all, undo)


def validation_step(strategy: Any, *args: Any, **kwargs: Any) -> Any:
    return _run(strategy, "validation_step", *args, **kwargs)


def test_step(strategy: Any, *args: Any, **kwargs: Any) -> Any:
    return _run(strategy, "test_step", *args, **kwargs)


def predict_step(strategy: Any, *args: Any, **kwargs: Any) -> Any:
    return _run(strategy, "predict_step", *args, **kwargs)


def _run(strategy: Any, name: str, batch: Any, *args: Any, **kwargs: Any) -> Any:
    step = functools.partial(_step, previous_method(strategy, name), args, kwargs)
    # If the step takes the dataloader iterator itself, there is no batch to split.
    if _RUNS not in vars(strategy) or isinstance(batch, Iterator):
        return step(batch)
    trainer, run_batch = vars(strategy)[_RUNS]
    broadcast_buffers(trainer)  # DDP would do it in the first micro-batch, and in each repetition
    with LoggedValues(trainer) as logged:
        output = run_batch(trainer, batch, step, logged, (name, *args[1:]))
        logged.flush()
    return output


def _step(method: Callable[..., Any], args: Any, kwargs: Any, batch: Any) -> Any:
    return method(batch, *args, **kwargs)
