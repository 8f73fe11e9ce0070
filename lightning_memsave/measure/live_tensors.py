"""Count the bytes of live tensors, exactly and by category, on any device."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_memsave.core.memory import HOST, MemoryBreakdown, category_in_context, mark_of
from lightning_memsave.measure.storages import (
    LiveStorage,
    device_of,
    on_storage_resize,
    operands,
    storages_of,
    tensors_in,
    tensors_in_batch,
    with_index,
)

_NO_GRAPH_TASK = -1
# Looking an operator up takes longer than all checks of it.
_DEVICE, _LIFT_FRESH = torch.ops.prim.device.default, torch.ops.aten.lift_fresh.default
_ADD, _TO_COPY = torch.ops.aten.add.Tensor, torch.ops.aten._to_copy.default
_OUT_OF_PLACE = frozenset({_ADD, torch.ops.aten.index_put.default})
NO_NODE = -1
# Use count of a storage that one tensor owns: the tensor, and the storage object of this check.
_SOLE_OWNER = 2


def in_backward() -> bool:
    """Return whether autograd's engine runs: backward, including recomputation."""
    return torch._C._current_graph_task_id() != _NO_GRAPH_TASK


def current_node() -> int:
    """Return the sequence number of the current autograd node; `NO_NODE` outside of backward."""
    if not in_backward():
        return NO_NODE
    node: Any = torch._C._current_autograd_node()
    number: int = NO_NODE if node is None else node._sequence_nr()
    return number


UNCLAIMED = frozenset({"activation", "temporary", "other", "weight_copy"})
"""Provisional categories of new storages, by phase, until a module or optimizer claims them.
Claimed ones keep theirs, for example a parameter that is also in an optimizer's ``state``."""


