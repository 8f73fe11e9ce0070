"""Why memory ran out, and what to do about it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_memsave.explain.oom_message import OutOfMemory, ProcessOnDevice
from lightning_memsave.units import GIB, KIB, MIB, format_bytes

# Memory that torch's allocator keeps without a tensor in it counts as fragmentation from this share
# of what it has reserved. When it raises its error it has given back every segment that is wholly
# free, so what is left lies between tensors; a few per cent of that are there in any healthy run.
FRAGMENTED_SHARE = 0.05
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
        Bytes of this process, ``None`` if not known, and the other processes. In a
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


def advise(
    oom: OutOfMemory, cause: str, allocator_settings: str, *, has_memsave: bool = False
) -> tuple[str, ...]:
    """Say what to do.

    Args:
        oom: The figures of the message.
        cause: Why memory ran out, a key of `CAUSES`.
        allocator_settings: Settings of torch's allocator in that run; empty if not known.
        has_memsave: Whether `MemSaveCallback` was on.

    Returns:
        What to do, in the order in which to try it.
    """
    allocator = _allocator_advice(oom, allocator_settings)
    less = _less_memory(oom, has_memsave)
    by_cause = {
        "full": [*less, *allocator],
        "too_large": [
            "Make the tensor smaller: it is one allocation, often attention scores (sequence "
            'length squared; use `attn_implementation="sdpa"`), logits (batch x length x '
            "vocabulary) or a wrong shape that broadcasts.",
            *less,
        ],
        "limit": [
            "Raise or remove the limit: `MemSaveCallback(budget=...)` sets one, and so does "
            "`torch.cuda.set_per_process_memory_fraction`.",
            *less,
            *allocator,
        ],
        "fragmentation": [*allocator, *_STEADY_SHAPES, *less],
        "other_process": [
            f"Look with `nvidia-smi` and end what is not needed{_pids(oom)}: often a notebook, a "
            "run that crashed, or another rank on the same device.",
            "Choose another device with `CUDA_VISIBLE_DEVICES` or `Trainer(devices=[...])`.",
            *less,
        ],
        "outside": [
            "Look with `nvidia-smi` which process uses it: another process that the message does "
            "not name, NCCL's buffers (one set for each communicator), or a second framework in "
            "this process.",
            *less,
        ],
        "refused": [
            "Run again with nothing else on the device; if it happens at once with nothing "
            "allocated, test the driver with `nvidia-smi` and restart the process or container.",
            "In WSL and on Windows, free host memory: the driver backs device memory with it.",
            *allocator,
            *less,
        ],
        "library": [
            "If it is the first use of the library, run once with `CUDA_LAUNCH_BLOCKING=1` or on "
            "the CPU: an index that is too large for an embedding shows itself this way too.",
            "Leave the driver some memory: `torch.cuda.set_per_process_memory_fraction(0.9)`.",
            *less,
        ],
        "host": [
            "Use fewer or smaller copies in host memory: `DataLoader(num_workers=...)` copies what "
            "the dataset holds for each worker; load data as it is needed, or as a memory map.",
            "Look for what grows with each step, such as a list of losses or outputs: keep "
            "`loss.item()` and not `loss`.",
            "If the model is trained on the CPU: a smaller batch with `accumulate_grad_batches`.",
        ],
        "unknown": [
            "Look at the whole message or log: the line after it often has the figures.",
            "Look with `nvidia-smi` whether other processes take memory on the device.",
            *less,
        ],
    }
    return tuple(by_cause[cause])


_STEADY_SHAPES = (
    "Keep shapes steady: pad to a few fixed lengths or sort samples by length, since every new "
    "length asks for blocks of another size. `torch.cuda.empty_cache()` does not help: the "
    "allocator has done that before it gave up.",
)


def _allocator_advice(oom: OutOfMemory, settings: str) -> list[str]:
    unallocated_bytes, reserved_bytes = oom.unallocated_bytes, oom.reserved_bytes
    if unallocated_bytes is None or reserved_bytes is None:
        return []
    if unallocated_bytes < FRAGMENTED_SHARE * reserved_bytes or not unallocated_bytes:
        return []
    if oom.device != "cuda":
        return []
    share = unallocated_bytes / reserved_bytes
    advice = []
    if "expandable_segments:True" not in settings.replace(" ", ""):
        advice.append(
            f"Set `{oom.allocator_variable}=expandable_segments:True` before Python starts: the "
            f"{format_bytes(unallocated_bytes)} ({share:.0%} of what torch has reserved) that lies "
            "between tensors can then be used by larger ones."
        )
    if "max_split_size_mb" not in settings:
        advice.append(
            f"Where segments cannot expand, as on Windows, set "
            f"`{oom.allocator_variable}=max_split_size_mb:{_max_split_size_mb(oom)}`: larger "
            "blocks are then kept whole for requests like this one. It may cost speed."
        )
    return advice


# A block above the limit serves only requests above it, so the limit must lie below the request;
# half of it leaves room for requests that differ from step to step. torch refuses 20 and less.
def _max_split_size_mb(oom: OutOfMemory) -> int:
    half = (oom.requested_bytes or 256 * MIB) // MIB // 2
    return int(min(max(1 << max(half.bit_length() - 1, 0), 32), 512))


def _less_memory(oom: OutOfMemory, has_memsave: bool) -> list[str]:
    if oom.phase == "optimizer":
        return [
            'Keep its state in 8 bits: `MemSaveCallback(optimizer="8bit")`; or in host memory when '
            'that does not fit: `optimizer="paged_8bit"`. A smaller batch does not help here.',
            "Train fewer parameters, or shard them over several devices.",
        ]
    if oom.phase == "setup":
        return [
            'Keep the weights in host memory: `MemSaveCallback(offload="parameters")`. A smaller '
            "batch does not help here: nothing but the module was on its way to the device.",
            'Keep them in bfloat16: `MemSaveCallback(low_precision_weights="stochastic")`.',
            "Use a smaller model, or shard it over several devices.",
        ]
    suite = (
        "Add `MemSaveCallback()` to the Trainer: it recomputes activations, keeps the optimizer's "
        "state in 8 bits, and repeats a batch in micro-batches when memory runs out, with the same "
        "gradients."
    )
    if has_memsave:
        suite = (
            "Look at the table that `MemSaveCallback` printed at the start of fit: what is off or "
            'unchanged there still saves, such as `activation_checkpointing="all"`, '
            '`optimizer="8bit"`, `micro_batch_size="auto"`.'
        )
    return [
        suite,
        "Use a smaller batch with `accumulate_grad_batches`, or shorter samples.",
        'Use `precision="bf16-mixed"` if the device supports it.',
    ]


def _pids(oom: OutOfMemory) -> str:
    pids = ", ".join(str(process.pid) for process in own_and_others(oom)[1])
    return f" (process {pids})" if pids else ""


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
    """Why memory ran out, and what to do about it.

    Args:
        oom: The figures of the message.
        cause: A key of `CAUSES`.
        shares: How the memory of the device divides, in bytes; what is not known is left out.
            ``allocated`` (tensors), ``unallocated`` (kept by torch's allocator), ``outside``
            (of it, in this process), ``others`` (processes), ``not_told`` and ``free``.
        findings: What the figures say, one sentence each, the reason for ``cause`` first.
        advice: What to do, in the order in which to try it.
    """

    oom: OutOfMemory
    cause: str
    shares: Mapping[str, int]
    findings: tuple[str, ...]
    advice: tuple[str, ...]

    @property
    def summary(self) -> str:
        """The cause in one line."""
        where = self.oom.device or "a device"
        if self.oom.device_index is not None:
            where += f":{self.oom.device_index}"
        phase = f" in {self.oom.phase}" if self.oom.phase else ""
        if self.oom.phase == "setup":
            phase = ", where the module is moved"
        return f"Out of memory on {where}{phase}: {CAUSES[self.cause]}."

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain values, for JSON.

        Returns:
            ``cause``, ``summary``, ``shares``, ``findings``, ``advice`` and ``oom``.
        """
        return {
            "cause": self.cause,
            "summary": self.summary,
            "shares": dict(self.shares),
            "findings": list(self.findings),
            "advice": list(self.advice),
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
    oom: OutOfMemory, allocator_settings: str = "", *, has_memsave: bool = False
) -> Diagnosis:
    """Say why memory ran out, from the figures of the message alone.

    Args:
        oom: What `read_out_of_memory` gave.
        allocator_settings: Value of ``PYTORCH_CUDA_ALLOC_CONF`` or ``PYTORCH_ALLOC_CONF`` in that
            run, if known: what is switched on already is not advised.
        has_memsave: Whether `MemSaveCallback` was on.

    Returns:
        The diagnosis.

    Example:
        >>> from lightning_memsave.explain.oom_message import read_out_of_memory
        >>> oom = read_out_of_memory(
        ...     "CUDA out of memory. Tried to allocate 1.00 GiB (GPU 0; 15.90 GiB total capacity; "
        ...     "9.00 GiB already allocated; 0.50 GiB free; 14.50 GiB reserved in total by PyTorch)"
        ... )
        >>> diagnose(oom).cause
        'fragmentation'
    """
    shares = shares_of(oom)
    cause, reason = cause_of(oom, shares)
    findings = [reason, *_remarks(oom, shares, cause)]
    advice = advise(oom, cause, allocator_settings, has_memsave=has_memsave)
    return Diagnosis(oom, cause, shares, tuple(findings), advice)


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
