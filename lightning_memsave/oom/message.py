"""Read what torch says when memory runs out."""

import bisect
import itertools
import re
from dataclasses import asdict, dataclass
from typing import Any

from lightning_memsave.core.out_of_memory import CONTEXT_LOST, WORDS, Words, phase_in
from lightning_memsave.errors import ConfigurationError

_LONGEST = 10_000  # characters of a message, with a hundred processes

# What stands at the left of a line in quotes, comments, logs of torchrun and rich's tracebacks.
_LEFT = re.compile(r"^(?:[\s>#|│*]|\[rank\d+\]:)+")
_COLOR = re.compile(r"\x1b\[[\d;]*m")

_MESSAGE = re.compile(
    "|".join(f"(?P<words_{n}>{words.pattern})" for n, words in enumerate(WORDS)), re.IGNORECASE
)
_INDEX = re.compile(r"GPU(\d+)(?:;|hasatotal)")
_SIZE = r"(\d+(?:\.\d+)?)(bytes|[KMGT]i?B|EB|B)"
_PROCESS = re.compile(rf"Process(\d+)has{_SIZE}memoryinuse")
_PATTERNS = {
    "requested_bytes": rf"triedtoallocate(?:morethan)?{_SIZE}|Requested:{_SIZE}"
    rf"|Unabletoallocate{_SIZE}foranarray",
    "capacity_bytes": rf"totalcapaci?tyof{_SIZE}|;{_SIZE}totalcapacity|Devicelimit:{_SIZE}",
    "free_bytes": rf"ofwhich{_SIZE}isfree|;{_SIZE}free|Free\(accordingtoCUDA\):{_SIZE}",
    "allowed_bytes": rf"{_SIZE}allowed;|memoryfraction\):{_SIZE}|maxallowed:{_SIZE}",
    "allocated_bytes": rf"{_SIZE}isallocatedbyPyTorch|{_SIZE}alreadyallocated"
    rf"|Currentlyallocated:{_SIZE}|MPSallocated:{_SIZE}",
    "unallocated_bytes": rf"{_SIZE}isreservedbyPyTorchbutunallocated|{_SIZE}cached\)",
    "reserved_bytes": rf"{_SIZE}reservedintotalbyPyTorch",
    "process_bytes": rf"thisprocesshas{_SIZE}memoryinuse",
}
_SIZES = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in _PATTERNS.items()}


def _sizes_in(dense: str, start: re.Match[str], stop: int) -> tuple[dict[str, int], int]:
    sizes: dict[str, int] = {}
    end = start.end()
    for name, pattern in _SIZES.items():
        match = pattern.search(dense, start.start(), stop)
        if match is None:
            continue
        end = max(end, match.end())
        number, unit = (group for group in match.groups() if group is not None)
        num_bytes = _bytes_of(number, unit)
        if num_bytes is not None:
            sizes[name] = num_bytes
    reserved_bytes = sizes.pop("reserved_bytes", None)
    if reserved_bytes is not None and "allocated_bytes" in sizes:
        # Both are rounded, so that their difference may come out below zero.
        sizes["unallocated_bytes"] = max(reserved_bytes - sizes["allocated_bytes"], 0)
    return sizes, end


def _bytes_of(number: str, unit: str) -> int | None:
    # torch divides by 1024 whatever it calls the unit.
    power = "BKMGTPE".index(unit[0].upper())
    num_bytes = round(float(number) * 1024**power)
    # -1 as an unsigned number: what NVML gives on Windows and in WSL, and "no limit".
    return None if num_bytes >= 2**63 else num_bytes


