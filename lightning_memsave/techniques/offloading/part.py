"""Parameters that wait on the host together."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memsave.core.memory import (
    counted_as,
    host_copies,
    is_fake,
    mark_as,
    on_cuda,
)
from lightning_memsave.core.states import next_state
from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.techniques.flat_memory import in_order, num_owners, shares_memory
from lightning_memsave.techniques.host_memory import HostMemory
from lightning_memsave.techniques.offloading.copies import Copies, nothing_to_wait_for
from lightning_memsave.techniques.offloading.gradients import Gradients
from lightning_memsave.techniques.offloading.halves import join_weight, split_weight
from lightning_memsave.techniques.offloading.host_worker import wait_for
from lightning_memsave.techniques.offloading.part_states import FINDINGS, MOVES, Place, Writes
from lightning_memsave.techniques.tiled_steps import Weights

_Versions = tuple[int, list[tuple[int, int]]]


class Part:
    """Parameters of one block, or all that are in no block, on the host and on the device.

    Outside of a step's forward and backward passes a parameter is what it is without offloading,
    but in host memory: its ``data`` and its ``grad`` are ordinary tensors there. While the part is
    on the device, ``data`` is the copy there, possibly in another type. Weights that are split into
    halves are joined by `join` only; before, ``data`` on the host is a NaN that all share.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        memory: HostMemory,
        *,
        is_streamed: bool = False,
        processes: Any = None,
    ) -> None:
        self.params = tuple(params)
        self.is_streamed = is_streamed
        self.num_uses = 0
        """How often its block was called since the last backward pass."""
        self._memory, self._processes = memory, processes
        self._positions = {id(param): index for index, param in enumerate(self.params)}
        of_weights = memory if processes is None else processes.memory
        self._weights: list[Tensor] = of_weights.tensors_like(self.params)
        self._forms = [torch.empty_like(weight, device="meta") for weight in self._weights]
        self.gradients = Gradients(self.params, memory, self._forms, leave_together=is_streamed)
        self._dtypes = [param.dtype for param in self.params]
        self._are_split: set[int] = set()  # positions of those whose copy is half of the weight
        self._lower: dict[int, Tensor] = {}
        self._others_are_apart = False  # whole weights: in other pieces of memory than split ones
        self._place, self._writes = Place.HOST, Writes.UNKNOWN
        self.is_in_halves = False
        """Whether the host has split weights in halves only."""
        self._to_send: list[Tensor] = []
        self._on_device: list[Tensor] = []
        self._sole_owners = 0
        self._num_changes = 0
        self._converted: _Versions | None = None
        self._sent: _Versions | None = None
        self._wait_for_copies: Callable[[], None] | None = None
        self._synchronize: Callable[[], None] = nothing_to_wait_for
        self._entered: list[int] = []  # versions of the parameters when they came
        self._written: set[int] = set()  # positions of those that forward writes unseen
        self._updates: list[Future[None]] = []
        self._take_back: Callable[[], None] | None = None  # the update that began before its step
        self._adopt(writes=processes is None or processes.is_first)

    def __contains__(self, param: Tensor) -> bool:
        return id(param) in self._positions

    @property
    def is_on_device(self) -> bool:
        return self._place in (Place.DEVICE, Place.TAKEN_BACK)

    def _move(self, place: Place) -> None:
        self._place = next_state(self._place, place, MOVES)

    @property
    def is_updating(self) -> bool:
        # In a prediction for CUDA until somebody waits: an update takes longer than launches do.
        if self._updates and is_fake(self.params[0]) and on_cuda(self.params[0]):
            return True
        are_done = self._processes is None or self._processes.are_done(self)
        return not (are_done and all(update.done() for update in self._updates))

    @property
    def has_copies(self) -> bool:
        """Whether weights are on the device, or on their way there."""
        return bool(self._on_device)

    @property
    def is_converted(self) -> bool:
        """Whether `convert` has nothing to do."""
        return self._versions() == self._converted

    def weight_of(self, param: Tensor) -> Tensor:
        return self._weights[self._positions[id(param)]]

    def is_split(self, param: Tensor) -> bool:
        return self._positions[id(param)] in self._are_split

    def updated_memory_of(self, param: Tensor) -> Tensor:
        """Return the memory that an update changes: the weight, or its upper half."""
        index = self._positions[id(param)]
        return self._to_send[index] if index in self._are_split else self._weights[index]

    def halves_of(self, param: Tensor) -> list[Tensor]:
        """Return the memory of a weight: one tensor, or its two halves."""
        index, memory = self._positions[id(param)], self.updated_memory_of(param)
        return [memory, self._lower[index]] if index in self._are_split else [memory]

    def access_to(self, param: Tensor, *, is_flat: bool) -> Weights:
        memory, index = self.updated_memory_of(param), self._positions[id(param)]
        memory = memory.view(-1) if is_flat else memory
        if index not in self._are_split:
            return Weights(lambda part: memory[part], lambda part, new: None)
        lower = self._lower[index].view(-1) if is_flat else self._lower[index]
        return Weights(
            lambda part: join_weight(memory[part], lower[part]),
            lambda part, new: split_weight(new, memory[part], lower[part]),
        )

    def form_of(self, param: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor without values like a weight, possibly in another type."""
        form = self._forms[self._positions[id(param)]]
        return form if dtype is None else torch.empty_like(form, dtype=dtype)

    def device_dtype_of(self, param: Tensor) -> torch.dtype:
        return self._dtypes[self._positions[id(param)]]

    # Data on another device gets another AccumulateGrad node, and each node calls the hooks.
    def sums_gradients_of(self, param: Tensor) -> bool:
        """Return whether a gradient is added to others: from before, or of other uses."""
        return (self.is_streamed and self.num_uses > 1) or self.gradients.adds_to(param)

    def set_device_dtype(
        self, param: nn.Parameter, dtype: torch.dtype, *, is_split: bool = False
    ) -> None:
        self.join()
        index = self._positions[id(param)]
        self._dtypes[index] = dtype
        self._are_split.discard(index)
        if is_split:
            self._are_split.add(index)
        self._lower, self._others_are_apart = {}, False
        self._to_send, self._on_device, self._converted, self._sent = [], [], None, None
        if self._place is not Place.HOST:
            self._move(Place.HOST)

    def note_change(self) -> None:
        """Note that weights have changed on the host, as kernels do it that torch does not see."""
        self._num_changes += 1

    def begin_update(
        self, update: "Future[None]", take_back: Callable[[], None] | None = None
    ) -> None:
        """Let everybody who needs the weights wait for an update in the background.

        One that began before its step is taken back then, unless it was confirmed.
        """
        self._updates.append(update)
        self._take_back = take_back

    @property
    def is_early(self) -> bool:
        """Whether an update began before its step, and was neither confirmed nor taken back."""
        return self._take_back is not None

    def cancel_updates(self) -> None:
        """Forget updates that have not begun."""
        self._updates = [update for update in self._updates if not update.cancel()]

    def confirm(self) -> Callable[[], None] | None:
        """Let an early update stand, or give the caller what takes it back."""
        take_back, self._take_back = self._take_back, None
        return take_back

    def wait(self) -> None:
        """Wait for the updates in the background, and raise what the first one has raised."""
        if self.is_early:
            self.cancel_updates()
        try:
            wait_for(self._updates)
        finally:
            if self._take_back is not None and not self._updates:  # none runs
                self._take_back()
                self.confirm()
                self.note_change()
        if self._processes is not None:
            self._processes.wait(self)

    @contextlib.contextmanager
    def on_host(self, params: Iterable[nn.Parameter], *, needs_type: bool) -> Iterator[None]:
        """Let parameters be on the host, with gradients that nobody may read, to allocate state."""
        before = [(param, param.data, param.grad) for param in params]
        for param, _, _ in before:
            param.grad = None
            known = self.weight_of(param) if needs_type else self.updated_memory_of(param)
            param.data = param.grad = known
        try:
            yield
        finally:
            for param, data, grad in before:
                param.grad = None
                param.data = data
                param.grad = grad

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def stay(self) -> None:
        """Let the parameters be up to date where they are looked up on the host."""
        self.wait()
        self._adopt()

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def send(self, copies: Copies, device: torch.device) -> None:
        self.wait()
        self._adopt()
        if self._on_device and self._versions() == self._sent:
            return
        self.convert()
        if not self._on_device:
            with counted_as("parameter"):
                self._on_device = self._allocate(copies, device)
            for copy in self._on_device:
                mark_as("parameter", copy)
            self._sole_owners = num_owners(self._on_device)
        self._move(Place.SENT)
        self._wait_for_copies = copies.to_device(self._on_device, self._to_send)
        self._synchronize = copies.synchronize
        self._sent = self._versions()

    # In the order of host memory, so that all that is in one piece there is copied at once.
    def _allocate(self, copies: Copies, device: torch.device) -> list[Tensor]:
        order = in_order(self._to_send)
        forms, dtypes = [self._to_send[i] for i in order], [self._dtypes[i] for i in order]
        found = dict(zip(order, copies.allocate(forms, dtypes, device), strict=True))
        return [found[index] for index in range(len(order))]

    def enter(self, copies: Copies, device: torch.device) -> None:
        if self.is_on_device:
            return
        self.send(copies, device)
        if self._wait_for_copies is not None:
            self._wait_for_copies()
            self._wait_for_copies = None
        for param, copy in zip(self.params, self._on_device, strict=True):
            param.data = copy
        self._move(Place.DEVICE)
        self._entered = [param._version for param in self.params]

    def watch_gradients(self) -> None:
        """Put gradients from before aside when autograd is about to add others to them."""
        if self._writes is not Writes.KNOWN:  # it copies all weights to the host
            self._writes = next_state(self._writes, Writes.COMPARED, FINDINGS)
        self.gradients.watch()

    def leave(self) -> None:
        if not self.is_on_device:
            return
        self.take_back()
        if self._writes is Writes.COMPARED:
            self._writes = next_state(self._writes, Writes.UNKNOWN, FINDINGS)
        self.gradients.stop_watching()
        for param, weight in zip(self.params, self._weights, strict=True):
            param.data = weight
        self._move(Place.SENT)
        self.drop()

    def know_writes(self) -> None:
        """Note that a training pass has shown which parameters forward writes unseen."""
        self._writes = next_state(self._writes, Writes.KNOWN, FINDINGS)

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def take_back(self) -> None:
        """Take to the host what forward has written into weights on the device, before updates."""
        if self._place is not Place.DEVICE:
            return
        self._move(Place.TAKEN_BACK)
        found = [(i, self.params[i].data, self._to_send[i]) for i in self._find_written()]
        if not found:
            return
        if self._processes is not None:
            what, why = "forward changes its own weights", "all processes share them"
            fix = 'Set `offload="activations"` or `None`.'
            raise IncompatibleError("offloading", [Problem(what, why, fix)])
        self.join()
        with host_copies():
            for index, data, sent in found:
                if data.dtype is not sent.dtype:
                    # Another type makes a new node for its gradient, of which nothing here knows.
                    why = (
                        f"forward replaces it by {data.dtype}, and on the device it is {sent.dtype}"
                    )
                    fix = "Set `low_precision_weights=None`, or keep its type in forward."
                    problem = Problem(f"a parameter of shape {tuple(data.shape)}", why, fix)
                    raise IncompatibleError("offloading", [problem])
                new, weight = data.cpu(), self._weights[index]
                # Where it was not written, a weight keeps what its copy lacks.
                weight.copy_(torch.where(new == sent, weight, new.to(weight.dtype)))
        self.note_change()

    def _find_written(self) -> list[int]:
        for index, (param, sent) in enumerate(zip(self.params, self._to_send, strict=True)):
            if self._writes is Writes.COMPARED and not is_fake(param):
                with host_copies():
                    if not torch.equal(param.data.cpu(), sent):  # torch does not count `.data`
                        self._written.add(index)
        both = enumerate(zip(self.params, self._entered, self._on_device, strict=True))
        return [
            index
            for index, (param, version, copy) in both
            if index in self._written or param._version != version or not shares_memory(param, copy)
        ]

    def drop(self) -> None:
        """Free what `send` has brought to the device, if it is streamed and not in use.

        A block that is not recomputed keeps views of its weights for backward: to free and to bring
        back the rest would need more memory, not less.
        """
        if not self.is_streamed or self._place is not Place.SENT:
            return
        if num_owners(self._on_device) > self._sole_owners:
            return
        if self._wait_for_copies is not None:  # memory must not be reused before they are done
            self._wait_for_copies()
            self._wait_for_copies = None
        self._on_device = []
        self._move(Place.HOST)

    def convert(self, changed: Iterable[Tensor] | None = None) -> None:
        versions = self._versions()
        if versions == self._converted:
            return
        own = range(len(self.params))
        chosen = own if changed is None else [self._positions[id(param)] for param in changed]
        if all(w.dtype is d for w, d in zip(self._weights, self._dtypes, strict=True)):
            self._to_send = self._weights
        elif self._are_split:
            self._convert_to_halves()
        else:
            with host_copies():  # also for the proof of the loss, which widens what is made in it
                if not self._to_send:
                    self._to_send = self._memory.tensors_like(self._weights, self._dtypes)
                    chosen = own
                for index in chosen:
                    self._to_send[index].copy_(self._weights[index])
        self._converted = self._versions()

    def keep_halves(self) -> None:
        if self._are_split and not self.is_in_halves:
            self.convert()

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def join(self) -> None:
        """Let all weights on the host be whole, where they may be changed.

        Their halves are freed: the whole weights of a model take no more than those did.
        """
        if not self.is_in_halves:
            return
        own = sorted(self._are_split)
        # Not of the memory that is locked for a GPU: it does not copy these weights.
        whole = HostMemory().tensors_like([self._forms[index] for index in own])
        with host_copies():
            for index, weight in zip(own, whole, strict=True):
                join_weight(self._to_send[index], self._lower[index], weight)
        self._replace_weights(dict(zip(own, whole, strict=True)))
        self.is_in_halves = False
        self._converted = None
        if not self.is_on_device:  # otherwise what forward writes is compared with them
            self._synchronize()  # the device may still read them
            self._to_send, self._lower = [], {}
        self.note_change()

    def _convert_to_halves(self) -> None:
        own = sorted(self._are_split)
        others = [index for index in range(len(self.params)) if index not in self._are_split]
        with host_copies():
            if not self._others_are_apart:
                # Memory comes in pieces, and what stays must not be in one with what goes.
                stay = self._memory.tensors_like([self._weights[index] for index in others])
                for index, weight in zip(others, stay, strict=True):
                    weight.copy_(self._weights[index])
                self._replace_weights(dict(zip(others, stay, strict=True)))
                self._others_are_apart = True
            if not self._lower:
                self._to_send = [*self._weights]  # of the others, the device gets the weights
                forms = [self._forms[index] for index in own]
                for dtype, into in ((torch.bfloat16, self._to_send), (torch.int16, self._lower)):
                    halves = self._memory.tensors_like(forms, [dtype] * len(own))
                    for index, half in zip(own, halves, strict=True):
                        into[index] = half
            if not self.is_in_halves:
                for index in own:
                    split_weight(self._weights[index], self._to_send[index], self._lower[index])
                empty = torch.empty((), dtype=torch.float32, device="meta")
                nan = self._memory.tensors_like([empty] * len(own))
                self._replace_weights(
                    {
                        index: each.fill_(math.nan).expand(self._forms[index].shape)
                        for index, each in zip(own, nan, strict=True)
                    }
                )
                self.is_in_halves = True

    def _replace_weights(self, weights: Mapping[int, Tensor]) -> None:
        for index, weight in weights.items():
            if shares_memory(self.params[index], self._weights[index]):
                self.params[index].data = weight
            self._weights[index] = weight

    def release(self, device: torch.device) -> None:
        """Give the parameters memory of their own, as they had before, and free that of the host.

        A device without memory for them raises before anything has changed.
        """
        self.leave()
        self.gradients.show()
        self._adopt()
        own = [torch.empty_like(form, device=device) for form in self._forms]
        for index, weight in enumerate(own):
            weight.copy_(self._whole(index))
        grads = [p.grad if p.grad is None else p.grad.to(device, copy=True) for p in self.params]
        self._synchronize()  # the device may still read this memory
        for param, weight, grad in zip(self.params, own, grads, strict=True):
            param.grad = None
            param.data = weight
            param.grad = grad
        self._weights, self._to_send, self._on_device, self._lower = own, [], [], {}
        self.is_in_halves = False
        self.gradients.free()

    def settle(self) -> None:
        """Let weights on the host be whole and up to date for code that may change them."""
        self.wait()
        self.join()
        self.note_change()

    def read(self, param: Tensor) -> Tensor:
        """Return a weight on the host, up to date: a joined copy of its two halves, or itself."""
        self.wait()
        return self._whole(self._positions[id(param)])

    def _whole(self, index: int) -> Tensor:
        if self.is_in_halves and index in self._are_split:
            # Pages of their own, which the system gets back at once.
            (whole,) = HostMemory().tensors_like([self._forms[index]])
            with host_copies():
                return join_weight(self._to_send[index], self._lower[index], whole)
        return self._weights[index]

    # Somebody may have given a parameter other data, as `Module.to` does.
    def _adopt(self, *, writes: bool = True) -> None:
        if not all(map(shares_memory, self.params, self._weights)):
            self.join()
        for param, weight in zip(self.params, self._weights, strict=True):
            if not shares_memory(param, weight):
                if writes:
                    weight.copy_(param.data)
                param.data = weight

    def _versions(self) -> _Versions:
        pairs = zip(self.params, self._weights, strict=True)
        return self._num_changes, [(p._version, w._version) for p, w in pairs]
