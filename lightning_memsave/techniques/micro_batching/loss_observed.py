"""Observe the losses of some samples together and apart, and the state that they leave."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from lightning_memsave.core.nested import Path
from lightning_memsave.core.out_of_memory import is_out_of_memory
from lightning_memsave.core.saved_state import with_attribute
from lightning_memsave.techniques.micro_batching.loss_probe import LossProbe
from lightning_memsave.techniques.micro_batching.loss_weights import (
    LossWeight,
    Weighting,
    weightings_of,
)
from lightning_memsave.techniques.micro_batching.module_state import ModuleState, are_close, key_of
from lightning_memsave.techniques.micro_batching.runner import SplitBatch
from lightning_memsave.techniques.optimizer_step import ACTIVE_UPDATES
from lightning_memsave.techniques.residences import leave_device

ComputeLoss = Callable[[Any], Tensor | None]
Whole = frozenset[Path]
"""Leaves of a batch that are shared by all micro-batches."""


@dataclass(frozen=True)
class Proof:
    weightings: tuple[Weighting, ...] = ()
    whole: Whole = frozenset()
    reason: str = ""
    fix: str = ""
    is_settled: bool = False
    seconds: float = 0.0
    num_samples: int = 2


def runs_for_each(names: Sequence[str]) -> Proof:
    """Refuse to split a batch for hooks that do something else for each of its parts."""
    return Proof(
        reason=f"{', '.join(f'`{name}`' for name in names)} would run for each micro-batch, and "
        "not for the batch",
        fix="Do the same in `on_before_optimizer_step` or `on_train_batch_end`, or set "
        "`micro_batch_size=None`.",
    )


class Room(Protocol):
    """Says how many samples pass at once, without a graph, within a limit of memory."""

    def measured(self) -> contextlib.AbstractContextManager[None]:
        """Measure what runs inside: passes of two samples."""

    def num_samples(self) -> int:
        """Give how many samples the limit has room for."""


@dataclass(frozen=True)
class LossCheck:
    compute_loss: ComputeLoss
    batch: Any
    module: nn.Module
    _: KW_ONLY
    loss_weight: LossWeight = "proven"
    split_batch: SplitBatch | None = None
    known: Proof | None = None
    needs_split: bool = False
    subject: str = "its loss"
    room: Room | None = None
    optimizers: Sequence[Any] = ()
    compute_next: ComputeLoss | None = None
    """The loss, where the samples are those of the next batch."""

    def weightings(self, part: Any, whole: Whole, seen: "Observed | None") -> list[Weighting]:
        if self.known is not None:
            return list(self.known.weightings)
        extra = () if seen is None else (seen.ignored, seen.class_weights)
        return weightings_of(self.loss_weight, part, whole, *extra)


class Samples(NamedTuple):
    both: Any
    one: Any
    other: Any


Parts: TypeAlias = Samples | tuple[Any]
"""Some samples and two parts of them, or the samples alone."""


@dataclass(frozen=True)
class Observed:
    losses: list[float]  # of both samples, of the first, of the second
    epsilon: float
    denominators: list[list[float]]
    ignored: list[int]
    class_weights: list[Tensor]
    has_logits: bool
    read: frozenset[str] = frozenset()
    """State that the first part has changed, and that the second one has read."""
    left: Sequence[dict[str, Any]] = ()
    """State that is not what it was, by name: after all samples, the first part, both parts."""

    def carried(self) -> set[str]:
        """List the state that the second part has read, and that is other than after all."""
        return self.written() & self.read

    def written(self) -> set[str]:
        """List the state that is not the same after both parts as after all samples at once."""
        together, _, parts = self.left
        return _differing(together, parts)

    def is_repeatable(self, name: str, again: "Observed") -> bool:
        """Return whether state is the same after the same samples: times are not."""
        return name not in _differing(self.left[0], again.left[0])

    def kept(self, num_together: int | None, num_first: int | None) -> set[str]:
        """List the tensors, bound by the step, with a dimension that follows the samples."""
        together, first, _ = self.left
        pairs = {n: (value, first[n]) for n, value in together.items() if n in first}
        sizes = num_together or 0, num_first or 0
        return {n for n, pair in pairs.items() if _follows(*pair, *sizes)}


def observe(
    check: LossCheck,
    samples: Parts,
    state: ModuleState,
    *,
    is_sharp: bool = False,
    is_carried: bool = False,
) -> Observed | None:
    run = functools.partial(
        _observe, check, samples, state, is_sharp=is_sharp, is_carried=is_carried
    )
    try:
        with torch.no_grad():
            return run()
    except RuntimeError as error:
        # A training step may compute gradients itself, as for a gradient penalty.
        if is_out_of_memory(error) or "grad" not in str(error) or ACTIVE_UPDATES:
            raise
    own_gradients = with_attribute(check.module.parameters(), "grad", None)
    with torch.enable_grad(), own_gradients, contextlib.ExitStack() as stack:
        stack.callback(leave_device, check.module)
        return run()


def _observe(
    check: LossCheck,
    samples: Parts,
    state: ModuleState,
    *,
    is_sharp: bool,
    is_carried: bool,
) -> Observed | None:
    probe = LossProbe(state, is_sharp=is_sharp)
    losses, denominators = [], []
    now: dict[str, Any] = {}
    left: list[dict[str, Any]] = []
    for part in samples:
        probe.denominators = []
        # Micro-batches see state changed by earlier ones; random numbers are reset nevertheless.
        if is_carried and part is samples[-1]:
            state.restore_random()
            tensors = {n: key_of(v) for n, v in now.items() if isinstance(v, Tensor)}
            probe.watched = {key: name for name, key in tensors.items() if key is not None}
        else:
            state.restore()
        with probe:
            loss = check.compute_loss(part)
        if is_carried:
            now = state.left()
            left.append({n: v.clone() if isinstance(v, Tensor) else v for n, v in now.items()})
        if loss is None:
            return None
        losses.append(loss.detach())
        denominators.append(probe.denominators)
    values = [float(value) for value in torch.stack(losses).reshape(-1).tolist()]
    return Observed(
        values,
        _epsilon(losses[0], check.module),
        [[float(count) for count in counts] for counts in denominators],
        sorted(probe.ignored),
        probe.class_weights[:1],
        probe.has_logits,
        frozenset(probe.read),
        left,
    )


# Labels that are Python's floats make float64 of the loss of a module that computes in float32.
def _epsilon(loss: Tensor, module: nn.Module) -> float:
    is_double = all(p.dtype == torch.float64 for p in module.parameters() if p.is_floating_point())
    is_wider = loss.dtype == torch.float64 and not is_double
    return torch.finfo(torch.float32 if is_wider else loss.dtype).eps


def _differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {
        name
        for name in one.keys() | other.keys()
        if name not in one or name not in other or not are_close(one[name], other[name])
    }


def _follows(together: Any, first: Any, num_together: int, num_first: int) -> bool:
    if not (isinstance(together, Tensor) and isinstance(first, Tensor)):
        return False
    pairs = [(a, b) for a, b in zip(together.shape, first.shape, strict=False) if a != b]
    return any(a * num_first == b * num_together for a, b in pairs)
