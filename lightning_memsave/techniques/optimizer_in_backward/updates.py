"""Update parameters in backward through hooks on their gradients, on the device or the host."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_memsave.core.optimizers import parameters_of
from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.techniques.flat_memory import aligned
from lightning_memsave.techniques.group_settings import apply_written
from lightning_memsave.techniques.optimizer_in_backward.held_gradients import (
    HeldGradients,
    dense_bytes,
)
from lightning_memsave.techniques.optimizer_step import (
    ACTIVE_UPDATES,
    around_step,
    owners_of,
    owns,
    step_parameters,
)

_GROUP_BYTES, _NUM_GROUPS = 2**25, 16
_SMALL_BYTES = 2**16


def open_to_keep(optimizers: Iterable[Optimizer]) -> list[HeldGradients]:
    found = [ACTIVE_UPDATES.get(optimizer) for optimizer in optimizers]
    held = [updates.held for updates in found if updates is not None]
    return [each for each in held if each is not None and each.kept_bytes is None]


_ADVICE = (
    "from a second backward pass without `optimizer.step()` between them, from a block that is "
    "used twice under checkpointing with `use_reentrant=True`, or from DistributedDataParallel",
    "Run every backward pass but the last of a step inside `with handle.accumulating():`, "
    "checkpoint with `use_reentrant=False`, and train in one process.",
)


@dataclass
class _Gathered:
    params: Any = field(default_factory=WeakTensorKeyDictionary)
    num_bytes: int = 0

    def take(self) -> list[nn.Parameter]:
        params = [param for param in self.params if param.grad is not None]
        self.params.clear()
        self.num_bytes = 0
        return params


class GradientUpdates:
    """Updates parameters of one optimizer in backward, as soon as their gradients are complete.

    Complete gradients are gathered, so that one call of the optimizer updates several parameters:
    on a GPU, a ``foreach`` step of one parameter needs as many kernels as that of a hundred.

    The garbage collector does not traverse hooks on parameters, so they refer to the optimizer and
    the parameters weakly.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        clip: Callable[[list[nn.Parameter]], None],
        held: HeldGradients | None = None,
        *,
        group_bytes: int | None = None,
    ) -> None:
        self.is_accumulating = False
        self.held = held
        self.advice = _ADVICE
        """Cause of a second gradient in a step, and its remedy."""
        self._optimizer = weakref.ref(optimizer)
        self._clip = clip
        self._group_bytes = group_bytes
        self._hooks: Any = WeakTensorKeyDictionary()
        self._taken: set[int] = set()
        self.freed: set[int] = set()
        """Ids of parameters whose gradients an ordinary step would have left until zeroing."""
        self._gathered: dict[Any, _Gathered] = {}
        self.has_updated = False
        """Whether a parameter was updated since the last step of the optimizer."""
        # In backward, each GPU has its own thread.
        self._lock = threading.RLock()

    def start(self) -> list[Callable[[], None]]:
        optimizer = self._optimizer()
        assert optimizer is not None, "the caller holds a reference"
        ACTIVE_UPDATES[optimizer] = self
        self._watch_parameters(optimizer)
        return [self._stop, *around_step(optimizer, self._finish, self._after_step)]

    @property
    def bytes_at_a_time(self) -> int:
        """Bytes of the gradients that exist at a time, at least."""
        optimizer = self._optimizer()
        params = [] if optimizer is None else parameters_of(optimizer)
        return max((p.nbytes for p in params if p.requires_grad), default=0)

    def forget(self) -> None:
        """Reset the state of the current step; parameters that were updated stay so."""
        self._taken.clear()
        self._gathered.clear()
        self.has_updated = False
        if self.held is not None:
            self.held.clear()

    def _stop(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        optimizer = self._optimizer()
        if optimizer is not None:
            ACTIVE_UPDATES.pop(optimizer, None)
            if self.held is not None:
                held = [[p] for p in parameters_of(optimizer) if p in self.held]
                for _ in self.held.give_back(held):
                    pass
        self.forget()

    # Parameters that were added or unfrozen are found after their first step.
    def _watch_parameters(self, optimizer: Optimizer) -> None:
        trained = [p for p in parameters_of(optimizer) if p.requires_grad and p.is_leaf]
        for param in trained:
            if param not in self._hooks:
                register: Any = param.register_post_accumulate_grad_hook  # untyped in torch
                self._hooks[param] = register(self._take)
        here = {id(param) for param in self._updated_here(optimizer)}
        sizes = [gradient_bytes(param) for param in trained if id(param) in here]
        group_bytes = self._group_bytes
        if group_bytes is None:
            group_bytes = max(_GROUP_BYTES, sum(sizes) // _NUM_GROUPS)
        if not _updates_together(optimizer):
            group_bytes = 0 if self.held is None else min(group_bytes, _SMALL_BYTES)
        self._kept_group_bytes = group_bytes
        # More than the largest gradient would need more memory than one after the other.
        self._max_bytes = min(group_bytes, max(sizes, default=0))
        if self.held is not None:
            self.held.expected_bytes = sum(sizes)

    def _take(self, param: nn.Parameter) -> None:
        optimizer = self._optimizer()
        if self.freed:
            self.freed = set()
        if self.is_accumulating or optimizer is None or param.grad is None:
            return
        with self._lock, torch.no_grad():
            if not owns(optimizer, param):
                return
            self._mark_as_taken(optimizer, param)
            self._gather(optimizer, param)

    def _mark_as_taken(self, optimizer: Optimizer, param: nn.Parameter) -> None:
        if id(param) in self._taken:
            cause, fix = self.advice
            why = f"it has a second gradient after its update in this step: {cause}"
            raise IncompatibleError(
                "optimizer_in_backward", [Problem(_named(optimizer, param), why, fix)]
            )
        self._taken.add(id(param))

    def _gather(self, optimizer: Optimizer, param: nn.Parameter) -> None:
        assert param.grad is not None, "hooks run when there is a gradient"
        # Per stream: kernels of another one may not have written their gradients yet.
        key = torch.cuda.current_stream(param.device) if param.is_cuda else param.device
        group = self._gathered.setdefault(key, _Gathered())
        num_bytes = dense_bytes(param.grad)
        if num_bytes >= self._max_bytes:
            self._process(optimizer, [param])
            return
        if group.num_bytes + num_bytes > self._max_bytes and (params := group.take()):
            self._process(optimizer, params)
        if not group.params:
            # At the end of backward, on the stream that called it, which waits for all others.
            finish: Any = torch.autograd.Variable._execution_engine.queue_callback
            finish(self._process_gathered)
        group.params[param] = None
        group.num_bytes += num_bytes

    @torch.no_grad()
    def _process_gathered(self) -> None:
        optimizer = self._optimizer()
        with self._lock:
            for group in self._gathered.values():
                params = group.take()
                if optimizer is not None and params:
                    self._process(optimizer, params)

    def _process(self, optimizer: Optimizer, params: list[nn.Parameter]) -> None:
        if self.held is None:
            self._update(optimizer, params)
        else:
            self.held.take(params)

    def _update(self, optimizer: Optimizer, params: list[nn.Parameter]) -> None:
        self.has_updated = True
        self._clip(params)
        step_parameters(optimizer, params)
        for param in params:
            param.grad = None

    @torch.no_grad()
    def _finish(self, optimizer: Optimizer) -> None:
        """Update parameters with held gradients, and those whose hook did not run."""
        waiting = []
        for param in self._updated_here(optimizer):
            if param.grad is not None:
                self._mark_as_taken(optimizer, param)
                waiting.append(param)
            elif self.held is not None and param in self.held:
                waiting.append(param)
        groups = self._in_groups(waiting)
        if self.held is not None:
            self.held.find_norm(waiting)
            groups = self.held.give_back(groups)
        for group in groups:
            self._update(optimizer, group)

    def _updated_here(self, optimizer: Optimizer) -> list[nn.Parameter]:
        return parameters_of(optimizer)

    # What is on the device comes first, which makes room for what comes back to it.
    def _in_groups(self, params: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        group: list[nn.Parameter] = []
        num_bytes, held = 0, self.held
        for param in sorted(params, key=lambda p: held is not None and held.is_on_host(p)):
            more = gradient_bytes(param)
            is_kept = held is not None and not held.is_on_host(param)
            max_bytes = self._kept_group_bytes if is_kept else self._max_bytes
            if more >= max_bytes:
                yield [param]
                continue
            if group and (num_bytes + more > max_bytes or param.device != group[0].device):
                yield group
                group, num_bytes = [], 0
            group.append(param)
            num_bytes += more
        if group:
            yield group

    def _after_step(self, optimizer: Optimizer) -> None:
        apply_written(optimizer)
        self.freed, self._taken = self._taken, set()
        self.forget()
        self._watch_parameters(optimizer)


# Others run a kernel for each parameter: at most norms of small gradients are computed together,
# and waiting for the next gradients costs memory at the end of backward. Torch's Muon is one of
# them, and says that its module is `torch.optim`.
def _updates_together(optimizer: Optimizer) -> bool:
    is_of_torch = type(optimizer).__module__.startswith("torch.optim.")
    return is_of_torch and not owners_of(optimizer)


def gradient_bytes(param: nn.Parameter) -> int:
    """Return the bytes of a parameter's gradient, which may have another type."""
    return param.numel() * (param.grad_dtype or param.dtype).itemsize


def _named(optimizer: Optimizer, param: nn.Parameter) -> str:
    return f"a parameter of shape {tuple(param.shape)} of `{type(optimizer).__name__}`"


Clip = Callable[[list[nn.Parameter]], None]
Part: TypeAlias = Any
Residence: TypeAlias = Any  # of `offloading`
_NUM_SLABS = 2
_ALIGNMENT_BYTES = 64


class _Slab:
    """Host memory for gradients, used again when an update has read them."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.num_used = 0
        self.update: Future[None] | None = None

    def empty(self) -> None:
        """Wait until nothing reads it; who needs the weights raises what the update has raised."""
        if self.update is not None:
            with contextlib.suppress(Exception):
                self.update.result()
        self.update, self.num_used = None, 0

    def take(self, form: Tensor) -> Tensor:
        """Give memory for a tensor of this shape, memory order and type."""
        piece = self.memory[self.num_used :][: form.nbytes].view(form.dtype)
        self.num_used += aligned(form.nbytes, _ALIGNMENT_BYTES)
        return piece.as_strided(form.shape, form.stride())


class _Open(NamedTuple):
    """Gradients that wait for others of their part."""

    part: Part
    slab: _Slab
    gradients: dict[nn.Parameter, Tensor]


class UpdatesInBackward(GradientUpdates):
    """Updates offloaded parameters in the background of backward, and others on their device.

    The gradients of a part go to the host together, into one of two pieces of memory, while those
    in the other one are used. So the host has no memory for the gradients of the whole model,
    unless those of several backward passes are added up.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        clip: Clip,
        residence: Residence,
        *,
        clips: bool,
        group_bytes: int | None = None,
    ) -> None:
        super().__init__(optimizer, clip, group_bytes=group_bytes)
        self._residence = weakref.ref(residence)
        self._clips = clips
        self._slabs = [_Slab() for _ in range(_NUM_SLABS)]
        self._open: _Open | None = None

    def start(self) -> list[Callable[[], None]]:
        residence = self._residence()
        assert residence is not None, "the caller holds the model"
        residence.takers.append(self)
        return [lambda: residence.takers.remove(self), *super().start()]

    def forget(self) -> None:
        """Reset the state of the current step; updates that run are not stopped."""
        super().forget()
        self._open = None

    @property
    def bytes_at_a_time(self) -> int:
        of_slabs = _NUM_SLABS * self._slab_bytes()  # 0 with tables alone
        return of_slabs or super().bytes_at_a_time

    # Of a block that came to the host later, before the residence takes the gradient.
    def _take(self, param: nn.Parameter) -> None:
        residence = self._residence()
        if residence is None or residence.part_of(param) is None:
            super()._take(param)

    @torch.no_grad()
    def take(self, param: nn.Parameter, part: Part) -> bool:
        optimizer, residence, grad = self._optimizer(), self._residence(), param.grad
        if self.freed:
            self.freed = set()
        is_own = optimizer is not None and owns(optimizer, param)
        if not is_own or self.is_accumulating or part.sums_gradients_of(param):
            return False
        assert optimizer is not None, "it owns the parameter"
        assert residence is not None, "its hook runs"
        assert grad is not None, "hooks run when there is a gradient"
        if residence.updates_of(optimizer) is None:
            why = "its weights are on the host, and nothing updates them there beside backward"
            fix = "Call `Offloading.update_in_background(optimizer)` before the first step."
            problem = Problem(f"`{type(optimizer).__name__}`", why, fix)
            raise IncompatibleError("optimizer_in_backward", [problem])
        with self._lock:
            self._mark_as_taken(optimizer, param)
            if part in residence.tables:
                self._submit()
                self._open = _Open(part, _Slab(), {param: grad})
                param.grad = None
                self._submit()
                return True
            form = part.form_of(param, None if self._clips else grad.dtype)
            gradients, slab = self._room_for(part, form)
            gradients[param] = slab.take(form)
            residence.copies.begin_group(part.gradients)
            residence.copies.to_host(gradients[param], grad, adds=False)
            param.grad = None
            if len(gradients) == sum(p.requires_grad for p in part.params):
                self._submit()
        return True

    def _room_for(self, part: Part, form: Tensor) -> tuple[dict[nn.Parameter, Tensor], _Slab]:
        opened = self._open
        if opened is not None and opened.part is part:
            slab = opened.slab
            if slab.num_used + form.nbytes <= slab.memory.nbytes:
                return opened.gradients, slab
        self._submit()
        slab = self._slabs.pop(0)
        self._slabs.append(slab)
        slab.empty()
        if slab.memory.nbytes < form.nbytes:
            num_bytes = max(form.nbytes, self._slab_bytes())
            residence = self._residence()
            assert residence is not None, "its hook runs"
            slab.memory = slab.memory.new_empty(0)  # freed before there is more
            like = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
            slab.memory = residence.memory.tensors_like([like])[0]
        self._open = opened = _Open(part, slab, {})
        queue: Any = torch.autograd.Variable._execution_engine.queue_callback
        queue(self._submit)  # at the end of backward, for what is not complete by then
        return opened.gradients, slab

    @torch.no_grad()
    def _submit(self) -> None:
        with self._lock:
            opened, self._open = self._open, None
            optimizer, residence = self._optimizer(), self._residence()
            if opened is None or optimizer is None or residence is None:
                return
            if (updates := residence.updates_of(optimizer)) is not None:
                self.has_updated = True
                clip = self._clip if self._clips else None
                opened.slab.update = updates.submit(opened.part, opened.gradients, clip)

    # Room for each block, and for each gradient of what is in none.
    def _slab_bytes(self) -> int:
        optimizer, residence = self._optimizer(), self._residence()
        if optimizer is None or residence is None:
            return 0
        largest = 0
        for part in residence.parts:
            owned = [param for param in part.params if owns(optimizer, param)]
            forms = [
                (part.form_of(p), None if self._clips else part.device_dtype_of(p)) for p in owned
            ]
            sizes = [
                aligned(form.numel() * (dtype or form.dtype).itemsize, _ALIGNMENT_BYTES)
                for form, dtype in forms
            ]
            together = max if part is residence.rest else sum
            largest = max(largest, together(sizes or [0]))
        return largest

    # Those on the host are updated by the step itself, if they are not yet.
    def _updated_here(self, optimizer: Optimizer) -> list[nn.Parameter]:
        residence = self._residence()
        return [
            param
            for param in super()._updated_here(optimizer)
            if residence is None or residence.part_of(param) is None
        ]
