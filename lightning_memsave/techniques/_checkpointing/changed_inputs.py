"""Arguments that a forward pass changes in place, as they were for its recomputation."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_memsave.errors import IncompatibleError, Problem

_IMMUTABLE = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size)

# Modules whose inputs were seen to change in place, and those whose were not.
_CHANGING: WeakSet[nn.Module] = WeakSet()
_CONSTANT: WeakSet[nn.Module] = WeakSet()


class Call:
    """A call of a function that gives the same result again, though it changes its arguments.

    Lists, dictionaries and objects are copied shallowly before the call. Tensors are copied where
    the module is known to change its inputs in place, and in its first call, to find that out.

    Args:
        run: The function.
        module: What it runs, for what is remembered from call to call.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._run, self._module = run, module
        self._first: tuple[Any, Any] | None = (tuple(args), dict(kwargs))
        leaves, self._structure = tree_flatten(self._first)
        # One that comes twice comes twice again: torch's attention asks whether query is key.
        unique = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        places = {key: _Place(index) for index, key in enumerate(unique)}
        self._inputs = list(unique.values())
        self._versions = [_version(tensor) for tensor in self._inputs]
        # Tensors are not kept here: `checkpoint` keeps them, and hooks may move them elsewhere.
        self._others = [
            places[id(leaf)] if isinstance(leaf, Tensor) else _shallow_copy(leaf) for leaf in leaves
        ]
        self._is_copied = module not in _CONSTANT
        self.tensors = [t.clone() for t in self._inputs] if self._is_copied else self._inputs
        """What to pass to ``checkpoint``: the tensors, or copies of them."""
        if not self.tensors:
            # From an argument, torch learns of which device to save the random state.
            device = next((p.device for p in module.parameters()), None)
            self.tensors = [torch.empty(0, device=device)]

    def __call__(self, *tensors: Tensor) -> Any:
        if self._first is not None:
            (args, kwargs), self._first = self._first, None
            return self._run(*args, **kwargs)
        # Objects are copied again because a graph can be gone through twice. Tensors are not: torch
        # refuses the second time if the first one changed them.
        leaves = [
            tensors[other.index] if isinstance(other, _Place) else _shallow_copy(other)
            for other in self._others
        ]
        args, kwargs = tree_unflatten(leaves, self._structure)
        return self._run(*args, **kwargs)

    def learn(self) -> None:
        """Find out, after the first run, whether tensors were changed in place.

        Raises:
            IncompatibleError: If they were for the first time only now, so that there is no copy.
        """
        is_changed = [_version(tensor) for tensor in self._inputs] != self._versions
        if is_changed and not self._is_copied:
            name = type(self._module).__name__
            raise IncompatibleError("activation_checkpointing", [_changes_late(name)])
        if is_changed:
            _CHANGING.add(self._module)
        elif self._module not in _CHANGING:
            _CONSTANT.add(self._module)
        self._inputs, self.tensors = [], []


@dataclass(frozen=True, slots=True)
class _Place:
    """Of a tensor among those that are passed to ``checkpoint``."""

    index: int


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _shallow_copy(value: Any) -> Any:
    if isinstance(value, (*_IMMUTABLE, nn.Module, type)) or callable(value):
        return value
    try:
        return copy.copy(value)
    except TypeError:  # a lock, a process group: nothing that a forward pass would change
        return value


def _changes_late(name: str) -> Problem:
    return Problem(
        f"a block of class `{name}`",
        "it changed its input in place, which it had not done before, so that it cannot be "
        "recomputed",
        "Write `x = x + y` in place of `x += y` there, or leave these blocks out with `blocks=`.",
    )
