"""How torch and others word that memory ran out."""

import re

LONGEST = 10_000  # characters of a message, with a hundred processes

# What stands at the left of a line in quotes, comments, logs of torchrun and rich's tracebacks.
_LEFT = re.compile(r"^(?:[\s>#|│*]|\[rank\d+\]:)+")
_COLOR = re.compile(r"\x1b\[[\d;]*m")

MESSAGE = re.compile(
    r"allocationondevice(?P<index>\d*)wouldexceedallowedmemory\.?(?:\(outofmemory\))?"
    r"|(?P<host>DefaultCPUAllocator:(?:can.tallocatememory|notenoughmemory)"
    r"|unabletoallocate(?=[\d.]+[KMGT]?i?B)|(?<!OutOf)MemoryError(?=:|$)"
    r"|outofmemory:killedprocess|oom[-_]kill)"
    r"|(?P<library>(?:CU|HIP|ROC)(?:BLAS(?:LT)?|DNN|SPARSE|SOLVER|FFT))_STATUS_ALLOC_FAILED"
    r"|(?P<backend>CUDA|HIP|XPU|NPU|MPSbackend)outofmemory(?!error)"
    r"|[:\]]outofmemory(?!error)|outofmemory(?:error:|withonesample|inthestep)",
    re.IGNORECASE,
)
INDEX = re.compile(r"GPU(\d+)(?:;|hasatotal)")
_SIZE = r"(\d+(?:\.\d+)?)(bytes|[KMGT]i?B|EB|B)"
PROCESS = re.compile(rf"Process(\d+)has{_SIZE}memoryinuse")
_PATTERNS = {
    "requested_bytes": rf"triedtoallocate(?:morethan)?{_SIZE}|Requested:{_SIZE}"
    rf"|unabletoallocate{_SIZE}",
    "capacity_bytes": rf"totalcapaci?tyof{_SIZE}|;{_SIZE}totalcapacity|Devicelimit:{_SIZE}",
    "free_bytes": rf"ofwhich{_SIZE}isfree|;{_SIZE}free|Free\(accordingtoCUDA\):{_SIZE}",
    "allowed_bytes": rf"{_SIZE}allowed;|memoryfraction\):{_SIZE}|maxallowed:{_SIZE}",
    "allocated_bytes": rf"{_SIZE}isallocatedbyPyTorch|{_SIZE}alreadyallocated"
    rf"|Currentlyallocated:{_SIZE}|MPSallocated:{_SIZE}",
    "private_pool_bytes": rf"with{_SIZE}allocatedinprivatepools",
    "unallocated_bytes": rf"{_SIZE}isreservedbyPyTorchbutunallocated|{_SIZE}cached\)",
    "reserved_bytes": rf"{_SIZE}reservedintotalbyPyTorch",
    "process_bytes": rf"thisprocesshas{_SIZE}memoryinuse",
}
_SIZES = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in _PATTERNS.items()}

# Lines of tracebacks as Python, IPython and Jupyter write them.
_FRAME = re.compile(r"([^\s\"]+\.py)\b[^\n]*?\bin (?:[\w<>]+\.)*(\w+)")
_FORWARD = frozenset(
    {"forward", "training_step", "validation_step", "test_step", "predict_step", "_call_impl"}
)


def words_of(text: str) -> list[str]:
    """Take a text apart, without colours and without what quotes and logs put around lines.

    Args:
        text: Any text.

    Returns:
        Its words, which have no white space inside.
    """
    lines = (_LEFT.sub("", line).rstrip(" \t\r|│") for line in _COLOR.sub("", text).splitlines())
    return [word for line in lines for word in line.split()]


def sizes_in(dense: str, start: re.Match[str], stop: int) -> tuple[dict[str, int], int]:
    """Read the figures of one message.

    Args:
        dense: The text without white space.
        start: Where `MESSAGE` found the message.
        stop: Where the next one begins.

    Returns:
        Bytes under the names of `OutOfMemory`, and where the last figure ends.
    """
    sizes: dict[str, int] = {}
    end = start.end()
    for name, pattern in _SIZES.items():
        match = pattern.search(dense, start.start(), stop)
        if match is None:
            continue
        end = max(end, match.end())
        number, unit = (group for group in match.groups() if group is not None)
        num_bytes = bytes_of(number, unit)
        if num_bytes is not None:
            sizes[name] = num_bytes
    reserved_bytes = sizes.pop("reserved_bytes", None)
    if reserved_bytes is not None and "allocated_bytes" in sizes:
        # Both are rounded, so that their difference may come out below zero.
        sizes["unallocated_bytes"] = max(reserved_bytes - sizes["allocated_bytes"], 0)
    return sizes, end


def bytes_of(number: str, unit: str) -> int | None:
    """Read a size as torch writes it.

    Args:
        number: Digits, with a point or without.
        unit: Such as ``"GiB"`` or ``"bytes"``.

    Returns:
        Bytes; ``None`` for what is no size but -1 as an unsigned number.
    """
    # torch divides by 1024 whatever it calls the unit.
    power = "BKMGTPE".index(unit[0].upper())
    num_bytes = round(float(number) * 1024**power)
    # -1 as an unsigned number: what NVML gives on Windows and in WSL, and "no limit".
    return None if num_bytes >= 2**63 else num_bytes


def device_in(start: re.Match[str], dense: str) -> str:
    """Tell the kind of device that had no memory.

    Args:
        start: Where `MESSAGE` found the message.
        dense: The text without white space.

    Returns:
        As ``torch.device.type`` says it; empty if nothing tells.
    """
    if start["host"]:
        return "cpu"
    backend = (start["backend"] or "").lower()
    if backend in {"xpu", "npu"}:
        return backend
    if backend == "mpsbackend":
        return "mps"
    around = dense[max(start.start() - 40, 0) : start.end() + 200].lower()
    is_cuda = start["library"] or any(word in around for word in ("cuda", "hip", "gpu"))
    return "cuda" if is_cuda else ""


def phase_in(text: str) -> str:
    """Tell from the lines of a traceback which part of the step ran.

    Args:
        text: Text with a traceback of Python, IPython or Jupyter.

    Returns:
        ``"forward"``, ``"backward"`` or ``"optimizer"``; empty if nothing tells.
    """
    phase = ""
    for path, function in _FRAME.findall(text):
        if re.search(r"[\\/](torch|bitsandbytes)[\\/]optim[\\/]", path):
            phase = "optimizer"  # also around the closure, whose frames follow
        elif function in {"backward", "_engine_run_backward"}:
            phase = "backward"
        elif function in _FORWARD and phase != "backward":  # recomputation is part of backward
            phase = "forward"
    return phase
