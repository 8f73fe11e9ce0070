"""Why memory ran out, and what to do about it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_memsave.planning.oom_advice import advise
from lightning_memsave.planning.oom_causes import CAUSES, cause_of, shares_of
from lightning_memsave.planning.out_of_memory import OutOfMemory
from lightning_memsave.units import format_bytes

_SHARES = {
    "allocated": "in tensors of this process",
    "unallocated": "kept by torch's allocator, no tensor in it",
    "outside": "outside of the allocator: context, libraries",
    "others": "other processes",
    "not_told": "not told: context, libraries, other processes",
    "free": "free",
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why memory ran out, and what to do about it.

    Args:
        oom: The figures of the message.
        cause: A key of ``oom_causes.CAUSES``.
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
        >>> from lightning_memsave.planning.out_of_memory import read_out_of_memory
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
    if oom.private_pool_bytes:
        remarks.append(
            f"Private pools, such as those of CUDA graphs, keep "
            f"{format_bytes(oom.private_pool_bytes)}."
        )
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
