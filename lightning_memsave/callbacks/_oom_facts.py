"""Gather what is known when memory ran out."""

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from torch import Tensor

from lightning_memsave import host
from lightning_memsave.callbacks._oom_report import BatchTensor, OutOfMemoryReport, trace_of
from lightning_memsave.callbacks._settings import describe
from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.core.out_of_memory import errors_behind, find_out_of_memory
from lightning_memsave.errors import ConfigurationError, MemoryExhaustedError
from lightning_memsave.measure.alive_tensors import AliveTensor, find_alive_tensors
from lightning_memsave.measure.allocator import AllocatorReading, read_allocator
from lightning_memsave.measure.host_memory import read_host_memory
from lightning_memsave.measure.nvml import read_nvml
from lightning_memsave.planning.oom_diagnosis import Diagnosis, diagnose
from lightning_memsave.planning.out_of_memory import OutOfMemory, read_out_of_memory

T = TypeVar("T")

_EVALUATION = ("sanity_check", "validate", "test", "predict")
_SMALLER_EVALUATION = (
    "Pass a smaller `batch_size` to that DataLoader; in one process "
    '`MemSaveCallback(eval_micro_batch_size="auto")`, its default, splits batches of steps that '
    "can be split. There is no backward pass, so what saves activations or optimizer state does "
    "not help."
)
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def out_of_memory_in(error: BaseException, outside: BaseException | None) -> BaseException | None:
    """Find out whether memory that ran out is what ended a run.

    Args:
        error: What was raised.
        outside: What was being handled when the run began.

    Returns:
        It, or what it was raised from; ``None`` if it was something else.
    """
    ours = (e for e in errors_behind(error, outside) if isinstance(e, MemoryExhaustedError))
    return next(ours, None) or find_out_of_memory(error, outside)


def make_report(
    trainer: Any,
    pl_module: Any,
    error: BaseException,
    batch: Sequence[Tensor],
    num_largest: int,
) -> OutOfMemoryReport:
    """Gather what is known; what cannot be read is a note in the report.

    Args:
        trainer: The Trainer, in whatever state.
        pl_module: Its LightningModule, or ``None``.
        error: What says that memory ran out.
        batch: Tensors of the batch at hand.
        num_largest: How many of the largest tensors to keep.

    Returns:
        The report, without the batch.
    """
    notes: list[str] = []

    def attempt(what: str, read: Callable[[], T], default: T) -> T:
        try:
            return read()
        except Exception as failure:
            notes.append(f"{what} cannot be read: {describe(failure)}")
            return default

    device = trainer.strategy.root_device
    trace = attempt("The traceback", lambda: trace_of(error), "")
    diagnosis = _diagnose(trainer, error, trace)
    alive: list[AliveTensor] = attempt(
        "The tensors that are alive",
        lambda: find_alive_tensors(
            device, pl_module, trainer.optimizers, batch, error, phase=diagnosis.oom.phase
        ),
        [],
    )
    allocator: AllocatorReading | None = None
    if device.type == "cuda":
        allocator = attempt("The allocator", lambda: read_allocator(device), None)
    reserved_bytes = None if allocator is None else allocator.reserved_bytes
    if isinstance(error, MemoryExhaustedError):
        notes.append(
            "The batch was repeated in smaller parts before, and the activations of the last "
            "attempt were freed: they are not among the tensors that were alive."
        )
    return OutOfMemoryReport(
        diagnosis=diagnosis,
        error=f"{type(error).__name__}: {error}",
        where=attempt("Where it happened", lambda: _where(trainer, device), {}),
        alive=_by_category(alive),
        largest=tuple(alive[:num_largest]),
        num_alive=len(alive),
        allocator=allocator,
        nvml=None if device.type != "cuda" else read_nvml(device, reserved_bytes),
        host=attempt("Host memory", read_host_memory, None),
        trace=trace,
        notes=notes,
    )


