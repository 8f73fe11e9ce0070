"""What a prediction is about: a model that can be made, with its settings and its batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from torch import Tensor, nn

from lightning_memsave.errors import ConfigurationError
from lightning_memsave.prediction.fake.tensors import fake_tensors
from lightning_memsave.targets.batches import (
    BatchSpec,
    batch_of,
    find_hugging_face_model,
    parse_batch,
    parse_sizes,
)


@dataclass(frozen=True)
class Target:
    """A model that was named, and what is known about its training.

    Args:
        name: As it was named.
        kind: What it was named by.
        make: Makes the model; ``None`` where only a checkpoint is known.
        settings: Arguments of `MemSaveCallback` that were found; ``None`` if there is no callback.
        trainer_arguments: Arguments of the Trainer that were found, such as ``precision``.
        tensors: What a checkpoint holds, without data, by name.
        notes: What was found and is not used, one line each.
    """

    name: str
    kind: Literal["factory", "hugging_face", "lightning_cli", "checkpoint"]
    make: Callable[[], nn.Module] | None = None
    settings: Mapping[str, Any] | None = None
    trainer_arguments: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def can_build(self) -> bool:
        """Whether there is code for the model, so that its step can be predicted."""
        return self.make is not None

    def build(self) -> nn.Module:
        """Make the model; under a ``FakeTensorMode`` it takes no memory.

        Returns:
            A new one, with random weights.

        Raises:
            ConfigurationError: If its code raises or gives something else, or if there is none.
        """
        if self.make is None:
            raise ConfigurationError(
                f"`{self.name}` is a checkpoint: it has the parameters of a model and not its "
                "code. Name that too: `--model module:Class`."
            )
        return self.make()

    @cached_property
    def module_without_data(self) -> nn.Module:
        """The model, made once without memory; parameters have shapes and no numbers."""
        with fake_tensors():
            return self.build()

    def parameter_source(self) -> nn.Module | Mapping[str, Tensor]:
        """Give what parameters can be counted in.

        Returns:
            The module without data, or the tensors of a checkpoint without code.
        """
        return self.module_without_data if self.can_build else self.tensors


def make_batch_spec(sizes: Any, target: Target | None = None) -> BatchSpec:
    """Describe a batch by its sizes, or by its tensors.

    Args:
        sizes: ``"8x512"`` (samples x tokens) or ``"8x3x224x224"`` for a Hugging Face model, also
            for one inside a LightningModule: inputs and labels of its task. For any module a text
            such as ``"x=float32[8,3,224,224],y=int64[8]<10"`` or ``"float32[8,10],int64[8]"``, or
            such texts in any nesting of mappings, lists and tuples.
        target: Needed for sizes alone.

    Returns:
        The batch; ``build()`` makes it.

    Raises:
        ConfigurationError: If it cannot be read, does not go with the model, or has sizes that no
            batch has.

    Example:
        >>> print(make_batch_spec({"x": "float32[8,10]", "y": "int64[8]<3"}))
        x=float32[8,10],y=int64[8]<3
    """
    numbers = parse_sizes(sizes)
    if numbers is None:
        return parse_batch(sizes)
    if target is None or not target.can_build:
        raise ConfigurationError(
            f"Batch {sizes!r} goes with a model only. Name each tensor, such as "
            '"x=float32[8,10],y=int64[8]".'
        )
    model = find_hugging_face_model(target.module_without_data)
    if model is None:
        raise ConfigurationError(
            f"Batch {sizes!r} says too little: `{target.name}` has no Hugging Face model, whose "
            "batches are known. Name each tensor that its `training_step` takes: "
            '"x=float32[8,3,224,224],y=int64[8]", or "float32[8,3,224,224],int64[8]" for a tuple.'
        )
    return BatchSpec(batch_of(numbers, model))
