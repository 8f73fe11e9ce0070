"""Record and restore what code may change in modules: bindings, contents of containers, values.

Values decide, not version counters, which writes through ``.data``, NumPy, fused and foreach
operators do not move.
"""

import itertools
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memsave.core.memory import is_fake
from lightning_memsave.core.saved_state import (
    CONTAINERS,
    bytes_of,
    generator_state,
    is_plain,
    is_same,
    once,
    refill,
    set_generator,
)

Names = dict[str, Any]
"""A dictionary of names: the attributes, parameters or buffers of an object."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_OF_THIS_PACKAGE = ("_memsave", "__getstate__", "__deepcopy__", "forward")
_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Size)
_CODE = (type, ModuleType, FunctionType, MethodType)
# Objects of these packages are settings and engines: no state of a forward pass.
_LIBRARIES = frozenset(
    {
        *("torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities"),
        *("transformers", "lightning_memsave", "peft", "bitsandbytes", *sys.stdlib_module_names),
    }
)
_MAX_DEPTH = 5
_MAX_INNER = 64
_MAX_ITEMS = 1000  # of a container that is searched for tensors; its items are always restored


class Reachable:
    """Dictionaries of names, containers, tensors and generators that an object leads to.

    Attributes of objects are followed, and items of containers and of tuples. Submodules are
    followed of modules that a container or an object holds, except submodules whose ids are in
    ``elsewhere``. With ``is_shallow`` only names and tensors of the owner itself are found.
    """

    __slots__ = (
        *("_elsewhere", "_identities", "_is_shallow", "_num_inner", "_own", "containers"),
        *("generators", "has_inner_tensors", "held", "names", "owner", "tensors"),
    )

    def __init__(
        self,
        owner: Any,
        path: str = "",
        *,
        is_shallow: bool = False,
        elsewhere: Collection[int] = (),
    ) -> None:
        self.owner, self._own, self._elsewhere = owner, names_of(owner), elsewhere
        self._identities = _identities(self._own)
        self.names: list[tuple[Names, Names]] = []
        """Dictionaries of names, and copies of them."""
        self.containers: list[tuple[Any, Any]] = []
        """Containers, and copies of them."""
        self.tensors: dict[str, Tensor] = {}
        self.held: list[str] = []
        """Prefixes of the names of state that other modules own."""
        self.generators: list[Any] = []
        self._is_shallow, self._num_inner, self.has_inner_tensors = is_shallow, 0, False
        self._follow(owner, path, {id(owner)}, 0)

    @property
    def is_deep(self) -> bool:
        """Whether more is reached than names and tensors of the owner itself."""
        return bool(self.containers or self.generators or len(self.names) > len(self._own))

    @property
    def is_of_settings(self) -> bool:
        """Whether so much is reached, and no state in it, that to look in each pass costs time."""
        has_state = self.has_inner_tensors or self.generators
        return self._num_inner > _MAX_INNER and not has_state

    def has_changed(self) -> bool:
        """Return whether anything but values of tensors is another than it was."""
        inner = self.names[len(self._own) :]
        return (
            self.has_other_names()
            or any(_identities((names,)) != _identities((before,)) for names, before in inner)
            or any(not is_same(container, items) for container, items in self.containers)
        )

    def has_other_names(self) -> bool:
        """Return whether other objects are bound to the names of the owner by now."""
        return _identities(self._own) != self._identities

    def has_other_structure(self) -> bool:
        """Return whether a module has other parameters or submodules by now."""
        pairs = self.names[1 : len(self._own) : 2]
        return any(_identities((names,)) != _identities((before,)) for names, before in pairs)

    def _follow(self, owner: Any, path: str, seen: set[int], depth: int) -> None:
        pairs = [(names, dict(names)) for names in names_of(owner)]
        self.names += pairs
        # Submodules are the last of the names of a module. The caller has those of the owner.
        for names, copied in pairs[:3]:
            for name, value in names.items():
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    copied[name] = _OfGraph(value)
                elif is_state(name) and not isinstance(value, _PLAIN):
                    self._visit(value, f"{path}.{name}".lstrip("."), seen, depth)
        for names, _ in pairs[3:] if depth else ():
            for name, module in names.items():
                if module is not None and self._is_new(module, seen):
                    self._follow(module, f"{path}.{name}", seen, depth)

    def _is_new(self, value: Any, seen: set[int]) -> bool:
        if id(value) in seen or id(value) in self._elsewhere:
            return False
        seen.add(id(value))
        return True

    def _visit(self, value: Any, path: str, seen: set[int], depth: int) -> None:
        self._num_inner += depth > 0
        if isinstance(value, Tensor):
            self.tensors[path] = value
            self.has_inner_tensors |= depth > 0
        elif (
            isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.flags.writeable
        ):
            self.tensors[path] = torch.from_numpy(value)
        elif self._is_shallow or isinstance(value, _PLAIN):
            return
        elif depth < _MAX_DEPTH and self._is_new(value, seen):
            self._enter(value, path, seen, depth + 1)

    def _enter(self, value: Any, path: str, seen: set[int], depth: int) -> None:
        if type(value) in CONTAINERS or isinstance(value, tuple):
            if not isinstance(value, tuple):
                self.containers.append((value, value.copy()))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in [*items] if len(value) <= _MAX_ITEMS else ():
                self._visit(item, f"{path}[{key!r}]", seen, depth)
        elif generator_state(value) is not None:
            self.generators.append(value)
        elif isinstance(value, nn.Module) or is_of_user(value):
            if isinstance(value, nn.Module):
                self.held.append(f"{path}.")
            self._follow(value, path, seen, depth)


def names_of(owner: Any) -> tuple[Names, ...]:
    """Return the dictionaries of names of an object, of a module with parameters and buffers."""
    if not isinstance(owner, nn.Module):
        return (vars(owner),)
    attributes = vars(owner)
    # A scripted module has no dictionaries for them.
    of_kinds = (attributes.get(kind) for kind in ("_parameters", "_buffers", "_modules"))
    return (attributes, *(names if isinstance(names, dict) else {} for names in of_kinds))


def is_state(name: str) -> bool:
    """Return whether an attribute is one of the user's own, or the mode of a module."""
    return name not in _OF_EVERY_MODULE and not str(name).startswith(_OF_THIS_PACKAGE)


