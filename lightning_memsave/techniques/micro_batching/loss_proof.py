"""Find the weighting of a loss by comparing the losses of a few samples, before splitting."""

import contextlib
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lightning_memsave.core.nested import (
    Path,
    count_samples,
    find_shared_leaves,
    pick_samples,
    split_samples,
)
from lightning_memsave.core.out_of_memory import (
    find_out_of_memory,
    free_unused,
    is_out_of_memory,
    with_memory_freed,
)
from lightning_memsave.core.saved_state import with_attribute
from lightning_memsave.errors import ConfigurationError, IncompatibleError
from lightning_memsave.techniques.micro_batching.loss_probe import LossProbe
from lightning_memsave.techniques.micro_batching.loss_weights import (
    LossWeight,
    Weighting,
    read_weights,
    shares_of,
    weightings_of,
)
from lightning_memsave.techniques.micro_batching.runner import (
    SplitBatch,
    samples_of,
    split_batch_with,
)
from lightning_memsave.techniques.micro_batching.training_state import (
    ModuleState,
    batch_norm_on_running_statistics,
    full_precision,
    key_of,
)
from lightning_memsave.techniques.optimizer_step import ACTIVE_UPDATES
from lightning_memsave.techniques.residences import leave_device, residence_with

ComputeLoss = Callable[[Any], Tensor | None]
Whole = frozenset[Path]
"""Leaves of a batch that are shared by all micro-batches."""

# In units of epsilon: sums in another order differ by a few of them, and in a deep model kernels
# for one sample and for two round differently.
_TOLERANCE = 64
_NUM_LOOKED_AT, _NUM_LOOKED_AT_AGAIN = 16, 64
"""Samples among which two are chosen in the first proof, and in later ones."""
_NUM_CONFIRMED = 8
"""Samples that are compared with their halves, fewer where memory is short: some losses need more
than two samples, such as triplet losses and those with hard-example mining."""
_REFUSED, _OPEN, _PROVEN = range(3)


@dataclass(frozen=True)
class Proof:
    weightings: tuple[Weighting, ...] = ()
    whole: Whole = frozenset()
    reason: str = ""
    fix: str = ""
    is_settled: bool = False
    seconds: float = 0.0
    num_samples: int = 2


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

    def weightings(self, part: Any, whole: Whole, seen: "_Observed | None") -> list[Weighting]:
        if self.known is not None:
            return list(self.known.weightings)
        extra = () if seen is None else (seen.ignored, seen.class_weights)
        return weightings_of(self.loss_weight, part, whole, *extra)


def prove(check: LossCheck, agree: Callable[[int], int] = lambda value: value) -> Proof:
    """Find the weightings with which losses of micro-batches give the loss of the batch."""
    start_s = time.perf_counter()
    shared: list[Whole] = [frozenset()]
    if check.known is not None:
        shared = [check.known.whole]
    elif check.split_batch is None:
        shared = find_shared_leaves(check.batch)
    num_samples = samples_of(check.batch, shared[0])
    proof = Proof()
    if agree(2 if num_samples is None else num_samples) < 2:
        return proof
    for whole in shared:
        with contextlib.nullcontext() if check.room is None else check.room.measured():
            found = _prove_with(check, whole)
        proof = found if found.weightings or not proof.reason else proof
        # Every process runs the same number of forward passes.
        if agree(int(bool(found.weightings) or not found.reason)):
            break
    if size := agree(_num_confirmed(check, proof)):
        proof = _with_state_kept(check, lambda state: _confirm(check, proof, size, state))
    verdict = agree(_REFUSED if proof.reason else _PROVEN if proof.weightings else _OPEN)
    if verdict == _OPEN:
        proof = Proof()
    elif verdict == _REFUSED and not proof.reason:
        proof = Proof(reason="its loss cannot be split in another process")
    is_settled = bool(agree(int(len(proof.weightings) == 1)))
    return replace(proof, is_settled=is_settled, seconds=time.perf_counter() - start_s)


