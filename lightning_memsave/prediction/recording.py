"""Record each allocation and free of training steps, with its module, operator and phase."""

import bisect
import functools
import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memsave.core.clock import processor_time_s
from lightning_memsave.core.memory import HOST, category_in_context, on_cuda
from lightning_memsave.measure.live_tensors import LiveTensors, in_backward
from lightning_memsave.measure.storages import LiveStorage, storages_of, tensors_in
from lightning_memsave.prediction.result import ModuleMemory
from lightning_memsave.prediction.snapshot import Origin
from lightning_memsave.prediction.work import Work, WorkCounter
from lightning_memsave.prediction.wrapped_module import inner_of
from lightning_memsave.techniques.optimizer_step import is_updating
from lightning_memsave.trainer.nested_fit import raise_if_interrupted

_OF_CUBLAS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "vdot")
_PRODUCTS = frozenset(
    (
        *(f"aten.{name}" for name in _OF_CUBLAS),
        "lightning_memsave.add_product",
    )
)
_CONVOLUTIONS = frozenset({"aten.convolution", "aten.convolution_backward"})
# gloo sums a copy of its input, of which each process then takes a part; NCCL needs none.
_REDUCE_SCATTER = "c10d._reduce_scatter_base_"
_OLDER = frozenset({"other", "input"})
# CUDA's kernel allocates the mask first; other kernels allocate their results in order.
_DROPOUT = torch.ops.aten.native_dropout.default


@dataclass(slots=True)
class Event:
    storage: LiveStorage
    change: int
    phase: str
    module: str
    op: str


@dataclass(slots=True)
class Recording:
    modules: tuple[ModuleMemory, ...] = ()
    events: list[Event] = field(default_factory=list)
    batch_ends: list[int] = field(default_factory=list)
    host_bytes: int = 0
    kept_gradient_bytes: int = 0
    first_products: dict[str, int] = field(default_factory=dict)
    phases_with_bias: set[str] = field(default_factory=set)
    """Those with products that add a bias."""
    has_loss: bool = True
    work: Work = field(default_factory=Work)

    def copy(self) -> Self:
        return replace(self, events=list(self.events), batch_ends=list(self.batch_ends))


