"""What settings of micro-batches share: reading, conflicts, what fits, and messages."""

import collections
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lightning_memsave.callbacks.settings.setting import Arguments, warn
from lightning_memsave.core.out_of_memory import first_line
from lightning_memsave.core.technique import Exactness
from lightning_memsave.core.trainer_facts import SHARDED
from lightning_memsave.errors import (
    ConfigurationError,
    ExactnessWarning,
    MemoryExhaustedError,
    MemsaveWarning,
    Problem,
)
from lightning_memsave.measure.peak import PeakMemory
from lightning_memsave.measure.storages import tensors_in_batch
from lightning_memsave.techniques.micro_batching.in_blocks import BlockMicroBatching
from lightning_memsave.techniques.micro_batching.loss_observed import Proof
from lightning_memsave.techniques.micro_batching.runner import MicroBatchRunner, PassPart
from lightning_memsave.techniques.micro_batching.technique import (
    BATCH_STATISTICS,
    MicroBatching,
    batch_norms_of,
)
from lightning_memsave.techniques.optimizer_kinds import is_of_torch
from lightning_memsave.trainer.batch_parts import BatchParts
from lightning_memsave.trainer.distributed import (
    alone,
    communicates_in_forward,
    has_custom_gradient_sync,
    has_static_graph,
    without_sync,
)
from lightning_memsave.trainer.nested_fit import quiet
from lightning_memsave.trainer.trainer import is_strategy

# The first step has no optimizer state before it, the second has all there is.
PROBED_STEPS = 2


def read_micro_batching(arguments: Arguments) -> MicroBatching | None:
    """Read micro-batches of batches; ``None`` for those of blocks."""
    wanted = arguments[MicroBatching.argument]
    if isinstance(wanted, BlockMicroBatching):
        fix = f'`micro_batch_size=MicroBatching({wanted.size}, of="blocks")`'
        raise ConfigurationError(f"`{wanted!r}` is for a loop of your own. Write {fix}.")
    return None if BlockMicroBatching.from_value(wanted) else MicroBatching.from_value(wanted)


def reasons_against(trainer: Any, pl_module: Any, *, is_auto: bool) -> Iterator[tuple[str, str]]:
    """Give every reason why the batches of a Trainer cannot be split, and what to do."""
    if not pl_module.automatic_optimization:
        name = f"`{type(pl_module).__name__}.automatic_optimization=False`"
        fix = "Set `micro_batch_size=None` and split the batch in `training_step`."
        yield f"{name}: the module runs its own backward passes", fix
    if trainer.strategy.handles_gradient_accumulation:
        why = f"`{type(trainer.strategy).__name__}` counts backward passes itself"
        fix = "Set `micro_batch_size=None`, and use a smaller batch and `accumulate_grad_batches`."
        yield why, fix
        return
    if not is_auto:
        if trainer.world_size > 1 and has_static_graph(trainer):
            why = (
                f"`{type(trainer.strategy).__name__}(static_graph=True)` must share gradients in "
                "every backward pass, also in those of the first micro-batches"
            )
            yield why, 'Remove `static_graph`, or use `micro_batch_size="halve"`.'
        return
    # Where one process repeats a batch while the others do not.
    fix = "Use a fixed size such as `micro_batch_size=4`."
    if meets := communicates_in_forward(trainer, pl_module):
        yield f"{meets}, so none of them can repeat a batch alone", fix
    elif own_way := has_custom_gradient_sync(trainer):
        yield f"{own_way}, which cannot wait until all processes had enough memory", fix
    if is_among(trainer, "BatchSizeFinder"):
        why = "`BatchSizeFinder` looks for the size at which memory runs out"
        yield why, "Remove that callback: batches shrink by themselves."


def is_among(trainer: Any, name: str) -> bool:
    return any(b.__name__ == name for c in trainer.callbacks for b in type(c).__mro__)


def warn_of_batch_norm(trainer: Any, pl_module: nn.Module, written: str, alone: str) -> None:
    """Warn that batch normalization sees the statistics of what passes alone."""
    if batch_norms_of(pl_module):
        fix = (
            "Use a normalisation without batch statistics, such as `nn.GroupNorm`, if that matters."
        )
        why = f"{written} and batch normalisation: its statistics come from each {alone}"
        warn(trainer, f"{why}. {fix}", ExactnessWarning)


def warn_of_retry(trainer: Any, runner: MicroBatchRunner, weighted: str = "") -> None:
    proven = f" The losses of micro-batches are {weighted}, as proven." if weighted else ""
    kept = f"{runner.retries[-1].capitalize()}, which is kept from now on.{proven}"
    warn(trainer, f"{kept} Begin with `micro_batch_size={runner.size}` next time.", MemsaveWarning)


@contextlib.contextmanager
def unnoticed(trainer: Any) -> Iterator[None]:
    """Run passes of a proof without DDP and, in one process, without output and logging."""
    with contextlib.ExitStack() as stack:
        if not is_strategy(trainer, *SHARDED):
            stack.enter_context(alone(trainer))
        if trainer.world_size == 1:
            stack.enter_context(quiet())
        yield


def refusal_of(what: str, proof: Proof) -> Problem:
    fix = (
        "Pass `MicroBatching(loss_weight=...)`, a function of a micro-batch that gives what its "
        "loss is divided by; set `micro_batch_size=None`; or use smaller batches and "
        "`accumulate_grad_batches`."
    )
    return Problem(what, proof.reason, proof.fix or fix)


