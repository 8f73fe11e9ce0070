"""Batches of validation, test and prediction in parts."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from lightning_memsave.core.patching import patch_method, previous_method
from lightning_memsave.core.technique import undo_all
from lightning_memsave.trainer.distributed import broadcast_buffers
from lightning_memsave.trainer.logged_values import LoggedValues

RunStep = Callable[[Any], Any]
RunBatch = Callable[[Any, Any, RunStep, LoggedValues, tuple[Any, ...]], Any]
"""Of the Trainer, a batch, the step of one part, where logged values wait, and the name of the step
with the index of the DataLoader where there are several: the output."""

# Of each strategy whose steps are replaced: how batches run, and their Trainer.
_RUNS = "_memsave_run_evaluation_batch"


def split_evaluation_batches(trainer: Any, run_batch: RunBatch) -> Callable[[], None]:
    """Decide how the batches of validation, test and prediction run.

    Args:
        trainer: A Trainer in ``setup``.
        run_batch: Runs a batch; what is logged in its parts is put together afterwards.

    Returns:
        A function that takes it back.
    """
    strategy = trainer.strategy
    vars(strategy)[_RUNS] = (trainer, run_batch)
    undo = [patch_method(strategy, f) for f in (validation_step, test_step, predict_step)]

    undo.append(lambda: vars(strategy).pop(_RUNS, None))
    return functools.partial(undo_all, undo)


def validation_step(strategy: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what ``Strategy.validation_step`` gives, for a batch in parts."""
    return _run(strategy, "validation_step", *args, **kwargs)


def test_step(strategy: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what ``Strategy.test_step`` gives, for a batch in parts."""
    return _run(strategy, "test_step", *args, **kwargs)


def predict_step(strategy: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what ``Strategy.predict_step`` gives, for a batch in parts."""
    return _run(strategy, "predict_step", *args, **kwargs)


def _run(strategy: Any, name: str, batch: Any, *args: Any, **kwargs: Any) -> Any:
    step = functools.partial(_step, previous_method(strategy, name), args, kwargs)
    # A module that takes the iterator itself has no batch that could be split.
    if _RUNS not in vars(strategy) or isinstance(batch, Iterator):
        return step(batch)
    trainer, run_batch = vars(strategy)[_RUNS]
    broadcast_buffers(trainer)  # DDP would in the first part, and again where that is repeated
    with LoggedValues(trainer) as logged:
        output = run_batch(trainer, batch, step, logged, (name, *args[1:]))
        logged.flush()
    return output


def _step(method: Callable[..., Any], args: Any, kwargs: Any, batch: Any) -> Any:
    return method(batch, *args, **kwargs)