class StepProfile(LiveTensors):
    """Counts live tensors and records each change, with the module that made it.

    In the forward pass a storage belongs to the innermost running module. In backward it belongs
    to the module whose forward created the running node of the autograd graph, found by the node's
    sequence number. Gradients and optimizer state belong to the owner of their parameter.
    """

    # Torch guards each call of a mode against its compiler, which does not run here.
    __torch_dispatch__ = inspect.unwrap(LiveTensors.__torch_dispatch__)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(
        self,
        module: nn.Module,
        optimizers: Iterable[Optimizer] = (),
        device: torch.device | str | None = None,
        *,
        deadline_s: float | None = None,
    ) -> None:
        super().__init__(module, optimizers, device)
        self._deadline_s = math.inf if deadline_s is None else deadline_s
        named = list(inner_of(module).named_modules())
        self._names = {id(part): name for name, part in named}
        sizes: dict[str, int] = {}
        # Tied parameters belong to the first module.
        self._owners: dict[Tensor, str] = {}
        for name, part in named:
            for parameter in part.parameters(recurse=False):
                if self._owners.setdefault(parameter, name) == name:
                    sizes[name] = sizes.get(name, 0) + parameter.numel()
        self.recording = Recording(
            tuple(
                ModuleMemory(name, type(part).__name__, sizes.get(name, 0)) for name, part in named
            )
        )
        self._buffer_owners = {
            id(buffer): name for name, part in named for buffer in part.buffers(recurse=False)
        }
        self._is_older = False
        self._num_running_closures = 0
        self._work = WorkCounter()
        self._stack = [""]
        # First sequence number of autograd nodes, and the module that ran from there on.
        self._first_nodes: list[int] = [0]
        self._running: list[str] = [""]

    def end_batch(self) -> None:
        self.recording.batch_ends.append(len(self.recording.events))
        self.recording.work = self._work.work()
        self.recording.host_bytes = self._peak_host_bytes

    def reset_host_peak(self) -> None:
        self._peak_host_bytes = self._host_bytes

    def start_step(self) -> None:
        self._work.clear()

    @override
    def _note_call(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = _name_of(func)
        if name == _REDUCE_SCATTER and not on_cuda(args[1]):
            self._see(args[1].clone(), "temporary")
        # Without cuDNN, convolutions are matrix products.
        is_product = name in _CONVOLUTIONS and not torch.backends.cudnn.enabled
        if is_product or name.rstrip("_") in _PRODUCTS:  # also in place
            # Products of offloaded updates that count as the device's: they have their own thread.
            in_updates = category_in_context() == "temporary"
            phase = "updates" if in_updates else "backward" if in_backward() else "forward"
            self.recording.first_products.setdefault(phase, len(self.recording.events))
            if name == "aten.addmm" and args[0].dim() == 1:
                self.recording.phases_with_bias.add(phase)
        in_step = self._num_running_steps > self._num_running_closures or is_updating()
        self._work.add(func, args, kwargs, result, in_step=in_step, module_of=self._current_module)

    @override
    def _as_allocated(self, func: Any, result: Any) -> Any:
        return result[::-1] if func is _DROPOUT else result

    @override
    def __enter__(self) -> Self:
        super().__enter__()
        self._undo.append(register_module_forward_pre_hook(self._enter_module).remove)
        self._undo.append(register_module_forward_hook(self._leave_module, always_call=True).remove)
        return self

    def _enter_module(self, module: nn.Module, args: object) -> None:
        self._stack.append(self._names.get(id(module), self._stack[-1]))
        self._note_module()

    def _leave_module(self, module: nn.Module, args: object, output: object) -> None:
        if len(self._stack) > 1:
            self._stack.pop()
        self._note_module()

    def _note_module(self) -> None:
        first = torch._C._autograd._get_sequence_nr()
        if first == self._first_nodes[-1]:
            self._running[-1] = self._stack[-1]
        else:
            self._first_nodes.append(first)
            self._running.append(self._stack[-1])

    # A Trainer runs forward and backward inside the closure of the optimizer step.
    @override
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        super()._before_step(optimizer, args, kwargs)
        return (
            tuple(self._count_calls(value) for value in args),
            {name: self._count_calls(value) for name, value in kwargs.items()},
        )

    def _count_calls(self, value: Any) -> Any:
        if not callable(value):
            return value

        @functools.wraps(value)
        def closure(*args: Any, **kwargs: Any) -> Any:
            self._num_running_closures += 1
            try:
                return value(*args, **kwargs)
            finally:
                self._num_running_closures -= 1

        return closure

    def _phase(self) -> str:
        if in_backward():
            return "backward"
        is_in_update = self._num_running_steps > self._num_running_closures
        is_update = is_in_update and not torch.is_grad_enabled()
        return "optimizer" if is_update else "forward"

    def _current_module(self, phase: str) -> str:
        # During recomputation in backward, modules are running.
        if phase not in ("backward", "recomputation") or len(self._stack) > 1:
            return self._stack[-1]
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return ""
        parameter = getattr(node, "variable", None)  # of an AccumulateGrad node
        if parameter is not None:
            return self._owners.get(parameter, "")
        return self._running[bisect.bisect_right(self._first_nodes, node._sequence_nr()) - 1]

    # Inputs of an operator are seen before its outputs: unknown ones are older than the context.
    @override
    def _see(self, tensor: Tensor, category: str) -> None:
        self._is_older = category in _OLDER
        super()._see(tensor, category)

    @override
    def _origin_of(self, tensor: Tensor) -> Origin:
        raise_if_interrupted()
        if processor_time_s() > self._deadline_s:
            raise TimeoutError("simulating this step takes longer than allowed")
        if isinstance(tensor, nn.Parameter) and tensor in self._owners:
            module, op, phase = self._owners[tensor], "", ""
        elif id(tensor) in self._buffer_owners:
            module, op, phase = self._buffer_owners[id(tensor)], "", ""
        else:
            phase = self._phase()
            op = "" if self._is_older else _name_of(self._op)
            module = self._current_module(phase)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Origin(module, op, phase, tuple(tensor.shape), dtype)

    @override
    def _change(self, entry: LiveStorage, change: int) -> None:
        super()._change(entry, change)
        if entry.category == HOST:
            return
        phase = self._phase()
        event = Event(entry, change, phase, self._current_module(phase), _name_of(self._op))
        self.recording.events.append(event)

    @override
    def _claim_gradient(self, parameter: Tensor) -> None:
        super()._claim_gradient(parameter)
        if parameter.grad is not None:
            self._assign_to(parameter.grad, self._owners.get(parameter, ""))

    @override
    def _claim_state(self, optimizer: Optimizer) -> None:
        super()._claim_state(optimizer)
        for parameter, state in optimizer.state.items():
            for tensor in tensors_in(state):
                self._assign_to(tensor, self._owners.get(parameter, ""))

    def _assign_to(self, tensor: Tensor, module: str) -> None:
        for storage in storages_of(tensor):
            entry = self._entries.get(storage._cdata)
            if entry is not None and entry.category in {"gradient", "optimizer_state"}:
                entry.origin.module = module


@functools.cache
def _name_of(op: Any) -> str:
    return "" if op is None else str(op).rsplit(".", 1)[0]
