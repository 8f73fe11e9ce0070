"""A step with some settings on, for the planner, and what its settings are."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_memsave.core.technique import Exactness
from lightning_memsave.planning.block_costs import BlockCosts
from lightning_memsave.planning.candidates import Candidate
from lightning_memsave.planning.step_time import Rates, step_time
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.techniques.offloading.technique import Offloading
from lightning_memsave.techniques.registry import BESIDE_OFFLOAD, entries

RECOMPUTED = "activation_checkpointing"
MICRO_BATCH = "micro_batch_size"
OFFLOAD = "offload"
FINAL = ("optimizer_in_backward",)  # it updates parameters before the batch has passed
# What may be on the host, that which leaves the least on the device last.
ON_HOST = (
    "activations",
    "optimizer",
    "parameters",
    "parameters+activations",
    "parameters+activations+embeddings",
)


@dataclass(eq=False)  # the search compares candidates by their variant
class Variant:
    """A step with some settings on, for any choice of recomputed blocks.

    Args:
        changes: Arguments of `MemSaveCallback`.
        exactness: Of the least exact of them.
        beside: Those of them that are no techniques of their own but tried in several ways:
            micro-batches, and what is on the host with what goes with it.
        costs: Of its blocks; ``None`` if nothing is chosen about them.
        prediction: Of the step as it is, where there is no choice.
        seconds: Estimated, of that prediction.
        weights_on_host: Bytes that weights and what belongs to them need there.
        is_too_large: It was recorded in the way with the least memory only, which does not fit.
    """

    changes: Mapping[str, Any]
    exactness: Exactness
    beside: Mapping[str, Any]
    costs: BlockCosts | None = None
    prediction: MemoryPrediction | None = None
    seconds: float = 0.0
    weights_on_host: int = 0
    is_too_large: bool = False

    @property
    def is_offloaded(self) -> bool:
        """Whether something is on the host."""
        return OFFLOAD in self.beside

    @property
    def moves_weights(self) -> bool:
        """Whether weights are on the host, which updates them."""
        return self.beside.get(OFFLOAD) not in (None, ON_HOST[0])

    def host_bytes(self, kinds: Sequence[str]) -> int:
        """Estimate bytes on the host."""
        return self.weights_on_host + (0 if self.costs is None else self.costs.host_bytes(kinds))

    def seconds_by_phase(self, kinds: Sequence[str], rates: Rates) -> dict[str, float]:
        """Estimate seconds by phase, always from recorded work, so that they can be compared."""
        if self.costs is not None:
            return self.costs.seconds_by_phase(kinds)
        assert self.prediction is not None, "one of the two is there"
        return dict(step_time(self.prediction.work, rates).by_phase)

    def estimate(self, kinds: Sequence[str]) -> tuple[int, float]:
        """Estimate bytes on the device and seconds."""
        if self.costs is None:
            assert self.prediction is not None, "one of the two is there"
            return self.prediction.device_bytes, self.seconds
        peak_bytes, seconds = self.costs.peak_and_seconds(kinds)
        return peak_bytes + self.costs.overhead_bytes, seconds


def exactness_of(one: Candidate) -> Exactness:
    """Give the exactness of a candidate."""
    return Exactness(one.exactness)


def argument_of(one: Candidate) -> str:
    """Name the argument that a candidate sets."""
    return next(iter(one.changes))


def leaving_out(chosen: Sequence[Candidate], one: Candidate) -> list[Candidate]:
    """Leave out what sets an argument."""
    return [c for c in chosen if argument_of(c) != argument_of(one)]


def changes_of(on: Sequence[Candidate], beside: Mapping[str, Any]) -> dict[str, Any]:
    """Join the settings of candidates with others."""
    return {name: value for one in on for name, value in one.changes.items()} | {**beside}


def form_of(changes: Mapping[str, Any]) -> str:
    """Give a key for the form of what is on the host."""
    names = (*BESIDE_OFFLOAD, *FINAL)
    return repr([changes.get(name) for name in names])


def all_exactness(values: Mapping[str, Any]) -> Iterator[Exactness]:
    """List the exactness of settings."""
    if MICRO_BATCH in values:
        yield Exactness.ROUNDING
    for entry in entries():
        value = values.get(entry.argument)
        if entry.technique is not None and value is not None and entry.argument != MICRO_BATCH:
            if entry.argument != OFFLOAD:
                yield entry.exactness
                continue
            technique = entry.technique.from_value(value)
            assert technique is not None, "it is on"
            yield technique.exactness
            # A CPU rounds updates in another way than a GPU.
            if isinstance(technique, Offloading) and technique.has_weights:
                yield Exactness.ROUNDING
