"""Estimate how long a step takes, from its kernels."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_memsave.prediction.cuda.gpus import Throughput
from lightning_memsave.prediction.work import Kernel, Work
from lightning_memsave.units import MIB

# Of the rates in data sheets: what published training runs reach on one GPU (torchtune, torchtitan
# and RoundPipe on RTX 4090, A100 and H100: 32 to 66 % of all FLOP/s). Between plans for the same
# GPU ratios hold better than seconds.
_PRODUCT, _ATTENTION, _MEMORY = 0.65, 0.45, 0.8
PASSES = {
    "forward": ("forward",),
    "backward": ("recomputation", "backward"),
    "optimizer": ("optimizer",),
}
"""The phases of each pass."""
_COPIES = ("to_host", "from_host")
Lane = tuple[str, str]
LEVEL = 0.5, 2.0
"""The least and the most time of a step, as factors of its estimate: published runs reach 32 to 66
% of a GPU, and estimates of the models in `benchmarks.plan` 19 to 62 %.
"""
# Of an operator in eager mode, forward or backward, with autograd and the dispatcher.
_LAUNCH_S = 7e-6


@dataclass(frozen=True, slots=True)
class Rates:
    """What kernels reach on a device.

    Args:
        products: FLOP/s of products by type of the factors; ``"float32"`` at least.
        attention: The same for fused attention.
        memory_bytes: Bytes/s that other kernels read and write.
        host_bytes: Bytes/s of copies from or to host memory.
        launch_s: Seconds that an operator takes at least.
        has_lanes: Whether copies from and to the host run beside kernels, on lanes of their own.
    """

    products: Mapping[str, float]
    attention: Mapping[str, float]
    memory_bytes: float
    host_bytes: float
    launch_s: float
    has_lanes: bool = True

    @classmethod
    def of_gpu(cls, throughput: Throughput, *, has_tf32: bool = False) -> Self:
        """Estimate the rates of a GPU from its data sheet.

        Args:
            throughput: What the data sheet says.
            has_tf32: Whether products in float32 may use TF32; torch's default is not to.

        Returns:
            The rates.
        """
        best = {
            "float32": throughput.tf32 if has_tf32 else throughput.float32,
            "float16": throughput.float16,
            "bfloat16": throughput.bfloat16,
        }
        return cls(
            {name: _PRODUCT * rate for name, rate in best.items()},
            {name: _ATTENTION * rate for name, rate in best.items()},
            _MEMORY * throughput.memory_bytes,
            _MEMORY * throughput.host_bytes,
            _LAUNCH_S,
        )

    def seconds(self, kernel: Kernel) -> float:
        """Estimate how long a kernel runs, or the host takes to launch it if that is longer."""
        if kernel.kind in _COPIES:
            return max(kernel.num_bytes / self.host_bytes, self.launch_s)
        table = self.attention if kernel.kind == "attention" else self.products
        return max(
            kernel.flop / table.get(kernel.dtype, table["float32"]),
            kernel.num_bytes / self.memory_bytes,
            self.launch_s * kernel.num_launches,
        )

    def by_phase(self, parts: Mapping[str, Sequence[Mapping[Lane, float]]]) -> dict[str, float]:
        """Schedule a step on lanes.

        A part copies to the host while later ones compute; what it needs comes while earlier ones
        do.

        Args:
            parts: Seconds by phase and lane, as `lane_of` names them, of the parts of each pass,
                one of `PASSES`, in the order in which they run; lanes of other passes are ignored.

        Returns:
            Seconds of all phases. What copies take longer is in the last phase of the pass.
        """
        found = {phase: 0.0 for phases in PASSES.values() for phase in phases}
        for name, phases in PASSES.items():
            computed, to_host, from_host = (
                [sum(part.get((phase, lane), 0.0) for phase in phases) for part in parts[name]]
                for lane in ("device", *_COPIES)
            )
            for phase in phases:
                found[phase] += sum(part.get((phase, "device"), 0.0) for part in parts[name])
            if self.has_lanes:
                ends = [
                    _pipelined(zip(computed, to_host, strict=True)),
                    _pipelined(zip(reversed(computed), reversed(from_host), strict=True)),
                ]
                found[phases[-1]] += max(ends) - sum(computed)
            else:
                found[phases[-1]] += sum(to_host) + sum(from_host)
        return found


# When the last copy has ended, one at a time, each after its part.
def _pipelined(parts: Iterable[tuple[float, float]]) -> float:
    computed_s = copied_s = 0.0
    for part_s, copy_s in parts:
        computed_s += part_s
        copied_s = max(copied_s, computed_s) + copy_s
    return copied_s


def lane_of(kernel: Kernel) -> Lane:
    """Name the phase of a kernel, and its lane: ``"device"``, ``"to_host"`` or ``"from_host"``."""
    return kernel.phase, kernel.kind if kernel.kind in _COPIES else "device"


@dataclass(frozen=True, slots=True)
class StepTime:
    """An estimate of the time of a step.

    Args:
        by_phase: Seconds in ``"forward"``, ``"recomputation"``, ``"backward"`` and
            ``"optimizer"``.
    """

    by_phase: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(self.by_phase.values())


def step_time(work: Work, rates: Rates) -> StepTime:
    """Estimate the time of a step: module after module, copies beside those that follow.

    Args:
        work: Its kernels, as `MemoryPrediction.work`.
        rates: What the device reaches.

    Returns:
        The time. Use it as a ratio to that of another step on the same device: the level depends on
        clock, driver and cooling.
    """
    parts: dict[str, dict[str, dict[Lane, float]]] = {name: {} for name in PASSES}
    pass_of = {phase: name for name, phases in PASSES.items() for phase in phases}
    for kernel, count in work:
        modules = parts[pass_of[kernel.phase]]
        part = modules.setdefault(kernel.module, defaultdict(float))
        part[lane_of(kernel)] += count * rates.seconds(kernel)
    return StepTime(rates.by_phase({name: [*found.values()] for name, found in parts.items()}))


_REPEATS = 10
_ROWS, _WIDTH = 1024, 768
_NUM_TINY = 500


def measure_rates(device: torch.device | str) -> Rates:
    """Measure what kernels reach on a device of this machine, in a second or two.

    Args:
        device: A CPU or CUDA device.

    Returns:
        The rates, of kernels as large as those of a transformer with a width of 768.
    """
    device = torch.device(device)
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        products = {
            name: _product_rate(device, dtype)
            for name, dtype in (
                ("float32", torch.float32),
                ("bfloat16", torch.bfloat16),
                ("float16", torch.float16),
            )
            if device.type == "cuda" or dtype is not torch.float16
        }
        x = torch.randn(_ROWS, _WIDTH, device=device)
        norm = nn.LayerNorm(_WIDTH, device=device)
        # About as often as in a block; dropout is the slowest of them on a CPU.
        mixture: tuple[tuple[Callable[[], Tensor], int], ...] = (
            (lambda: x + x, 3),
            (lambda: x * 0.5, 2),
            (lambda: norm(x), 2),
            (lambda: functional.gelu(x), 2),
            (lambda: x.softmax(-1), 2),
            (lambda: functional.dropout(x, 0.1), 2),
        )
        seconds = sum(_seconds(function, device) for function, _ in mixture)
        moved = x.nbytes * sum(num_tensors for _, num_tensors in mixture)
        host = torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=device.type == "cuda")
        copied = _seconds(lambda: host.to(device, copy=True), device)
    launch_s = _seconds(lambda: _tiny_pass(device), device) / (2 * _NUM_TINY)
    memory, link = moved / seconds, host.nbytes / copied
    return Rates(products, products, memory, link, launch_s, has_lanes=device.type == "cuda")


# A step waits for the host, not for the device: forward and backward of many small operators.
def _tiny_pass(device: torch.device) -> None:
    x = y = torch.zeros(1, device=device, requires_grad=True)
    for _ in range(_NUM_TINY):
        y = y * x
    y.backward()


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    a = torch.randn(_ROWS, _WIDTH, device=device, dtype=dtype)
    b = torch.randn(4 * _WIDTH, _WIDTH, device=device, dtype=dtype)
    return 2 * len(a) * len(b) * _WIDTH / _seconds(lambda: a @ b.t(), device)


# The best of some: others are disturbed by what else runs.
def _seconds(function: Callable[[], object], device: torch.device) -> float:
    found = []
    for _ in range(_REPEATS + 1):  # the first allocates, and may compile
        _wait(device)
        start = time.perf_counter()
        function()
        _wait(device)
        found.append(time.perf_counter() - start)
    return min(found[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":  # pragma: no cover (gpu)
        torch.cuda.synchronize(device)
