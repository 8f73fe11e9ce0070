"""What is known when memory ran out, as text, as JSON and as files."""

import contextlib
import json
import os
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, TypeVar

from torch import Tensor

from lightning_memsave.core.files import write_file
from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.core.nested import items_of
from lightning_memsave.core.out_of_memory import errors_behind, find_what_to_explain
from lightning_memsave.core.versions import versions
from lightning_memsave.errors import ConfigurationError, MemoryExhaustedError, NoEffectWarning
from lightning_memsave.measure.alive_tensors import (
    AliveTensor,
    find_alive_tensors,
    is_of_library,
    merge_alike,
)
from lightning_memsave.measure.allocator import (
    AllocatorReading,
    HostReading,
    read_allocator,
    read_host_memory,
)
from lightning_memsave.measure.nvml import NvmlReading, read_nvml
from lightning_memsave.oom.advice import RunFacts, kept_bytes, most_kept
from lightning_memsave.oom.diagnosis import Diagnosis, diagnose
from lightning_memsave.oom.message import OutOfMemory, read_out_of_memory
from lightning_memsave.prediction.cuda.allocator import ALLOCATOR_VARIABLES
from lightning_memsave.techniques.attention_kernel.technique import AttentionKernel
from lightning_memsave.techniques.chunked_cross_entropy.technique import ChunkedCrossEntropy
from lightning_memsave.trainer.failures import describe
from lightning_memsave.units import format_bytes

TEXT_NAME = "memsave_oom.txt"
JSON_NAME = "memsave_oom.json"
SNAPSHOT_NAME = "memsave_oom_snapshot.pickle"


@dataclass(frozen=True, slots=True)
class BatchTensor:
    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str


@dataclass
class OutOfMemoryReport:
    """What is known when memory ran out. Holds no tensors, so that it may be kept."""

    diagnosis: Diagnosis
    error: str
    where: dict[str, Any]
    alive: MemoryBreakdown
    largest: tuple[AliveTensor, ...]
    num_alive: int
    kept: dict[str, int] = field(default_factory=dict)
    batch: tuple[BatchTensor, ...] = ()
    allocator: AllocatorReading | None = None
    nvml: NvmlReading | None = None
    host: HostReading | None = None
    trace: str = ""
    notes: list[str] = field(default_factory=list)
    sections: list[tuple[str, tuple[str, ...], Any]] = field(default_factory=list, init=False)
    files: dict[str, str | bytes] = field(default_factory=dict, init=False)

    def add_section(self, title: str, lines: Sequence[str], data: Any = None) -> None:
        self.sections.append((title, tuple(lines), data))

    def add_file(self, name: str, content: str | bytes) -> None:
        self.files[name] = content

    def to_dict(self) -> dict[str, Any]:
        readings = {"allocator": self.allocator, "nvml": self.nvml, "host": self.host}
        return {
            "diagnosis": self.diagnosis.to_dict(),
            "error": self.error,
            "where": self.where,
            "alive": {
                "total_bytes": self.alive.total_bytes,
                "by_category": self.alive.by_category(),
                "num_tensors": self.num_alive,
                "kept": self.kept,
                "largest": [asdict(one) | {"shape": list(one.shape)} for one in self.largest],
            },
            "batch": [asdict(one) | {"shape": list(one.shape)} for one in self.batch],
            **{name: None if one is None else asdict(one) for name, one in readings.items()},
            "notes": list(self.notes),
            "sections": {
                title: list(lines) if data is None else data for title, lines, data in self.sections
            },
            "traceback": self.trace,
            "versions": versions(),
        }

    def __str__(self) -> str:
        parts = [
            str(self.diagnosis),
            _titled(
                "Where",
                [f"{name.replace('_', ' ')}: {value}" for name, value in self.where.items()],
            ),
            *(_titled(title, lines) for title, lines, _ in self.sections),
            _titled("Tensors that were alive", self._alive_lines()),
            _titled("Batch", [f"{b.name}: {b.shape} {b.dtype} on {b.device}" for b in self.batch]),
            _titled("torch's allocator", _reading_lines(self.allocator)),
            _titled("The driver (NVML)", _reading_lines(self.nvml)),
            _titled("Host memory of this process", _reading_lines(self.host)),
            _titled("Notes", self.notes),
            _titled("Message", [self.diagnosis.oom.message]),
            _titled("Traceback", self.trace.splitlines()),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _alive_lines(self) -> list[str]:
        total_bytes = self.alive.total_bytes
        lines = [
            f"{format_bytes(n):>11}  {n / total_bytes:6.1%}  {name}"
            for name, n in sorted(self.alive.by_category().items(), key=lambda item: -item[1])
            if n
        ]
        lines += [f"{format_bytes(total_bytes):>11}  in {self.num_alive} tensors"]
        if self.allocator is not None:
            rest_bytes = max(self.allocator.allocated_bytes - total_bytes, 0)
            lines += [
                f"{format_bytes(rest_bytes):>11}  allocated beside them: held by C++ alone, and "
                "rounding"
            ]
        if self.kept:
            lines += ["", "Kept from step to step, by attribute:"]
        lines += [f"{format_bytes(n):>11}  {owner}" for owner, n in self.kept.items()]
        if self.largest:
            lines += ["", "The largest:"]
        return lines + [
            f"{format_bytes(one.num_bytes):>11}  {one.category}: {one.name}"
            f"{'' if one.count == 1 else f', {one.count} tensors of'} {one.shape} {one.dtype}"
            for one in self.largest
        ]


def write_files(report: OutOfMemoryReport, directory: str, rank: int | None) -> dict[str, str]:
    contents = {
        TEXT_NAME: str(report),
        JSON_NAME: json.dumps(report.to_dict(), indent=2, default=str) + "\n",
        **report.files,
    }
    written = {}
    for name, content in contents.items():
        path, why = PurePosixPath(name), ""
        own_name = name if rank is None else f"{path.stem}_rank{rank}{path.suffix}"
        try:
            write_file(directory, own_name, content)
        except Exception as failure:  # remote file systems raise their own classes
            why = describe(failure)
        written[f"{directory}/{own_name}"] = why
    return written


def _trace_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _titled(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"{title}:", *(f"  {line}".rstrip() for line in lines)]) if lines else ""


