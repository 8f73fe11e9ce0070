"""How much of the host's work lies beside computation: a simulated device, bus and host."""

import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from lightning_memsave import ActivationCheckpointing, Offloading
from lightning_memsave.techniques.offloading.copies import Copies
from lightning_memsave.techniques.offloading.early_updates import EarlyUpdate

BUS_BYTES, FLOP = 24e9, 0.6 * 165e12
"""Of an RTX 4090, in a second: each way of the bus, and 60 % of its peak in bfloat16."""
_BITS = 2  # bytes of a weight and of a gradient on the bus
_UPDATE_BYTES = 30  # that AdamW reads and writes for a parameter with its half for the device
_VALUE_BYTES = 4
_COPY_BYTES = 24  # to read a weight and two moments, and to write them
_NUMEL = 7  # of a weight; simulated is that of a large one
_Span = tuple[float, float]


def threshold_tokens() -> float:
    """Return the tokens per pass whose computation takes as long as the copies of weights."""
    return 2 * _BITS / BUS_BYTES * FLOP / 8


@dataclass
class _Machine:
    """A device that computes, a bus and a host, as clocks: nothing but time passes."""

    forward_s: float
    copy_s: float
    byte_s: float
    """Of the host, for a byte of each parameter of a block."""
    device_s: float = 0.0
    up_s: float = 0.0
    down_s: float = 0.0
    computed: list[_Span] = field(default_factory=list)
    worked: list[_Span] = field(default_factory=list)

    def compute(self, seconds: float) -> None:
        """Compute for so long; who launches it is ahead of the device by at most a block."""
        begin = max(self.device_s, time.monotonic())
        self.device_s = begin + seconds
        self.computed.append((begin, self.device_s))
        _sleep_until(self.device_s - 3 * self.forward_s)

    def work(self, num_bytes: float) -> None:
        """Let the host read and write so many bytes for each parameter of a block."""
        start_s = time.monotonic()
        _sleep_until(start_s + num_bytes * self.byte_s)
        self.worked.append((start_s, time.monotonic()))

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Let updates, norms and what is kept of old values take their time."""
        with contextlib.ExitStack() as stack:
            for owner, name, num_bytes in (
                (importlib.import_module("torch.optim.adam"), "adam", _UPDATE_BYTES),
                (torch.linalg, "vector_norm", _VALUE_BYTES),
                (EarlyUpdate, "save", _COPY_BYTES),
                (EarlyUpdate, "take_back", _COPY_BYTES),
            ):
                method = self._slowed(getattr(owner, name), num_bytes)
                stack.enter_context(mock.patch.object(owner, name, method))
            yield

    def _slowed(self, function: Callable[..., Any], num_bytes: int) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **rest: Any) -> Any:
            found = function(*args, **rest)
            if not (isinstance(args[0], Tensor) and args[0].numel() != _NUMEL):
                self.work(num_bytes)
            return found

        return run


class _SimulatedCopies(Copies):
    """Copies that are there at once, for which everybody waits as long as the bus takes."""

    def __init__(self, machine: _Machine) -> None:
        self._machine = machine

    def to_device(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Callable[[], None]:
        super().to_device(targets, sources)
        machine = self._machine
        begin = max(machine.device_s, machine.up_s, time.monotonic())
        there_s = machine.up_s = begin + machine.copy_s

        def wait() -> None:
            machine.device_s = max(machine.device_s, there_s)

        return wait

    def to_host(self, target: Tensor, source: Tensor, *, adds: bool) -> None:
        super().to_host(target, source, adds=adds)
        machine = self._machine
        begin = max(machine.device_s, machine.down_s, time.monotonic())
        machine.down_s = begin + machine.copy_s

    def land(self) -> None:
        _sleep_until(self._machine.down_s)

    def landing(self) -> Callable[[], None]:
        there_s = self._machine.down_s
        return lambda: _sleep_until(there_s)

    finish = synchronize = land


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, machine: _Machine) -> Tensor:
        machine.compute(machine.forward_s)
        ctx.machine, ctx.form = machine, weight.shape
        ctx.save_for_backward(x)  # otherwise nothing would be recomputed
        return x + weight[:1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _ = ctx.saved_tensors
        ctx.machine.compute(2 * ctx.machine.forward_s)
        return grad, torch.full(ctx.form, 1e-6), None


class _Block(nn.Module):
    def __init__(self, machine: _Machine) -> None:
        super().__init__()
        self.weight, self.machine = nn.Parameter(torch.zeros(_NUMEL)), machine

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Compute.apply(x, self.weight, self.machine)  # type: ignore[no-untyped-call]
        return found


@dataclass(frozen=True)
class Hidden:
    """What the steps of a simulated machine took."""

    share: float
    """Of the time of the host's work, what lies beside computation."""
    ratio: float
    """Time of a step over that of its computation."""
    host_ratio: float
    """Time of the host's work in a step over that of its computation."""


def hide(
    *,
    tokens: float,
    host_bytes: float,
    early: int | str,
    num_blocks: int = 12,
    forward_s: float = 0.03,
    num_steps: int = 2,
) -> Hidden:
    """Train with offloaded parameters and clipping on a simulated machine.

    Args:
        tokens: In a step.
        host_bytes: That the host reads and writes in a second.
        early: Of how many blocks updates may begin in backward; 0 with torch's clipping.
        num_blocks: Of the model, which has nothing else.
        forward_s: Of a block, long beside what Python needs; all else follows.
        num_steps: Steps that are timed, after two that are not.
    """
    per_parameter_s = forward_s * FLOP / (2 * tokens)  # the parameters of a block, by the device
    machine = _Machine(forward_s, per_parameter_s * _BITS / BUS_BYTES, per_parameter_s / host_bytes)
    model = nn.Sequential(*[_Block(machine) for _ in range(num_blocks)])
    ActivationCheckpointing(blocks=_Block).apply(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    technique = Offloading("parameters", blocks=_Block, early_updates=early)
    handle = technique.apply(model)
    updates = technique.update_in_background(optimizer)
    assert handle.residence is not None, "there are weights"
    handle.residence.copies = _SimulatedCopies(machine)
    x, ends = torch.zeros(1, requires_grad=True), []
    with machine.working():
        for number in range(num_steps + 2):
            if number == 2:
                handle.residence.finish()
                machine.worked.clear()
                machine.computed.clear()
                ends.append(time.monotonic())
            model(x).sum().backward()
            if early:
                updates.clip_grad_norm_(1.0)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                machine.work(2 * _VALUE_BYTES * num_blocks)  # it multiplies them, also by 1
            optimizer.step()
            optimizer.zero_grad()
        handle.wait()
        ends.append(time.monotonic())
    updates.undo()
    handle.undo()
    computed_s, worked_s = (
        sum(end - start for start, end in spans) for spans in (machine.computed, machine.worked)
    )
    return Hidden(
        _overlap(machine.worked, machine.computed) / worked_s,
        (ends[1] - ends[0]) / computed_s,
        worked_s / computed_s,
    )


def _overlap(some: Sequence[_Span], others: Sequence[_Span]) -> float:
    return sum(max(0.0, min(e, f) - max(s, t)) for s, e in some for t, f in others)


def _sleep_until(end_s: float) -> None:
    while (left_s := end_s - time.monotonic()) > 0:
        time.sleep(left_s)