@dataclass(frozen=True, slots=True)
class ProcessOnDevice:
    pid: int
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The figures of one out-of-memory message; what it does not tell is ``None``.

    torch writes two digits behind the point, so that sizes are exact to half a hundredth of the
    unit they were written in.
    """

    message: str
    device: str = ""
    device_index: int | None = None
    library: str = ""
    told: str = ""
    """The cause, where the words alone tell it."""
    requested_bytes: int | None = None
    capacity_bytes: int | None = None
    free_bytes: int | None = None
    allowed_bytes: int | None = None
    allocated_bytes: int | None = None
    unallocated_bytes: int | None = None
    process_bytes: int | None = None
    processes: tuple[ProcessOnDevice, ...] = ()
    phase: str = ""
    allocator_variable: str = "PYTORCH_CUDA_ALLOC_CONF"
    num_messages: int = 1

    @property
    def reserved_bytes(self) -> int | None:
        if self.allocated_bytes is None or self.unallocated_bytes is None:
            return None
        return self.allocated_bytes + self.unallocated_bytes

    def to_dict(self) -> dict[str, Any]:
        processes = [asdict(process) for process in self.processes]
        return {**asdict(self), "reserved_bytes": self.reserved_bytes, "processes": processes}


def read_out_of_memory(text: str) -> OutOfMemory:
    """Find the message of an out-of-memory error in a text and read its figures.

    Reads the messages of torch since 1.0, on CUDA with either allocator backend, on ROCm and the
    CPU, and those of CUDA's libraries.
    """
    # Without colours and what quotes and logs put around lines; and without white space, because a
    # terminal may have broken a line anywhere.
    lines = (_LEFT.sub("", line).rstrip(" \t\r|│") for line in _COLOR.sub("", text).splitlines())
    pieces = [piece for line in lines for piece in line.split()]
    ends = list(itertools.accumulate(map(len, pieces)))
    dense = "".join(pieces)
    starts = list(_MESSAGE.finditer(dense))
    lost = CONTEXT_LOST.search(text)
    if lost is not None and starts and all(_words_of(start).library for start in starts):
        raise ConfigurationError(
            f"This text says `{lost[0]}`, after which every call to the device fails: memory did "
            "not run out. Run again with the environment variable `CUDA_LAUNCH_BLOCKING=1`: the "
            "traceback then ends in the operation that failed."
        )
    if not starts:
        raise ConfigurationError(
            f"There is no out-of-memory error in this text of {len(text)} characters. Pass the "
            'message, such as "CUDA out of memory. Tried to allocate 2.00 GiB ...", or the whole '
            "traceback or log with it."
        )
    stops = [start.start() for start in starts[1:]] + [len(dense)]
    found = [
        (start, *_sizes_in(dense, start, min(stop, start.start() + _LONGEST)))
        for start, stop in zip(starts, stops, strict=True)
    ]
    with_sizes = [one for one in found if one[1]]
    # A process is also killed because another one has failed.
    not_killed = [one for one in found if _words_of(one[0]).cause != "killed"]
    start, sizes, end = (with_sizes or not_killed or found)[-1]
    words = _words_of(start)
    part = dense[start.start() : end]
    first, last = (bisect.bisect_right(ends, at) for at in (start.start(), end - 1))
    index = start["index"] or next(iter(_INDEX.findall(part)), "")
    around = dense[max(start.start() - 40, 0) : start.end() + 200].lower()
    is_cuda = any(word in around for word in ("cuda", "hip", "gpu"))
    variable = re.search(r"PYTORCH_\w*?ALLOC_CONF", dense[start.start() : stops[-1]])
    return OutOfMemory(
        message=" ".join(pieces[first : last + 1]),
        device=words.device or ("cuda" if is_cuda else ""),
        device_index=None if not index else int(index),
        library=(start["library"] or "").upper() or words.library,
        told=words.cause,
        processes=tuple(
            ProcessOnDevice(int(pid), _bytes_of(number, unit))
            for pid, number, unit in _PROCESS.findall(part)
        ),
        phase=phase_in(text),
        allocator_variable="PYTORCH_CUDA_ALLOC_CONF" if variable is None else variable[0],
        num_messages=max(len(with_sizes), 1),
        **sizes,
    )


def _words_of(start: re.Match[str]) -> Words:
    return WORDS[int((start.lastgroup or "").removeprefix("words_"))]


def own_and_others(oom: OutOfMemory) -> tuple[int | None, tuple[ProcessOnDevice, ...]]:
    """Tell this process from the others that the message names."""
    if oom.process_bytes is not None or oom.reserved_bytes is None:
        return oom.process_bytes, oom.processes
    least_bytes = oom.reserved_bytes * 0.99  # sizes are rounded
    large_enough = [p for p in oom.processes if (p.used_bytes or 0) >= max(least_bytes, 1)]
    if not large_enough:
        return None, oom.processes
    own = min(large_enough, key=lambda process: process.used_bytes or 0)
    return own.used_bytes, tuple(p for p in oom.processes if p is not own)
