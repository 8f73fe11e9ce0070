"""Find which tensors are alive after an exception, by category and by name."""

import contextlib
import gc
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import checkpoint

from lightning_memsave.core.memory import HOST, mark_of
from lightning_memsave.measure.storages import storages_of, tensors_in, tensors_in_batch

_OWNED = frozenset({"parameter", "gradient", "buffer", "optimizer_state", "input"})
_CheckpointFrame = getattr(checkpoint, "_CheckpointFrame", None)


@dataclass(frozen=True, slots=True)
class AliveTensor:
    """One live storage.

    Args:
        category: As in `MemoryBreakdown`, for example ``"activation"``.
        num_bytes: Its size in bytes.
        name: Name of a parameter, a variable with its function, or the operator that saved it for
            backward.
        shape: Shape of its first tensor that was found.
        dtype: Type of that tensor, such as ``"float32"``.
    """

    category: str
    num_bytes: int
    name: str
    shape: tuple[int, ...]
    dtype: str


def find_alive_tensors(
    device: torch.device | str,
    module: nn.Module | None = None,
    optimizers: Iterable[Optimizer] = (),
    batch: object = None,
    error: BaseException | None = None,
    *,
    phase: str = "",
) -> list[AliveTensor]:
    """Find the tensors that are alive on a device, each storage once.

    Read-only: nothing is computed or unpacked. Storages are named in this order: parameters,
    gradients, buffers, optimizer state and the batch; variables of functions in the traceback;
    tensors that autograd has saved; all other tensors that Python's garbage collector knows. Needs
    up to a second in a process with a million objects.

    Args:
        device: The device.
        module: Owner of parameters, gradients and buffers.
        optimizers: Owners of optimizer state.
        batch: The input.
        error: The exception, with its traceback and its causes.
        phase: In ``"backward"`` and ``"optimizer"``, tensors outside of a graph are temporaries,
            otherwise activations.

    Returns:
        The storages, largest first.

    Note:
        Tensors that only C++ holds are not found, such as gradients inside backward and workspaces
        of kernels.

    Example:
        >>> model = nn.Linear(100, 10, bias=False)
        >>> [alive.name for alive in find_alive_tensors("cpu", model) if alive.num_bytes == 4000]
        ['weight']
    """
    finder = _Finder(torch.empty(0, device=device).device)
    if module is not None:
        finder.claim_module(module)
    for optimizer in optimizers:
        finder.claim_state(optimizer)
    for tensor in tensors_in_batch(batch):
        finder.claim(tensor, "input", "batch")
    variables = [] if error is None else list(_variables(error))
    objects = gc.get_objects()
    # `isinstance` would run code of lazy proxies.
    others = [found for found in objects if issubclass(type(found), Tensor)]
    for frame in (found for found in objects if type(found) is _CheckpointFrame):
        finder.note_recomputed(frame)
    del objects
    for tensor in [*(tensor for _, tensor in variables), *others]:
        finder.follow(tensor)
    finder.find_saved()
    for name, tensor in variables:
        finder.claim(tensor, "temporary" if phase in {"backward", "optimizer"} else "", name)
    finder.claim_saved()
    for tensor in others:
        finder.claim(tensor, "other", "no variable of the traceback")
    return sorted(finder.found.values(), key=lambda alive: -alive.num_bytes)