def add_advice(trainer: Any, exception: BaseException, error: BaseException) -> None:
    """Let an exception say what to do, below its traceback.

    Args:
        trainer: The Trainer, in whatever state.
        exception: What ends the run.
        error: What says that memory ran out, in it or behind it.
    """
    if isinstance(error, MemoryExhaustedError):  # says it itself
        return
    diagnosis = _diagnose(trainer, error, trace_of(error))
    advice = list(diagnosis.advice)
    if getattr(trainer.state.stage, "value", None) in _EVALUATION:
        advice.insert(0, _SMALLER_EVALUATION)
    lines = [f"  {number}. {line}" for number, line in enumerate(advice, 1)]
    note = "\n".join([diagnosis.summary, "What to do:", *lines])
    if note not in getattr(exception, "__notes__", ()):  # of another callback of ours
        exception.add_note(note)


def describe_batch(batch: object, name: str = "batch") -> Iterator[BatchTensor]:
    """List the tensors of a batch.

    Args:
        batch: Tensors in any nesting.
        name: What to call it.

    Yields:
        Name, shape, type and device of each tensor; no reference to it.

    Example:
        >>> import torch
        >>> [(t.name, t.shape) for t in describe_batch({"x": [torch.zeros(4, 2)]})]
        [("batch['x'][0]", (4, 2))]
    """
    if isinstance(batch, Tensor):
        dtype = str(batch.dtype).removeprefix("torch.")
        yield BatchTensor(name, tuple(batch.shape), dtype, str(batch.device))
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from describe_batch(value, f"{name}[{key!r}]")
    elif isinstance(batch, (list, tuple)):
        for index, value in enumerate(batch):
            yield from describe_batch(value, f"{name}[{index}]")
    elif is_dataclass(batch) and not isinstance(batch, type):
        for field in fields(batch):
            yield from describe_batch(getattr(batch, field.name, None), f"{name}.{field.name}")


def say(trainer: Any, message: str) -> None:
    """Log a warning on the rank where it happened: a Python warning could be made an error.

    Args:
        trainer: The Trainer, whose package's logger is used.
        message: One line.
    """
    logging.getLogger(f"{host.package_of(trainer).__name__}.memsave").warning(message)


def _diagnose(trainer: Any, error: BaseException, trace: str) -> Diagnosis:
    oom = _read(trace or str(error), error, trainer.strategy.root_device)
    settings = ",".join(os.environ.get(name, "") for name in _ALLOCATOR_VARIABLES)
    return diagnose(oom, settings, has_memsave=_has_memsave(trainer))


@contextlib.contextmanager
def attempted(trainer: Any, otherwise: str) -> Iterator[None]:
    """Log what fails inside, and raise nothing: what ended the run must be seen.

    Args:
        trainer: The Trainer.
        otherwise: What is missing then.

    Yields:
        Once.
    """
    try:
        yield
    except Exception as failure:
        say(trainer, f"{otherwise}: {describe(failure)}")


# By name: `MemSaveCallback` may have an observer of its own, so that importing it makes a circle.
def _has_memsave(trainer: Any) -> bool:
    classes = (cls for callback in trainer.callbacks for cls in type(callback).__mro__)
    return any(cls.__name__ == "MemSaveCallback" for cls in classes)


def _read(text: str, error: BaseException, device: Any) -> OutOfMemory:
    try:
        return read_out_of_memory(text)
    except ConfigurationError:  # a library's own words
        return OutOfMemory(" ".join(str(error).split()), device.type, device.index)


def _by_category(alive: Sequence[AliveTensor]) -> MemoryBreakdown:
    total: Counter[str] = Counter()
    for one in alive:
        total[one.category] += one.num_bytes
    return MemoryBreakdown.from_categories(dict(total))


def _where(trainer: Any, device: Any) -> dict[str, Any]:
    return {
        "stage": getattr(trainer.state.stage, "value", None),
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "batch": None,
        "device": str(device),
        "rank": trainer.global_rank,
        "world_size": trainer.world_size,
        "precision": str(trainer.precision),
    }
