"""Predict variants of one training step, each once."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from lightning_memsave.core.nested import (
    attributes_of,
    items_of,
    with_attributes,
    with_items,
)
from lightning_memsave.errors import ConfigurationError, MemsaveError
from lightning_memsave.measure.parameters import ParameterTable, parameter_table
from lightning_memsave.measure.storages import tensors_in, tensors_in_batch
from lightning_memsave.prediction.fake.tensors import replaced
from lightning_memsave.prediction.fake.values import MAX_KNOWN_NUMEL
from lightning_memsave.prediction.predict import predict
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.prediction.training_step import TrainingStep
from lightning_memsave.techniques.micro_batching.technique import batch_norms_of
from lightning_memsave.trainer.precision import overflows_in_float16

_IDS_NDIM = 2  # token ids: (samples, tokens)


@dataclass(frozen=True, slots=True)
class SequenceAxis:
    axis: int
    length: int


def sample_count(batch: Any) -> int | None:
    """Return the batch size shared by all tensors; other objects are ignored."""
    sizes = {tensor.shape[0] for tensor in tensors_in_batch(batch) if tensor.ndim}
    return sizes.pop() if len(sizes) == 1 else None


def with_samples(batch: Any, num_samples: int) -> Any:
    """Return the batch with another number of samples, repeating them as needed.

    Tensors whose values a prediction does not read (over 2**20 elements) are on the meta device.
    """
    now = sample_count(batch)
    assert now, "the caller checked `sample_count`"

    def change(tensor: Tensor) -> Tensor:
        return _resized_axis(tensor, 0, num_samples) if tensor.ndim else tensor

    def resized(values: list[Any]) -> list[Any]:
        is_per_sample = len(values) == now
        return [values[i % now] for i in range(num_samples)] if is_per_sample else values

    return _mapped(batch, _once(change), resized)


def find_sequence(batch: Any, axis: int | None = None) -> SequenceAxis | None:
    tensors = list(tensors_in_batch(batch))
    if axis is not None:
        if type(axis) is not int or axis < 1 or all(tensor.ndim <= axis for tensor in tensors):
            raise ConfigurationError(
                f"`sequence_axis={axis!r}` is not a sequence axis of this batch: it must be from "
                f"1 to {max([t.ndim for t in tensors], default=1) - 1}. For tensors of shape "
                "(samples, tokens, features) it is 1."
            )
        return SequenceAxis(axis, next(t.shape[axis] for t in tensors if t.ndim > axis))
    ids = [t for t in tensors if t.ndim == _IDS_NDIM and not t.is_floating_point()]
    lengths = {tensor.shape[1] for tensor in ids}
    return SequenceAxis(1, lengths.pop()) if len(lengths) == 1 else None


def find_axis(batch: Any, lengths: Iterable[int]) -> SequenceAxis | None:
    tensors = list(tensors_in_batch(batch))
    for length in lengths:
        for tensor in tensors:
            if length in tensor.shape[1:]:
                return SequenceAxis(tensor.shape[1:].index(length) + 1, length)
    return None


def with_length(batch: Any, sequence: SequenceAxis, length: int) -> Any:
    """Return the batch with another sequence length, repeating tokens as needed.

    Tensors whose values a prediction does not read (over 2**20 elements) are on the meta device.
    """

    def change(tensor: Tensor) -> Tensor:
        axes = [a for a in range(sequence.axis, tensor.ndim) if tensor.shape[a] == sequence.length]
        for axis in axes:
            tensor = _resized_axis(tensor, axis, length)
        return tensor

    return _mapped(batch, _once(change), lambda of_list: of_list)


def _resized_axis(tensor: Tensor, axis: int, size: int) -> Tensor:
    shape = (*tensor.shape[:axis], size, *tensor.shape[axis + 1 :])
    if math.prod(shape) > MAX_KNOWN_NUMEL:
        return torch.empty(shape, dtype=tensor.dtype, device="meta")
    chosen = torch.arange(size, device=tensor.device) % tensor.shape[axis]
    return tensor.detach().index_select(axis, chosen)


# A tensor that occurs twice in the batch must stay one tensor.
def _once(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    changed: dict[int, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in changed:
            changed[id(tensor)] = change(tensor)
        return changed[id(tensor)]

    return once


def _mapped(
    value: Any, of_tensor: Callable[[Tensor], Tensor], of_list: Callable[[Any], Any]
) -> Any:
    if isinstance(value, Tensor):
        return of_tensor(value)
    if isinstance(value, list) and value and next(tensors_in(value), None) is None:
        return of_list(value)
    items = {name: _mapped(item, of_tensor, of_list) for name, item in items_of(value)}
    if items:
        return with_items(value, items)
    held = {name: _mapped(item, of_tensor, of_list) for name, item in attributes_of(value)}
    return with_attributes(value, held)


# Where the tokens are in what each of them takes.
_TOKEN_AXES = {"scaled_dot_product_attention": -2, "multi_head_attention_forward": 0}


@dataclass
class Observed:
    optimizers: list[str] = field(default_factory=list)
    attended: set[int] = field(default_factory=set)

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._note_optimizer).remove)
            for name, axis in _TOKEN_AXES.items():
                noting = self._noting(getattr(functional, name), axis)
                stack.enter_context(replaced(functional, name, noting))
            yield

    # Not a mode of torch: it would hold what every function takes until that function returns.
    def _noting(self, function: Callable[..., Any], axis: int) -> Callable[..., Any]:
        @functools.wraps(function)
        def noting(query: Any, *args: Any, **kwargs: Any) -> Any:
            # Without batch `multi_head_attention_forward` takes (tokens, features), too.
            if query.ndim >= 2 and query.shape[axis] > 1:
                self.attended.add(query.shape[axis])
            return function(query, *args, **kwargs)

        return noting

    def _note_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        name = type(optimizer).__name__
        if name not in self.optimizers:
            self.optimizers.append(name)


def attention_of(module: nn.Module) -> str | None:
    parts: list[Any] = [m for m in module.modules() if hasattr(m, "set_attn_implementation")]
    return parts[0].config._attn_implementation if parts else None


class ImpossibleVariantError(MemsaveError):
    """The model cannot do the step as it was changed."""

    is_expected = False
    """Whether a setting refused it or time was over: no code of the model has failed."""


@dataclass
class WhatIf:
    step: TrainingStep
    table: ParameterTable
    attention: str | None = None
    known_sequence: SequenceAxis | None = None
    overflows: bool = False
    has_batch_norm: bool = False
    observed: Observed = field(default_factory=Observed)
    _known: dict[str, MemoryPrediction | ImpossibleVariantError] = field(default_factory=dict)

    @property
    def can_predict(self) -> bool:
        return self.step.model is not None and self.step.batch is not None

    @property
    def num_samples(self) -> int | None:
        """Samples of the batch; ``None`` if they cannot be counted."""
        return sample_count(self.step.batch)

    @property
    def sequence(self) -> SequenceAxis | None:
        """Where the sequence runs in the batch: token ids, or else what is attended to."""
        if self.known_sequence is not None or not self.can_predict:
            return self.known_sequence
        return find_axis(self.step.batch, self.lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens the unchanged step attends to, the largest number first."""
        softmaxes = (t.shape for t in self.base().largest_tensors if "softmax" in t.op)
        by_hand = {s[-1] for s in softmaxes if len(s) > 2 and s[-1] == s[-2] > 1}
        known = () if self.known_sequence is None else (self.known_sequence.length,)
        return tuple(sorted({*self.observed.attended, *by_hand, *known}, reverse=True))

    @property
    def optimizer_name(self) -> str:
        return " and ".join(self.observed.optimizers) or "the optimizer"

    @property
    def num_predictions(self) -> int:
        return len(self._known)

    def base(self) -> MemoryPrediction:
        key = self._key({}, None, None)
        if not isinstance(self._known.get(key), MemoryPrediction):
            with self.observed.looking():
                self._known[key] = self._predict({}, self.step.batch)
        found = self._known[key]
        assert isinstance(found, MemoryPrediction), "it was made above"
        return found

    def predict(
        self,
        changes: Mapping[str, Any] | None = None,
        *,
        num_samples: int | None = None,
        length: int | None = None,
        limit_s: float = math.inf,
    ) -> MemoryPrediction:
        changes = changes or {}
        num_samples = None if num_samples == self.num_samples else num_samples
        key = self._key(changes, num_samples, length)
        if key not in self._known:
            try:
                batch = self.step.batch
                if num_samples is not None:
                    batch = with_samples(batch, num_samples)
                if length is not None and self.sequence is not None:
                    batch = with_length(batch, self.sequence, length)
                self._known[key] = self._predict(changes, batch, limit_s)
            # A model may raise anything on inputs that it was not made for.
            except Exception as error:
                first_line = (str(error).strip().splitlines() or [""])[0]
                failure = ImpossibleVariantError(f"{type(error).__name__}: {first_line}")
                failure.is_expected = isinstance(error, MemsaveError | TimeoutError)
                if isinstance(error, TimeoutError) and limit_s < math.inf:
                    raise failure from error  # there may be more time for it later
                self._known[key] = failure
        found = self._known[key]
        if isinstance(found, ImpossibleVariantError):
            raise found
        return found

    @staticmethod
    def _key(changes: Mapping[str, Any], *others: object) -> str:
        return repr((sorted(changes.items()), *others))

    def _predict(
        self, changes: Mapping[str, Any], batch: Any, limit_s: float = math.inf
    ) -> MemoryPrediction:
        step = replace(self.step.with_settings(changes), batch=batch)
        if limit_s <= 0:
            raise TimeoutError("no time is left for another prediction")
        if limit_s < (step.time_limit_s or math.inf):
            step = replace(step, time_limit_s=limit_s)
        return predict(step)


def what_if_of(step: TrainingStep, source: Any, sequence_axis: int | None = None) -> WhatIf:
    return WhatIf(
        step,
        parameter_table(source),
        attention_of(source) if isinstance(source, nn.Module) else None,
        None if step.batch is None else find_sequence(step.batch, sequence_axis),
        isinstance(source, nn.Module) and bool(overflows_in_float16(source)),
        isinstance(source, nn.Module) and bool(batch_norms_of(source)),
    )
