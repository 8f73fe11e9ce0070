"""What a training step may change in a module, in any nesting, restored to its very bytes."""

import argparse
import ctypes
import functools
import math
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memsave.blocks.snapshot import fingerprints, is_there
from lightning_memsave.core.memory import is_fake
from lightning_memsave.core.nested import leaves_of
from lightning_memsave.core.saved_state import (
    RandomState,
    devices_of,
    generator_state,
    is_plain,
    is_same,
    refill,
    set_generator,
    values_in,
)
from lightning_memsave.techniques.residences import residence_among, residence_with

_SMALL_BYTES, _MAX_COPIED_BYTES = 2**20, 2**26
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set, deque)
_TOLERANCE = 1e-6  # of the same sums in another order
_MAX_ITEMS = 10_000  # longer containers are assumed to hold data
# Objects of these packages, and of the standard library, are no state of a step.
_LIBRARIES = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_memsave"}
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_LEVELS = ("_parameters", "_buffers", "_modules")
_OF_THREADS = ("_thread", "threading")
# Attributes of this package are no state of the user's.
_OWN = ("_memsave", "__getstate__", "__deepcopy__")


class ModuleState:
    """What modules hold, in containers and objects of any nesting, with values and random states.

    Small tensors on the host are compared by their bytes; of others there is a copy once an
    operator is about to write to them (`save_before_write`), and a fingerprint of the rest if it
    `is_checked`.
    """

    def __init__(
        self,
        module: nn.Module,
        batch: Any,
        optimizers: Sequence[Any] = (),
        is_checked: bool = False,
    ) -> None:
        residence = residence_among(module.parameters()) if optimizers else None
        if residence is not None:
            residence.finish()  # a thread of the host may still be writing to state
        # No attribute of a scripted module holds its tensors.
        tensors = [*module.named_parameters(), *module.named_buffers()]
        self._module, self._roots = module, [("", module), *tensors, *_roots_of(optimizers)]
        self._holders: list[tuple[Any, Any]] = []
        self._types: list[tuple[Any, type]] = []
        self._generators: list[tuple[Any, Any]] = []
        self._arrays: list[tuple[np.ndarray[Any, Any], bytes]] = []
        self._storages: dict[int, _Storage] = {}
        self._places: list[tuple[Tensor, Tensor]] = []
        self._tensors: list[tuple[Tensor, bool, Tensor | None]] = []
        self._plain: dict[str, Any] = {}
        self.names: set[str] = set()
        """Names of what was there."""
        self._room_bytes = _MAX_COPIED_BYTES
        # Sharded strategies replace parameters in forward, and restore them themselves.
        is_alone = not (dist.is_available() and dist.is_initialized())
        self._left = set() if is_alone else {id(m._parameters) for m in module.modules()}
        for name, value in held_in([*self._roots, *leaves_of(batch)]):
            self._keep(name, value)
        self._printed = [known for known in self._storages.values() if known.may_be_printed()]
        self._prints = _fingerprints(self._printed) if is_checked else []
        self._random = RandomState(devices_of(module))

    def owns(self, tensor: Tensor) -> bool:
        return key_of(tensor) in self._storages

    def save_before_write(self, tensor: Tensor) -> None:
        if (known := self._of(tensor)) is not None:
            known.save()

    def has_other_values(self, tensor: Tensor) -> bool:
        """Return whether the storage of a tensor has other bytes; never of a fake tensor."""
        known = None if is_fake(tensor) else self._of(tensor)
        return known is not None and known.has_changed()

    def now(self) -> Iterator[tuple[str, Any]]:
        """Give the tensors and plain values that are held, but by metrics, by name."""
        metrics = [m for m in self._module.modules() if is_metric(m)]
        known = {id(value) for _, value in held_in(enumerate(metrics))}
        for name, value in held_in(self._roots):
            is_own = any(part.startswith(_OWN) for part in name.split("."))
            if isinstance(value, (Tensor, *_PLAIN)) and id(value) not in known and not is_own:
                yield name, value

    def left(self) -> dict[str, Any]:
        """Return the tensors and plain values, by name, that are not what they were."""
        moved = {id(tensor) for tensor, _ in self._moved()}
        return {
            name: value.detach() if isinstance(value, Tensor) else value
            for name, value in self.now()
            if (
                key_of(value) is not None
                and (id(value) in moved or not self.owns(value) or self.has_other_values(value))
                if isinstance(value, Tensor)
                else name not in self._plain or not are_close(value, self._plain[name])
            )
        }

    def written(self) -> list[Tensor]:
        """List the tensors that were bound, or written to, since `restore`."""
        found = [value for _, value in self.now() if isinstance(value, Tensor)]
        return [t for t in found if not self.owns(t) or self._is_written(t)]

    def _is_written(self, tensor: Tensor) -> bool:
        known = self._of(tensor)
        return known is not None and (known.is_written or known.has_changed())

    def has_changed(self) -> bool:
        return (
            any(known.is_written or known.has_changed() for known in self._storages.values())
            or bool(self._moved())
            or not all(_has(*pair) for pair in self._holders)
        )

    def restore(self) -> None:
        for holder, contents in reversed(self._holders):
            if not _has(holder, contents):
                _fill(holder, contents)
        for array, before in self._arrays:
            if array.tobytes() != before:
                array[...] = np.frombuffer(before, array.dtype).reshape(array.shape)
        self._restore_tensors()
        for one, kind in self._types:
            if type(one) is not kind:  # a lazy one has got its size
                one.__class__ = kind
        self.restore_random()

    def _restore_tensors(self) -> None:
        changed = {key for key, known in self._storages.items() if known.restore()}
        for tensor, before in self._moved():
            tensor.data = before
            changed.add(key_of(before) or 0)
        for tensor, is_trained, _ in self._tensors:
            # Where it is offloaded, the device has other values.
            if changed and not tensor.is_inference() and key_of(tensor) in changed:
                increment_version(tensor)
            if tensor.is_leaf and tensor.requires_grad != is_trained:
                tensor.requires_grad = is_trained

    def restore_gradients(self) -> None:
        """Give tensors the gradients that they had."""
        for tensor, _, grad in self._tensors:
            if tensor.is_leaf and tensor.grad is not grad:
                tensor.grad = grad

    def restore_random(self) -> None:
        for generator, state in self._generators:
            set_generator(generator, state)
        self._random.restore()

    def damaged(self) -> list[str]:
        """List the large tensors, by name, that could not be restored."""
        now = _fingerprints(self._printed) if self._prints else []
        pairs = zip(self._printed, now, self._prints, strict=bool(now))
        return [known.name for known, after, before in pairs if after != before]

    def _moved(self) -> list[tuple[Tensor, Tensor]]:
        pairs = [pair for pair in self._places if not is_lazy(pair[0])]
        return [(tensor, before) for tensor, before in pairs if not is_there(tensor, before)]

    def _of(self, tensor: Tensor) -> "_Storage | None":
        return self._storages.get(key_of(tensor) or 0)

    def _keep(self, name: str, value: Any) -> None:
        self.names.add(name)
        if isinstance(value, _PLAIN):
            self._plain[name] = value
        elif isinstance(value, Tensor):
            self._keep_tensor(name, value)
        elif isinstance(value, np.ndarray):
            is_plain = type(value) is np.ndarray and not value.dtype.hasobject
            if is_plain and value.flags.writeable and value.nbytes <= _SMALL_BYTES:
                self._arrays.append((value, value.tobytes()))
        elif (state := generator_state(value)) is not None:
            self._generators.append((value, state))
        elif id(value) not in self._left and (holder := _holder_of(value)) is not None:
            self._holders.append((holder, _contents_of(holder)))
            if isinstance(value, nn.Module):
                self._types.append((value, type(value)))

    def _keep_tensor(self, name: str, tensor: Tensor) -> None:
        self._types.append((tensor, type(tensor)))
        self._tensors.append(
            (tensor, tensor.requires_grad, tensor.grad if tensor.is_leaf else None)
        )
        is_offloaded = residence_with(tensor) is not None  # it takes other data as values
        if is_lazy(tensor):
            self._places.append((tensor, torch.empty(0, dtype=tensor.dtype, device=tensor.device)))
        elif is_plain(tensor) and not (is_offloaded or is_fake(tensor) or tensor.is_inference()):
            self._places.append((tensor, tensor.data))
        storage = _storage_of(tensor)
        if storage is None or int(storage._cdata) in self._storages:
            return
        known = _Storage(name, storage, is_known=not (is_offloaded or is_fake(tensor)))
        self._storages[int(storage._cdata)] = known
        if known.is_on_host and known.num_bytes <= min(_SMALL_BYTES, self._room_bytes):
            self._room_bytes -= known.num_bytes
            known.copy = known.read()


