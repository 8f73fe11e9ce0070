"""Compute the values that training code on fake tensors reads."""

import functools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from lightning_memsave.measure.storages import operands
from lightning_memsave.prediction.fake import kernels as _fake_kernels

aten = torch.ops.aten


def packed_sequence(tensor: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    sizes = [sum(length > step for length in lengths) for step in range(max(lengths))]
    packed = tensor.new_empty((sum(sizes), *tensor.shape[2:]))
    with _disable_current_modes():
        return packed, torch.tensor(sizes)


def padded_sequence(
    data: Tensor,
    batch_sizes: Tensor,
    is_batch_first: bool,
    padding: float,
    total_length: int,
) -> tuple[Tensor, Tensor]:
    """Pad sequences as ``_pad_packed_sequence`` does, without reading the input's memory."""
    sizes = batch_sizes.tolist()
    shape = (max(total_length, len(sizes)), sizes[0], *data.shape[1:])
    padded = data.new_full(shape, padding)
    start = offset = 0
    for end in range(1, len(sizes) + 1):
        size = sizes[start]
        if end == len(sizes) or sizes[end] != size:
            part = data.narrow(0, offset, size * (end - start))
            rows = part.view(end - start, size, *data.shape[1:])
            padded.narrow(0, start, end - start).narrow(1, 0, size).copy_(rows)
            offset, start = offset + size * (end - start), end
    lengths = torch.tensor([sum(size > i for size in sizes) for i in range(sizes[0])])
    return padded.transpose(0, 1) if is_batch_first else padded, lengths


def _masked_select(tensor: Tensor, mask: Tensor) -> Tensor:
    return tensor.new_empty(torch.broadcast_shapes(tensor.shape, mask.shape).numel())


def _bincount(tensor: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    dtype = torch.int64 if weights is None else weights.dtype
    return tensor.new_empty(max(minlength, 1), dtype=dtype)


def _unique(tensor: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    def indices() -> Tensor:
        return tensor.new_empty(tensor.numel(), dtype=torch.int64)

    return tensor.new_empty(tensor.numel()), indices().view(tensor.shape), indices()


def _unique_dim(
    tensor: Tensor, dim: int, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor, Tensor]:
    def indices() -> Tensor:
        return tensor.new_empty(tensor.shape[dim], dtype=torch.int64)

    return tensor.new_empty(tensor.shape), indices(), indices()


# By operator that selects elements: the largest possible result.
LARGEST: dict[Any, Callable[..., Any]] = {
    aten.nonzero.default: lambda t: t.new_empty((t.numel(), t.ndim), dtype=torch.int64),
    aten.masked_select.default: _masked_select,
    aten.bincount.default: _bincount,
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique,
    aten.unique_dim.default: _unique_dim,
}


# Packages whose branches do not affect memory: they log, count and update.
_NOT_REPORTED = (
    *("torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fabric"),
    *("lightning_utilities", "lightning_memsave"),
)


def is_called_by_scaler() -> bool:
    """Return whether a ``GradScaler`` reads the value, not an optimizer that it calls."""
    for _, name in _callers():
        if name == "torch.amp.grad_scaler" or name.startswith("torch.optim."):
            return name == "torch.amp.grad_scaler"
    return False


def _callers() -> Iterator[tuple[FrameType, str]]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame, str(frame.f_globals.get("__name__", ""))
        frame = frame.f_back


def calling_line() -> str | None:
    for frame, name in _callers():
        package = name.partition(".")[0]
        # The optimizer's next operations may depend on it, such as another closure call.
        if package == "torch" and isinstance(frame.f_locals.get("self"), torch.optim.Optimizer):
            return f"{name}, line {frame.f_lineno}"
        if package not in ("torch", "lightning_memsave", "contextlib"):
            if package in _NOT_REPORTED:
                return None
            return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
    return None


MAX_KNOWN_NUMEL = 2**20
MAX_ASKED = 10_000
"""After this many guesses, a line is assumed to be in a loop that waits for another value."""
_VALUE = "_memsave_value"
# Set on the storage of known values after an in-place change with unknown ones, through any view.
_STALE = "_memsave_stale"
_RANDOM = "_memsave_random"
_DRAWN = 0.5
_WITH_DATA = (Tensor, nn.Parameter)


class KnownValues(TorchDispatchMode):
    """Computes the values of small tensors that depend on the batch alone, beside the fake ones.

    Padding masks, the number of valid labels, positions: what a model computes from token ids and
    reads in Python, or uses as a shape, has the value of the real step. Values that depend on
    weights or random numbers are guessed (conditions are true, all elements are selected, a single
    uniform random number is 0.5) and listed in ``guesses``, as are those that depend on values
    marked by `mark_placeholder`.
    """

    supports_higher_order_operators = True

    # Torch guards each call against its compiler, which does not run here.
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode
        self._num_asked: Counter[str] = Counter()
        self._shared: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()

    @property
    def guesses(self) -> tuple[str, ...]:
        return tuple(self._num_asked)

    @property
    def most_asked(self) -> str:
        return next((f"{guess} ({n:,} times)" for guess, n in self._num_asked.most_common(1)), "")

    def make(self, tensor: Tensor) -> Tensor:
        original = tensor
        with _disable_current_modes():
            tensor = tensor.detach()
            # Steps may change their batch in place.
            value = _copy(original) if is_kept(tensor) else None
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
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        kwargs = kwargs or {}
        if "device" in kwargs:
            _refuse_missing_gpu(kwargs["device"])
        inputs = [*operands(args), *operands(kwargs.values())]
        # Tensors made from Python numbers are known.
        is_constant = func is aten.lift_fresh.default and not isinstance(args[0], FakeTensor)
        if not is_constant and any(type(tensor) in _WITH_DATA for tensor in inputs):
            args, kwargs = tree_map_only(_WITH_DATA, self._fake_of_shared, (args, kwargs))
            inputs = [*operands(args), *operands(kwargs.values())]
        is_known = is_constant or all(_value_of(tensor) is not None for tensor in inputs)
        if (answer := self._answer(func, args)) is not None:
            result = self._run(func, args, kwargs, is_known=False)
            with _disable_current_modes():
                setattr(result, _VALUE, torch.tensor(answer).expand(result.shape))
            return result
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return self._scalar(args[0])
        if _is_composite(func):
            # The operators it decomposes into must be seen here too: their values may be known.
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        result = self._run(func, args, kwargs, is_known=is_known)
        if is_known and _is_computable(func, result):
            self._compute(func, args, kwargs, result)
        elif func._schema.is_mutable:
            _invalidate(func, args, kwargs)
        return result

    def _answer(self, func: Any, args: tuple[Any, ...]) -> bool | float | None:
        # One number decides whether a part runs, as in LayerDrop: with this one it does.
        if func is aten.rand.default and not args[0]:
            self._guess(f"a random number was assumed to be {_DRAWN}")
            return _DRAWN
        return _answer_for_finite(func, args)

    # A real tensor that the module's copy shares with the original: steps must not change it, but
    # must see their own changes.
    def _fake_of_shared(self, tensor: Tensor) -> Tensor:
        if type(tensor) not in _WITH_DATA:
            return tensor
        if tensor not in self._shared:
            with _disable_current_modes():
                is_small = tensor.device.type == "cpu" and tensor.numel() <= MAX_KNOWN_NUMEL
                value = _copy(tensor) if is_small else None
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            if value is not None:
                setattr(fake, _VALUE, value)
            self._shared[tensor] = fake
        return self._shared[tensor]

    def _run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_known: bool
    ) -> Any:
        if func is aten.index.Tensor:
            args = (args[0], self._without_masks(args[1]))
        try:
            return _fake_kernels.run(func, args, kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            result = self._run_data_dependent(func, args, kwargs, is_known=is_known)
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
            self._guess("a condition on data was assumed to be true")
            return True
        if is_called_by_scaler():
            return 0.0  # found_inf: no gradient overflows, so the optimizer steps
        self._guess("a value that depends on data was assumed to be 1")
        return 1.0 if tensor.is_floating_point() else 1

    # The result of indexing with a mask has as many elements as the mask has true ones, which fake
    # tensors do not know.
    def _without_masks(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                found.append(index)
                continue
            is_known = _value_of(index) is not None
            places = self._run_data_dependent(aten.nonzero.default, (index,), {}, is_known=is_known)
            found += [aten.select.int(places, 1, axis) for axis in range(index.ndim)]
        return found

    def _run_data_dependent(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_known: bool
    ) -> Any:
        if func is aten._pack_padded_sequence.default:
            lengths = _value_of(args[1])
            self._note_random(args[1])
            if lengths is None:
                self._guess("all sequences were assumed to be as long as the longest")
                steps, num_sequences = args[0].shape[:2][:: -1 if args[2] else 1]
                return packed_sequence(args[0], [steps] * num_sequences)
            with _disable_current_modes():
                known = lengths.tolist()
            return packed_sequence(args[0], known)
        if is_known:
            self._note_random(*args, *kwargs.values())
            with _disable_current_modes():
                real = func(*_values(args), **_values(kwargs))
            return tree_map_only(Tensor, self.make, real)
        if func is aten.masked_select.default and (mask := _value_of(args[1])) is not None:
            self._note_random(args[1])
            with _disable_current_modes():
                shape = torch.broadcast_shapes(args[0].shape, mask.shape)
                num_chosen = int(mask.expand(shape).sum())
            return args[0].new_empty(num_chosen)
        if func not in LARGEST:
            return NotImplemented
        self._guess(f"`{func}` was assumed to select every element")
        return LARGEST[func](*args, **kwargs)

    @staticmethod
    def _compute(func: Any, args: Any, kwargs: Any, result: Any) -> None:
        with _disable_current_modes():
            real = func(*_values(args), **_values(kwargs))
            fakes, reals = tree_leaves(result), tree_leaves(real)
            if "empty" in func._schema.name:  # correct code writes before it reads
                reals = [value.zero_() for value in reals]
        if _is_random(*args, *kwargs.values()):
            for value in reals:
                mark_placeholder(value)
        for fake, value in zip(fakes, reals, strict=True):
            # After an in-place operator, the known values were changed in place too.
            if isinstance(fake, FakeTensor) and not hasattr(fake, _VALUE):
                setattr(fake, _VALUE, value)

    def _note_random(self, *arguments: Any) -> None:
        if _is_random(*arguments):
            self._guess("depends on integers of the batch, which are random here", math.inf)

    def _guess(self, what: str, limit: float | None = None) -> None:
        where = calling_line()
        if where is None:
            return
        guess = f"{where}: {what}"
        self._num_asked[guess] += 1
        if self._num_asked[guess] > (limit or MAX_ASKED):
            raise TimeoutError(
                f"{guess}, {MAX_ASKED:,} times: a loop that waits for another value never ends on "
                "fake tensors. Limit its number of iterations"
            )


_OF_NUMBERS = frozenset((torch.tensor, torch.as_tensor))


class KnownInFunctions(TorchFunctionMode):
    """Passes known values to torch functions that read memory below the dispatcher."""

    @override
    def __torch_function__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _OF_NUMBERS and isinstance(args[0], list | tuple):
            args = (tree_map_only(FakeTensor, _number_of, args[0]), *args[1:])
        elif getattr(func, "__name__", "") == "_pad_packed_sequence":
            return padded_sequence(*args, **(kwargs or {}))
        return func(*args, **kwargs) if kwargs else func(*args)


# A torch that is built with CUDA takes fake tensors to a GPU that is not there, without counting
# them, and fails in backward if at all.
def _refuse_missing_gpu(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("No CUDA GPUs are available")


def _number_of(tensor: Tensor) -> Any:
    return tensor.detach().item() if tensor.ndim == 0 else tensor.tolist()


# All values are assumed to be finite.
def _answer_for_finite(func: Any, args: tuple[Any, ...]) -> bool | None:
    if func in _NEVER_FINITE:
        return False
    if func in (aten.eq.Tensor, aten.ne.Tensor) and args[0] is args[1]:
        return bool(func is aten.eq.Tensor)
    is_equality = func in (aten.eq.Scalar, aten.ne.Scalar)
    if is_equality and isinstance(args[1], float) and not math.isfinite(args[1]):
        return bool(func is aten.ne.Scalar)
    return None


_NEVER_FINITE = (
    aten.isnan.default,
    aten.isinf.default,
    aten.isposinf.default,
    aten.isneginf.default,
)


def is_kept(tensor: Tensor) -> bool:
    """Return whether the values of a real tensor stay known: small integer tensors."""
    return not tensor.is_floating_point() and tensor.numel() <= MAX_KNOWN_NUMEL


def _value_of(tensor: Tensor) -> Tensor | None:
    value: Tensor | None = getattr(tensor, _VALUE, None)
    if value is None or hasattr(value.untyped_storage(), _STALE):
        return None
    return value


def _invalidate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed = args[index] if index < len(args) else kwargs.get(argument.name)
            for tensor in operands((changed,)):
                value = _value_of(tensor)
                if value is not None:
                    setattr(value.untyped_storage(), _STALE, True)


def mark_placeholder(value: Any) -> None:
    """Mark the values of a real tensor as placeholders for those of a real batch."""
    if isinstance(value, Tensor):
        setattr(value, _RANDOM, True)


def _is_random(*arguments: Any) -> bool:
    return any(hasattr(value, _RANDOM) for value in operands(_values(arguments)))


def _copy(value: Tensor) -> Tensor:
    copy = value.detach().clone()
    if hasattr(value, _RANDOM):
        mark_placeholder(copy)
    return copy


def copy_value(tensor: Tensor, other: Tensor) -> Tensor:
    """Copy the known values of another tensor, if it has any, to a fake tensor and return it."""
    value = _value_of(other)
    if value is not None:
        with _disable_current_modes():
            setattr(tensor, _VALUE, _copy(value))
    return tensor


def _is_computable(func: Any, result: Any) -> bool:
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if result is None and func._schema.is_mutable:
        return True  # it changed lists of tensors, such as an optimizer's step counts
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    # Memory that is written before it is read; bytes are room for other things.
    is_room = "empty" in func._schema.name
    if is_room and any(t.is_floating_point() or t.dtype is torch.uint8 for t in tensors):
        return False
    return bool(tensors) and all(
        isinstance(t, FakeTensor) and t.numel() <= MAX_KNOWN_NUMEL and t.fake_device.type != "meta"
        for t in tensors
    )


@functools.cache
def _is_composite(func: Any) -> bool:
    if not isinstance(func, torch._ops.OpOverload) or func.namespace == "prim":
        return False
    key = "CompositeImplicitAutograd"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))


# What operators take is nested in few ways, for which torch's `tree_map` is slow.
def _values(arguments: Any) -> Any:
    if isinstance(arguments, Tensor):
        return getattr(arguments, _VALUE, arguments)
    if isinstance(arguments, list | tuple):
        return [*map(_values, arguments)]
    if isinstance(arguments, dict):
        return {name: _values(value) for name, value in arguments.items()}
    return arguments
