"""Find the weighting of a loss by comparing the losses of a few samples, before splitting."""

import contextlib
import functools
import itertools
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from lightning_memsave.core.nested import (
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
from lightning_memsave.errors import ConfigurationError, IncompatibleError, Problem
from lightning_memsave.techniques.micro_batching.loss_observed import (
    LossCheck,
    Observed,
    Proof,
    Samples,
    Whole,
    observe,
    runs_for_each,
)
from lightning_memsave.techniques.micro_batching.loss_weights import (
    Weighting,
    read_weights,
    shares_of,
)
from lightning_memsave.techniques.micro_batching.module_state import (
    ModuleState,
    is_of_user,
)
from lightning_memsave.techniques.micro_batching.runner import (
    samples_of,
    split_batch_with,
)
from lightning_memsave.techniques.micro_batching.training_state import (
    batch_norm_on_running_statistics,
    full_precision,
)
from lightning_memsave.techniques.residences import residence_with

# In units of epsilon: sums in another order differ by a few of them, and in a deep model kernels
# for one sample and for two round differently.
_TOLERANCE = 64
_NUM_LOOKED_AT, _NUM_LOOKED_AT_AGAIN = 16, 64
"""Samples among which two are chosen in the first proof, and in later ones."""
_NUM_CONFIRMED = 8
"""Samples that are compared with their halves, fewer where memory is short: some losses need more
than two samples, such as triplet losses and those with hard-example mining."""
_OTHER = 1.25
"""Factor that makes other values of what a step writes to."""
_REFUSED, _OPEN, _PROVEN = range(3)


def prove(check: LossCheck, agree: Callable[[int], int] = lambda value: value) -> Proof:
    """Find the weightings with which losses of micro-batches give the loss of the batch."""
    start_s = time.perf_counter()
    shared: list[Whole] = [frozenset()]
    if check.known is not None:
        shared = [check.known.whole]
    elif check.split_batch is None:
        shared = find_shared_leaves(check.batch)
    num_samples = samples_of(check.batch, shared[0])
    if agree(2 if num_samples is None else num_samples) < 2:
        return Proof()
    if check.module.training and (hooks := _hooks_of_backward(check.module)):
        return runs_for_each(hooks)
    with _state_kept(check) as state:
        proof = _prove_in(check, shared, state, agree)
    verdict = agree(_REFUSED if proof.reason else _PROVEN if proof.weightings else _OPEN)
    if verdict == _OPEN:
        proof = Proof()
    elif verdict == _REFUSED and not proof.reason:
        proof = Proof(reason="its loss cannot be split in another process")
    is_settled = bool(agree(int(len(proof.weightings) == 1)))
    return replace(proof, is_settled=is_settled, seconds=time.perf_counter() - start_s)


def _hooks_of_backward(module: nn.Module) -> list[str]:
    """List the parameters and modules with hooks of the user's in backward passes."""
    kinds = ("_backward_pre_hooks", "_backward_hooks", "_post_accumulate_grad_hooks")
    return [
        f"{name or type(owner).__name__}: a hook in backward"
        for name, owner in [*module.named_modules(), *module.named_parameters()]
        if any(is_of_user(hook) for kind in kinds for hook in _hooks(owner, kind))
    ][:3]


def _hooks(owner: Any, kind: str) -> list[Any]:
    return list((getattr(owner, kind, None) or {}).values())


@contextlib.contextmanager
def _state_kept(check: LossCheck) -> Iterator[ModuleState]:
    with full_precision(), batch_norm_on_running_statistics(check.module):
        state = ModuleState(check.module, check.batch, check.optimizers, is_checked=True)
        try:
            yield state
        finally:
            state.restore()
            state.restore_gradients()
        damaged = state.damaged()
    if damaged:
        what = ", ".join(f"`{name}`" for name in damaged)
        why = (
            "the step writes to it in a way that torch does not see, as NumPy does, so that a look "
            "at the loss of a few samples has changed it"
        )
        fix = "Write to it with operators of torch, or set `micro_batch_size=None`."
        raise IncompatibleError("micro_batch_size", [Problem(what, why, fix)])


def _prove_in(
    check: LossCheck, shared: Sequence[Whole], state: ModuleState, agree: Callable[[int], int]
) -> Proof:
    proof = Proof()
    for whole in shared:
        with contextlib.nullcontext() if check.room is None else check.room.measured():
            found = _or_reason(check, functools.partial(_find_with, check, whole, state))
        proof = found if found.weightings or not proof.reason else proof
        # Every process runs the same number of forward passes.
        if agree(int(bool(found.weightings) or not found.reason)):
            break
    if size := agree(_num_confirmed(check, proof)):
        proof = _or_reason(check, lambda: _confirm(_confirm_here, check, proof, size, state))
    if size := agree(proof.num_samples if proof.weightings else 0):
        proof = _or_reason(check, lambda: _confirm(_confirm_next, check, proof, size, state))
    return proof


def _find_with(check: LossCheck, whole: Whole, state: ModuleState) -> Proof:
    samples = _two_samples(check, whole)
    if samples is None:
        return Proof()
    return with_memory_freed(lambda: _find(check, samples, state, whole))


def _or_reason(check: LossCheck, find: Callable[[], Proof]) -> Proof:
    try:
        return find()
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


def _two_samples(check: LossCheck, whole: Whole) -> Samples | None:
    """Choose the two samples that distinguish weightings best; ``None`` if there are not two."""
    batch, split_batch = check.batch, check.split_batch
    if split_batch is not None:
        both = split_batch_with(split_batch, batch, 2)[0]
        singles = split_batch_with(split_batch, both, 1)
        return Samples(both, *singles) if len(singles) == 2 else None
    limit = _NUM_LOOKED_AT if check.known is None else _NUM_LOOKED_AT_AGAIN
    first = pick_samples(batch, range(min(count_samples(batch, whole), limit)), whole)
    singles = split_samples(first, 1, whole)
    rows = read_weights(check.weightings(first, whole, None), singles)
    pairs = itertools.combinations(range(len(singles)), 2)
    i, j = max(pairs, key=lambda pair: _difference(rows, *pair))
    return Samples(*(pick_samples(batch, chosen, whole) for chosen in ([i, j], [i], [j])))


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


def _halves(check: LossCheck, proof: Proof, size: int, start: int = 0) -> Samples | None:
    """Return some samples and their halves; ``None`` if the user's function gives none."""
    batch, split_batch = check.batch, check.split_batch
    if size == 2:
        return _two_samples(check, proof.whole)
    if split_batch is not None:
        both = split_batch_with(split_batch, batch, size)[0]
        parts = split_batch_with(split_batch, both, size // 2)
        return Samples(both, *parts) if len(parts) == 2 else None
    start = min(start, count_samples(batch, proof.whole) - size)
    both = pick_samples(batch, range(start, start + size), proof.whole)
    return Samples(both, *split_samples(both, (size + 1) // 2, proof.whole))


Confirm: TypeAlias = Callable[[LossCheck, Proof, int, ModuleState], Proof]


def _confirm(
    confirm: Confirm, check: LossCheck, proof: Proof, size: int, state: ModuleState
) -> Proof:
    """Keep the weightings that hold for more samples: as many as there is memory for."""
    outside = sys.exception()
    while size > 1:
        try:
            return replace(confirm(check, proof, size, state), num_samples=size)
        except Exception as error:
            if not is_out_of_memory(error, outside):
                raise
        # Outside of the except block, whose traceback keeps tensors alive.
        free_unused()
        size = max(size // 2, 2) if size > 2 else 0
    return proof  # by less: micro-batches may be smaller


def _confirm_here(check: LossCheck, proof: Proof, size: int, state: ModuleState) -> Proof:
    samples = _halves(check, proof, size)
    return proof if samples is None else _confirm_with(check, proof, samples, state)


def _confirm_with(check: LossCheck, proof: Proof, samples: Samples, state: ModuleState) -> Proof:
    """Keep the weightings that hold for these, and with state changed by the first half."""
    rows = read_weights(proof.weightings, [*samples])
    pairs = [*zip(proof.weightings, rows, strict=True)]
    seen = observe(check, samples, state, is_carried=True)
    if seen is None or not (any(seen.losses) or check.needs_split):
        return Proof()  # a later batch may have a loss
    if not any(seen.losses):
        return Proof(reason="the loss of its first samples is 0, so nothing can be proven")
    if why := _why_carried(check, proof, samples, seen, state):
        fix = "" if why.startswith(_CARRIED) else _ONCE
        return Proof(reason=f"{check.subject} cannot be split: {why}", fix=fix)
    held = [weighting for weighting, weights in pairs if _holds(weighting, weights, seen)]
    if held:
        return replace(proof, weightings=tuple(held))
    alone = observe(check, samples, state) if state.has_changed() else None
    if alone is not None and any(_holds(*pair, alone) for pair in pairs):
        return Proof(reason=f"{check.subject} cannot be split: {_CARRIED}")
    return Proof(reason=_reason(seen.losses, check, "several"))


_CARRIED = (
    "it depends on state that the previous micro-batch changed, such as a queue or running "
    "statistics"
)
_KEPT = "what it keeps for later has an entry for each sample of the batch"
_ITEM = re.compile(r"\[\d+\]")
_ONCE = "Do that once for a batch, in `on_train_batch_end`, or set `micro_batch_size=None`."
_WRITTEN = "each micro-batch would change what a batch changes once"


def _why_carried(
    check: LossCheck, proof: Proof, samples: Samples, seen: Observed, state: ModuleState
) -> str:
    """Say which state passes from a part to the next, or is changed once for each part."""
    if check.module.training and (carried := seen.carried()):
        return f"{_CARRIED}: {_named(carried)}"
    if kept := seen.kept(*(samples_of(part, proof.whole) for part in samples[:2])):
        return f"{_KEPT}: {_named(kept)}"
    # A list to which the step appends, as for a mean at the end, gets an entry from each part.
    written = {n for n in seen.written() if n in state.names or not _ITEM.search(n)}
    again = observe(check, samples, state, is_carried=True) if written else None
    if again is not None:
        written = {name for name in written if seen.is_repeatable(name, again)}
    return f"{_WRITTEN}: {_named(written)}" if written else ""


def _named(names: set[str]) -> str:
    shown = [f"`{name}`" for name in sorted(names)]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def _confirm_next(check: LossCheck, proof: Proof, size: int, state: ModuleState) -> Proof:
    """Keep the weightings that hold for the next batch, with the state that this one leaves."""
    written = _pass_whole(check, proof, size, state)
    next_check = replace(check, compute_loss=check.compute_next or check.compute_loss)
    found = _confirm_after(next_check, proof, size)
    if not found.weightings or not written:
        return found
    # Averages of weights that were not updated yet are equal to them: with other values it shows.
    _pass_whole(check, proof, size, state)
    with torch.no_grad():
        for tensor in written:
            tensor.mul_(_OTHER)
    try:
        other = _confirm_after(next_check, proof, size)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return found  # the values may mean nothing to the step
    is_of_state = any(why in other.reason for why in (_CARRIED, _KEPT, _WRITTEN))
    return other if is_of_state else found


def _confirm_after(check: LossCheck, proof: Proof, size: int) -> Proof:
    samples = _halves(check, proof, size, start=size)
    if samples is None:
        return proof
    state = ModuleState(check.module, check.batch, check.optimizers)
    try:
        found = _confirm_with(check, proof, samples, state)
    finally:
        state.restore()
    # Those samples may have no loss.
    return found if found.weightings or "cannot be split" in found.reason else proof


def _pass_whole(check: LossCheck, proof: Proof, size: int, state: ModuleState) -> list[Tensor]:
    """Let some samples change the state; returns the tensors of it that they have written to."""
    samples = _halves(check, proof, size)
    if samples is not None:
        observe(check, (samples.both,), state)
    found = [t for t in state.written() if t.is_floating_point() and not t.is_inference()]
    return [tensor for tensor in found if residence_with(tensor) is None]


def _find(check: LossCheck, samples: Samples, state: ModuleState, whole: Whole) -> Proof:
    seen = observe(check, samples, state)
    if seen is None:
        return Proof()
    weightings = check.weightings(samples.both, whole, seen)
    rows = read_weights(weightings, [*samples])
    found = [pair for pair in zip(weightings, rows, strict=True) if _holds(*pair, seen)]
    if found and seen.has_logits:
        # In untrained models all samples have nearly the same loss; larger logits make them differ.
        sharp = observe(check, samples, state, is_sharp=True)
        if sharp is not None and math.isfinite(sharp.losses[0]):
            found = [pair for pair in found if _holds(*pair, sharp)]
    if not found:
        return Proof(reason=_reason(seen.losses, check))
    return Proof(tuple(_preferred(found, seen.denominators)), whole)


def _holds(weighting: Weighting, weights: Sequence[float], seen: Observed) -> bool:
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