# What a budget advises takes the place of our own advice.
def failed_step(
    advice: str, optimizer: torch.optim.Optimizer, error: BaseException
) -> MemoryExhaustedError:
    fix = (
        'Its state needs less with `optimizer="8bit"`, or host memory with '
        '`optimizer="paged_8bit"`; micro-batches do not help here.'
    )
    if type(optimizer).__module__.startswith("bitsandbytes."):  # its state is 8-bit
        fix = 'Its state is in host memory with `offload="optimizer"`; micro-batches do not help.'
    return MemoryExhaustedError(
        f"Out of memory in the step of `{type(optimizer).__name__}`, after the gradients were "
        f"complete: {first_line(error)}\n{advice or fix}",
        "optimizer",
    )


def failed_window(advice: str) -> MemoryExhaustedError:
    """Memory ran out where earlier gradients would be lost."""
    return MemoryExhaustedError(
        "Out of memory in the backward pass of a batch in the middle of an accumulation window, "
        "where batches of this size had fitted before: gradients of the earlier batches have no "
        f"copy by then, so the batch cannot be repeated.\n"
        f"{advice or 'Pass a size such as `micro_batch_size=4`.'} Resume from the last checkpoint."
    )


def failed_rank(num_samples: int | None, where: str, advice: str) -> MemoryExhaustedError:
    size, at_once = 1, ""
    if num_samples is not None:
        size, at_once = max(num_samples // 2, 1), f"with {num_samples} samples at once "
    return MemoryExhaustedError(
        f"Out of memory {at_once}{where}. Processes repeat a batch "
        f"together in the first {PROBED_STEPS} steps only: from then on they train under DDP "
        "itself, which cannot repeat one. Batches that grow during training are the usual reason.\n"
        f"{advice or f'Pass `micro_batch_size={size}`.'} Resume from the last checkpoint with "
        "`trainer.fit(..., ckpt_path=...)`, or let the longest batches come first."
    )


# Of the parameters of a group, in torch's ``foreach`` updates without and with weight decay.
_COPIES: dict[type, tuple[int, int]] = {
    torch.optim.SGD: (0, 1),
    torch.optim.RMSprop: (1, 2),
    torch.optim.NAdam: (1, 2),
    torch.optim.Adagrad: (2, 2),
    torch.optim.Adadelta: (2, 3),
}


def try_step(optimizer: torch.optim.Optimizer) -> None:
    """Allocate, and free, what updates of torch's optimizers need for a moment."""
    if not is_of_torch(optimizer):
        return
    for group in optimizer.param_groups:
        if group.get("fused") or group.get("foreach") is False:
            continue
        num_copies = _COPIES.get(type(optimizer), (1, 1))[group.get("weight_decay", 0) != 0]
        params = [p for p in group["params"] if p.is_cuda and p.grad is not None]
        copies = [torch.empty_like(param) for param in params * num_copies]
        del copies


def part_passer(trainer: Any, parts: BatchParts, *, is_apart: bool) -> PassPart:
    context = alone if is_apart else without_sync

    def pass_part(part: Any, weight: float, num_samples: int | None, is_last: bool) -> None:
        with context(trainer) if is_apart or not is_last else contextlib.nullcontext():
            parts(part, weight, num_samples, is_last)

    return pass_part


class PlannedRoom:
    """Keeps passes without a graph within the peak that was planned for a step."""

    def __init__(self, peak: PeakMemory, limit_bytes: int) -> None:
        self._peak, self._limit_bytes = peak, limit_bytes
        self._num_samples = 0

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        with self._peak:
            before_bytes = self._peak.allocated_bytes
            yield
        needed_bytes = max(self._peak.allocated_bytes - before_bytes, 1)
        # What does not grow with the samples is counted more than once: it is little.
        self._num_samples = 2 * (self._limit_bytes - before_bytes) // needed_bytes

    def num_samples(self) -> int:
        return self._num_samples


class BatchProbe:
    """Remembers which batches have been proven to fit, so that they need no safety net."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._phase: object = None
        self._allocations = collections.Counter[object]()
        self._largest = {True: (0, 0), False: (0, 0)}  # of those without and with gradients

    def is_open(self, batch: Any, is_fresh: bool) -> bool:
        """Say whether a batch may need more memory than those before."""
        numel, length = _extent(batch)
        most = self._largest[is_fresh]
        return self.num_steps < PROBED_STEPS or numel > most[0] or length > most[1]

    def is_first_of(self, phase: object) -> bool:
        """Say whether this is the first batch of an epoch, or after validation."""
        before, self._phase = self._phase, phase
        return before != phase

    def allocates(self, phase: object) -> bool:
        """Say whether parameters may get their first gradients: hooks of epochs unfreeze them."""
        if phase not in self._allocations:
            self._allocations.clear()
        self._allocations[phase] += 1
        return self._allocations[phase] <= PROBED_STEPS

    def passed(self, batch: Any, is_fresh: bool, has_stepped: bool) -> None:
        numel, length = _extent(batch)
        most = self._largest[is_fresh]
        self._largest[is_fresh] = (max(most[0], numel), max(most[1], length))
        self.num_steps += has_stepped


# Attention grows with the square of the longest side: the sizes alone do not tell which is larger.
def _extent(batch: Any) -> tuple[int, int]:
    tensors = list(tensors_in_batch(batch))
    lengths = (max(t.shape, default=1) for t in tensors)
    return sum(t.numel() for t in tensors), max(lengths, default=0)


def batch_norm_problems(pl_module: nn.Module, what: str, limit: Exactness) -> list[Problem]:
    if limit.allows(Exactness.APPROXIMATE) or not batch_norms_of(pl_module):
        return []
    why = (
        f"{BATCH_STATISTICS}, which is approximate, and `exactness={limit.value!r}` does not allow "
        "that"
    )
    fix = (
        'Use `exactness="approximate"`, a normalisation without batch statistics, such as '
        "`nn.GroupNorm`, or `micro_batch_size=None`."
    )
    return [Problem(what, why, fix)]
