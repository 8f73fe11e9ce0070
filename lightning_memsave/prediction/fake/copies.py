"""Deep-copy modules and batches for simulation: share large data, replace locks and files."""

import collections
import copy
import copyreg
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memsave.core.clock import processor_time_s
from lightning_memsave.core.nested import items_of
from lightning_memsave.trainer.nested_fit import raise_if_interrupted

MAX_COPIED_ITEMS = 1000
"""Items of longer containers are shared, such as those of a replay buffer."""
MAX_COPIED_BYTES = 2**20
"""Larger numpy arrays are shared, as read-only views."""

_UNCHANGED = (
    *(type(None), bool, int, float, complex, str, bytes, range, type, type(...)),
    *(types.ModuleType, types.CodeType, torch.dtype, torch.device, torch.Generator, weakref.ref),
)
_CONTAINERS = (list, dict, set, frozenset, collections.deque)
# Copies of their objects would block on threads, processes or sockets.
_BLOCKING_PACKAGES = {
    *("threading", "_thread", "queue", "_queue", "multiprocessing", "concurrent", "asyncio"),
    *("subprocess", "socket", "ssl", "sqlite3", "tempfile"),
}
_ORIGINALS = "_memsave_originals"
_EMPTY: Any = object()


class Copier:
    """Makes a deep copy with new tensors that shares large data with the original.

    Everything that steps may change is copied: modules, small containers, objects of Python
    classes. Objects with data outside of Python, such as tokenizers and tables, are shared. Locks,
    open files and connections are replaced by a `StandIn`.
    """

    def __init__(
        self,
        make_tensor: Callable[[Tensor], Tensor],
        memo: dict[int, Any],
        deadline_s: float,
        max_items: int = MAX_COPIED_ITEMS,
    ) -> None:
        self._make_tensor = make_tensor
        self._memo = memo
        self._deadline_s = deadline_s
        self._max_items = max_items
        self._kept: list[Any] = []  # keeps originals alive, so that their ids stay unique

    def __call__(self, value: Any) -> Any:
        if isinstance(value, _UNCHANGED):
            return value
        if id(value) not in self._memo:
            raise_if_interrupted()
            if processor_time_s() > self._deadline_s:
                raise TimeoutError("copying the module takes longer than allowed")
            self._kept.append(value)
            self._memo[id(value)] = self._copy(value)
        return self._memo[id(value)]

    def _copy(self, value: Any) -> Any:
        makers: tuple[tuple[type, Callable[[Any], Any]], ...] = (
            (Tensor, self._tensor),
            (tuple, self._tuple),
            (types.FunctionType, self._function),
            (types.MethodType, self._method),
            (types.BuiltinFunctionType, self._builtin),
        )
        for kind, make in makers:
            if isinstance(value, kind):
                return make(value)
        return self._object(value)

    def _tensor(self, tensor: Tensor) -> Tensor:
        copied = self._memo[id(tensor)] = self._make_tensor(tensor)
        for name, value in vars(tensor).items():  # such as the scales of a quantized weight
            if name not in vars(copied):
                setattr(copied, name, self(value))
        if isinstance(tensor, nn.Parameter):
            setattr(copied, _ORIGINALS, (id(tensor), *originals_of(tensor)))
        return copied

    def _tuple(self, value: Any) -> Any:
        items = [self(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)

    def _method(self, method: types.MethodType) -> types.MethodType:
        return types.MethodType(self(method.__func__), self(method.__self__))

    def _builtin(self, function: Any) -> Any:
        owner = self(function.__self__)
        return function if owner is function.__self__ else getattr(owner, function.__name__)

    # With its closure: a hook that refers to `self` must refer to the copy.
    def _function(self, function: types.FunctionType) -> types.FunctionType:
        if not function.__closure__ and not function.__defaults__:
            return function
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        copied = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, closure=cells or None
        )
        self._memo[id(function)] = copied
        for cell, original in zip(cells, function.__closure__ or (), strict=True):
            content = _content_of(original)
            if content is not _EMPTY:
                cell.cell_contents = self(content)
        copied.__defaults__ = self(function.__defaults__)
        copied.__kwdefaults__ = self(function.__kwdefaults__)
        copied.__qualname__ = function.__qualname__
        copied.__dict__.update(function.__dict__)
        return copied

    def _object(self, value: Any) -> Any:
        cls = type(value)
        package = cls.__module__.partition(".")[0]
        is_module = isinstance(value, nn.Module)
        if not is_module and (package in _BLOCKING_PACKAGES or hasattr(cls, "__del__")):
            return StandIn()
        if package == "numpy" and getattr(value, "nbytes", 0) > MAX_COPIED_BYTES:
            return _read_only(value)
        if _has_data_outside_of_python(value):
            return value
        try:
            if package == "numpy" or (is_module and hasattr(cls, "__deepcopy__")):
                return copy.deepcopy(value, self._memo)
            reduced = value.__reduce_ex__(4)
        except Exception:
            if is_module:
                raise
            return StandIn()
        return value if isinstance(reduced, str) else self._reconstruct(value, reduced)

    def _reconstruct(self, value: Any, reduced: tuple[Any, ...]) -> Any:
        make, args, state, items, pairs = (*reduced, None, None, None)[:5]
        is_long = isinstance(value, _CONTAINERS) and len(value) > self._max_items
        each = self._shared_item if is_long else self
        copied: Any
        if isinstance(value, set | frozenset):
            copied = type(value)(each(item) for item in value)
        else:
            copied = make(*(self(argument) for argument in args))
        self._memo[id(value)] = copied
        for item in items or ():
            copied.append(each(item))
        for key, item in pairs or ():
            copied[each(key)] = each(item)
        if state is not None:
            _set_state(copied, self(state))
        return copied

    # In a long container only modules and their parameters (copied already) are replaced.
    def _shared_item(self, value: Any) -> Any:
        return self(value) if isinstance(value, nn.Module) else self._memo.get(id(value), value)