def _reading_lines(reading: AllocatorReading | NvmlReading | HostReading | None) -> list[str]:
    if reading is None:
        return []
    lines = []
    for name, value in asdict(reading).items():
        if value is None or value == "":
            continue
        words = name.removesuffix("_bytes").replace("_", " ")
        lines.append(f"{words}: {format_bytes(value) if name.endswith('_bytes') else value}")
    return lines


T = TypeVar("T")

_TO_DO = "What to do:"
_EVALUATION = ("sanity_check", "validate", "test", "predict")
_ALLOCATOR_VARIABLES = (*ALLOCATOR_VARIABLES, "PYTORCH_HIP_ALLOC_CONF")


def out_of_memory_in(error: BaseException, outside: BaseException | None) -> BaseException | None:
    ours = (e for e in errors_behind(error, outside) if isinstance(e, MemoryExhaustedError))
    return next(ours, None) or find_what_to_explain(error, outside)


def make_report(
    trainer: Any,
    pl_module: Any,
    error: BaseException,
    batch: Sequence[Tensor],
    num_largest: int,
) -> OutOfMemoryReport:
    notes: list[str] = []

    def attempt(what: str, read: Callable[[], T], default: T) -> T:
        try:
            return read()
        except Exception as failure:
            notes.append(f"{what} cannot be read: {describe(failure)}")
            return default

    device = trainer.strategy.root_device
    trace = attempt("The traceback", lambda: _trace_of(error), "")
    oom = _read_error(trainer, error, trace)
    alive: list[AliveTensor] = attempt(
        "The tensors that are alive",
        lambda: find_alive(trainer, pl_module, batch, error, oom.phase),
        [],
    )
    by_category: Counter[str] = Counter()
    for one in alive:
        by_category[one.category] += one.num_bytes
    allocator: AllocatorReading | None = None
    if device.type == "cuda":
        allocator = attempt("The allocator", lambda: read_allocator(device), None)
    reserved_bytes = None if allocator is None else allocator.reserved_bytes
    if isinstance(error, MemoryExhaustedError):
        notes.append(
            "The batch was repeated in smaller micro-batches before, and the activations of the "
            "last attempt were freed: they are not among the tensors that were alive."
        )
    return OutOfMemoryReport(
        diagnosis=_diagnose(trainer, oom, alive),
        error=f"{type(error).__name__}: {error}",
        where={
            "stage": getattr(trainer.state.stage, "value", None),
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "batch": None,
            "device": str(device),
            "rank": trainer.global_rank,
            "world_size": trainer.world_size,
            "precision": str(trainer.precision),
        },
        alive=MemoryBreakdown.from_categories(dict(by_category)),
        largest=tuple(merge_alike(alive)[:num_largest]),
        num_alive=len(alive),
        kept=kept_bytes(alive),
        allocator=allocator,
        nvml=None if device.type != "cuda" else read_nvml(device, reserved_bytes),
        host=attempt("Host memory", read_host_memory, None),
        trace=trace,
        notes=notes,
    )


