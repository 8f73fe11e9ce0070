"""The model that a user named, with its settings and batch."""

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
from lightning_memsave.targets.code import call_for_batch


@dataclass(frozen=True)
class Target:
    name: str
    kind: Literal["factory", "hugging_face", "lightning_cli", "checkpoint"]
    make: Callable[[], nn.Module] | None = None
    settings: Mapping[str, Any] | None = None
    trainer_arguments: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def can_build(self) -> bool:
        """Whether the model can be constructed, so that its step can be predicted."""
        return self.make is not None

    def build(self) -> nn.Module:
        if self.make is None:
            raise ConfigurationError(
                f"`{self.name}` is a checkpoint: it has the parameters of a model, but not its "
                "code. Name the class too: `--model module:Class`."
            )
        return self.make()

    @cached_property
    def module_without_data(self) -> nn.Module:
        """The model on fake tensors, constructed once."""
        with fake_tensors():
            return self.build()

    def parameter_source(self) -> nn.Module | Mapping[str, Tensor]:
        """Return the module on fake tensors, or the tensors of a checkpoint without code."""
        return self.module_without_data if self.can_build else self.tensors


def read_batch(text: str, target: Target | None = None) -> tuple[Any, str]:
    """Make the batch that a user described, for a prediction, and say what it is."""
    where, separator, _ = text.strip().rpartition(":")
    if separator and (where.endswith(".py") or where.replace(".", "").isidentifier()):
        return call_for_batch(text.strip()), text.strip()
    spec = make_batch_spec(text, target)
    return spec.build(), str(spec)


def make_batch_spec(sizes: str, target: Target | None = None) -> BatchSpec:
    """Make a batch spec from sizes, or from a description of each tensor."""
    numbers = parse_sizes(sizes)
    if numbers is None:
        return parse_batch(sizes)
    if target is None or not target.can_build:
        raise ConfigurationError(
            f"Batch {sizes!r} has sizes only, which needs a Hugging Face model. Describe each "
            'tensor, such as "x=float32[8,10],y=int64[8]".'
        )
    model = find_hugging_face_model(target.module_without_data)
    if model is None:
        raise ConfigurationError(
            f"Batch {sizes!r} has sizes only, and `{target.name}` contains no Hugging Face model, "
            "whose inputs would be known. Describe each tensor that its `training_step` uses: "
            '"x=float32[8,3,224,224],y=int64[8]", or "float32[8,3,224,224],int64[8]" for a tuple.'
        )
    return BatchSpec(batch_of(numbers, model))
