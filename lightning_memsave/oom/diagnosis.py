"""Why memory ran out."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_memsave.oom.advice import FRAGMENTED_SHARE, Kept, RunFacts, advise
from lightning_memsave.oom.message import OutOfMemory, own_and_others
from lightning_memsave.units import GIB, KIB, MIB, format_bytes

# Others on the device count from this share of it: a desktop alone uses less.
OTHERS_SHARE = 0.1
# CUDA's context and the buffers of its libraries are smaller than this as a rule.
USUAL_OUTSIDE_BYTES = 2 * GIB

CAUSES = {
    "full": "the device is full of tensors of this process",
    "too_large": "one request is larger than the device",
    "limit": "the limit set for this process is reached",
    "fragmentation": "free memory is scattered between tensors",
    "other_process": "other processes take memory on the device",
    "outside": "memory outside of torch's allocator fills the device",
    "refused": "the request was refused although memory was free",
    "library": "a library found no memory beside torch's allocator",
    "nccl": "NCCL found no memory for its buffers beside torch's allocator",
    "bitsandbytes": "bitsandbytes found no memory beside torch's allocator",
    "kernel": "a Triton kernel needs more shared memory than a multiprocessor of this GPU has",
    "mps": "the memory that MPS may use is full",
    "host": "the memory of the host ran out",
    "killed": "the system killed a process, as a rule because the memory of the host ran out",
    "shared_memory": "the shared memory of the host (`/dev/shm`) ran out",
    "unknown": "the message has no figures",
}


def shares_of(oom: OutOfMemory) -> dict[str, int]:
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


def cause_of(oom: OutOfMemory, shares: Mapping[str, int]) -> tuple[str, str]:
    if oom.told:
        return oom.told, _told(oom)
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


def _told(oom: OutOfMemory) -> str:
    if oom.library:
        return (
            f"{oom.library} asks the driver for memory of its own, and torch's allocator had not "
            "left enough."
        )
    sentences = {
        "kernel": "Each multiprocessor has this memory beside that of the device, which was not "
        "full: a smaller batch does not help.",
        "killed": "A killed process says nothing itself: the kernel's log does (`dmesg | grep -i "
        '"killed process"`), and so does Slurm (`sacct -o MaxRSS`).',
        "shared_memory": "Workers of a DataLoader pass batches through it: containers have 64 MiB.",
    }
    return sentences.get(oom.told) or _asked(oom)


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
    if missing_bytes <= -_rounding_of(free_bytes) and oom.free_bytes is not None:
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


# torch writes two digits behind the point, so that what was missing may not be seen.
def _rounding_of(num_bytes: int) -> float:
    return next(unit for unit in (GIB, MIB, KIB, 1) if num_bytes >= unit or unit == 1) / 100


def _asked(oom: OutOfMemory) -> str:
    if oom.requested_bytes is None:
        return "The message does not say how much was requested."
    return f"{format_bytes(oom.requested_bytes)} was requested."


_SHARES = {
    "allocated": "in tensors of this process",
    "unallocated": "reserved by torch's allocator but unused",
    "outside": "outside torch's allocator: context, libraries",
    "others": "other processes",
    "not_told": "not told: context, libraries, other processes",
    "free": "free",
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    oom: OutOfMemory
    cause: str
    shares: Mapping[str, int]
    findings: tuple[str, ...]
    advice: tuple[str, ...]
    kept: Kept | None = None

    @property
    def summary(self) -> str:
        where = self.oom.device or "a device"
        if self.oom.device_index is not None:
            where += f":{self.oom.device_index}"
        phase = f" in {self.oom.phase}" if self.oom.phase else ""
        if self.oom.phase == "setup":
            phase = ", where the module is moved"
        return f"Out of memory on {where}{phase}: {self.kept or CAUSES[self.cause]}."

    def to_dict(self) -> dict[str, Any]:
        return {
            "cause": self.cause,
            "summary": self.summary,
            "shares": dict(self.shares),
            "findings": list(self.findings),
            "advice": list(self.advice),
            "kept": None if self.kept is None else asdict(self.kept),
            "oom": self.oom.to_dict(),
        }

    def __str__(self) -> str:
        lines = [self.summary, *(f"  {finding}" for finding in self.findings)]
        capacity_bytes = self.oom.capacity_bytes
        if self.shares and capacity_bytes:
            lines += ["", f"On the device, {format_bytes(capacity_bytes)}:"]
            lines += [
                f"  {format_bytes(n):>11}  {n / capacity_bytes:6.1%}  {_SHARES[name]}"
                for name, n in ((name, self.shares.get(name)) for name in _SHARES)
                if n is not None
            ]
        lines += ["", "What to do:"]
        lines += [f"  {number}. {line}" for number, line in enumerate(self.advice, 1)]
        return "\n".join(lines)


def diagnose(
    oom: OutOfMemory, allocator_settings: str = "", run: RunFacts | None = None
) -> Diagnosis:
    shares = shares_of(oom)
    cause, reason = cause_of(oom, shares)
    run = run or RunFacts()
    instead = [f"{CAUSES[cause][0].upper()}{CAUSES[cause][1:]}."] if run.kept else []
    findings = [*instead, reason, *_remarks(oom, shares, cause)]
    advice = advise(oom, cause, allocator_settings, run)
    return Diagnosis(oom, cause, shares, tuple(findings), advice, run.kept)


def _remarks(oom: OutOfMemory, shares: Mapping[str, int], cause: str) -> list[str]:
    remarks = []
    if oom.process_bytes is None and "outside" in shares:
        remarks.append(
            "The message does not name this process, as usual in a container: it is taken for the "
            "smallest one that is large enough."
        )
    if "others" in shares and cause != "other_process":
        remarks.append(f"Other processes hold {format_bytes(shares['others'])} on this device.")
    if oom.phase == "optimizer":
        remarks.append(
            "It happened in the optimizer's step: most optimizers make their state in the first "
            "one, when gradients are complete."
        )
    if oom.num_messages > 1:
        remarks.append(
            f"The text has {oom.num_messages} messages of this kind; this is about the last one."
        )
    return remarks
