"""Begin updates in backward as if no gradient were clipped, and take back those that were wrong."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_memsave.core.memory import host_copies, is_fake
from lightning_memsave.core.optimizers import parameters_of
from lightning_memsave.techniques.flat_memory import aligned, tensor_in
from lightning_memsave.techniques.offloading.device_tiles import is_updated_in_tiles
from lightning_memsave.techniques.offloading.part import Part
from lightning_memsave.techniques.offloading.residence import Residence
from lightning_memsave.techniques.offloading.whole_on_device import is_updated_whole
from lightning_memsave.techniques.optimizer_step import updates_each_alone

_ALIGNMENT_BYTES = 64
_WAIT_S = 1e-3  # from when on the host has waited for gradients


class EarlyUpdate:
    """An update that begins before its step, and all that it changes, as it was before."""

    def __init__(
        self,
        optimizer: Optimizer,
        gradients: Mapping[nn.Parameter, Tensor],
        changed: Sequence[Tensor],
        room: Tensor,
    ) -> None:
        self._gradients, self._settings = gradients, _settings_of(optimizer)
        self._groups = [dict(group) for group in optimizer.param_groups]  # to keep what they have
        self._states = [optimizer.state[param] for param in gradients]
        self._changed, self.room = changed, room
        self._before: list[dict[str, Any]] = []
        self._versions: list[int] = []  # of gradients, once it has begun

    # Before the update reads a gradient: whatever changes it later changes its version.
    def save(self) -> None:
        self._versions = [gradient._version for gradient in self._gradients.values()]
        self._before = [dict(state) for state in self._states]
        for there, tensor in zip(self._places(), self._changed, strict=True):
            there.copy_(tensor)

    def take_back(self) -> None:
        if not self._versions:
            return
        with torch.inference_mode(mode=False), torch.no_grad(), host_copies():
            for there, tensor in zip(self._places(), self._changed, strict=True):
                tensor.copy_(there)
        for state, before in zip(self._states, self._before, strict=True):
            state.clear()
            state.update(before)

    def is_of(self, optimizer: Optimizer, gradients: Mapping[nn.Parameter, Tensor]) -> bool:
        """Return whether a step with these gradients would be the same update."""
        own = self._gradients
        return (
            own.keys() == gradients.keys()
            and all(own[param] is gradient for param, gradient in gradients.items())
            and self._versions == [gradient._version for gradient in own.values()]
            and self._settings == _settings_of(optimizer)
            and not any(vars(optimizer).get(k) is not None for k in ("grad_scale", "found_inf"))
        )

    def _places(self) -> list[Tensor]:
        places, start = [], 0
        for tensor in self._changed:
            places.append(tensor_in(self.room, start, _form(tensor), tensor.dtype))
            start += aligned(tensor.nbytes, _ALIGNMENT_BYTES)
        return places


class EarlyUpdates:
    """Which parts begin their update in backward, with room for what it changes of so many."""

    def __init__(self, residence: Residence, number: int) -> None:
        self.number, self.is_paused = number, False
        self.is_alone = False
        """Whether nothing but `clip` may change gradients between backward and step."""
        self._residence = residence
        self._rooms: list[Tensor] | None = None  # those that are free
        self._begun: dict[Part, EarlyUpdate] = {}
        self._last: Future[None] | None = None
        self._norms: dict[nn.Parameter, tuple[Tensor, int, Tensor]] = {}
        self._finding: list[Future[None]] = []
        self._is_used = self._has_clipped = False  # ever, and in this step
        self._is_behind = True  # the host, which finds gradients there when it comes to them

    def may_begin(self, optimizer: Optimizer, part: Part) -> bool:
        """Return whether the host has time and room: what waits is better updated after backward.

        There it is in the order in which the next step needs it.
        """
        if (without_step := self._begun.pop(part, None)) is not None:
            self._free([without_step])
        is_waiting = self._last is not None and not (self._last.running() or self._last.done())
        return (
            len(self._begun) < self.number
            and not (is_waiting and self._is_behind)
            and not self.is_paused
            and not why_none(optimizer)
        )

    def begin(
        self, optimizer: Optimizer, part: Part, gradients: Mapping[nn.Parameter, Tensor]
    ) -> EarlyUpdate:
        """Prepare the update of a part; its state is there."""
        changed = [tensor for param in gradients for tensor in part.halves_of(param)]
        for param in gradients:
            changed += [v for v in optimizer.state[param].values() if isinstance(v, Tensor)]
        num_bytes = sum(aligned(tensor.nbytes, _ALIGNMENT_BYTES) for tensor in changed)
        room = self._room(num_bytes)
        early = self._begun[part] = EarlyUpdate(optimizer, gradients, changed, room)
        return early

    # Who launches the backward pass is ahead of the device: that updates wait says nothing.
    def land(self, landing: Callable[[], None]) -> None:
        """Wait in the host's thread, and note whether what it waits for was there already."""
        start_s = time.monotonic()
        landing()
        self._is_behind = time.monotonic() - start_s < _WAIT_S

    def note(self, update: "Future[None]") -> None:
        """Note the last one, after which the host has nothing to do."""
        self._last = update

    # All at once, so that what the host needs does not depend on how fast it is.
    def _room(self, num_bytes: int) -> Tensor:
        form = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
        make = self._residence.memory.tensors_like
        if self._rooms is None:
            self._rooms = [make([form])[0] for _ in range(self.number)]
        room = self._rooms.pop()
        if room.nbytes < num_bytes:
            del room  # freed before there is more
            room = make([form])[0]
        return room

    # The host's thread reads a room for the last time before it writes it for the next update.
    def _free(self, updates: Iterable[EarlyUpdate]) -> None:
        assert self._rooms is not None, "they were made for the first update"
        self._rooms += [early.room for early in updates]

    def settle(
        self, optimizer: Optimizer, gradients: Mapping[Part, Mapping[nn.Parameter, Tensor]]
    ) -> dict[Part, bool]:
        """Let updates stand that are those of this step; say so by part whose update has begun.

        Others are taken back before the next one.
        """
        begun, self._begun = self._begun, {}
        if begun:
            self._free(begun.values())
        self._norms, self._finding = {}, []
        # Under a mode torch changes several tensors at once without a new version of each.
        is_known = self.is_alone or not _get_current_dispatch_mode_stack()
        may_stand, self._has_clipped = is_known and not self._has_clipped, False
        found = {}
        for part, early in begun.items():
            part.cancel_updates()
            if part in gradients and part.is_early:
                found[part] = may_stand and early.is_of(optimizer, gradients[part])
                if found[part]:
                    part.confirm()
        return found

    @property
    def finds_norms(self) -> bool:
        """Whether norms are found in backward: from the second clipping on."""
        return self._is_used and not self.is_paused

    def find_norms(
        self, gradients: Mapping[nn.Parameter, Tensor], landing: Callable[[], None]
    ) -> None:
        """Let the host find norms of gradients beside backward."""
        if not self.finds_norms:
            return

        def find() -> None:
            self.land(landing)
            for param, grad in gradients.items():
                self._norms[param] = grad, grad._version, torch.linalg.vector_norm(grad)

        self._finding.append(self._residence.worker.submit(find))

    def clip(self, params: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Clip as torch does, but leave gradients alone whose norm is not above the bound."""
        self._is_used = True
        finding, self._finding = self._finding, []
        for each in finding:
            if not each.cancel():
                each.result()
        params = [param for param in params if param.grad is not None]
        total = self._total_norm([(p, p.grad) for p in params if p.grad is not None])
        one = nn.Parameter(torch.ones_like(total))
        one.grad = torch.ones_like(total)
        torch.nn.utils.clip_grads_with_norm_([one], max_norm, total)
        # A prediction does not know the norm, and most steps are not clipped.
        if params and not is_fake(total) and float(one.grad) != 1.0:
            self._has_clipped = True
            torch.nn.utils.clip_grads_with_norm_(params, max_norm, total)
        return total

    # As torch finds it, to the bit: of one kind of tensors on the host, from the norm of each.
    def _total_norm(self, pairs: Sequence[tuple[nn.Parameter, Tensor]]) -> Tensor:
        grads = [grad for _, grad in pairs]
        are_on_host = all(g.device.type == "cpu" and g.layout == torch.strided for g in grads)
        if not (self._norms and are_on_host and len({grad.dtype for grad in grads}) == 1):
            total: Tensor = torch.nn.utils.get_total_norm(grads)
            return total
        norms = []
        for param, grad in pairs:
            found, version, norm = self._norms.get(param, (None, 0, grad))
            is_known = found is grad and version == grad._version
            norms.append(norm if is_known else torch.linalg.vector_norm(grad))
        of_all: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return of_all


def why_none(optimizer: Optimizer) -> str:
    """Say why an optimizer has no update that begins early; empty if it may have."""
    if not updates_each_alone(optimizer):
        return "the optimizer is not known to update each parameter alone"
    in_tiles = any(is_updated_in_tiles(optimizer, param) for param in parameters_of(optimizer))
    is_on_device = in_tiles or is_updated_whole(optimizer)
    return "the device updates its state" if is_on_device else ""


# Tensors, such as a learning rate, by identity and version: predictions know no values.
def _settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {
            k: (id(v), v._version) if isinstance(v, Tensor) else v
            for k, v in group.items()
            if k != "params"
        }
        for group in optimizer.param_groups
    ]


def _form(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")  # without gaps
