"""Predictions of one model on changed inputs, each made once."""

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_memsave.analysis._explain_attention import attention_set, set_attention
from lightning_memsave.analysis._explain_observed import Observed
from lightning_memsave.callbacks._stacks import OFF_BY_NONE, with_stack
from lightning_memsave.planning.batch_sizes import (
    SequenceAxis,
    find_axis,
    sample_count,
    with_length,
    with_samples,
)
from lightning_memsave.planning.gpus import Gpu
from lightning_memsave.planning.parameter_table import ParameterTable
from lightning_memsave.planning.prediction import MemoryPrediction


@dataclass
class Trials:
    """A model with its batch, and what has been predicted about it.

    Args:
        predict: As `predict_memory`.
        make_callback: Makes a `MemSaveCallback`.
        module: The module, or a function that makes it; ``None`` if there is only a checkpoint.
        batch: The batch; ``None`` without one.
        arguments: Of `MemSaveCallback`, those that are not its own defaults.
        table: The parameters.
        configured: Name of the optimizer that was given; empty where the module makes its own.
        attention: Kind of attention of the Hugging Face model in it, such as ``"eager"``.
        known_sequence: Where the sequence runs in the batch, if that is known.
        gpu: The card that is meant.
        device: Whose kernels are assumed.
        observed: What was seen of the step as it is, once it has been predicted.
        options: More arguments of `predict_memory`.
    """

    predict: Callable[..., MemoryPrediction]
    make_callback: Callable[..., Any]
    module: nn.Module | Callable[[], nn.Module] | None
    batch: Any
    arguments: dict[str, Any]
    table: ParameterTable
    configured: str = ""
    attention: str | None = None
    known_sequence: SequenceAxis | None = None
    gpu: Gpu | None = None
    device: str = "cuda"
    options: Mapping[str, Any] = field(default_factory=dict)
    observed: Observed = field(default_factory=Observed)
    _known: dict[str, MemoryPrediction | str] = field(default_factory=dict)

    @property
    def can_predict(self) -> bool:
        """Whether there are a batch and code for the model."""
        return self.module is not None and self.batch is not None

    @property
    def num_samples(self) -> int | None:
        """Samples of the batch; ``None`` if they cannot be counted."""
        return sample_count(self.batch)

    @property
    def sequence(self) -> SequenceAxis | None:
        """Where the sequence runs in the batch: token ids, or else what is attended to."""
        if self.known_sequence is not None or not self.can_predict:
            return self.known_sequence
        return find_axis(self.batch, self.lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens the step as it is attends to, the largest number first."""
        softmaxes = (t.shape for t in self.base().largest_tensors if "softmax" in t.op)
        by_hand = {s[-1] for s in softmaxes if len(s) > 2 and s[-1] == s[-2] > 1}
        known = () if self.known_sequence is None else (self.known_sequence.length,)
        return tuple(sorted({*self.observed.attended, *by_hand, *known}, reverse=True))

    @property
    def optimizer_name(self) -> str:
        """Who updates the parameters, for sentences."""
        return " and ".join(self.observed.optimizers) or self.configured or "the optimizer"

    @property
    def precision(self) -> str:
        """What is trained in."""
        trainer_arguments = self.options.get("trainer_arguments") or {}
        chosen = self.in_force["precision"] or trainer_arguments.get("precision")
        return str(chosen or "32-true")

    @property
    def in_force(self) -> dict[str, Any]:
        """All arguments of `MemSaveCallback`, with those of its stack."""
        return with_stack(self.make_callback(**self.arguments).arguments)

    @property
    def num_predictions(self) -> int:
        """How many there are so far."""
        return len(self._known)

    def base(self) -> MemoryPrediction:
        """Predict the step as it is.

        Returns:
            The prediction; what the module raises comes through.
        """
        key = self._key({}, None, None, None)
        if not isinstance(self._known.get(key), MemoryPrediction):
            with self.observed.looking():
                self._known[key] = self._predict({}, self.batch, None)
        found = self._known[key]
        assert isinstance(found, MemoryPrediction), "it was made above"
        return found

    def attempt(
        self,
        changes: Mapping[str, Any] | None = None,
        *,
        num_samples: int | None = None,
        length: int | None = None,
        attention: str | None = None,
    ) -> MemoryPrediction | str:
        """Predict the step with something changed.

        Args:
            changes: Of the arguments of `MemSaveCallback`.
            num_samples: In place of those of the batch.
            length: In place of that of the sequence.
            attention: In place of the kind that the model has.

        Returns:
            The prediction; where the model cannot do it, the reason in one line.
        """
        changes = changes or {}
        num_samples = None if num_samples == self.num_samples else num_samples
        key = self._key(changes, num_samples, length, attention)
        if key not in self._known:
            try:
                batch = self.batch
                if num_samples is not None:
                    batch = with_samples(batch, num_samples)
                if length is not None and self.sequence is not None:
                    batch = with_length(batch, self.sequence, length)
                self._known[key] = self._predict(changes, batch, attention)
            # Whatever a model says of inputs that nobody has asked it to take.
            except Exception as error:
                first_line = (str(error).strip().splitlines() or [""])[0]
                self._known[key] = f"{type(error).__name__}: {first_line}"
        return self._known[key]

    def callback_with(self, changes: Mapping[str, Any]) -> str:
        """Say what to type for changed settings.

        Args:
            changes: Of the arguments of `MemSaveCallback`.

        Returns:
            Such as ``MemSaveCallback(activation_checkpointing="all", optimizer=None, ...)``; the
            techniques are all named, since those that are not would be on; a stack names itself.
        """
        arguments = {**self.arguments, **changes}
        named = () if arguments.get("stack") else OFF_BY_NONE
        defaults = inspect.signature(self.make_callback).parameters
        shown = [
            f"{name}={_quoted(arguments[name])}"
            for name, parameter in defaults.items()
            if name in named or (name in arguments and arguments[name] != parameter.default)
        ]
        return f"MemSaveCallback({', '.join(shown)})"

    @staticmethod
    def _key(changes: Mapping[str, Any], *others: object) -> str:
        return repr((sorted(changes.items()), *others))

    def _predict(
        self, changes: Mapping[str, Any], batch: Any, attention: str | None
    ) -> MemoryPrediction:
        assert self.module is not None, "there is code for the model"
        module = self.module
        with contextlib.ExitStack() as stack:
            if attention is not None and isinstance(module, nn.Module):
                stack.enter_context(attention_set(module, attention))
            elif attention is not None:
                module = _maker_with(module, attention)
            return self.predict(
                module,
                batch,
                settings={**self.arguments, **changes},
                device=self.device,
                gpu=self.gpu,
                **self.options,
            )


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _maker_with(make: Callable[[], nn.Module], attention: str) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        module = make()
        set_attention(module, attention)
        return module

    return made
