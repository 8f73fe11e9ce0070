"""A step with some settings on, for the planner, and what its settings are."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_memsave.core.technique import Exactness
from lightning_memsave.measure.parameters import ParameterTable
from lightning_memsave.planning.block_costs import KEEP, BlockCosts
from lightning_memsave.planning.candidates import (
    OFFLOAD,
    Candidate,
    exactness_of,
)
from lightning_memsave.planning.constants import EQUALLY_FAST, MOST_STEPS, NEAR, STEP
from lightning_memsave.planning.recorded_blocks import TILED, value_of
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.techniques.offloading.host_budget import host_bytes_per_parameter
from lightning_memsave.techniques.offloading.technique import Offloading
from lightning_memsave.techniques.registry import BESIDE_OFFLOAD, FINAL, entries, with_optimizer

RECOMPUTED = "activation_checkpointing"
_OPTIMIZER = ("optimizer",)
NOT_ADVISED = 1 + Exactness.APPROXIMATE.rank
NO_LIMIT = 2**60
"""Bytes, for a limit that is given as a number."""
# What may be on the host, that which leaves the least on the device last. What is between them is
# what stays of blocks: the whole of the last ones.
ACTIVATIONS = "activations"
ON_HOST = (ACTIVATIONS, "parameters+activations", "parameters+activations+embeddings")


@dataclass(eq=False)  # the search compares candidates by their variant
class Variant:
    changes: Mapping[str, Any]
    exactness: Exactness
    beside: Mapping[str, Any]
    costs: BlockCosts | None = None
    prediction: MemoryPrediction | None = None
    seconds: float = 0.0
    weights_on_host: int = 0
    shown: frozenset[str] = frozenset()
    resident: "Resident | None" = None
    not_advised: Mapping[str, str] = field(default_factory=dict)
    """Changes that are advised against, with the reason."""

    @property
    def rank(self) -> int:
        """How far it moves results; what is advised against comes last."""
        return self.exactness.rank if not self.not_advised else NOT_ADVISED

    @property
    def most_resident(self) -> int:
        """How many of the blocks that wait on the host may stay on the device."""
        return 0 if self.resident is None else self.resident.most

    def changes_with(self, kinds: Sequence[str], num_resident: int = 0) -> dict[str, Any]:
        """Give its changes to settings, with what is done with blocks."""
        changes = {**self.changes}
        if self.is_offloaded:
            changes[OFFLOAD] = with_resident(changes[OFFLOAD], num_resident)
        return changes | ({} if self.costs is None else {RECOMPUTED: value_of(kinds)})

    @property
    def is_offloaded(self) -> bool:
        return OFFLOAD in self.beside

    @property
    def but_optimizer(self) -> str:
        """What is on beside an optimizer: estimates of its blocks are wrong by the same bytes."""
        return repr(sorted((n, v) for n, v in self.changes.items() if n not in _OPTIMIZER))

    @property
    def moves_weights(self) -> bool:
        return what_of(self.beside) not in (None, ACTIVATIONS)

    def tells_enough(
        self, least: str, num_blocks: int, room: float, slowest_s: float, host_budget_bytes: float
    ) -> bool:
        """Return whether nothing of it fits, all of it is too slow, or its fastest way fits."""
        if least in self.shown and self.estimate([least] * num_blocks)[0] > room * (1 + NEAR):
            return True
        kept = [KEEP] * num_blocks
        if KEEP not in self.shown:
            return False
        needed, seconds = self.estimate(kept)
        fits = self.host_bytes(kept) <= host_budget_bytes * (1 - NEAR)
        fits = fits and needed <= room * (1 - NEAR) < math.inf
        least_s = self.estimate(kept, self.most_resident)[1]
        # Where copies take longer than what they hide behind, less to copy may be faster.
        is_hidden = seconds <= least_s * (1 + EQUALLY_FAST)
        return least_s >= slowest_s or (fits and is_hidden and least in self.shown)

    def host_bytes(self, kinds: Sequence[str], num_resident: int = 0) -> int:
        weights = self.weights_on_host
        weights -= 0 if self.resident is None else num_resident * self.resident.host_bytes
        return weights + (0 if self.costs is None else self.costs.host_bytes(kinds, num_resident))

    def estimate(self, kinds: Sequence[str], num_resident: int = 0) -> tuple[int, float]:
        if self.costs is None:
            assert self.prediction is not None, "one of the two is there"
            more_bytes, more_s = (0, 0.0) if self.resident is None else self.resident.each
            num_bytes = self.prediction.device_bytes + num_resident * more_bytes
            return num_bytes, self.seconds + num_resident * more_s
        peak_bytes, seconds = self.costs.peak_and_seconds(kinds, num_resident)
        return peak_bytes + self.overhead_bytes, seconds

    @property
    def overhead_bytes(self) -> int:
        return 0 if self.costs is None else self.costs.overhead_bytes


@dataclass(frozen=True, slots=True)
class Resident:
    """How many blocks may stay on the device, and what each of them saves on the host."""

    most: int
    host_bytes: int
    each: tuple[int, float] = (0, 0.0)
    """Bytes on the device and seconds that each adds, where no costs of blocks are known."""


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    variant: Variant
    kinds: tuple[str, ...]
    num_resident: int
    num_bytes: int
    seconds: float
    host_bytes: int = 0

    @property
    def exactness(self) -> Exactness:
        of_blocks = Exactness.ROUNDING if TILED in self.kinds else Exactness.BITWISE
        return max(of_blocks, self.variant.exactness, key=lambda exactness: exactness.rank)

    @property
    def way(self) -> tuple[tuple[str, ...], int]:
        """What is done with blocks."""
        return self.kinds, self.num_resident

    @classmethod
    def of(cls, variant: Variant, kinds: tuple[str, ...], number: int = 0) -> "Estimate":
        on_host = variant.host_bytes(kinds, number)
        return cls(variant, kinds, number, *variant.estimate(kinds, number), on_host)


def what_of(settings: Mapping[str, Any]) -> Any:
    """Name what is on the host; ``None`` for nothing."""
    offload = settings.get(OFFLOAD)
    return getattr(offload, "what", offload)


def with_resident(offload: Any, number: int) -> Any:
    """Let so many blocks stay on the device; a name stays one if all of them wait."""
    if not number and isinstance(offload, str):
        return offload
    technique = Offloading.from_value(offload)
    assert technique is not None, "it is on"
    return replace(technique, resident=number)


def weights_on_host(settings: Mapping[str, Any], table: ParameterTable) -> int:
    if not {"optimizer", "parameters"} & set(str(what_of(settings)).split("+")):
        return 0
    trained = [p.num_elements for p in table.parameters if p.is_trainable is not False]
    return host_bytes_per_parameter(with_optimizer(settings)) * sum(trained)


def leaving_out(chosen: Sequence[Candidate], one: Candidate) -> list[Candidate]:
    return [c for c in chosen if c.argument != one.argument]


def changes_of(on: Sequence[Candidate], beside: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for one in on for name, value in one.changes.items()} | {**beside}


def form_of(changes: Mapping[str, Any]) -> str:
    names = (*BESIDE_OFFLOAD, *FINAL)
    return repr([changes.get(name) for name in names])


def all_exactness(values: Mapping[str, Any], has_batch_norm: bool) -> Iterator[Exactness]:
    for entry in entries():
        value = values.get(entry.argument)
        if entry.technique is not None and value is not None:
            if entry.argument != OFFLOAD:
                yield exactness_of(entry, has_batch_norm)
                continue
            technique = entry.technique.from_value(value)
            assert technique is not None, "it is on"
            yield technique.exactness
            # A CPU rounds updates in another way than a GPU.
            if isinstance(technique, Offloading) and technique.has_weights:
                yield Exactness.ROUNDING


def frontier_of(
    estimates: Sequence[Estimate], bytes_of: Callable[[Estimate], float]
) -> list[Estimate]:
    found: list[Estimate] = []
    least = math.inf
    for one in sorted(estimates, key=lambda e: (e.seconds, bytes_of(e), e.variant.rank)):
        if bytes_of(one) < least:
            least = bytes_of(one)
            found.append(one)
    return found


def thinned_frontier(
    estimates: Sequence[Estimate],
    bytes_of: Callable[[Estimate], float],
    chosen: Estimate | None = None,
) -> Iterator[Estimate]:
    """List some of the frontier, with one that must be among them."""
    frontier = frontier_of(estimates, bytes_of)
    if chosen is not None:
        above = [c for c in frontier if bytes_of(c) > bytes_of(chosen) and c is not chosen]
        below = [c for c in frontier if bytes_of(c) < bytes_of(chosen)]
        last, frontier = frontier[-1], [*above, chosen, *below]
    else:
        last = frontier[-1]
    share = bytes_of(last) / bytes_of(frontier[0])
    step = max(STEP, 1 - share ** (1 / MOST_STEPS))
    before = math.inf
    for one in frontier:
        if one in (chosen, last) or bytes_of(one) < before * (1 - step):
            before = bytes_of(one)
            yield one


def shown_frontier(
    estimates: Sequence[Estimate], bytes_of: Callable[[Estimate], float], chosen: Estimate
) -> Iterator[Estimate]:
    """List the frontier; what is advised against comes last, where nothing else needs as little."""
    advised = [one for one in estimates if one.variant.rank < NOT_ADVISED]
    if chosen in advised:
        yield from thinned_frontier(advised, bytes_of, chosen)
        return
    yield from thinned_frontier(advised, bytes_of)
    least = min(map(bytes_of, advised))
    others = [one for one in estimates if one is chosen or bytes_of(one) < least]
    others = [one for one in others if one.variant.rank == NOT_ADVISED]
    yield from thinned_frontier(others, bytes_of, chosen)
