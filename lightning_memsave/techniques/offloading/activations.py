"""Keep in host memory what blocks save for the backward pass."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import TensorWeakRef

from lightning_memsave.core.blocks import Block
from lightning_memsave.core.memory import counted_as, is_fake
from lightning_memsave.core.patching import own, set_own
from lightning_memsave.techniques.host_memory import HostMemory
from lightning_memsave.techniques.offloading.copies import Copies, nothing_to_wait_for


class HostBuffers:
    """Host memory that is used again from step to step."""

    def __init__(self, memory: HostMemory) -> None:
        self.num_bytes = 0
        """Bytes of all that is in use or free."""
        self._memory = memory
        # With their bytes. Garbage collection may append at any time.
        self._free: list[tuple[int, Tensor]] = []

    def take(self, flat: Tensor, copies: Copies) -> Tensor:
        """Give the smallest free memory in which a tensor has room."""
        needed = flat.nbytes
        sizes = [(size, index) for index, (size, _) in enumerate(self._free)]
        fitting = [found for found in sizes if found[0] >= needed]
        if fitting:
            return self._free.pop(min(fitting)[1])[1]
        if sizes:
            copies.synchronize()
            self.num_bytes -= self._free.pop(max(sizes)[1])[0]
        self.num_bytes += needed
        return self._memory.tensors_like([flat])[0]

    def give_back(self, buffer: Tensor) -> None:
        self._free.append((buffer.nbytes, buffer))

    def clear(self) -> None:
        """Free what nobody uses; no copy may run."""
        self.num_bytes -= sum(size for size, _ in self._free)
        self._free.clear()


class Stash:
    """The memory behind saved tensors; all that share a storage share one stash."""

    def __init__(self, tensor: Tensor, buffers: HostBuffers, copies: Copies) -> None:
        self.copies = copies
        self.place = -1
        """Of the latest block that saved it, among those with saved tensors."""
        self.flat: Tensor | None = None
        """All bytes, on the device."""
        self.on_host: Tensor | None = None
        """The same bytes, or a copy that has begun."""
        self.is_fetched = False
        """Whether ``flat`` came back, and was not used yet."""
        self._tensor = TensorWeakRef(tensor)
        self._storage = weakref.ref(tensor.untyped_storage())
        # Until another copy of the bytes came back, which nobody else knows.
        self._version: int | None = tensor._version
        self._is_changed = False
        self._num_bytes = tensor.untyped_storage().nbytes()
        self._device = tensor.device
        self._buffers = buffers
        self._buffer: Tensor | None = None
        self._wait: Callable[[], None] | None = None
        self._num_saved = self._num_used = 0

    def __del__(self) -> None:
        self._finish_copy()
        if self._buffer is not None:
            self._buffers.give_back(self._buffer)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether it has the bytes of a tensor, which has not changed since."""
        storage = self._storage()
        is_same = storage is not None and storage._cdata == tensor.untyped_storage()._cdata
        return is_same and self._version == tensor._version

    def save(self, tensor: Tensor, place: int) -> "Saved":
        self.flat = _flat(tensor)
        self.place = place
        self._num_saved += 1
        offset = int(tensor.storage_offset())
        return Saved(self, tensor.dtype, tensor.shape, tensor.stride(), offset)

    def leave_for(self, buffer: Tensor) -> None:
        """Note host memory to which a copy of all bytes has begun."""
        self._buffer = buffer
        self.on_host = buffer[: self._num_bytes]

    def make_room(self) -> Tensor:
        """Return device memory to copy all bytes back to."""
        with counted_as("activation"):
            return torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)

    def come_to(self, flat: Tensor, wait: Callable[[], None]) -> None:
        """Note device memory to which a copy of all bytes has begun, and how to wait for it."""
        self.flat = flat
        self._version = None
        self._wait = wait
        self.is_fetched = True

    def find(self) -> bool:
        """Return whether somebody else holds on to the tensor on the device, and hold on to it."""
        tensor = self._tensor()
        if tensor is None or not self.holds(tensor):
            return False
        self.flat = _flat(tensor)
        self.is_fetched = True
        return True

    def use(self) -> Tensor:
        """Return all bytes on the device, to which it holds on until each save was used once."""
        self._finish_copy()
        self.look_for_changes()
        if self._is_changed:
            _refuse()
        flat = self.flat
        assert flat is not None, "the caller has fetched it"
        self.is_fetched = False
        self._num_used += 1
        if self._num_used >= self._num_saved:
            self.leave()
        return flat

    def look_for_changes(self) -> None:
        """Note whether bytes on the device were changed in place since they were saved."""
        if self.flat is not None and self._version is not None:
            self._is_changed |= self.flat._version != self._version

    def leave(self) -> None:
        """Let go of device memory that has a copy on the host."""
        if self.on_host is not None:
            self._finish_copy()
            self.flat = None
            self.is_fetched = False
            self._num_used = 0

    # A copy that nobody waits for would write to memory that is used by others already.
    def _finish_copy(self) -> None:
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved tensor: the bytes of a stash, and how to read them."""

    stash: Stash
    dtype: torch.dtype
    size: Sequence[int]
    stride: Sequence[int]
    offset: int

    def restore(self) -> Tensor:
        flat = self.stash.use().view(self.dtype)
        return flat.as_strided(self.size, self.stride, self.offset)


class Kept:
    """A saved tensor that stays where it is."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        # An output would hold itself through its own graph.
        self._tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self._version = tensor._version

    def restore(self) -> Tensor:
        if self._tensor._version != self._version:
            _refuse()
        return self._tensor


