"""Replace a method on one object, reversibly, so that deepcopy and pickle keep working.

The replacement is a ``MethodType`` of a module-level function whose name is the method's name:
``deepcopy`` then binds the copy's method to the copy, and ``pickle`` stores the method by name,
so that a loaded object has the class's own method again. A closure would make copies run the
original's weights; a function of another name cannot be unpickled.
"""

import inspect
import threading
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

from torch import nn

PROCESS_WIDE = threading.RLock()
"""Held during process-wide replacements: if two threads replaced the same attribute and restored it
in the order in which they began, it would stay replaced. A single lock, as replacements nest."""

_OURS = "_memsave_"
BEFORE_COPIES = "_memsave_before_copies"
"""What `set_own` gives modules to call before they are copied or pickled."""
_NEEDS_IT = "memsave_needs_it"
_NUM_TECHNIQUES = "_memsave_num_techniques"
_PREVIOUS = "_memsave_previous_{}"
_INSIDE = "_memsave_inside_{}"  # what an outer replacement calls


def patch_method(
    owner: object, function: Callable[..., Any], *, is_outer: bool = False
) -> Callable[[], None]:
    """Replace the method of the same name by a function, on this object only."""
    name = function.__name__
    if getattr(function, "__closure__", None) is not None:
        raise ValueError(f"{function!r} is a closure: copies of the object would run the original")
    attributes = vars(owner)
    previous_key = (_INSIDE if is_outer else _PREVIOUS).format(name)
    place = name if is_outer else _place_inside(owner, name)
    replaced = attributes.get(place)
    if replaced is None or _is_own(owner, name, replaced):
        replaced = None  # the class's own method, as after unpickling a patched object
    elif previous_key in attributes:
        if _is_ours(replaced, name):
            raise ValueError(f"{type(owner).__name__}.{name} is patched already")
        return lambda: None  # a method that was set over the function still calls it
    is_static = isinstance(inspect.getattr_static(type(owner), name), staticmethod)
    attributes[previous_key] = getattr(type(owner), name) if is_static else replaced
    attributes[place] = MethodType(function, owner)

    def undo() -> None:
        place = name if is_outer else _place_inside(owner, name)
        if previous_key not in attributes or not _holds(owner, place, function):
            return
        # Of an outer one, what is inside now may be newer.
        before = attributes.pop(previous_key) if is_outer else replaced
        attributes.pop(previous_key, None)
        if before is None and place == name:
            attributes.pop(name, None)
        else:
            attributes[place] = before

    return undo


def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a replacement of the method of a name, which passes the name on to a function."""

    def call(
        owner: Any, *args: Any, _name: str = name, _function: Any = function, **rest: Any
    ) -> Any:
        return _function(owner, _name, *args, **rest)  # defaults: a closure would be refused

    call.__name__ = name
    return call


def keep_copies_plain(model: nn.Module) -> Callable[[], None]:
    """Let copies and pickles of a model, and of its modules, have nothing of this package.

    What a user copies in the middle of a fit, such as a teacher or an average, is an ordinary
    module: a technique can be applied to it, and it loads where this package is not installed.
    """
    modules = list(model.modules())
    for module in modules:
        set_own(module, _NUM_TECHNIQUES, (own(module, _NUM_TECHNIQUES) or 0) + 1)
        vars(module)["__getstate__"] = MethodType(__getstate__, module)
        if hasattr(type(module), "__deepcopy__"):  # which asks for no state; torch's parametrized
            vars(module)["__deepcopy__"] = MethodType(__deepcopy__, module)

    def undo() -> None:
        for module in modules:
            num = own(module, _NUM_TECHNIQUES) - 1
            set_own(module, _NUM_TECHNIQUES, num)
            if not num:
                del vars(module)[_NUM_TECHNIQUES], vars(module)["__getstate__"]
                vars(module).pop("__deepcopy__", None)

    return undo


def __getstate__(self: nn.Module) -> Any:  # noqa: N807 - named like the method that it replaces
    """Return what copies and pickles of a module get; replaces its ``__getstate__``."""
    if (before := own(self, BEFORE_COPIES)) is not None:
        before()
    state: Any = type(self).__getstate__(self)
    return _plain(self, state) if isinstance(state, dict) else state


def __deepcopy__(self: nn.Module, memo: dict[int, Any]) -> Any:  # noqa: N807 - as above
    """Return a deep copy of a module whose class makes it; replaces its ``__deepcopy__``."""
    if (before := own(self, BEFORE_COPIES)) is not None:
        before()
    copied: Any = type(self).__deepcopy__(self, memo)  # type: ignore[attr-defined]
    if copied is not self:
        copied.__dict__ = _plain(copied, vars(copied))
    return copied


def _plain(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    plain = {k: v for k, v in state.items() if not k.startswith(_OURS)}
    for name in ("__getstate__", "__deepcopy__"):
        plain.pop(name, None)
    for prefix in (_INSIDE.format(""), _PREVIOUS.format("")):
        for key in [key for key in state if key.startswith(prefix)]:
            name, previous = key.removeprefix(prefix), state[key]
            if not _is_ours(plain.get(name), name):
                continue
            if previous is None or previous is getattr(type(module), name, None):
                del plain[name]
            else:
                plain[name] = previous
    hooks = {k: v for k, v in plain.items() if "_hooks" in k and isinstance(v, dict)}
    # Other dictionaries have the keys of those with arguments by name.
    ours = {
        key
        for each in hooks.values()
        for key, hook in each.items()
        if is_of_this_package(hook) and not getattr(hook, _NEEDS_IT, lambda _: False)(module)
    }
    for name, each in hooks.items():
        plain[name] = type(each)((key, hook) for key, hook in each.items() if key not in ours)
    return plain


class _Own:
    """What belongs to one object: its copies, shallow ones too, and its pickles do not have it."""

    def __init__(self, owner: object, value: Any) -> None:
        # Not its `id`, which a later copy may have when it is gone.
        self.owner, self.value = weakref.ref(owner), value

    def __reduce__(self) -> tuple[type[set[Any]], tuple[()]]:
        return set, ()  # so that pickles need nothing of this package


def set_own(owner: object, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute that copies and pickles of an object do not have, in place of a registry."""
    vars(owner)[name] = _Own(owner, value)
    return lambda: vars(owner).pop(name, None)