def is_of_user(value: Any) -> bool:
    """Return whether an object is of a class that is not one of a library's."""
    package = type(value).__module__.partition(".")[0]
    return package not in _LIBRARIES and not isinstance(value, _CODE) and hasattr(value, "__dict__")


def _identities(names: Iterable[Names]) -> list[int]:
    return [*map(id, itertools.chain.from_iterable(map(dict.values, names)))]


def has_values(tensor: Tensor) -> bool:
    """Return whether the values of a tensor can be read and written as bytes of one storage.

    Predictions follow the same tensors without values.
    """
    return (
        (type(tensor) in (Tensor, nn.Parameter) or is_fake(tensor))
        and is_plain(tensor)
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


class Snapshot:
    """Present bindings and contents of containers, and copies of the values of some tensors.

    `restore` gives the same objects the same contents, and the same values in the same memory:
    whoever holds one of them, such as autograd, sees no other object.
    """

    __slots__ = ("_containers", "_found", "_generators", "_names", "_values")

    def __init__(self, found: Sequence[Reachable], tensors: Iterable[Tensor]) -> None:
        self._found = found
        self._names: list[tuple[Names, Names]] = []
        self._containers = [pair for each in found for pair in each.containers]
        self._generators = [(g, generator_state(g)) for each in found for g in each.generators]
        self._values = [Values(tensor) for tensor in tensors]

    def add(self, values: Iterable["Values"]) -> None:
        """Let more values be restored."""
        self._values += values

    def counted_tensors(self) -> list[Tensor]:
        """List the tensors with values here that have version counters."""
        return [v.tensor for v in self._values if not v.tensor.is_inference()]

    def replaced(self) -> "Snapshot":
        """Restore everything, and return what was there instead; may be called again."""
        now, pairs = Snapshot((), ()), [pair for each in self.changed() for pair in each.names]
        # First all that needs memory, which there may not be.
        with torch.no_grad():
            now._values = [Values(each.tensor) for each in self._values]
        now._names = [(names, dict(names)) for names, _ in pairs]
        now._containers = [(c, c.copy()) for c, _ in self._containers]
        now._generators = [(g, generator_state(g)) for g, _ in self._generators]
        for names, before in pairs:
            _bind(names, before)
        self._refill()
        return now

    def changed(self) -> list[Reachable]:
        """List the owners with other bindings or other contents by now."""
        return [each for each in self._found if each.has_changed()]

    def restore(self) -> None:
        """Restore everything."""
        for names, before in self._names:
            _bind(names, before)
        self._refill()

    def _refill(self) -> None:
        for container, items in self._containers:
            if not is_same(container, items):
                refill(container, items)
        for generator, state in self._generators:
            set_generator(generator, state)
        with torch.no_grad():
            for values in self._values:
                values.write()


class _OfGraph(weakref.ref[Tensor]):
    """A tensor with a graph, which must not live longer than the user lets it."""


def _alive(value: _OfGraph, otherwise: Any) -> Any:
    tensor = value()
    return otherwise if tensor is None else tensor


def _bind(names: Names, before: Names) -> None:
    before = {
        name: _alive(value, names.get(name)) if type(value) is _OfGraph else value
        for name, value in before.items()
    }
    if _identities((names,)) == _identities((before,)):
        return
    kept = {name: value for name, value in names.items() if not is_state(name)}
    names.clear()
    names.update({name: kept.pop(name, value) for name, value in before.items()})
    names.update(kept)


class Values:
    """A tensor, the memory that it has, and a copy of what stands there."""

    __slots__ = ("_alias", "_copy", "tensor")

    def __init__(
        self, tensor: Tensor, alias: Tensor | None = None, copy: Tensor | None = None
    ) -> None:
        self.tensor = tensor
        # `data` has a version counter of its own: writing there is no change for autograd.
        self._alias = tensor.data if alias is None else alias
        self._copy = once(self._alias).clone() if copy is None else copy

    def write(self) -> None:
        if not is_there(self.tensor, self._alias):
            self.tensor.data = self._alias
        with torch.inference_mode(self._alias.is_inference()):
            once(self._alias).copy_(self._copy)


def is_there(tensor: Tensor, alias: Tensor) -> bool:
    """Return whether a tensor is where an alias of it was made."""
    return (
        tensor.untyped_storage()._cdata == alias.untyped_storage()._cdata
        and tensor.storage_offset() == alias.storage_offset()
        and tensor.shape == alias.shape
        and tensor.stride() == alias.stride()
        and tensor.dtype == alias.dtype
    )


def fingerprints(tensors: Iterable[Tensor]) -> list[int]:
    """Return a number for the bytes of each tensor; waits for the device once.

    It differs if one element does, or two are exchanged: sums of rows and of columns of the bytes,
    as whole numbers, with odd weights.
    """
    with torch.no_grad(), _disable_current_modes():
        found = [_fingerprint(tensor) for tensor in tensors]
        by_device: dict[torch.device, list[int]] = {}
        for number, each in enumerate(found):
            by_device.setdefault(each.device, []).append(number)
        numbers = [0] * len(found)
        for places in by_device.values():
            together = torch.stack([found[place] for place in places]).tolist()
            for place, value in zip(places, together, strict=True):
                numbers[place] = value
    return numbers


_ROW = 4096


def _fingerprint(tensor: Tensor) -> Tensor:
    row = bytes_of(tensor)
    if row.storage_offset() % 8:
        row = row.clone()
    num_words = row.numel() // 8
    words, rest = row[: num_words * 8].view(torch.int64), row[num_words * 8 :].to(torch.int64)
    num_rows = num_words // _ROW
    table, tail = words[: num_rows * _ROW].view(num_rows, _ROW), words[num_rows * _ROW :]
    sums = [table.sum(0), table.sum(1), tail, rest]
    parts = [(each * _weights(each)).sum() for each in sums]
    return (torch.stack(parts) * _weights(torch.stack(parts))).sum()


def _weights(like: Tensor) -> Tensor:
    return torch.arange(1, 2 * like.numel() + 1, 2, device=like.device) * 0x2545F4914F6CDD1D


def host_copies_of(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Copy values to the host; no measurement of the device counts them."""
    with torch.no_grad(), _disable_current_modes():
        for tensor in tensors:
            values = once(tensor.detach())
            yield values.to("cpu", copy=True)


def is_without_values(tensor: Tensor) -> bool:
    """Return whether a tensor stands for one in a prediction."""
    return is_fake(tensor) or tensor.is_meta