def add_advice(
    trainer: Any,
    pl_module: Any,
    exception: BaseException,
    error: BaseException,
    diagnosis: Diagnosis | None = None,
) -> None:
    """Let an exception say what to do, below its traceback, unless it does already."""
    if any(_TO_DO in note for note in getattr(exception, "__notes__", ())):
        return  # of another callback of this package
    if diagnosis is None:
        oom = _read_error(trainer, error, _trace_of(error))
        alive = find_alive(trainer, pl_module, (), error, oom.phase)
        diagnosis = _diagnose(trainer, oom, alive)
    lines = [f"  {number}. {line}" for number, line in enumerate(diagnosis.advice, 1)]
    exception.add_note("\n".join([diagnosis.summary, _TO_DO, *lines]))


def describe_batch(batch: object, name: str = "batch") -> Iterator[BatchTensor]:
    if isinstance(batch, Tensor):
        dtype = str(batch.dtype).removeprefix("torch.")
        yield BatchTensor(name, tuple(batch.shape), dtype, str(batch.device))
    is_container = isinstance(batch, Mapping | list | tuple)
    for key, value in items_of(batch):
        yield from describe_batch(value, f"{name}[{key!r}]" if is_container else f"{name}.{key}")


def _read_error(trainer: Any, error: BaseException, trace: str) -> OutOfMemory:
    device = trainer.strategy.root_device
    try:
        oom = read_out_of_memory(trace or str(error))
    except ConfigurationError:  # a library's own words
        oom = OutOfMemory(" ".join(str(error).split()), device.type, device.index)
    return replace(oom, phase=error.phase) if isinstance(error, MemoryExhaustedError) else oom


def _diagnose(trainer: Any, oom: OutOfMemory, alive: Sequence[AliveTensor]) -> Diagnosis:
    settings = ",".join(os.environ.get(name, "") for name in _ALLOCATOR_VARIABLES)
    # By name: `MemSaveCallback` may have an observer of its own, so that importing it is a circle.
    suite: Any = next(
        (
            c
            for c in trainer.callbacks
            if "MemSaveCallback" in [k.__name__ for k in type(c).__mro__]
        ),
        None,
    )
    run = RunFacts(
        suite is not None,
        () if suite is None else tuple(suite.rows),
        getattr(trainer.state.stage, "value", None) in _EVALUATION,
        str(trainer.precision),
        most_kept(alive),
        _without_effect(trainer.lightning_module),
    )
    return diagnose(oom, settings, run)


# No table names them where the preset is without them. Where this raises, as for what is on, the
# report is as it would be without it.
def _without_effect(module: Any) -> frozenset[str]:
    found = set()
    for kind in (AttentionKernel, ChunkedCrossEntropy):
        technique: Any = kind.from_value(kind.offers[-1].value)
        with warnings.catch_warnings(), contextlib.suppress(Exception):
            warnings.simplefilter("ignore", NoEffectWarning)
            handle = technique.apply(module)
            handle.undo()
            found |= set() if handle.changes else {kind.argument}
    return frozenset(found)


def find_alive(
    trainer: Any,
    pl_module: Any,
    batch: object,
    error: BaseException | None = None,
    phase: str = "",
) -> list[AliveTensor]:
    parts = [*trainer.callbacks, *trainer.loggers, getattr(trainer, "datamodule", None)]
    owners = {"self": pl_module}
    for part in parts:
        name = type(part).__name__
        owners[f"{name} {len(owners)}" if name in owners else name] = part
    # Variables of a script or a notebook, such as a list that a hook fills.
    names = dict.fromkeys(["__main__", *(type(owner).__module__ for owner in owners.values())])
    others = {name: sys.modules.get(name) for name in names if not is_of_library(name)}
    others["trainer"] = trainer
    return find_alive_tensors(
        trainer.strategy.root_device,
        pl_module,
        trainer.optimizers,
        batch,
        error,
        phase=phase,
        owners=owners,
        others=others,
    )