def own(owner: object, name: str) -> Any:
    found = vars(owner).get(name)
    return found.value if isinstance(found, _Own) and found.owner() is owner else None


HookT = TypeVar("HookT", bound=Callable[..., Any])


def kept_in_copies(needs_it: Callable[[nn.Module], bool]) -> Callable[[HookT], HookT]:
    """Let copies keep a hook of modules that cannot compute without it."""

    def mark(hook: HookT) -> HookT:
        vars(hook)[_NEEDS_IT] = needs_it
        return hook

    return mark


def is_of_this_package(hook: Any) -> bool:
    """Return whether a hook is one of this package's own."""
    function = getattr(hook, "func", hook)  # of a partial one
    return str(getattr(function, "__module__", "")).startswith("lightning_memsave.")


def previous_method(owner: object, name: str, *, is_outer: bool = False) -> Callable[..., Any]:
    """Return the method that ``patch_method`` replaced, bound to the object."""
    key = (_INSIDE if is_outer else _PREVIOUS).format(name)
    replaced: Callable[..., Any] | None = vars(owner).get(key)
    if replaced is not None:
        return replaced
    method: Callable[..., Any] = getattr(type(owner), name).__get__(owner)
    return method


def has_foreign_method(owner: object, name: str) -> bool:
    """Return whether an object itself has a method of a name that others gave it."""
    places = (name, _PREVIOUS.format(name), _INSIDE.format(name))
    methods = [vars(owner).get(place) for place in places]
    return any(
        method is not None
        and method is not getattr(type(owner), name, None)
        and not _is_own(owner, name, method)
        and not is_of_this_package(method)
        for method in methods
    )


def is_patched_with(owner: object, function: Callable[..., Any]) -> bool:
    places = (function.__name__, _INSIDE.format(function.__name__))
    return any(_holds(owner, place, function) for place in places)


def _holds(owner: object, place: str, function: Callable[..., Any]) -> bool:
    return getattr(vars(owner).get(place), "__func__", None) is function


# The attribute that holds the method, or what an outer replacement calls.
def _place_inside(owner: object, name: str) -> str:
    inside = _INSIDE.format(name)
    has_outer = inside in vars(owner) and not _is_own(owner, name, vars(owner).get(name))
    return inside if has_outer else name


def _is_own(owner: object, name: str, method: object) -> bool:
    return getattr(method, "__func__", None) is getattr(type(owner), name)


def _is_ours(method: object, name: str) -> bool:
    return isinstance(method, MethodType) and method.__func__.__name__ == name
