"""Estimate how long a step takes, from its kernels."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_memsave.planning.constants import (
    ATTENTION,
    HOST_MEMORY,
    LAUNCH_S,
    MEMORY,
    PRODUCT,
    RECOMPUTED,
)
from lightning_memsave.prediction.cuda.gpus import Throughput
from lightning_memsave.prediction.work import Kernel, Work
from lightning_memsave.units import MIB

PASSES = {
    "forward": ("forward",),
    "backward": ("recomputation", "backward"),
    "optimizer": ("optimizer",),
}
"""The phases of each pass."""
_COPIES = ("to_host", "from_host")
_LANES = ("device", *_COPIES, "host", "network")
Lane = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Rates:
    products: Mapping[str, float]
    attention: Mapping[str, float]
    memory_bytes: float
    host_bytes: float
    launch_s: float
    has_lanes: bool = True
    host_memory_bytes: float = HOST_MEMORY
    network_bytes: float = math.inf

    @classmethod
    def of_gpu(cls, throughput: Throughput) -> Self:
        best = {name: getattr(throughput, name) for name in ("float32", "float16", "bfloat16")}
        return cls(
            {name: PRODUCT * rate for name, rate in best.items()},
            {name: ATTENTION * rate for name, rate in best.items()},
            MEMORY * throughput.memory_bytes,
            MEMORY * throughput.host_bytes,
            LAUNCH_S,
            network_bytes=MEMORY * throughput.link_bytes,
        )

    def seconds(self, kernel: Kernel) -> float:
        """Estimate how long a kernel runs, or the host takes to launch it if that is longer."""
        if kernel.kind in _COPIES:
            return max(kernel.num_bytes / self.host_bytes, self.launch_s)
        if kernel.kind == "host":
            return max(kernel.num_bytes / self.host_memory_bytes, self.launch_s)
        if kernel.kind == "network":
            return kernel.num_bytes / self.network_bytes
        table = self.attention if kernel.kind == "attention" else self.products
        repeats = RECOMPUTED if kernel.phase == "recomputation" else 1
        return max(
            kernel.flop / table.get(kernel.dtype, table["float32"]),
            kernel.num_bytes / self.memory_bytes,
            self.launch_s * kernel.num_launches * repeats,
        )

    def by_phase(self, parts: Mapping[str, Sequence[Mapping[Lane, float]]]) -> dict[str, float]:
        """Schedule a step on lanes.

        A part copies to the host while later ones compute; what it needs comes while earlier ones
        do, from the host and from other processes, which get its gradients meanwhile. The host
        updates weights in backward once their gradients are there; after backward in forward order,
        and each part waits for its own.
        """
        found = {phase: 0.0 for phases in PASSES.values() for phase in phases}
        in_pass = {
            name: {
                lane: [
                    sum(part.get((phase, lane), 0.0) for phase in phases) for part in parts[name]
                ]
                for lane in _LANES
            }
            for name, phases in PASSES.items()
        }
        updates = self._updates(in_pass)
        for name, phases in PASSES.items():
            device, to_host, from_host, host, network = in_pass[name].values()
            for phase in phases:
                found[phase] += sum(part.get((phase, "device"), 0.0) for part in parts[name])
            stages, waits_s = [from_host, device, to_host], sum(host)
            if name == "backward":
                stages, waits_s = [*stages, host, network], 0.0
            elif name == "forward":
                stages = [updates, network, *stages]
            elif any(updates):
                waits_s = 0.0
            if not self.has_lanes:
                stages, waits_s = [device], sum(map(sum, (to_host, from_host, host, network)))
            found[phases[-1]] += _pipelined(stages) - sum(device) + waits_s
        return found

    # Those that the next forward pass waits for, by its parts: as long as their weights are large.
    def _updates(self, in_pass: Mapping[str, Mapping[str, Sequence[float]]]) -> list[float]:
        copied = in_pass["forward"]["from_host"]
        share = sum(in_pass["optimizer"]["host"]) / sum(copied) if any(copied) else 0.0
        return [share * seconds for seconds in copied] if self.has_lanes else []


# When all is done if each part passes the stages in turn, and each stage takes part after part.
def _pipelined(stages: Sequence[Sequence[float]]) -> float:
    ends = [0.0] * len(stages)
    for part in zip(*stages, strict=True):
        done_s = 0.0
        for index, seconds in enumerate(part):
            done_s = ends[index] = max(ends[index], done_s) + seconds
    return max(ends)


def lane_of(kernel: Kernel) -> Lane:
    """Name the phase of a kernel and its lane: "device", "host", "network", or a copy."""
    return kernel.phase, kernel.kind if kernel.kind in _LANES else "device"


def step_seconds(work: Work, rates: Rates) -> dict[str, float]:
    """Estimate the time of a step, by phase: module by module, copies beside those that follow."""
    parts: dict[str, dict[str, dict[Lane, float]]] = {name: {} for name in PASSES}
    pass_of = {phase: name for name, phases in PASSES.items() for phase in phases}
    for kernel, count in work:
        modules = parts[pass_of[kernel.phase]]
        part = modules.setdefault(kernel.module, defaultdict(float))
        part[lane_of(kernel)] += count * rates.seconds(kernel)
    return rates.by_phase({name: [*found.values()] for name, found in parts.items()})


_REPEATS, _ENOUGH_S = 10, 0.2
_ROWS, _WIDTH = 1024, 768
_NUM_TINY = 500
_NUM_UPDATED = 2**22


def measure_cpu_rates() -> Rates:
    with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng([]):
        products = {name: _product_rate(getattr(torch, name)) for name in ("float32", "bfloat16")}
        x, norm = torch.randn(_ROWS, _WIDTH), nn.LayerNorm(_WIDTH)
        # About as often as in a block; dropout is the slowest of them on a CPU.
        mixture: tuple[tuple[Callable[[], Tensor], int], ...] = (
            (lambda: x + x, 3),
            (lambda: x * 0.5, 2),
            (lambda: norm(x), 2),
            (lambda: functional.gelu(x), 2),
            (lambda: x.softmax(-1), 2),
            (lambda: functional.dropout(x, 0.1), 2),
        )
        seconds = sum(_seconds(function) for function, _ in mixture)
        memory = x.nbytes * sum(num_tensors for _, num_tensors in mixture) / seconds
        copied = torch.empty(64 * MIB, dtype=torch.uint8)
        link = copied.nbytes / _seconds(copied.clone)
    launch_s = _seconds(_tiny_pass) / (2 * _NUM_TINY)
    host = host_memory_rate()
    return Rates(
        *(products, products, memory, link, launch_s),
        has_lanes=False,
        host_memory_bytes=host,
        network_bytes=link,
    )


def host_memory_rate() -> float:
    weight = nn.Parameter(torch.ones(_NUM_UPDATED, device="cpu"))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return 8 * weight.nbytes / _seconds(optimizer.step)


# Forward and backward of many small operators.
def _tiny_pass() -> None:
    x = y = torch.zeros(1, device="cpu", requires_grad=True)
    for _ in range(_NUM_TINY):
        y = y * x
    y.backward()


def _product_rate(dtype: torch.dtype) -> float:
    a, b = (torch.randn(n * _ROWS, _WIDTH, dtype=dtype) for n in (1, 3))
    return 2 * len(a) * len(b) * _WIDTH / _seconds(lambda: a @ b.t())


# The best of some: others are disturbed by what else runs. A CPU without kernels for bfloat16 needs
# half a second for a product.
def _seconds(function: Callable[[], object]) -> float:
    found: list[float] = []
    # The first allocates, and may compile.
    while len(found) < 3 or (len(found) <= _REPEATS and sum(found[1:]) < _ENOUGH_S):
        start = time.perf_counter()
        function()
        found.append(time.perf_counter() - start)
    return min(found[1:])
