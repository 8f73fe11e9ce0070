"""Replace a method on one object, reversibly, so that deepcopy and pickle keep working.

The replacement is a ``MethodType`` of a module-level function whose name is the method's name:
``deepcopy`` then binds the copy's method to the copy, and ``pickle`` stores the method by name,
so that a loaded object has the class's own method again. A closure would make copies run the
original's weights; a function of another name cannot be unpickled.
"""

import inspect
import threading
from collections.abc import Callable
from types import MethodType
from typing import Any

PROCESS_WIDE = threading.RLock()
"""Held during process-wide replacements: if two threads replaced the same attribute and restored it
in the order in which they began, it would stay replaced. A single lock, as replacements nest."""

_PREVIOUS = "_memsave_previous_{}"


def patch_method(owner: object, function: Callable[..., Any]) -> Callable[[], None]:
    """Replace the method of the same name by a function, on this object only.

    Args:
        owner: The object; its class and other instances are not touched.
        function: A module-level function whose first parameter is the object.

    Returns:
        A function that restores the former method; a second call does nothing. A method that was
        later set over the function stays, and continues to call it.

    Raises:
        ValueError: If ``function`` is a closure, which would break copies of ``owner``, or if the
            method is patched already.
    """
    name = function.__name__
    if getattr(function, "__closure__", None) is not None:
        raise ValueError(f"{function!r} is a closure: copies of the object would run the original")
    attributes = vars(owner)
    previous_key = _PREVIOUS.format(name)
    replaced = attributes.get(name)
    if getattr(replaced, "__func__", None) is getattr(type(owner), name):
        replaced = None  # the class's own method, as after unpickling a patched object
    elif previous_key in attributes:
        if _is_ours(replaced, name):
            raise ValueError(f"{type(owner).__name__}.{name} is patched already")
        return lambda: None  # a method that was set over the function still calls it
    is_static = isinstance(inspect.getattr_static(type(owner), name), staticmethod)
    attributes[previous_key] = getattr(type(owner), name) if is_static else replaced
    attributes[name] = MethodType(function, owner)

    def undo() -> None:
        if previous_key not in attributes or not is_patched_with(owner, function):
            return
        del attributes[previous_key]
        if replaced is None:
            attributes.pop(name, None)
        else:
            attributes[name] = replaced

    return undo


def unpatch(owner: object) -> None:
    """Undo all patches of an object, such as a copy of a patched one.

    Args:
        owner: Any object; methods that were later set over patches stay.
    """
    attributes = vars(owner)
    prefix = _PREVIOUS.format("")
    for key in [key for key in attributes if key.startswith(prefix)]:
        name, previous = key.removeprefix(prefix), attributes.pop(key)
        if not _is_ours(attributes.get(name), name):
            continue
        if previous is None or previous is getattr(type(owner), name, None):
            del attributes[name]
        else:
            attributes[name] = previous


def previous_method(owner: object, name: str) -> Callable[..., Any]:
    """Return the method that ``patch_method`` replaced, bound to the object.

    Args:
        owner: The patched object, or a copy of it.
        name: Name of the method.

    Returns:
        The method that the replacement should call.
    """
    replaced: Callable[..., Any] | None = vars(owner).get(_PREVIOUS.format(name))
    if replaced is not None:
        return replaced
    method: Callable[..., Any] = getattr(type(owner), name).__get__(owner)
    return method


def is_patched_with(owner: object, function: Callable[..., Any]) -> bool:
    """Return whether an object is patched with this function now."""
    return getattr(vars(owner).get(function.__name__), "__func__", None) is function


def _is_ours(method: object, name: str) -> bool:
    return isinstance(method, MethodType) and method.__func__.__name__ == name