class StandIn:
    """Replaces what cannot be copied, such as a lock or an open file; calls do nothing."""

    def __getattr__(self, name: str) -> "StandIn":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: object, **kwargs: object) -> None:
        """Do nothing."""

    def __enter__(self) -> "StandIn":
        return self

    def __exit__(self, *error: object) -> None:
        pass


def originals_of(parameter: Tensor) -> tuple[int, ...]:
    """Return the ids of the parameters that this one was copied from, directly or not."""
    ids: tuple[int, ...] = getattr(parameter, _ORIGINALS, ())
    return ids


def keep_originals(parameter: Tensor, converted: Tensor) -> None:
    setattr(converted, _ORIGINALS, originals_of(parameter))


def with_parameters_of(module: nn.Module, configured: Any) -> Any:
    memo: dict[int, Any] = {
        original: p for p in module.parameters() for original in originals_of(p)
    }
    optimizers = list(_optimizers_in(configured))
    parameters = (p for o in optimizers for group in o.param_groups for p in group["params"])
    if not any(id(parameter) in memo for parameter in parameters):
        return configured
    memo |= {id(parameter): parameter for parameter in module.parameters()}
    memo |= {id(o.state): collections.defaultdict(dict) for o in optimizers}
    return Copier(lambda tensor: tensor, memo, float("inf"))(configured)


def _optimizers_in(value: Any) -> Iterator[Optimizer]:
    if isinstance(value, Optimizer):
        yield value
    for _, item in items_of(value):
        yield from _optimizers_in(item)


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _EMPTY


def _read_only(array: Any) -> Any:
    view = array.view()
    view.flags.writeable = False
    return view


# Iterators are not shared: using the copy would advance the original.
def _has_data_outside_of_python(value: Any) -> bool:
    cls = type(value)
    if isinstance(value, _CONTAINERS) or hasattr(value, "__dict__") or hasattr(cls, "__next__"):
        return False
    own = ("__reduce_ex__", "__reduce__", "__getstate__")
    is_reduced_by_itself = (
        any(getattr(cls, name) is not getattr(object, name) for name in own)
        or hasattr(cls, "__deepcopy__")
        or cls in copyreg.dispatch_table
    )
    is_pythons = hasattr(cls, "__slots__")
    return is_reduced_by_itself and not is_pythons and cls.__module__.partition(".")[0] != "numpy"


def _set_state(copied: Any, state: Any) -> None:
    if hasattr(copied, "__setstate__"):
        copied.__setstate__(state)
        return
    attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, {})
    if attributes:
        vars(copied).update(attributes)
    for name, value in (slots or {}).items():
        object.__setattr__(copied, name, value)
