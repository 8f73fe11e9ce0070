"""Tell from the figures of an out-of-memory message what the cause was."""

from collections.abc import Mapping

from lightning_memsave.planning.out_of_memory import OutOfMemory, ProcessOnDevice
from lightning_memsave.units import GIB, format_bytes

# Memory that torch's allocator keeps without a tensor in it counts as fragmentation from this share
# of what it has reserved. When it raises its error it has given back every segment that is wholly
# free, so what is left lies between tensors; a few per cent of that are there in any healthy run.
FRAGMENTED_SHARE = 0.05
# Others on the device count from this share of it: a desktop alone takes less.
OTHERS_SHARE = 0.1
# CUDA's context and the buffers of its libraries are smaller than this as a rule.
USUAL_OUTSIDE_BYTES = 2 * GIB

CAUSES = {
    "full": "the device is full of tensors of this process",
    "too_large": "one request is larger than the device",
    "limit": "the limit set for this process is reached",
    "fragmentation": "free memory is scattered between tensors",
    "other_process": "other processes take memory on the device",
    "outside": "memory outside of torch's allocator takes the place",
    "refused": "the request was refused although memory was free",
    "library": "a library found no memory beside torch's allocator",
    "host": "the memory of the host ran out",
    "unknown": "the message has no figures",
}


def shares_of(oom: OutOfMemory) -> dict[str, int]:
    """Divide the memory of the device.

    Args:
        oom: The figures of the message.

    Returns:
        Bytes under the names that `Diagnosis` explains; what is not known or nothing is left out.
    """
    known: dict[str, int | None] = {
        "allocated": oom.allocated_bytes,
        "unallocated": oom.unallocated_bytes,
    }
    torch_bytes = oom.reserved_bytes or oom.allocated_bytes
    if torch_bytes is not None:
        own_bytes, others = own_and_others(oom)
        outside_bytes = 0 if own_bytes is None else max(own_bytes - torch_bytes, 0)
        others_bytes = sum(other.used_bytes or 0 for other in others)
        known |= {"outside": outside_bytes, "others": others_bytes}
        if oom.capacity_bytes is not None and oom.free_bytes is not None:
            rest_bytes = oom.capacity_bytes - oom.free_bytes
            rest_bytes -= torch_bytes + outside_bytes + others_bytes
            # Less than this is rounding and what the driver keeps.
            known["not_told"] = rest_bytes if rest_bytes > oom.capacity_bytes // 50 else None
    shares = {name: num_bytes for name, num_bytes in known.items() if num_bytes}
    return shares if oom.free_bytes is None else shares | {"free": oom.free_bytes}


def own_and_others(oom: OutOfMemory) -> tuple[int | None, tuple[ProcessOnDevice, ...]]:
    """Tell this process from the others that the message names.

    Args:
        oom: The figures of the message.

    Returns:
        What this process takes in bytes, ``None`` if not known, and the other processes. In a
        container this process has another number outside and stands among the others: it is the
        smallest one that is large enough.
    """
    if oom.process_bytes is not None or oom.reserved_bytes is None:
        return oom.process_bytes, oom.processes
    least_bytes = oom.reserved_bytes * 0.99  # sizes are rounded
    large_enough = [p for p in oom.processes if (p.used_bytes or 0) >= max(least_bytes, 1)]
    if not large_enough:
        return None, oom.processes
    own = min(large_enough, key=lambda process: process.used_bytes or 0)
    return own.used_bytes, tuple(p for p in oom.processes if p is not own)


def cause_of(oom: OutOfMemory, shares: Mapping[str, int]) -> tuple[str, str]:
    """Find the cause.

    Args:
        oom: The figures of the message.
        shares: What `shares_of` gave.

    Returns:
        A key of `CAUSES`, and the figures that speak for it in a sentence or two.
    """
    if oom.device == "cpu":
        return "host", _asked(oom)
    if oom.library:
        return "library", (
            f"{oom.library} asks the driver for memory of its own, and torch's allocator had not "
            "left enough."
        )
    requested_bytes = oom.requested_bytes
    is_told = oom.free_bytes is not None or oom.allocated_bytes is not None
    limit_bytes = min((n for n in (oom.capacity_bytes, oom.allowed_bytes) if n), default=None)
    if requested_bytes is None or not is_told:
        return "unknown", f"{_asked(oom)} How much there was is not told."
    if limit_bytes is not None and requested_bytes > limit_bytes:
        return "too_large", (
            f"{_asked(oom)} There are {format_bytes(limit_bytes)} for this process in all, so that "
            "nothing helps but a smaller request."
        )
    return _cause_of_missing(oom, requested_bytes, shares)


def _cause_of_missing(
    oom: OutOfMemory, requested_bytes: int, shares: Mapping[str, int]
) -> tuple[str, str]:
    reserved_bytes = oom.reserved_bytes or oom.allocated_bytes or 0
    capacity_bytes = oom.capacity_bytes or 0
    on_device_bytes = capacity_bytes - reserved_bytes if oom.free_bytes is None else oom.free_bytes
    allowed_bytes = capacity_bytes if oom.allowed_bytes is None else oom.allowed_bytes
    free_bytes = max(min(on_device_bytes, allowed_bytes - reserved_bytes), 0)
    missing_bytes = requested_bytes - free_bytes
    was_free = f"{_asked(oom)} {format_bytes(free_bytes)} was free"
    if missing_bytes <= 0 and oom.free_bytes is not None:
        return "refused", (
            f"{was_free}: the driver refused it, or another process gave memory back in between."
        )
    missing_bytes = max(missing_bytes, 1)
    unallocated_bytes = shares.get("unallocated", 0)
    if unallocated_bytes >= max(missing_bytes, FRAGMENTED_SHARE * reserved_bytes):
        return "fragmentation", (
            f"{was_free}, and {format_bytes(unallocated_bytes)} more lies between tensors in "
            "pieces that are too small."
        )
    if oom.allowed_bytes is not None and free_bytes < on_device_bytes:
        return "limit", (
            f"{_asked(oom)} This process may take {format_bytes(allowed_bytes)} and had "
            f"{format_bytes(reserved_bytes)}; {format_bytes(on_device_bytes)} was free on the "
            "device."
        )
    others_bytes = shares.get("others", 0)
    if others_bytes >= max(missing_bytes, OTHERS_SHARE * capacity_bytes):
        return "other_process", (
            f"{was_free}. Other processes hold {format_bytes(others_bytes)}: without them it would "
            "fit."
        )
    outside_bytes = shares.get("outside", 0) + shares.get("not_told", 0)
    if outside_bytes - USUAL_OUTSIDE_BYTES >= missing_bytes:
        return "outside", (
            f"{was_free}. {format_bytes(outside_bytes)} is in use that torch's allocator does not "
            "know of; a CUDA context and its libraries take less than "
            f"{format_bytes(USUAL_OUTSIDE_BYTES)} as a rule."
        )
    if unallocated_bytes:
        was_free += f", and {format_bytes(unallocated_bytes)} lay between tensors"
    return "full", f"{was_free}."


def _asked(oom: OutOfMemory) -> str:
    if oom.requested_bytes is None:
        return "It is not told how much was asked for."
    return f"{format_bytes(oom.requested_bytes)} was asked for."
