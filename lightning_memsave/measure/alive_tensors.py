"""Find which tensors are alive after an exception, by category and by name."""

import contextlib
import functools
import gc
import itertools
import sys
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from types import (
    BuiltinMethodType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import checkpoint

from lightning_memsave.core.memory import HOST, mark_of
from lightning_memsave.measure.storages import storages_of, tensors_in, tensors_in_batch

_OURS = __name__.partition(".")[0]
OWNED = frozenset({"parameter", "gradient", "buffer", "optimizer_state", "input"})
_CheckpointFrame = getattr(checkpoint, "_CheckpointFrame", None)


@dataclass(frozen=True, slots=True)
class AliveTensor:
    category: str
    num_bytes: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    owner: str = ""
    count: int = 1


def merge_alike(alive: Iterable[AliveTensor]) -> list[AliveTensor]:
    merged: dict[AliveTensor, AliveTensor] = {}
    for one in alive:
        key = replace(one, num_bytes=0, count=1)
        known = merged.get(key, replace(key, count=0))
        total_bytes, count = known.num_bytes + one.num_bytes, known.count + one.count
        merged[key] = replace(key, num_bytes=total_bytes, count=count)
    return sorted(merged.values(), key=lambda one: -one.num_bytes)


def find_alive_tensors(
    device: torch.device | str,
    module: nn.Module | None = None,
    optimizers: Iterable[Optimizer] = (),
    batch: object = None,
    error: BaseException | None = None,
    *,
    phase: str = "",
    owners: Mapping[str, object] = MappingProxyType({}),
    others: Mapping[str, object] = MappingProxyType({}),
) -> list[AliveTensor]:
    """Find the tensors that are alive on a device, each storage once.

    Read-only: nothing is computed or unpacked, and no code of the objects runs. Storages are named
    in this order: parameters, gradients, buffers, optimizer state and the batch; attributes of
    owners; variables of functions in the traceback; tensors that autograd has saved; attributes of
    other owners; all other tensors that Python's garbage collector knows. Needs up to a second in a
    process with a million objects.

    Note:
        Tensors that only C++ holds are not found, such as gradients inside backward and workspaces
        of kernels.
    """
    finder = _Finder(torch.empty(0, device=device).device)
    if module is not None:
        finder.claim_module(module)
    for optimizer in optimizers:
        finder.claim_state(optimizer)
    for tensor in tensors_in_batch(batch):
        finder.claim(tensor, "input", "batch")
    seen = {id(root) for root in (*owners.values(), *others.values())}
    kept = list(_kept_by_all(owners, seen))
    variables = [] if error is None else list(_variables(error, seen))
    elsewhere = list(_kept_by_all(others, seen))
    objects = gc.get_objects()
    # `isinstance` would run code of lazy proxies.
    unnamed = [("", found) for found in objects if issubclass(type(found), Tensor)]
    for frame in (found for found in objects if type(found) is _CheckpointFrame):
        finder.note_recomputed(frame)
    del objects
    # What a step needs it keeps too, whoever else does.
    finder.follow((("", tensor) for _, tensor in variables))
    # A list may be the one that an attribute keeps.
    counts = Counter(name for name, _ in variables)
    finder.note_running(tensor for name, tensor in variables if counts[name] == 1)
    finder.follow([*kept, *elsewhere, *unnamed])
    finder.claim_kept(kept)
    for name, tensor in variables:
        finder.claim(tensor, "temporary" if phase in {"backward", "optimizer"} else "", name)
    finder.claim_saved()
    finder.claim_kept(elsewhere)
    for _, tensor in unnamed:
        finder.claim(tensor, "other", "no variable of the traceback")
    return sorted(finder.found.values(), key=lambda alive: -alive.num_bytes)


class _Finder:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.found: dict[int, AliveTensor] = {}
        self._names: dict[int, str] = {}  # of parameters
        self._visited: set[Any] = set()  # nodes of graphs
        self._saved: list[tuple[str, str, Tensor]] = []
        self._saved_storages: set[int] = set()
        self._running: set[int] = set()  # storages that the step at hand needs

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

    def follow(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Note what their graphs have saved, for the first owner that leads to it."""
        for owner, tensor in tensors:
            with contextlib.suppress(Exception):  # raises for some views after in-place changes
                if tensor.grad_fn is not None:
                    self._follow(tensor.grad_fn, owner)

    def _follow(self, start: Any, owner: str) -> None:
        nodes = [start]
        while nodes:
            node = nodes.pop()
            if node in self._visited:
                continue
            self._visited.add(node)
            nodes += [following for following, _ in node.next_functions if following]
            saved = list(_saved_by(node))
            module = self._module_of(node) if saved else ""
            graph = f", in a graph of {owner}" if owner else ""
            self.note_saved(f"saved by {node.name()}{module}{graph}", saved, owner)

    def note_running(self, tensors: Iterable[Tensor]) -> None:
        """Note what the step at hand needs, with all that has been saved so far."""
        self._running |= self._saved_storages
        for tensor in tensors:
            with contextlib.suppress(Exception):
                self._running |= {storage._cdata for storage in storages_of(tensor)}

    # Recomputed tensors of checkpointed blocks are in no graph, and torch has no public access.
    def note_recomputed(self, frame: Any) -> None:
        for tensors in list(getattr(frame, "recomputed", {}).values()):
            self.note_saved("recomputed in backward", tensors_in(list(tensors.values())))

    def note_saved(self, name: str, tensors: Iterable[Tensor], owner: str = "") -> None:
        for tensor in tensors:
            self._saved.append((name, owner, tensor))
            with contextlib.suppress(Exception):
                self._saved_storages |= {storage._cdata for storage in storages_of(tensor)}

    def claim_kept(self, kept: Iterable[tuple[str, Tensor]]) -> None:
        for owner, tensor in kept:
            self.claim(tensor, "other", owner, owner)

    def claim_saved(self) -> None:
        for name, owner, tensor in self._saved:
            self.claim(tensor, "activation", name, owner)

    def claim(self, tensor: Tensor, category: str, name: str, owner: str = "") -> None:
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
                if mark is not None and category not in OWNED:
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
                        "" if storage._cdata in self._running else owner,
                    ),
                )

    # The module whose parameter an operator used, found through adjacent leaves of the graph.
    def _module_of(self, node: Any) -> str:
        near = [following for following, _ in node.next_functions if following]
        near += [further for one in near for further, _ in one.next_functions if further]
        for one in near:
            name = self._names.get(id(getattr(one, "variable", None)))
            if name is not None:
                return f" of {name.rpartition('.')[0] or 'the module'}"
        return ""


# The user's functions before those of libraries, whose variables have names such as `args`.
def _variables(error: BaseException, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    frames = [(is_of_library(f.f_globals.get("__name__")), f, line) for f, line in _frames(error)]
    for is_foreign, frame, line in sorted(frames, key=lambda entry: entry[0]):
        code = frame.f_code
        where = f"{code.co_qualname} ({PurePath(code.co_filename).name}:{line})"
        for name, value in list(frame.f_locals.items()):
            if not is_foreign:
                yield from (
                    (found, t) for found, t in _kept_by([value], f"{name} in {where}", seen)
                )
                continue
            # Mappings and dataclasses of the user may raise.
            with contextlib.suppress(Exception):
                for tensor in tensors_in(value):
                    yield f"{name} in {where}", tensor


_LIBRARIES = frozenset(
    {"torch", "lightning", "pytorch_lightning", "lightning_memsave", "contextlib", "builtins"}
)


# Of one owner: a model has some thousand objects, a dataset may have any number.
_MOST_OBJECTS, _MOST_ITEMS, _MOST_STEPS = 200_000, 20_000, 30
_WITHOUT_TENSORS = (type, ModuleType, Optimizer, str, bytes, bool, int, float, complex, type(None))
_REGISTERED = ("_parameters", "_buffers", "_modules")
_OF_IMPORTS = (".__loader__", ".__spec__")  # of a module: what has imported it may have anything


def _kept_by_all(owners: Mapping[str, object], seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    for name, root in owners.items():
        yield from _kept_by(root, name, seen)


def _kept_by(root: object, name: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Find the tensors that an object refers to, each under the attribute that leads to it."""
    queue: deque[tuple[str, object, int, bool]] = deque([(name, root, 0, False)])
    for _ in range(_MOST_OBJECTS):
        if not queue:
            return
        path, value, num_steps, is_inside = queue.popleft()
        with contextlib.suppress(Exception):
            is_of_module = issubclass(type(value), nn.Module)
            for step, item in _references_of(value):
                if step in _OF_IMPORTS:
                    continue
                kind = type(item)
                held = path if is_inside else f"{path}{step}"
                if issubclass(kind, Tensor):
                    yield held, item
                elif id(item) not in seen and not issubclass(kind, _WITHOUT_TENSORS):
                    seen.add(id(item))
                    is_foreign = issubclass(kind, nn.Module) and not is_of_module
                    if num_steps < _MOST_STEPS:
                        inside = is_inside or not step or is_foreign
                        queue.append((held, item, num_steps + 1, inside))


def _references_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Read attributes and items as they are stored: no property, `__getattr__` or iterator runs."""
    kind = type(value)
    if str(getattr(value if kind is FunctionType else kind, "__module__", "")).startswith(_OURS):
        return
    yield from (("", item) for item in _items_of(value))
    for name, item in _stored_attributes(value):
        if name in _REGISTERED and issubclass(kind, nn.Module) and type(item) is dict:
            for own, part in list(item.items()):
                yield ("[*]" if own.isdigit() else f".{own}"), part
        else:
            yield f".{name}", item


def _items_of(value: Any) -> Iterator[Any]:
    kind = type(value)
    for base in (dict, list, tuple, set, frozenset, deque):
        if issubclass(kind, base):
            items = dict.values(value) if base is dict else base.__iter__(value)
            yield from list(itertools.islice(items, _MOST_ITEMS))
    if kind is FunctionType:
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # nothing is in it yet
                yield cell.cell_contents
    elif kind in (MethodType, BuiltinMethodType):
        yield value.__self__
    elif kind is functools.partial:
        yield from (value.func, value.args, value.keywords)


def _stored_attributes(value: object) -> Iterator[tuple[str, Any]]:
    for cls in type(value).__mro__:
        own = vars(cls)
        descriptor: Any = own.get("__dict__")
        # A property of this name would be code.
        if type(descriptor) in (GetSetDescriptorType, MemberDescriptorType):
            yield from list(dict.items(descriptor.__get__(value)))
        for name, member in list(own.items()) if "__slots__" in own else ():
            if type(member) is MemberDescriptorType:
                with contextlib.suppress(AttributeError):  # it has no value yet
                    yield name, member.__get__(value)


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


def is_of_library(name: object) -> bool:
    return str(name).partition(".")[0] in _LIBRARIES


def _saved_by(node: Any) -> Iterator[Tensor]:
    for name in dir(node):
        if not name.startswith("_raw_saved_"):  # others run unpack hooks
            continue
        with contextlib.suppress(RuntimeError):  # freed by backward
            raw = getattr(node, name)
            for saved in raw if isinstance(raw, (tuple, list)) else (raw,):
                # None if freed; with hooks the packed object, such as a tensor on the host.
                yield from tensors_in(getattr(saved, "data", None))