class LiveTensors(TorchDispatchMode):
    """Bytes of the live tensor storages of one device, now and at their peak.

    Each storage counts once, however many tensors share it, from its allocation until it is freed.
    The result is the same on every machine, and what a GPU would hold except for rounding,
    fragmentation and workspaces of kernels. Slows down each operation (a call of Python), but needs
    no memory: storages are referenced weakly.

    Note:
        Categories: storages allocated in an optimizer step or in backward, with gradients disabled,
        are *temporary*; in backward with gradients enabled they are recomputed, and an
        *activation*, as all others. If a storage becomes a ``Parameter.grad`` or part of
        ``Optimizer.state``, it counts as *gradient* or *optimizer state*, also in the peak if it
        was alive then. Unknown storages that are older than the context are *other* from their
        first use on.

        Not counted: scratch memory inside kernels, such as reordered copies of oneDNN's
        convolutions and temporaries of bitsandbytes' 8-bit optimizers; states of random generators
        (5 kB per checkpointed block on a CPU); and graphs of ``torch.compile``.

    Example:
        >>> model = nn.Linear(100, 10, bias=False)
        >>> with LiveTensors(model) as live:
        ...     model(torch.ones(5, 100)).sum().backward()
        >>> live.peak.parameter_bytes, live.breakdown.gradient_bytes
        (4000, 4000)
    """

    # Let operators such as flex_attention through instead of failing on them.
    supports_higher_order_operators = True

    # Let torch.compile work under the mode; else a function with `fullgraph=True` would fail.
    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(
        self,
        module: nn.Module | None = None,
        optimizers: Iterable[Optimizer] = (),
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device_of(module) if device is None else with_index(torch.device(device))
        self._module = None if module is None else weakref.ref(module)
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._entries: dict[int, LiveStorage] = {}
        self._bytes = MemoryBreakdown().by_category()
        self._peak = dict(self._bytes)
        self._live_bytes = 0
        self._peak_bytes = 0
        self._num_born = 0  # storages so far: a clock
        self._peak_time = 0
        self._num_running_steps = 0
        self._host_bytes = self._peak_host_bytes = 0
        self._op: Callable[..., Any] | None = None
        self._undo: list[Callable[[], None]] = []

    @property
    def live_bytes(self) -> int:
        return self._live_bytes

    @property
    def breakdown(self) -> MemoryBreakdown:
        return MemoryBreakdown.from_categories(self._bytes)

    @property
    def peak(self) -> MemoryBreakdown:
        peak = MemoryBreakdown.from_categories(self._peak)
        return replace(peak, host_bytes=self._peak_host_bytes)

    def reset_peak(self) -> None:
        self._peak_bytes = self._live_bytes
        self._peak_time = self._num_born
        self._peak = dict(self._bytes)

    def track_input(self, batch: object) -> None:
        for tensor in tensors_in_batch(batch):
            self._claim(tensor, "input")

    def __enter__(self) -> Self:
        if self._undo:
            raise RuntimeError("LiveTensors is active already. Create a second one.")
        module = nn.Module() if self._module is None else self._module()
        if module is None:
            raise RuntimeError("The module of this LiveTensors was freed. Create a new one.")
        self._bytes = MemoryBreakdown().by_category()
        self._live_bytes = self._num_running_steps = 0
        self._undo.append(on_storage_resize(self._see_storage))
        try:
            self._register(module)
            super().__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            self._stop()
            raise
        self.reset_peak()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
        finally:
            self._stop()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _DEVICE:  # called for fake tensors at each node
            return getattr(args[0], "fake_device", None) or func(*args)
        kwargs = kwargs or {}
        if func is not _LIFT_FRESH:  # its input is new: torch.tensor(...)
            for tensor in operands(args):
                self._see(tensor, "other")
            for tensor in operands(kwargs.values()):
                self._see(tensor, "other")
        self._op = func
        summed = self._written_in_place(func, args) if func in _OUT_OF_PLACE else None
        result = func(*args, **kwargs)
        if summed is not None:
            self._hand_over(summed, args[0].untyped_storage(), result.untyped_storage())
        category = self._category_of_new(func, args)
        for tensor in operands((self._as_allocated(func, result),)):
            self._see(tensor, category)
        self._note_call(func, args, kwargs, result)
        return result

    def _category_of_new(self, func: Callable[..., Any], args: Sequence[Any]) -> str:
        if category := category_in_context():
            return category
        if func is _TO_COPY:
            sources = [self._entries.get(storage._cdata) for storage in storages_of(args[0])]
            if any(source is not None and source.category == "parameter" for source in sources):
                return "weight_copy"
        is_temporary = in_backward() or self._num_running_steps > 0
        return "temporary" if is_temporary and not torch.is_grad_enabled() else "activation"

    def _written_in_place(self, func: Any, args: tuple[Any, ...]) -> LiveStorage | None:
        """Find the storage that autograd would write to if there were no mode or subclass."""
        if not in_backward() or torch.is_grad_enabled():
            return None
        total, other = args[:2]
        key = total.untyped_storage()._cdata
        if torch._C._storage_Use_Count(key) > _SOLE_OWNER:
            return None
        entry = self._entries.get(key)
        if func is not _ADD or entry is None:  # the gradient of an index, added to zeros
            return entry
        # The sum of two gradients (``accumulate`` in torch's ``input_buffer.cpp``). Additions
        # inside the formula of a node allocate new memory.
        is_alike = (
            isinstance(other, Tensor)
            and (total.shape, total.dtype) == (other.shape, other.dtype)
            and total.is_contiguous()
        )
        is_of_other_node = entry.node != current_node()
        is_summed = is_alike and entry.category in ("temporary", HOST) and is_of_other_node
        return entry if is_summed else None

    def _as_allocated(self, func: Any, result: Any) -> Any:
        """Give the results of an operator in the order of their allocation; for subclasses."""
        return result

    def _hand_over(
        self, entry: LiveStorage, old: torch.UntypedStorage, new: torch.UntypedStorage
    ) -> None:
        del self._entries[old._cdata]
        self._entries[new._cdata] = entry
        entry.ref = self._watch(new, new._cdata)
        entry.node = current_node()

    def _note_call(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note a call of an operator; for subclasses."""

    def _register(self, module: nn.Module) -> None:
        for part in _innermost_first(module):
            for parameter in part.parameters(recurse=False):
                self._claim(parameter, "parameter")
            for buffer in part.buffers(recurse=False):
                self._claim(buffer, "buffer")
        for parameter in module.parameters():
            self._claim_gradient(parameter)
            if parameter.requires_grad and not is_lazy(parameter):
                register: Any = parameter.register_post_accumulate_grad_hook  # untyped in torch
                self._undo.append(register(self._claim_gradient).remove)
        for ref in self._optimizers:
            optimizer = ref()
            if isinstance(optimizer, Optimizer):  # DeepSpeed's has neither state nor hooks of torch
                self._claim_state(optimizer)
                self._undo.append(optimizer.register_step_pre_hook(self._before_step).remove)
                self._undo.append(optimizer.register_step_post_hook(self._after_step).remove)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._num_running_steps += 1
        for group in optimizer.param_groups:  # gradients that someone assigned
            for parameter in group["params"]:
                self._claim_gradient(parameter)
        return None

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._num_running_steps -= 1
        self._claim_state(optimizer)

    def _claim_state(self, optimizer: Optimizer) -> None:
        for tensor in tensors_in(optimizer.state):
            self._claim(tensor, "optimizer_state")

    def _claim_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._claim(parameter.grad, "gradient")

    def _claim(self, tensor: Tensor, category: str) -> None:
        self._see(tensor, category)
        for storage in storages_of(tensor):
            entry = self._entries.get(storage._cdata)
            if entry is not None and entry.category in UNCLAIMED:
                self._move(self._bytes, entry, category)
                # Alive now and older than the peak, so it was part of it.
                if entry.born <= self._peak_time:
                    self._move(self._peak, entry, category)
                entry.category = category

    @staticmethod
    def _move(by_category: dict[str, int], entry: LiveStorage, category: str) -> None:
        by_category[entry.category] -= entry.num_bytes
        by_category[category] += entry.num_bytes

    def _see(self, tensor: Tensor, category: str) -> None:
        # The cheap check first: `device` of a fake tensor dispatches to all modes.
        if getattr(tensor, "fake_device", None) == self.device or tensor.device == self.device:
            for storage in storages_of(tensor):
                key = storage._cdata
                entry = self._entries.get(key)
                if entry is None:
                    category = mark_of(storage) or category
                    self._num_born += 1
                    entry = self._entries[key] = LiveStorage(category, self._num_born)
                    entry.ref = self._watch(storage, key)
                    entry.node = current_node()
                    entry.origin = self._origin_of(tensor)
                self._measure(storage, entry)

    def _see_storage(self, storage: torch.UntypedStorage) -> None:
        entry = self._entries.get(storage._cdata)
        if entry is not None:
            self._measure(storage, entry)

    def _measure(self, storage: torch.UntypedStorage, entry: LiveStorage) -> None:
        change = storage.nbytes() - entry.num_bytes
        if change:
            entry.num_bytes += change
            self._change(entry, change)
            # The later one of equal peaks: the first step differs from the others.
            if self._live_bytes >= self._peak_bytes:
                self.reset_peak()

    def _watch(
        self, storage: torch.UntypedStorage, key: int
    ) -> "weakref.ref[torch.UntypedStorage]":
        return weakref.ref(storage, lambda _: self._forget(key))

    def _forget(self, key: int) -> None:
        entry = self._entries.pop(key)
        self._change(entry, -entry.num_bytes)

    def _change(self, entry: LiveStorage, change: int) -> None:
        if entry.category == HOST:
            self._host_bytes += change
            self._peak_host_bytes = max(self._peak_host_bytes, self._host_bytes)
            return
        self._bytes[entry.category] += change
        self._live_bytes += change

    def _origin_of(self, tensor: Tensor) -> object:
        """Return information on the allocation of a new storage, by `_op`; for subclasses."""

    def _stop(self) -> None:
        for entry in self._entries.values():
            entry.ref = None  # removes the callback
        self._entries.clear()
        self._op = None
        while self._undo:
            self._undo.pop()()


def _innermost_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _innermost_first(child)
    yield module
