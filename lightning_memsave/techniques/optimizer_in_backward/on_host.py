"""Update offloaded parameters while backward computes the gradients of others."""

import contextlib
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.techniques.optimizer_in_backward.updates import GradientUpdates
from lightning_memsave.techniques.optimizer_step import owns

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
        self.num_used += _aligned(form.nbytes)
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

    @torch.no_grad()
    def take(self, param: nn.Parameter, part: Part) -> bool:
        optimizer, residence, grad = self._optimizer(), self._residence(), param.grad
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
                _aligned(form.numel() * (dtype or form.dtype).itemsize) for form, dtype in forms
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


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
