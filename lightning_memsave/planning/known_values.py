"""Give training code on tensors without data the numbers that it asks for."""

import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from lightning_memsave.measure.storages import operands
from lightning_memsave.planning import _fake_kernels
from lightning_memsave.planning._asking_lines import asking_line, is_asked_by_scaler
from lightning_memsave.planning._unknown_shapes import largest_result

MAX_KNOWN_NUMEL = 2**20
MAX_ASKED = 10_000
"""A line that has guessed more often than that waits for an answer that does not come."""
_VALUE = "_memsave_value"
# On a storage of such numbers: they were replaced by unknown ones, through some view of it.
_STALE = "_memsave_stale"
_RANDOM = "_memsave_random"

aten = torch.ops.aten


class KnownValues(TorchDispatchMode):
    """Computes, beside tensors without data, the small ones that follow from the batch alone.

    A mask of padding, the number of labels that count, positions: what a model computes from token
    ids and asks for in Python, or what decides about the shape of a tensor, is what it would be in
    the real step. What depends on weights or random numbers is guessed - a condition holds, all
    elements are chosen - and noted in ``guesses``; so is what depends on `mark_random` numbers.

    Args:
        mode: The mode under which the tensors without data are made; entered already.
    """

    supports_higher_order_operators = True

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode
        self._num_asked: Counter[str] = Counter()

    @property
    def guesses(self) -> list[str]:
        """What was guessed so far and where, each once."""
        return list(self._num_asked)

    @property
    def most_asked(self) -> str:
        """Of the guesses the one that was asked for most often, and how often; else empty."""
        return next((f"{guess} ({n:,} times)" for guess, n in self._num_asked.most_common(1)), "")

    def make(self, tensor: Tensor) -> Tensor:
        """Make a tensor without data, and remember its numbers if they are integers and few.

        Args:
            tensor: A real one.

        Returns:
            One of the same shape, strides, type and device.
        """
        original = tensor
        with _disable_current_modes():
            tensor = tensor.detach()
            is_kept = not tensor.is_floating_point() and tensor.numel() <= MAX_KNOWN_NUMEL
            # A copy: steps may change their batch in place.
            value = _copy(original) if is_kept else None
        fake = self.mode.from_tensor(tensor, static_shapes=True)
        if value is not None:
            setattr(fake, _VALUE, value)
        return fake

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [*operands(args), *operands(kwargs.values())]
        # What Python numbers are made into is known.
        is_constant = func is aten.lift_fresh.default and not isinstance(args[0], FakeTensor)
        is_known = is_constant or all(_value_of(tensor) is not None for tensor in inputs)
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return self._scalar(args[0])
        if _is_composite(func):
            # Its parts must come here too: what they ask for may be known.
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        result = self._run(func, args, kwargs, is_known=is_known)
        if is_known and _is_computable(func, result):
            self._compute(func, args, kwargs, result)
        elif func._schema.is_mutable:
            _forget(func, args, kwargs)
        return result

    def _run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_known: bool
    ) -> Any:
        if func is aten.index.Tensor:
            args = (args[0], self._without_masks(args[1]))
        try:
            return _fake_kernels.run(func, args, kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            result = self._of_unknown_shape(func, args, kwargs, is_known=is_known)
            if result is NotImplemented:
                raise
            return result

    def _scalar(self, tensor: Tensor) -> bool | int | float:
        value = _value_of(tensor)
        if value is not None:
            self._note_random(tensor)
            with _disable_current_modes():
                known: bool | int | float = value.item()
                return known
        if tensor.dtype is torch.bool:
            self._guess("a condition on data was taken as true")
            return True
        if is_asked_by_scaler():
            return 0.0  # no gradient overflows, so that the optimizer steps
        self._guess("a number that depends on data was taken as 1")
        return 1.0 if tensor.is_floating_point() else 1

    # Indexing with a mask chooses as many elements as the mask has; fake tensors cannot say.
    def _without_masks(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                found.append(index)
                continue
            is_known = _value_of(index) is not None
            places = self._of_unknown_shape(aten.nonzero.default, (index,), {}, is_known=is_known)
            found += [aten.select.int(places, 1, axis) for axis in range(index.ndim)]
        return found

    def _of_unknown_shape(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_known: bool
    ) -> Any:
        if is_known:
            self._note_random(args, kwargs)
            with _disable_current_modes():
                real = func(*_values(args), **_values(kwargs))
            return tree_map_only(Tensor, self.make, real)
        if func is aten.masked_select.default and (mask := _value_of(args[1])) is not None:
            self._note_random(args[1])
            with _disable_current_modes():
                shape = torch.broadcast_shapes(args[0].shape, mask.shape)
                num_chosen = int(mask.expand(shape).sum())
            return args[0].new_empty(num_chosen)
        result = largest_result(func, args, kwargs)
        if result is not NotImplemented:
            self._guess(f"`{func}` was taken to choose everything")
        return result

    @staticmethod
    def _compute(func: Any, args: Any, kwargs: Any, result: Any) -> None:
        with _disable_current_modes():
            real = func(*_values(args), **_values(kwargs))
        fakes, reals = tree_leaves(result), tree_leaves(real)
        if _is_random(args, kwargs):
            for value in reals:
                mark_random(value)
        for fake, value in zip(fakes, reals, strict=True):
            # What was changed in place has its numbers, which were changed in place too.
            if isinstance(fake, FakeTensor) and not hasattr(fake, _VALUE):
                setattr(fake, _VALUE, value)

    def _note_random(self, *arguments: Any) -> None:
        if _is_random(*arguments):
            self._guess("depends on integers of the batch, which are random ones", math.inf)

    def _guess(self, what: str, limit: float | None = None) -> None:
        where = asking_line()
        if where is None:
            return
        guess = f"{where}: {what}"
        self._num_asked[guess] += 1
        if self._num_asked[guess] > (limit or MAX_ASKED):
            raise TimeoutError(
                f"{guess}, {MAX_ASKED:,} times: a loop that waits for other data never ends on "
                "tensors without data. Give the loop a largest number of rounds"
            )


def _value_of(tensor: Tensor) -> Tensor | None:
    value: Tensor | None = getattr(tensor, _VALUE, None)
    if value is None or hasattr(value.untyped_storage(), _STALE):
        return None
    return value


def _forget(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed = args[index] if index < len(args) else kwargs.get(argument.name)
            for tensor in operands((changed,)):
                value = _value_of(tensor)
                if value is not None:
                    setattr(value.untyped_storage(), _STALE, True)


def mark_random(value: Any) -> None:
    """Let it be known that nobody has these numbers: they stand for those of a real batch.

    Args:
        value: A tensor with data; anything else has no numbers.
    """
    if isinstance(value, Tensor):
        setattr(value, _RANDOM, True)


def _is_random(*arguments: Any) -> bool:
    return any(hasattr(leaf, _RANDOM) for leaf in tree_leaves(_values(arguments)))


def _copy(value: Tensor) -> Tensor:
    copy = value.detach().clone()
    if hasattr(value, _RANDOM):
        mark_random(copy)
    return copy


def know_as(tensor: Tensor, other: Tensor) -> Tensor:
    """Let a tensor without data have the numbers of another one.

    Args:
        tensor: The one.
        other: The other, with numbers or without.

    Returns:
        The first.
    """
    value = _value_of(other)
    if value is not None:
        with _disable_current_modes():
            setattr(tensor, _VALUE, _copy(value))
    return tensor


# What has data in code that runs on tensors without is what it has just written down itself.
def _is_known(tensor: Tensor) -> bool:
    return hasattr(tensor, _VALUE) or not isinstance(tensor, FakeTensor)


def _is_computable(func: Any, result: Any) -> bool:
    # What is empty has no numbers yet.
    if torch.Tag.nondeterministic_seeded in func.tags or "empty" in func._schema.name:
        return False
    if result is None and func._schema.is_mutable:
        return True  # it changed lists of tensors, such as the numbers of steps of an optimizer
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return bool(tensors) and all(
        isinstance(t, FakeTensor) and t.numel() <= MAX_KNOWN_NUMEL for t in tensors
    )


@functools.cache
def _is_composite(func: Any) -> bool:
    if not isinstance(func, torch._ops.OpOverload) or func.namespace == "prim":
        return False
    key = "CompositeImplicitAutograd"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))


def _values(arguments: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: getattr(tensor, _VALUE, tensor), arguments)