def _prove_with(check: LossCheck, whole: Whole) -> Proof:
    def find(state: ModuleState) -> Proof:
        samples = _two_samples(check, whole)
        if samples is None:
            return Proof()
        return with_memory_freed(lambda: _find(check, samples, state, whole))

    return _with_state_kept(check, find)


def _with_state_kept(check: LossCheck, find: Callable[[ModuleState], Proof]) -> Proof:
    with full_precision(), batch_norm_on_running_statistics(check.module):
        state = ModuleState(check.module, check.batch)
        # What is offloaded takes other data as values, which the state has.
        own = [p for p in check.module.parameters() if residence_with(p) is None]
        before = [(param, param.data) for param in own]
        try:
            return find(state)
        except ConfigurationError:  # from the result of the user's function
            raise
        except IncompatibleError as error:
            problem = error.problems[0]
            return Proof(reason=f"{problem.what}: {problem.why}", fix=problem.fix)
        except Exception as error:
            if check.needs_split and find_out_of_memory(error) is not None:
                raise  # two samples do not fit: more informative than a failed proof
            what = f"it cannot be proven that {check.subject} can be split"
            return Proof(reason=f"{what}: {_words(error)}")
        finally:
            state.restore()
            for param, data in before:
                if key_of(param) != key_of(data):
                    param.data = data


class _Samples(NamedTuple):
    both: Any
    one: Any
    other: Any


def _two_samples(check: LossCheck, whole: Whole) -> _Samples | None:
    """Choose the two samples that distinguish weightings best; ``None`` if there are not two."""
    batch, split_batch = check.batch, check.split_batch
    if split_batch is not None:
        both = split_batch_with(split_batch, batch, 2)[0]
        singles = split_batch_with(split_batch, both, 1)
        return _Samples(both, *singles) if len(singles) == 2 else None
    limit = _NUM_LOOKED_AT if check.known is None else _NUM_LOOKED_AT_AGAIN
    first = pick_samples(batch, range(min(count_samples(batch, whole), limit)), whole)
    singles = split_samples(first, 1, whole)
    rows = read_weights(check.weightings(first, whole, None), singles)
    pairs = itertools.combinations(range(len(singles)), 2)
    i, j = max(pairs, key=lambda pair: _difference(rows, *pair))
    return _Samples(*(pick_samples(batch, chosen, whole) for chosen in ([i, j], [i], [j])))


def _difference(rows: Sequence[Sequence[float]], i: int, j: int) -> tuple[int, float, int]:
    """Measure how well two samples distinguish weightings."""
    shares = [round(r[i] / (r[i] + r[j]), 9) for r in rows if r[i] + r[j] > 0]
    distinct = {0.5, *shares}
    spread = sum(math.sqrt(abs(x - y)) for x, y in itertools.combinations(distinct, 2))
    return len(distinct), spread, len(shares)


def _num_confirmed(check: LossCheck, proof: Proof) -> int:
    """Count the samples that are compared with their halves; 0 if nothing is to be compared."""
    if not proof.weightings:
        return 0
    size = _NUM_CONFIRMED
    while check.room is not None and size > max(check.room.num_samples(), 2):
        size //= 2
    if check.split_batch is None:
        return min(size, count_samples(check.batch, proof.whole))
    return 0 if _halves(check, proof, size) is None else size