class _Finder:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.found: dict[int, AliveTensor] = {}
        self._names: dict[int, str] = {}  # of parameters
        self._nodes: list[Any] = []
        self._saved: list[tuple[str, Tensor]] = []
        self._saved_storages: set[int] = set()

    def claim_module(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            self._names[id(parameter)] = name
            self.claim(parameter, "parameter", name)
            if parameter.grad is not None:
                self.claim(parameter.grad, "gradient", f"{name}.grad")
        for name, buffer in module.named_buffers():
            self.claim(buffer, "buffer", name)

    def claim_state(self, optimizer: Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            owner = self._names.get(id(parameter), type(optimizer).__name__)
            for key, value in state.items() if isinstance(state, dict) else ():
                for tensor in tensors_in(value):
                    self.claim(tensor, "optimizer_state", f"{key} of {owner}")

    def follow(self, tensor: Tensor) -> None:
        with contextlib.suppress(Exception):  # raises for some views after in-place changes
            if tensor.grad_fn is not None:
                self._nodes.append(tensor.grad_fn)

    def find_saved(self) -> None:
        visited = set()
        while self._nodes:
            node = self._nodes.pop()
            if node in visited:
                continue
            visited.add(node)
            self._nodes += [following for following, _ in node.next_functions if following]
            saved = list(_saved_by(node))
            owner = self._owner_of(node) if saved else ""
            self.note_saved(f"saved by {node.name()}{owner}", saved)

    # Recomputed tensors of checkpointed blocks are in no graph, and torch has no public access.
    def note_recomputed(self, frame: Any) -> None:
        for tensors in list(getattr(frame, "recomputed", {}).values()):
            self.note_saved("recomputed in backward", tensors_in(list(tensors.values())))

    def note_saved(self, name: str, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._saved.append((name, tensor))
            with contextlib.suppress(Exception):
                self._saved_storages |= {storage._cdata for storage in storages_of(tensor)}

    def claim_saved(self) -> None:
        for name, tensor in self._saved:
            self.claim(tensor, "activation", name)

    def claim(self, tensor: Tensor, category: str, name: str) -> None:
        # Wrappers of torch.func and others have no storage, device or shape.
        with contextlib.suppress(Exception):
            if tensor.device != self.device:
                return
            for storage in storages_of(tensor):
                if storage.device != self.device or not storage.nbytes():
                    continue  # the storage of a fake tensor is on "meta"
                mark = mark_of(storage)  # such as weights that offloading has brought to the device
                if mark == HOST:
                    continue
                if mark is not None and category not in _OWNED:
                    category = mark
                if category in {"", "temporary", "other"}:
                    is_part = tensor.grad_fn is not None or storage._cdata in self._saved_storages
                    category = "activation" if is_part else category or "activation"
                self.found.setdefault(
                    storage._cdata,
                    AliveTensor(
                        category,
                        storage.nbytes(),
                        name,
                        tuple(tensor.shape),
                        str(tensor.dtype).removeprefix("torch."),
                    ),
                )

    # The module whose parameter an operator used, found through adjacent leaves of the graph.
    def _owner_of(self, node: Any) -> str:
        near = [following for following, _ in node.next_functions if following]
        near += [further for one in near for further, _ in one.next_functions if further]
        for one in near:
            name = self._names.get(id(getattr(one, "variable", None)))
            if name is not None:
                return f" of {name.rpartition('.')[0] or 'the module'}"
        return ""


# The user's functions before those of libraries, whose variables have names such as `args`.
def _variables(error: BaseException) -> Iterator[tuple[str, Tensor]]:
    for frame, line in sorted(_frames(error), key=lambda entry: _is_of_library(entry[0])):
        code = frame.f_code
        where = f"{code.co_qualname} ({PurePath(code.co_filename).name}:{line})"
        for name, value in list(frame.f_locals.items()):
            # Mappings and dataclasses of the user may raise.
            with contextlib.suppress(Exception):
                for tensor in tensors_in(value):
                    yield f"{name} in {where}", tensor


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    # Reading the variables of a running function would keep them alive until it returns.
    running = set()  # ids, as a reference to this frame would be a cycle
    running_frame: FrameType | None = sys._getframe()
    while running_frame is not None:
        running.add(id(running_frame))
        running_frame = running_frame.f_back
    errors: list[BaseException | None] = [error]
    seen: set[int] = set()
    while errors:
        one = errors.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        errors += [one.__cause__, one.__context__]
        for frame, line in traceback.walk_tb(one.__traceback__):
            if id(frame) not in running:
                yield frame, line


def _is_of_library(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package in {"torch", "lightning", "pytorch_lightning", "lightning_memsave", "contextlib"}


def _saved_by(node: Any) -> Iterator[Tensor]:
    for name in dir(node):
        if not name.startswith("_raw_saved_"):  # others run unpack hooks
            continue
        with contextlib.suppress(RuntimeError):  # freed by backward
            raw = getattr(node, name)
            for saved in raw if isinstance(raw, (tuple, list)) else (raw,):
                # None if freed; with hooks the packed object, such as a tensor on the host.
                yield from tensors_in(getattr(saved, "data", None))