class _Storage:
    """Bytes of a storage: a copy if it is small, else one that is made before a write."""

    copy: bytes | None = None
    saved: torch.UntypedStorage | None = None
    is_written = False

    def __init__(self, name: str, storage: torch.UntypedStorage, is_known: bool) -> None:
        self.name, self.storage, self.num_bytes = name, storage, storage.nbytes()
        is_there = is_known and (self.num_bytes == 0 or _pointer_of(storage) != 0)
        self.is_on_host = is_there and storage.device.type == "cpu"
        self._is_there = is_there and storage.device.type in ("cpu", "cuda")

    def read(self) -> bytes:
        return ctypes.string_at(self.storage.data_ptr(), self.num_bytes) if self.num_bytes else b""

    def save(self) -> None:
        self.is_written = True
        if self.copy is None and self.saved is None:
            self.saved = self.storage.clone()

    def has_changed(self) -> bool:
        if self.storage.nbytes() != self.num_bytes:
            return True
        if self.copy is not None:
            return self.read() != self.copy
        if self.saved is None:
            return False
        return not torch.equal(self.as_bytes(self.storage), self.as_bytes(self.saved))

    def as_bytes(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def restore(self) -> bool:
        """Give it its bytes; returns whether it may have had others."""
        saved, self.saved, self.is_written = self.saved, None, False
        if self.storage.nbytes() != self.num_bytes:
            self.storage.resize_(self.num_bytes)
        elif saved is None and (self.copy is None or self.read() == self.copy):
            return False
        if saved is not None:
            self.storage.copy_(saved)
        elif self.copy:
            ctypes.memmove(self.storage.data_ptr(), self.copy, self.num_bytes)
        return True

    def may_be_printed(self) -> bool:
        return self._is_there and self.copy is None and self.num_bytes > 0


def _fingerprints(storages: Iterable[_Storage]) -> list[int]:
    with torch.no_grad(), _disable_current_modes():
        return fingerprints([known.as_bytes(known.storage) for known in storages])


def held_in(roots: Iterable[tuple[Any, Any]]) -> Iterator[tuple[str, Any]]:
    """Give what objects hold, by name: modules, containers, objects and tensors each once."""
    seen: set[int] = set()
    left = [(str(name), value) for name, value in roots][::-1]
    while left:
        name, value = left.pop()
        if isinstance(value, _PLAIN):
            yield name, value
        elif id(value) not in seen:
            seen.add(id(value))
            yield name, value
            left += [(f"{name}{path}".lstrip("."), item) for path, item in _items_of(value)]


def _roots_of(optimizers: Sequence[Any]) -> list[tuple[str, Any]]:
    groups = [("optimizer.param_groups", one.param_groups) for one in optimizers]
    return groups + [("optimizer.state", one.state) for one in optimizers]


def are_close(one: Any, other: Any) -> bool:
    """Return whether tensors or plain values are the same but for rounding of sums."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
            return False
        one, other = values_in(one), values_in(other)
        if not (one.is_floating_point() or one.is_complex()):
            return torch.equal(one, other)
        wide = torch.complex128 if one.is_complex() else torch.float64
        one, other = one.to(wide), other.to(wide)
        scale = float(one.abs().nan_to_num(0, 0, 0).max()) if one.numel() else 0.0
        return torch.allclose(one, other, rtol=0, atol=_TOLERANCE * scale, equal_nan=True)
    if isinstance(one, float) and isinstance(other, float):
        is_nan = math.isnan(one) and math.isnan(other)
        return is_nan or math.isclose(one, other, rel_tol=_TOLERANCE)
    return type(one) is type(other) and one == other


def _items_of(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        items = [(f".{name}", item) for name, item in vars(value).items() if name not in _LEVELS]
        for held in (vars(value).get(level, {}) for level in _LEVELS):
            items += [("", held), *((f".{name}", item) for name, item in held.items())]
        return items
    if isinstance(value, _CONTAINERS) and len(value) > _MAX_ITEMS:
        return [("[...]", len(value))]
    if isinstance(value, dict):
        # Of a tensor, as in the state of an optimizer, the text is long to make.
        names = (key if isinstance(key, _PLAIN) else n for n, key in enumerate([*value]))
        return [(f"[{name!r}]", item) for name, item in zip(names, [*value.values()], strict=True)]
    if isinstance(value, list | tuple | set | deque):
        return [(f"[{index}]", item) for index, item in enumerate([*value])]
    return _items_of_object(value)


def _items_of_object(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, types.MethodType):
        return [("", value.__self__)]
    if isinstance(value, functools.partial):
        return [("", value.func), *_items_of(value.args), *_items_of(value.keywords)]
    if isinstance(value, types.FunctionType):
        cells = value.__closure__ or () if is_of_user(value) else ()
        return [(f".{n}", cell) for n, cell in zip(value.__code__.co_freevars, cells, strict=False)]
    holder = _holder_of(value)
    fields = {} if holder is None else _contents_of(holder)
    return [("" if name == "cell_contents" else f".{name}", v) for name, v in fields.items()]


def is_of_user(function: Any) -> bool:
    """Return whether a function or a method is not of torch, Lightning or this package."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = type(function.__self__) if isinstance(function, types.MethodType) else function
    return _root_of(owner) not in {*_LIBRARIES, "transformers"}


def _root_of(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


def _holder_of(value: Any) -> Any:
    """Return what holds the items or attributes of a value; ``None`` if they are no state."""
    if isinstance(value, _CONTAINERS):
        return value
    if isinstance(value, (nn.Module, *_NAMESPACES)):
        return vars(value)
    if isinstance(value, types.CellType):
        return value
    root = _root_of(type(value))
    if (
        isinstance(value, tuple | type | Tensor)
        or root in _LIBRARIES
        or root in sys.stdlib_module_names
    ):
        return None
    held = getattr(value, "__dict__", None)
    if held is None:
        return value if _slots_of(value) else None
    # Another thread may change it, too.
    return None if any(_root_of(type(v)) in _OF_THREADS for v in held.values()) else held


def _slots_of(value: Any) -> list[str]:
    if isinstance(value, types.CellType):
        return ["cell_contents"]
    found = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
    return [name for names in found for name in ([names] if isinstance(names, str) else names)]


def _contents_of(holder: Any) -> Any:
    for kind in (dict, set, list, deque):
        if isinstance(holder, kind):
            return (list if kind is deque else kind)(holder)
    return {name: getattr(holder, name) for name in _slots_of(holder) if _has_slot(holder, name)}


def _has_slot(holder: Any, name: str) -> bool:
    try:
        return hasattr(holder, name)
    except ValueError:  # an empty cell
        return False


def _has(holder: Any, contents: Any) -> bool:
    now = holder if isinstance(holder, _CONTAINERS) else _contents_of(holder)
    return is_same(now, contents)


def _fill(holder: Any, contents: Any) -> None:
    if isinstance(holder, _CONTAINERS):
        refill(holder, contents)
        return
    for name in _slots_of(holder):
        if name in contents:
            object.__setattr__(holder, name, contents[name])
        elif _has_slot(holder, name):
            object.__delattr__(holder, name)


# Without an import of torchmetrics there is no metric.
def is_metric(module: nn.Module) -> bool:
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(module, torchmetrics.Metric)


def key_of(tensor: Tensor) -> int | None:
    """Return what tells a storage apart from all others that are alive; ``None`` without one."""
    storage = _storage_of(tensor)
    return None if storage is None else int(storage._cdata)


def _storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    if is_lazy(tensor):
        return None
    try:
        return values_in(tensor).untyped_storage()
    except RuntimeError:  # opaque layouts and some subclasses have none
        return None


def _pointer_of(storage: torch.UntypedStorage) -> int:
    try:
        return storage.data_ptr()
    except RuntimeError:  # of a subclass that has no memory of its own
        return 0