def _halves(check: LossCheck, proof: Proof, size: int) -> _Samples | None:
    """Return some samples and their halves; ``None`` if the user's function gives none."""
    batch, split_batch = check.batch, check.split_batch
    if size == 2:
        return _two_samples(check, proof.whole)
    if split_batch is not None:
        both = split_batch_with(split_batch, batch, size)[0]
        parts = split_batch_with(split_batch, both, size // 2)
        return _Samples(both, *parts) if len(parts) == 2 else None
    both = pick_samples(batch, range(size), proof.whole)
    return _Samples(both, *split_samples(both, (size + 1) // 2, proof.whole))


def _confirm(check: LossCheck, proof: Proof, size: int, state: ModuleState) -> Proof:
    """Keep the weightings that hold for more samples: as many as there is memory for."""

    def confirm() -> Proof:
        samples = _halves(check, proof, size)
        if samples is None:
            return proof
        return replace(_confirm_with(check, proof, samples, state), num_samples=size)

    outside = sys.exception()
    while size > 1:
        try:
            return confirm()
        except Exception as error:
            if not is_out_of_memory(error, outside):
                raise
        # Outside of the except block, whose traceback keeps tensors alive.
        free_unused()
        size = max(size // 2, 2) if size > 2 else 0
    return proof  # by less: micro-batches may be smaller


def _confirm_with(check: LossCheck, proof: Proof, samples: _Samples, state: ModuleState) -> Proof:
    """Keep the weightings that hold for these, and with state changed by the first half."""

    def observe(*, is_carried: bool) -> _Observed | None:
        return _observe_with_graph_if_needed(check, samples, state, is_carried=is_carried)

    rows = read_weights(proof.weightings, [*samples])
    pairs = [*zip(proof.weightings, rows, strict=True)]
    seen = observe(is_carried=True)
    if seen is None or not (any(seen.losses) or check.needs_split):
        return Proof()  # a later batch may have a loss
    if not any(seen.losses):
        return Proof(reason="the loss of its first samples is 0, so nothing can be proven")
    if seen.carried and check.module.training:
        names = ", ".join(f"`{name}`" for name in sorted(seen.carried))
        return Proof(reason=f"{check.subject} {_CARRIED}: {names}")
    held = [weighting for weighting, weights in pairs if _holds(weighting, weights, seen)]
    if held:
        return replace(proof, weightings=tuple(held))
    alone = observe(is_carried=False) if state.has_changed() else None
    if alone is not None and any(_holds(*pair, alone) for pair in pairs):
        return Proof(reason=f"{check.subject} {_CARRIED}")
    return Proof(reason=_reason(seen.losses, check, "several"))


_CARRIED = (
    "cannot be split: it depends on state that the previous micro-batch changed, such as a queue "
    "or running statistics"
)


@dataclass(frozen=True)
class _Observed:
    losses: list[float]  # of both samples, of the first, of the second
    epsilon: float
    denominators: list[list[float]]
    ignored: list[int]
    class_weights: list[Tensor]
    has_logits: bool
    carried: frozenset[str] = frozenset()
    """State that the second sample has read and that is other than after both together."""


def _find(check: LossCheck, samples: _Samples, state: ModuleState, whole: Whole) -> Proof:
    seen = _observe_with_graph_if_needed(check, samples, state)
    if seen is None:
        return Proof()
    weightings = check.weightings(samples.both, whole, seen)
    rows = read_weights(weightings, [*samples])
    found = [pair for pair in zip(weightings, rows, strict=True) if _holds(*pair, seen)]
    if found and seen.has_logits:
        # In untrained models all samples have nearly the same loss; larger logits make them differ.
        sharp = _observe_with_graph_if_needed(check, samples, state, is_sharp=True)
        if sharp is not None and math.isfinite(sharp.losses[0]):
            found = [pair for pair in found if _holds(*pair, sharp)]
    if not found:
        return Proof(reason=_reason(seen.losses, check))
    return Proof(tuple(_preferred(found, seen.denominators)), whole)


def _observe_with_graph_if_needed(
    check: LossCheck,
    samples: _Samples,
    state: ModuleState,
    *,
    is_sharp: bool = False,
    is_carried: bool = False,
) -> _Observed | None:
    observe = functools.partial(
        _observe, check, samples, state, is_sharp=is_sharp, is_carried=is_carried
    )
    try:
        with torch.no_grad():
            return observe()
    except RuntimeError as error:
        # A training step may compute gradients itself, as for a gradient penalty.
        if is_out_of_memory(error) or "grad" not in str(error) or ACTIVE_UPDATES:
            raise
    own_gradients = with_attribute(check.module.parameters(), "grad", None)
    with torch.enable_grad(), own_gradients, contextlib.ExitStack() as stack:
        stack.callback(leave_device, check.module)
        return observe()


def _observe(
    check: LossCheck, samples: _Samples, state: ModuleState, *, is_sharp: bool, is_carried: bool
) -> _Observed | None:
    probe = LossProbe(state, is_sharp=is_sharp)
    losses, denominators = [], []
    now: dict[str, Tensor] = {}
    left: list[dict[str, Tensor]] = []
    for part in samples:
        probe.denominators = []
        # Micro-batches see state changed by earlier ones; random numbers are reset nevertheless.
        if is_carried and part is samples.other:
            state.restore_random()
            keys = {name: key_of(tensor) for name, tensor in now.items()}
            probe.watched = {key: name for name, key in keys.items() if key is not None}
        else:
            state.restore()
        with probe:
            loss = check.compute_loss(part)
        if is_carried:
            now = state.left_in(check.module)
            left.append({name: tensor.clone() for name, tensor in now.items()})
        if loss is None:
            return None
        losses.append(loss.detach())
        denominators.append(probe.denominators)
    values = [float(value) for value in torch.stack(losses).reshape(-1).tolist()]
    return _Observed(
        values,
        _epsilon(losses[0], check.module),
        [[float(count) for count in counts] for counts in denominators],
        sorted(probe.ignored),
        probe.class_weights[:1],
        probe.has_logits,
        frozenset(name for name in probe.read if _is_other(left[0].get(name), left[2].get(name))),
    )


# Labels that are Python's floats make float64 of the loss of a module that computes in float32.
def _epsilon(loss: Tensor, module: nn.Module) -> float:
    is_double = all(p.dtype == torch.float64 for p in module.parameters() if p.is_floating_point())
    is_wider = loss.dtype == torch.float64 and not is_double
    return torch.finfo(torch.float32 if is_wider else loss.dtype).eps


def _is_other(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return one is not other
    return not torch.allclose(one.double(), other.double(), rtol=1e-5, atol=1e-8)


def _holds(weighting: Weighting, weights: Sequence[float], seen: _Observed) -> bool:
    together, *weights = weights
    shares = shares_of(weighting, weights)
    if shares is None or (
        weighting.weigh and not math.isclose(together, sum(weights), rel_tol=1e-5)
    ):
        return False
    both, *losses = seen.losses
    counted = [share * loss for share, loss in zip(shares, losses, strict=True) if share]
    # A sample without a label has no finite loss; it is ignored if its share is zero.
    scale = max(abs(loss) for loss in [both, *losses] if math.isfinite(loss) or loss is both)
    return abs(both - sum(counted)) <= _TOLERANCE * seen.epsilon * scale


def _preferred(
    found: Sequence[tuple[Weighting, Sequence[float]]], denominators: Sequence[Sequence[float]]
) -> list[Weighting]:
    """Prefer weightings that agree with the denominators of cross-entropy, if there are any."""
    _, one, other = denominators
    shares = {x / (x + y) for x, y in zip(one, other, strict=False) if x + y > 0}
    agreeing = [
        weighting
        for weighting, weights in found
        if len(shares) == 1
        and weighting.weigh is not None
        and math.isclose(weights[1] / sum(weights[1:]), next(iter(shares)), rel_tol=1e-5)
    ]
    return agreeing or [weighting for weighting, _ in found]


def _reason(
    losses: Sequence[float], check: LossCheck, of: Literal["two", "several"] = "two"
) -> str:
    both, one, other = (f"{loss:.6g}" for loss in losses)
    each = "each" if of == "two" else "each half"
    if not math.isfinite(losses[0]):
        return f"the loss of {of} samples is not finite ({both}; of {each} {one} and {other})"
    what = "a weighted mean or the sum"
    if check.loss_weight != "proven":
        weight = check.loss_weight
        shown = getattr(weight, "__name__", "...") if callable(weight) else repr(weight)
        what = f"the mean with the weights of `loss_weight={shown}`"
    return (
        f"{check.subject} cannot be split: the loss of {of} samples together is {both}, which is "
        f"not {what} of the losses of {each}, {one} and {other}"
    )


def _words(error: BaseException) -> str:
    first_line = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