# As autograd itself does without hooks.
def _refuse() -> NoReturn:
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        "operation, after it was saved in a block whose activations are offloaded. Write "
        "`x = x + y` instead of `x += y`."
    )


def _flat(tensor: Tensor) -> Tensor:
    num_elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((num_elements,), (1,), 0).view(torch.uint8)


_OFFLOADED = "_memsave_offloaded_activations"
_NO_TASK = -1


class OffloadedActivations:
    """Moves what blocks save for backward to the host, and back before it is needed.

    Of checkpointed blocks these are their inputs, and with ``"selective"`` also the outputs that it
    keeps; of other blocks all saved tensors. When a block begins, what the block before it saved
    starts to leave the device, and is gone when the block ends; in backward it comes back one block
    ahead of its use. So the device holds what the last block saved, which backward needs at once,
    and for a time what one other block saved.

    Whole storages are copied, each once, whichever views of them are saved, so that nothing is
    cloned. Small ones stay, and tensors of integers, parameters and buffers. What others hold on to
    (a batch, a mask, an output of the model) is copied in vain, as nobody knows that at the time;
    it does not come back, as it is still there.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        copies_of: Callable[[Tensor], Copies],
        memory: HostMemory,
        *,
        min_bytes: int = 2**20,
    ) -> None:
        self._blocks = [weakref.ref(block.module) for block in blocks]
        self._copies_of = copies_of
        self._copies: dict[torch.device, Copies] = {}
        self._buffers = HostBuffers(memory)
        self._min_bytes = min_bytes
        self._hooks = (self._pack, self._unpack)
        self._running: tuple[nn.Module, saved_tensors_hooks] | None = None
        # Of the running block: its device, and storages that stay there.
        self._home: tuple[torch.device | None, set[int]] | None = None
        # Weakly: stashes end with what autograd has saved, and give their host memory back then.
        self._stashes: weakref.WeakValueDictionary[int, Stash] = weakref.WeakValueDictionary()
        # By block, in the order in which they ran, as far as a backward pass can come.
        self._saved: list[list[weakref.ref[Stash]]] = []
        self._leaving: list[tuple[Callable[[], None], list[Tensor], int]] = []
        self._fetched: list[weakref.ref[Stash]] = []
        self._task = _NO_TASK

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that are in use or wait to be used again."""
        return self._buffers.num_bytes

    def start(self) -> list[Callable[[], None]]:
        undo: list[Callable[[], None]] = [self._stop]
        for reference in self._blocks:
            module = reference()
            assert module is not None, "the caller holds the model"
            undo += [
                set_own(module, _OFFLOADED, self),
                module.register_forward_pre_hook(_before_block).remove,
                module.register_forward_hook(_after_block, always_call=True).remove,
            ]
        return undo

    def drain(self) -> None:
        """Let go of all device memory that has a copy on the host, as after an error."""
        self._leave_interrupted()
        self._let_all_go()

    def begin(self, module: nn.Module) -> None:
        """Save the tensors of a block from now on, and move those of the one before."""
        self._leave_interrupted()
        if not _saves_here():
            return
        self._let_all_go()
        while self._saved and not any(self._at(len(self._saved) - 1)):
            self._saved.pop()
        self._saved.append([])
        self._home = None
        hooks = saved_tensors_hooks(*self._hooks)
        hooks.__enter__()
        self._running = (module, hooks)
        self._start_leaving(len(self._saved) - 2)

    def end(self, module: nn.Module) -> None:
        if self._running is None or self._running[0] is not module:
            return
        self._running[1].__exit__()
        self._running = self._home = None
        self._end_leaving()

    def _let_all_go(self) -> None:
        self._end_leaving()
        self._let_go(self._fetched)
        self._fetched = []

    def _stop(self) -> None:
        self.drain()
        for copies in self._copies.values():
            copies.synchronize()
        self._buffers.clear()

    # A keyboard interrupt ends a block without a call of its hooks.
    def _leave_interrupted(self) -> None:
        if self._running is not None and _top_hooks() == self._hooks:
            self._running[1].__exit__()
            self._running = None

    def _pack(self, tensor: Tensor) -> Saved | Kept:
        if not self._can_move(tensor):
            return Kept(tensor)
        key = tensor.untyped_storage()._cdata
        place = len(self._saved) - 1
        stash = self._stashes.get(key)
        if stash is None or not stash.holds(tensor):
            copies = self._copies.get(tensor.device)
            if copies is None:
                copies = self._copies[tensor.device] = self._copies_of(tensor)
            stash = self._stashes[key] = Stash(tensor, self._buffers, copies)
        if stash.place != place:
            self._saved[place].append(weakref.ref(stash))
        return stash.save(tensor, place)

    def _can_move(self, tensor: Tensor) -> bool:
        # Most are small, or parameters: they are noticed at little cost.
        is_own = type(tensor) is Tensor or (
            is_fake(tensor) and not isinstance(tensor, nn.Parameter)
        )
        if not is_own or tensor.layout is not torch.strided:
            return False
        if tensor.untyped_storage().nbytes() < self._min_bytes or not _has_plain_bytes(tensor):
            return False
        if _is_of_parameter(tensor):
            return False
        if self._home is None:
            assert self._running is not None, "hooks are there while a block runs"
            module = self._running[0]
            resident = [*module.parameters(), *module.buffers()]
            device = next((each.device for each in resident), None)
            self._home = (
                device,
                {
                    each.untyped_storage()._cdata
                    for each in resident
                    if each.layout is torch.strided and not hasattr(each, "__tensor_flatten__")
                },
            )
        device, storages = self._home
        is_here = device is None or tensor.device == device
        return is_here and tensor.untyped_storage()._cdata not in storages

    def _unpack(self, saved: Saved | Kept) -> Tensor:
        if isinstance(saved, Kept):
            return saved.restore()
        stash = saved.stash
        with torch.no_grad():
            if torch._C._current_graph_task_id() != _NO_TASK:
                self._queue_end()
                self._forget_others(stash.place)
            self._fetch([stash])
            tensor = saved.restore()
            if torch._C._current_graph_task_id() != _NO_TASK:
                self._fetch(self._at(stash.place - 1))
        return tensor

    def _at(self, place: int) -> Iterator[Stash]:
        for reference in self._saved[place] if 0 <= place < len(self._saved) else ():
            stash = reference()
            if stash is not None and stash.place == place:
                yield stash

    def _start_leaving(self, place: int) -> None:
        by_copies: dict[Copies, list[Stash]] = {}
        for stash in self._at(place):
            if stash.on_host is None:
                by_copies.setdefault(stash.copies, []).append(stash)
        with torch.no_grad():
            for copies, stashes in by_copies.items():
                sources = [stash.flat for stash in stashes if stash.flat is not None]
                buffers = [self._buffers.take(source, copies) for source in sources]
                targets = [b[: s.nbytes] for b, s in zip(buffers, sources, strict=True)]
                self._leaving.append((copies.send_to_host(targets, sources), sources, place))
                for stash, buffer in zip(stashes, buffers, strict=True):
                    stash.leave_for(buffer)
        if not by_copies:
            self._leaving.append((nothing_to_wait_for, [], place))

    def _end_leaving(self) -> None:
        leaving, self._leaving = self._leaving, []
        for wait, _, place in leaving:
            wait()
            for stash in self._at(place):
                stash.look_for_changes()
                stash.leave()

    def _fetch(self, stashes: Iterable[Stash]) -> None:
        by_copies: dict[Copies, list[Stash]] = {}
        for stash in stashes:
            if stash.flat is not None:
                continue
            self._fetched.append(weakref.ref(stash))
            if not stash.find():
                by_copies.setdefault(stash.copies, []).append(stash)
        for copies, found in by_copies.items():
            # Out of memory, if at all, before anything is noted: backward can be repeated.
            targets = [stash.make_room() for stash in found]
            sources = [stash.on_host for stash in found if stash.on_host is not None]
            wait = copies.to_device(targets, sources)
            for stash, target in zip(found, targets, strict=True):
                stash.come_to(target, wait)

    # Backward may take another way than back through the blocks: what came in vain leaves.
    def _forget_others(self, place: int) -> None:
        near = (place - 1, place)
        fetched = [(each, each()) for each in self._fetched]
        self._let_go([r for r, s in fetched if s is not None and s.place not in near], unused=True)
        self._fetched = [r for r, s in fetched if s is not None and s.flat is not None]

    @staticmethod
    def _let_go(references: Iterable["weakref.ref[Stash]"], *, unused: bool = False) -> None:
        for reference in references:
            stash = reference()
            if stash is not None and (stash.is_fetched or not unused):
                stash.leave()

    # At the end of backward: on the thread that called it, or on CUDA that of the device.
    def _queue_end(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            queue: Any = torch.autograd.Variable._execution_engine.queue_callback
            queue(self._let_all_go)


def _top_hooks() -> object:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


# Inside of a checkpoint, or of somebody's own hooks, tensors are theirs.
def _saves_here() -> bool:
    return (
        torch.is_grad_enabled()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._current_graph_task_id() == _NO_TASK
        and _top_hooks() is None
    )


# What is restored has the same bytes, but neither a class nor attributes of its own.
def _has_plain_bytes(tensor: Tensor) -> bool:
    return (
        not (tensor.is_leaf and tensor.requires_grad)
        and (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.untyped_storage().nbytes() % tensor.element_size() == 0
    )


# A view of a parameter, or of the copy of it that autocast makes and holds on to.
def _is_of_parameter(tensor: Tensor) -> bool:
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter):
        return True
    cast = base.grad_fn
    if cast is None or cast.name() != "ToCopyBackward0":
        return False
    return isinstance(getattr(cast.next_functions[0][0], "variable", None), nn.Parameter)


# Module-level functions, which copies of a module share without moving the original's tensors.
def _before_block(module: nn.Module, _: object) -> None:
    offloaded = None if torch.compiler.is_compiling() else own(module, _OFFLOADED)
    if offloaded is not None:
        offloaded.begin(module)


def _after_block(module: nn.Module, *_: object) -> None:
    offloaded = None if torch.compiler.is_compiling() else own(module, _OFFLOADED)
    if offloaded is not None:
        offloaded.end(module)
