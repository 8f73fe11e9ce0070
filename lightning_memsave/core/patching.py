"""Replace a method on one object, reversibly, so that deepcopy and pickle keep working.

The replacement is a ``MethodType`` of a module-level function whose name is the method's name:
``deepcopy`` then binds the copy's method to the copy, and ``pickle`` stores the method by name,
so that a loaded object simply has the class's own method again. A closure would make copies run
the original's weights; a function of another name cannot be unpickled.
"""

import inspect
import threading
from collections.abc import Callable
from types import MethodType
from typing import Any

PROCESS_WIDE = threading.RLock()
"""Held while something is replaced for the whole process: what two threads replace at once, and put
back in the order in which they began, would stay replaced. One for all, as they are nested."""

_PREVIOUS = "_memsave_previous_{}"


def patch_method(owner: object, function: Callable[..., Any]) -> Callable[[], None]:
    """Put a function in place of the method of the same name, on this object alone.

    Args:
        owner: The object; its class and other instances are not touched.
        function: A module-level function whose first parameter is the object.

    Returns:
        A function that restores what was there before; a second call does nothing. A method that
        somebody has put over ours stays, and goes on calling it.

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
        replaced = None  # the class's own method, which is what unpickling a patched object leaves
    elif previous_key in attributes:
        if _is_ours(replaced, name):
            raise ValueError(f"{type(owner).__name__}.{name} is patched already")
        return lambda: None  # what somebody has put over ours still calls it
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
    """Take all replacements off an object, such as a copy of one that is patched.

    Args:
        owner: Any object; what was there before our replacements is there again, and what somebody
            else has put over them stays.
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
    """Find what ``patch_method`` replaced, bound to the object.

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
    """Say whether the object's method is this function.

    Args:
        owner: Any object.
        function: What ``patch_method`` was given.

    Returns:
        True if it is in place now.
    """
    return getattr(vars(owner).get(function.__name__), "__func__", None) is function


def _is_ours(method: object, name: str) -> bool:
    return isinstance(method, MethodType) and method.__func__.__name__ == name
