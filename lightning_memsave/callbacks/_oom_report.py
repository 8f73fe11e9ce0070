"""What is known when memory ran out, as text, as JSON and as files."""

import json
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from lightning_memsave.callbacks._report import versions
from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.measure.alive_tensors import AliveTensor
from lightning_memsave.measure.allocator import AllocatorReading
from lightning_memsave.measure.host_memory import HostReading
from lightning_memsave.measure.nvml import NvmlReading
from lightning_memsave.planning.oom_diagnosis import Diagnosis
from lightning_memsave.units import format_bytes

TEXT_NAME = "memsave_oom.txt"
JSON_NAME = "memsave_oom.json"
SNAPSHOT_NAME = "memsave_oom_snapshot.pickle"


@dataclass(frozen=True, slots=True)
class BatchTensor:
    """A tensor of the batch at hand.

    Args:
        name: Where it stands in the batch, such as ``batch['input_ids']``.
        shape: Its sizes.
        dtype: Such as ``"int64"``.
        device: Such as ``"cuda:0"``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class Section:
    """One more part of a report.

    Args:
        title: Its heading, and its key in JSON.
        lines: Its text.
        data: The same for programs; must be plain values.
    """

    title: str
    lines: tuple[str, ...]
    data: Any = None


@dataclass
class OutOfMemoryReport:
    """What is known when memory ran out. Holds no tensors, so that it may be kept.

    Args:
        diagnosis: What the message says and what to do.
        error: Class and message of the exception.
        where: Stage, epoch, step and rank.
        alive: Bytes of the tensors that were found alive on the device, by category.
        largest: The largest of them, largest first.
        num_alive: How many there are.
        batch: The batch at hand; empty between batches.
        allocator: What torch's allocator says; ``None`` without CUDA.
        nvml: What the driver says; ``None`` without CUDA.
        host: Host memory of this process.
        trace: The traceback as text.
        notes: What is special about this report, one sentence each.
    """

    diagnosis: Diagnosis
    error: str
    where: dict[str, Any]
    alive: MemoryBreakdown
    largest: tuple[AliveTensor, ...]
    num_alive: int
    batch: tuple[BatchTensor, ...] = ()
    allocator: AllocatorReading | None = None
    nvml: NvmlReading | None = None
    host: HostReading | None = None
    trace: str = ""
    notes: list[str] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list, init=False)
    files: dict[str, str | bytes] = field(default_factory=dict, init=False)

    def add_section(self, title: str, lines: Sequence[str], data: Any = None) -> None:
        """Add a part to text and JSON.

        Args:
            title: Its heading, and its key under ``sections`` in JSON.
            lines: Its text.
            data: The same for programs, as plain values; without it, the lines.
        """
        self.sections.append(Section(title, tuple(lines), data))

    def add_file(self, name: str, content: str | bytes) -> None:
        """Write one more file beside the report.

        Args:
            name: Such as ``"memsave_oom.html"``; with several ranks, the rank is put into it.
            content: What to write.
        """
        self.files[name] = content

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain values, for JSON.

        Returns:
            The fields under their names, ``alive`` as ``total_bytes`` and ``by_category``.
        """
        readings = {"allocator": self.allocator, "nvml": self.nvml, "host": self.host}
        return {
            "diagnosis": self.diagnosis.to_dict(),
            "error": self.error,
            "where": self.where,
            "alive": {
                "total_bytes": self.alive.total_bytes,
                "by_category": self.alive.by_category(),
                "num_tensors": self.num_alive,
                "largest": [asdict(one) | {"shape": list(one.shape)} for one in self.largest],
            },
            "batch": [asdict(one) | {"shape": list(one.shape)} for one in self.batch],
            **{name: None if one is None else asdict(one) for name, one in readings.items()},
            "notes": list(self.notes),
            "sections": {
                one.title: list(one.lines) if one.data is None else one.data
                for one in self.sections
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
            *(_titled(one.title, one.lines) for one in self.sections),
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
        if self.largest:
            lines += ["", "The largest:"]
        return lines + [
            f"{format_bytes(one.num_bytes):>11}  {one.category}: {one.name} {one.shape} {one.dtype}"
            for one in self.largest
        ]


def write_files(report: OutOfMemoryReport, directory: str, rank: int | None) -> str:
    """Write a report and the files that were added to it.

    Args:
        report: What to write.
        directory: Where to, also a remote one such as ``s3://...``; made if it does not exist.
        rank: The rank to put into the names, ``None`` if there is only one.

    Returns:
        Path of the text.
    """
    filesystem, folder = url_to_fs(directory)
    filesystem.makedirs(folder, exist_ok=True)
    contents = {
        TEXT_NAME: str(report),
        JSON_NAME: json.dumps(report.to_dict(), indent=2, default=str) + "\n",
        **report.files,
    }
    for name, content in contents.items():
        data = content.encode() if isinstance(content, str) else content
        filesystem.write_bytes(f"{folder}/{_with_rank(name, rank)}", data)
    return f"{directory}/{_with_rank(TEXT_NAME, rank)}"


def trace_of(error: BaseException) -> str:
    """Write down a traceback with its causes.

    Args:
        error: What was raised.

    Returns:
        Text, which holds on to nothing.
    """
    return "".join(traceback.format_exception(error))


def _with_rank(name: str, rank: int | None) -> str:
    if rank is None:
        return name
    path = PurePosixPath(name)
    return f"{path.stem}_rank{rank}{path.suffix}"


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
