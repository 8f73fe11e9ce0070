"""Count the bytes of live tensors, exactly and by category, on any device."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_memsave.core.memory import MemoryBreakdown, is_host_copy
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
NO_NODE = -1
# The tensor itself, and the storage object that was made to ask.
_SOLE_OWNER = 2


def in_backward() -> bool:
    """Say whether autograd's engine runs.

    Returns:
        True in backward, recomputation included.
    """
    return torch._C._current_graph_task_id() != _NO_GRAPH_TASK


def current_node() -> int:
    """Tell apart the nodes of the graph that run one after the other in backward.

    Returns:
        The number of the node that runs or ran last; `NO_NODE` outside of backward.
    """
    if not in_backward():
        return NO_NODE
    node: Any = torch._C._current_autograd_node()
    number: int = NO_NODE if node is None else node._sequence_nr()
    return number


def summed_in_place(
    entries: Mapping[int, LiveStorage], total: Tensor, gradient: object
) -> LiveStorage | None:
    """Find the storage in which autograd adds up two gradients.

    It adds in the memory of the first where it holds the last reference to it (``accumulate`` in
    torch's ``input_buffer.cpp``), but never while a dispatch mode looks on.

    Args:
        entries: Known storages.
        total: What there is of the gradient already.
        gradient: What is added to it.

    Returns:
        The storage that would hold the sum without the mode; ``None`` if that would be a new one.
    """
    if not isinstance(gradient, Tensor) or torch.is_grad_enabled():
        return None
    is_alike = total.shape == gradient.shape and total.dtype == gradient.dtype
    key = total.untyped_storage()._cdata
    if not is_alike or not total.is_contiguous() or torch._C._storage_Use_Count(key) > _SOLE_OWNER:
        return None
    entry = entries.get(key)
    # What this node made itself is added in its own formula, which takes new memory.
    if entry is None or entry.category != "temporary" or entry.node == current_node():
        return None
    return entry


HOST = "host"
"""Kept on the host by a technique; counted apart from the categories of `MemoryBreakdown`."""

UNCLAIMED = frozenset({"activation", "temporary", "other", "weight_copy"})
"""What the phase of the step says of a new storage is a guess until something claims it. What is
claimed already keeps its category, for example a parameter that an optimizer also has in
``state``."""


def category_of_new(
    func: Callable[..., Any],
    args: Sequence[Any],
    entries: Mapping[int, LiveStorage],
    *,
    in_step: bool,
) -> str:
    """Say what an operator makes.

    Args:
        func: The operator.
        args: What it was given.
        entries: Known storages.
        in_step: Whether an optimizer steps.

    Returns:
        A category of `MemoryBreakdown`, or `HOST`.
    """
    if is_host_copy():
        return HOST
    if func is torch.ops.aten._to_copy.default:
        sources = [entries.get(storage._cdata) for storage in storages_of(args[0])]
        if any(source is not None and source.category == "parameter" for source in sources):
            return "weight_copy"
    if torch.is_grad_enabled():
        return "activation"
    return "temporary" if in_backward() or in_step else "activation"


class LiveTensors(TorchDispatchMode):
    """Bytes of the live tensor storages of one device, now and at their peak.

    Each storage counts once, however many tensors share it, from the operation that makes it until
    it is freed. The same on every machine, and what a GPU would have to hold apart from rounding,
    fragmentation and the workspaces of its kernels. Costs time (each operation passes through
    Python) and no memory: storages are held by weak reference only.

    Args:
        module: Its parameters, buffers and gradients are counted from the start. Held weakly.
        optimizers: Their state is counted from the start and found again after each step.
        device: The device to count on. ``None`` takes that of the first parameter, and the CPU
            where there is none.

    Note:
        What counts as what: made inside an optimizer step with gradients switched off, or during
        backward with gradients switched off, is *temporary*; made during backward with gradients
        on is recomputation, and an *activation* as all else is. Then ``Parameter.grad`` makes a
        *gradient* of it and ``Optimizer.state`` *optimizer state*, in the peak as well if it was
        there then. A storage that is older than the context and that no one has named is *other*
        from its first use on.

        Scratch memory inside a kernel is not seen, such as the reordered copies of oneDNN's
        convolutions or what bitsandbytes' 8-bit optimizers do inside; nor are states of random
        generators, 5 kB for each checkpointed block on a CPU, and graphs of ``torch.compile``.

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
        """Bytes of all storages alive now, or when the context was left."""
        return self._live_bytes

    @property
    def breakdown(self) -> MemoryBreakdown:
        """The same by category."""
        return MemoryBreakdown.from_categories(self._bytes)

    @property
    def peak(self) -> MemoryBreakdown:
        """Bytes by category when their sum was largest; host copies at a peak of their own."""
        peak = MemoryBreakdown.from_categories(self._peak)
        return replace(peak, host_bytes=self._peak_host_bytes)

    def reset_peak(self) -> None:
        """Look for the peak from now on."""
        self._peak_bytes = self._live_bytes
        self._peak_time = self._num_born
        self._peak = dict(self._bytes)

    def track_input(self, batch: object) -> None:
        """Count the tensors of a batch as input; for storages that the context has not seen made.

        Args:
            batch: Tensors in any nesting of containers, or an object that holds them.
        """
        for tensor in tensors_in_batch(batch):
            self._claim(tensor, "input")

    def track_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Follow more optimizers, plain ones and not wrappers; known ones stay as they are.

        Args:
            optimizers: As for the constructor.
        """
        known = {id(ref()) for ref in self._optimizers}
        for optimizer in optimizers:
            if id(optimizer) not in known:
                self._optimizers.append(weakref.ref(optimizer))
                if self._undo:
                    self._follow(optimizer)

    def __enter__(self) -> Self:
        if self._undo:
            raise RuntimeError("LiveTensors is running already: make a second one.")
        module = nn.Module() if self._module is None else self._module()
        if module is None:
            raise RuntimeError("The module of this LiveTensors is gone: make one with another.")
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
        if func is torch.ops.prim.device.default:  # asked of tensors without data at each node
            return getattr(args[0], "fake_device", None) or func(*args)
        kwargs = kwargs or {}
        if func is not torch.ops.aten.lift_fresh.default:  # its input is new: torch.tensor(...)
            for tensor in operands(args):
                self._see(tensor, "other")
            for tensor in operands(kwargs.values()):
                self._see(tensor, "other")
        self._op = func
        if func is torch.ops.aten.add.Tensor and in_backward():
            summed = summed_in_place(self._entries, *args[:2])
            if summed is not None:
                change, summed.num_bytes = -summed.num_bytes, 0
                self._change(summed, change)
        result = func(*args, **kwargs)
        in_step = self._num_running_steps > 0
        category = category_of_new(func, args, self._entries, in_step=in_step)
        for tensor in operands((result,)):
            self._see(tensor, category)
        return result

    def _register(self, module: nn.Module) -> None:
        for parameter in module.parameters():
            self._claim(parameter, "parameter")
        for buffer in module.buffers():
            self._claim(buffer, "buffer")
        for parameter in module.parameters():
            self._claim_gradient(parameter)
            if parameter.requires_grad:
                register: Any = parameter.register_post_accumulate_grad_hook  # untyped in torch
                self._undo.append(register(self._claim_gradient).remove)
        for ref in self._optimizers:
            optimizer = ref()
            if optimizer is not None:
                self._follow(optimizer)

    def _follow(self, optimizer: Optimizer) -> None:
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
        # First what costs nothing: tensors without data ask all modes for `device`.
        if getattr(tensor, "fake_device", None) == self.device or tensor.device == self.device:
            for storage in storages_of(tensor):
                key = storage._cdata
                entry = self._entries.get(key)
                if entry is None:
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
            # Of two equal peaks the later one: the first step is not like the others.
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
        """Take into account that a storage grew, shrank or is gone."""
        if entry.category == HOST:
            self._host_bytes += change
            self._peak_host_bytes = max(self._peak_host_bytes, self._host_bytes)
            return
        self._bytes[entry.category] += change
        self._live_bytes += change

    def _origin_of(self, tensor: Tensor) -> object:
        """Note where a new storage comes from; `_op` runs."""

    def _stop(self) -> None:
        for entry in self._entries.values():
            entry.ref = None  # so that no callback comes any more
        self._entries.clear()
        self._op = None
        while self._undo:
            self._undo.pop()()
