"""Find code that reads gradients, without running it."""

import contextlib
import dis
import functools
import inspect
import itertools
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

_READERS = {"grad", "grad_norm", "clip_grad_norm_", "clip_grad_value_"}
_LOADS = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME"}
_NOT_SEARCHED = ("torch", "lightning", "lightning_fabric", "pytorch_lightning", "lightning_memsave")
_MAX_FUNCTIONS, _MAX_DEPTH, _MAX_ELEMENTS = 200, 4, 4
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, functools.partial)


def reads_gradients(function: Any, *objects: Any) -> bool:
    """Return whether the code of a function, or of a function that it calls, loads ``.grad``.

    Called functions are found by name: among globals, in closures, and in the attributes of the
    owner of a method and of ``objects``. Code of torch and Lightning is not searched.
    """
    seen: set[CodeType] = set()
    waiting = [function]
    while waiting and len(seen) < _MAX_FUNCTIONS:
        owner, plain = _plain(waiting.pop(0))
        if plain is None or plain.__code__ in seen:
            continue
        seen.add(plain.__code__)
        codes = list(_codes_in(plain.__code__))
        if any(map(_loads_gradient, codes)):
            return True
        names = list(dict.fromkeys(name for code in codes for name in code.co_names))
        found = [plain.__globals__[name] for name in names if name in plain.__globals__]
        waiting += _callables((owner, *objects, *_cells_of(plain), *found), names)
    return False


def _plain(function: Any) -> tuple[Any, FunctionType | None]:
    """Return the owner of a method, and the function that is searched, if any."""
    if isinstance(function, functools.partial):
        return _plain(function.func)
    owner, function = getattr(function, "__self__", None), getattr(function, "__func__", function)
    if isinstance(function, type):
        owner, function = function, function.__init__  # type: ignore[misc]
    elif not isinstance(function, FunctionType):
        owner, function = function, _class_attribute(type(function), "__call__")
    function = inspect.unwrap(function) if function is not None else None
    package = (getattr(function, "__module__", None) or "").partition(".")[0]
    is_searched = isinstance(function, FunctionType) and package not in _NOT_SEARCHED
    return owner, function if is_searched else None


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _codes_in(value)


def _loads_gradient(code: CodeType) -> bool:
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    return "grad" in code.co_consts or any(
        step.opname in _LOADS and step.argval in _READERS and before.argval != "autograd"
        for before, step in itertools.pairwise(steps)
    )


def _cells_of(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _callables(objects: Iterable[Any], names: list[str]) -> list[Any]:
    """Find functions and classes under these names in objects, their attributes and elements."""
    level = list(objects)
    reached: dict[int, Any] = {id(one): one for one in level}
    for _ in range(_MAX_DEPTH):
        values = [part for one in level for name in names for part in _parts(_attribute(one, name))]
        new = {id(value): value for value in values if id(value) not in reached}
        reached |= new
        level = [value for value in new.values() if not isinstance(value, _FUNCTIONS)]
    # Whether an object with `__call__` is called, or only its attributes are used, is not known.
    return [one for one in reached.values() if isinstance(one, (*_FUNCTIONS, type))]


def _parts(value: Any) -> list[Any]:
    elements: Iterable[Any] = ()
    if isinstance(value, list | tuple | nn.ModuleList | nn.Sequential):
        elements = value
    elif isinstance(value, dict | nn.ModuleDict):
        elements = value.values()
    return [value, *itertools.islice(elements, _MAX_ELEMENTS)]


def _attribute(one: Any, name: str) -> Any:
    """Return an attribute without running code of properties; of those the function."""
    if isinstance(one, Tensor) or not hasattr(one, "__dict__"):
        return None
    if isinstance(one, type):
        return _class_attribute(one, name)
    if name in vars(one):
        return vars(one)[name]
    static = _class_attribute(type(one), name)
    function = static.fget if isinstance(static, property) else static
    if isinstance(function, FunctionType):
        return MethodType(function, one)
    if static is not None or not isinstance(one, nn.Module):
        return static
    with contextlib.suppress(Exception):
        return getattr(one, name)  # a submodule, or an attribute that a wrapper passes on


def _class_attribute(cls: Any, name: str) -> Any:
    found = next((vars(c)[name] for c in getattr(cls, "__mro__", ()) if name in vars(c)), None)
    return found.__func__ if isinstance(found, staticmethod | classmethod) else found
