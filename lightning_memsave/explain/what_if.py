"""Predictions of one model on changed inputs, each made once."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from lightning_memsave.explain.parameters import ParameterTable
from lightning_memsave.prediction.batch_sizes import (
    SequenceAxis,
    find_axis,
    sample_count,
    with_length,
    with_samples,
)
from lightning_memsave.prediction.cuda.gpus import Gpu
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.techniques.registry import OFF_BY_NONE, with_stack

# Where the tokens are in what each of them takes.
_TOKEN_AXES = {"scaled_dot_product_attention": -2, "multi_head_attention_forward": 0}


@dataclass
class Observed:
    """What was seen.

    Args:
        optimizers: Names of their classes, in order.
        attended: From how many tokens attention was computed.
    """

    optimizers: list[str] = field(default_factory=list)
    attended: set[int] = field(default_factory=set)

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Look until the context is left.

        Yields:
            Nothing.
        """
        functional: Any = torch.nn.functional
        originals = {name: getattr(functional, name) for name in _TOKEN_AXES}
        hook = register_optimizer_step_pre_hook(self._note_optimizer)
        try:
            for name, original in originals.items():
                setattr(functional, name, self._noting(original, _TOKEN_AXES[name]))
            yield
        finally:
            hook.remove()
            for name, original in originals.items():
                setattr(functional, name, original)

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
    """Say which kind of attention a model uses.

    Args:
        module: Any module.

    Returns:
        Such as ``"sdpa"`` or ``"eager"``; ``None`` without a Hugging Face model in it.
    """
    found = _models(module)
    return found[0].config._attn_implementation if found else None


def set_attention(module: nn.Module, kind: str) -> None:
    """Let all Hugging Face models in a module use a kind of attention.

    Args:
        module: What they are in.
        kind: Such as ``"sdpa"``.
    """
    for model in _models(module):
        model.set_attn_implementation(kind)


@contextlib.contextmanager
def attention_set(module: nn.Module, kind: str) -> Iterator[None]:
    """Let them use it until the context is left.

    Args:
        module: As for `set_attention`.
        kind: As for `set_attention`.

    Yields:
        Nothing.
    """
    configs: dict[int, Any] = {}
    for part in module.modules():
        _add_config(configs, getattr(part, "config", None))
    before = [(config, config._attn_implementation_internal) for config in configs.values()]
    try:
        set_attention(module, kind)
        yield
    finally:
        for config, value in before:
            config._attn_implementation_internal = value


# The outermost ones: they set those inside them, too.
def _models(module: nn.Module) -> list[Any]:
    found: list[tuple[str, Any]] = []
    for name, part in module.named_modules():
        is_inside = any(not outer or name.startswith(f"{outer}.") for outer, _ in found)
        is_model = hasattr(part, "set_attn_implementation") and hasattr(part, "config")
        if is_model and not is_inside:
            found.append((name, part))
    return [part for _, part in found]


def _add_config(configs: dict[int, Any], config: Any) -> None:
    if not hasattr(config, "_attn_implementation_internal") or id(config) in configs:
        return
    configs[id(config)] = config
    for name in getattr(config, "sub_configs", {}):
        _add_config(configs, getattr(config, name, None))


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
