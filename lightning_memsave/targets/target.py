"""The model that a user named, with its settings, and batches by dtypes and shapes."""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_memsave.errors import ConfigurationError
from lightning_memsave.prediction.fake.tensors import fake_tensors
from lightning_memsave.prediction.fake.values import MAX_KNOWN_NUMEL, mark_placeholder
from lightning_memsave.targets.code import call_for_batch
from lightning_memsave.targets.hugging_face import TASK_NAMES, TASKS

MAX_NUMEL = 2**40
"""Larger tensors are refused, as typing errors."""

_SIZES = re.compile(r"[-+]?[\d.]+(\s*x\s*[-+]?[\d.]+)*")
_TENSOR = re.compile(r"(?P<dtype>\w+)\s*\[(?P<shape>[^\]]*)\]\s*(?:<\s*(?P<bound>\d+))?")
_SHORT = {
    "float": "float32", "fp32": "float32", "double": "float64", "half": "float16",
    "fp16": "float16", "bf16": "bfloat16", "long": "int64", "int": "int32",
}  # fmt: skip
_HOW = (
    'Write "8x512" for samples x tokens of a Hugging Face model, describe each tensor: '
    '"x=float32[8,3,224,224],y=int64[8]" (without names for a tuple, and "int64[8,512]," for one '
    'of a single tensor), or name a function that returns the batch: "file.py:function".'
)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    dtype: torch.dtype
    shape: tuple[int, ...]
    upper_bound: int = 2
    lower_bound: int = 0

    def build(self, generator: torch.Generator | None = None) -> Tensor:
        """Make the tensor with random values; a fake one under a ``FakeTensorMode``."""
        if self.dtype.is_floating_point or self.dtype.is_complex:
            dtype = self.dtype if self.dtype.itemsize > 1 else torch.float32
            made = torch.randn(self.shape, dtype=dtype, generator=generator, device="cpu")
            return made.to(self.dtype)
        bounds = (self.lower_bound, self.upper_bound)
        if self.upper_bound == self.lower_bound + 1:
            # Constants stay known in predictions, such as a mask of ones.
            return torch.full(self.shape, self.lower_bound, dtype=self.dtype, device="cpu")
        dtype = torch.int64 if self.dtype is torch.bool else self.dtype
        tensor = torch.randint(*bounds, self.shape, dtype=dtype, generator=generator, device="cpu")
        tensor = tensor.to(self.dtype)
        mark_placeholder(tensor)
        return tensor

    def __str__(self) -> str:
        sizes = ",".join(map(str, self.shape))
        bound = f"<{self.upper_bound}" if self.upper_bound != 2 else ""
        return f"{str(self.dtype).removeprefix('torch.')}[{sizes}]{bound}"


@dataclass(frozen=True, slots=True)
class BatchSpec:
    structure: Any  # a `TensorSpec`, a tuple of them, or a dict

    def build(self) -> Any:
        """Make the batch for a prediction, which needs no values of large tensors (on ``meta``)."""
        generator = torch.Generator().manual_seed(0)

        def make(spec: TensorSpec) -> Tensor:
            if math.prod(spec.shape) > MAX_KNOWN_NUMEL:
                return torch.empty(spec.shape, dtype=spec.dtype, device="meta")
            return spec.build(generator)

        return self._each(make)

    def _each(self, make: Callable[[TensorSpec], Tensor]) -> Any:
        if isinstance(self.structure, TensorSpec):
            return make(self.structure)
        if isinstance(self.structure, Mapping):
            return {name: make(spec) for name, spec in self.structure.items()}
        return tuple(map(make, self.structure))

    def __str__(self) -> str:
        if isinstance(self.structure, Mapping):
            return ",".join(f"{name}={value}" for name, value in self.structure.items())
        if isinstance(self.structure, tuple):
            comma = "," if len(self.structure) == 1 else ""
            return ",".join(map(str, self.structure)) + comma
        return str(self.structure)


def parse_sizes(text: str) -> tuple[int, ...] | None:
    if not _SIZES.fullmatch(text.strip()):
        return None
    return tuple(_size(size, text) for size in re.split(r"\s*x\s*", text.strip()))


def parse_batch(text: str) -> BatchSpec:
    is_tuple = text.strip().endswith(",")  # of one, as in Python
    parts = [part.strip() for part in re.split(r",(?![^\[]*\])", text.strip().removesuffix(","))]
    if parts == [""]:
        raise ConfigurationError(f"Batch {text!r} has no tensor. {_HOW}")
    named = [part.partition("=") for part in parts]
    if all(equals and name.strip().isidentifier() for name, equals, _ in named):
        names = [name.strip() for name, _, _ in named]
        if len(set(names)) < len(names):
            raise ConfigurationError(f"Batch {text!r} names a tensor twice. Use each name once.")
        return BatchSpec({name.strip(): _parse_tensor(value) for name, _, value in named})
    if any(equals for _, equals, _ in named):
        raise ConfigurationError(f"Batch {text!r} has tensors with a name and without. {_HOW}")
    tensors = tuple(map(_parse_tensor, parts))
    return BatchSpec(tensors if is_tuple or len(tensors) > 1 else tensors[0])


def checked(spec: TensorSpec) -> TensorSpec:
    if any(size < 1 for size in spec.shape):
        raise ConfigurationError(
            f"`{spec}` has a size below 1. Use whole numbers of at least 1 for all sizes."
        )
    if torch.Size(spec.shape).numel() > MAX_NUMEL:
        raise ConfigurationError(
            f"`{spec}` has more than {MAX_NUMEL:,} elements, which no device can hold. Use smaller "
            "sizes."
        )
    if spec.upper_bound <= spec.lower_bound:
        raise ConfigurationError(
            f"`{spec}` allows no integer: values must be at least {spec.lower_bound} and below "
            f"{spec.upper_bound}. Use a bound of at least {spec.lower_bound + 1}."
        )
    return spec


def _parse_tensor(text: str) -> TensorSpec:
    match = _TENSOR.fullmatch(text.strip())
    if match is None:
        raise ConfigurationError(f"{text.strip()!r} does not describe a tensor. {_HOW}")
    dtype = getattr(torch, _SHORT.get(match["dtype"], match["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigurationError(
            f"`{match['dtype']}` in {text.strip()!r} is not a dtype of torch. Use for example "
            "`float32`, `bfloat16`, `int64` or `bool`."
        )
    shape = match["shape"].strip()
    sizes = [_size(size, text) for size in re.split(r"[,x]", shape)] if shape else []
    bound = 2 if match["bound"] is None else int(match["bound"])
    return checked(TensorSpec(dtype, tuple(sizes), bound))


def _size(text: str, of: str) -> int:
    text = text.strip()
    if not re.fullmatch(r"\d+", text) or int(text) < 1:
        raise ConfigurationError(
            f"{text!r} in batch {of!r} is not a size: it must be a whole number of at least 1. "
            f"{_HOW}"
        )
    return int(text)


def find_hugging_face_model(module: nn.Module) -> Any:
    found = [
        part
        for part in module.modules()
        if hasattr(part, "config") and hasattr(part, "main_input_name")
    ]
    return next((part for part in found if _task_of(part) is not None), next(iter(found), None))


def batch_of(sizes: tuple[int, ...], model: Any) -> dict[str, TensorSpec]:
    name, task = type(model).__name__, _task_of(model)
    if task is None or model.main_input_name not in ("input_ids", "pixel_values"):
        raise ConfigurationError(
            f"The inputs of `{name}` are not known. Describe each tensor, such as "
            '"input_ids=int64[8,512]<30522,labels=int64[8]", or choose a task with a loss: '
            f"{', '.join(TASKS)}."
        )
    is_image = model.main_input_name == "pixel_values"
    make = _image_batch if is_image else _token_batch
    batch = make(sizes, model, task)
    accepted = inspect.signature(model.forward).parameters
    return {key: checked(spec) for key, spec in batch.items() if key in accepted}


def _token_batch(sizes: tuple[int, ...], model: Any, task: str) -> dict[str, TensorSpec]:
    form = "samples x choices x tokens" if task == "multiple_choice" else "samples x tokens"
    expected = {"multiple_choice": (3,), "seq2seq_lm": (2, 3)}.get(task, (2,))
    example = "8x4x512" if task == "multiple_choice" else "8x512"
    _check_count(sizes, expected, model, form, example)
    vocabulary = model.config.get_text_config().vocab_size
    shape, samples, tokens = sizes, sizes[0], sizes[-1]
    label_tokens = tokens
    if task == "seq2seq_lm":
        shape, tokens = sizes[:2], sizes[1]
        _check_start_token(model.config)
    _check_positions(model, max(tokens, label_tokens))
    batch = {
        "input_ids": _integers(shape, vocabulary),
        "attention_mask": TensorSpec(torch.int64, shape, upper_bound=2, lower_bound=1),
    }
    if task == "question_answering":
        return batch | {
            key: _integers((samples,), tokens) for key in ("start_positions", "end_positions")
        }
    if task == "multiple_choice":
        return batch | {"labels": _integers((samples,), sizes[1])}
    if task == "sequence_classification":
        return batch | {"labels": _class_labels(model.config, samples)}
    if task == "token_classification":
        return batch | {"labels": _integers(shape, model.config.num_labels)}
    return batch | {"labels": _integers((samples, label_tokens), vocabulary)}


# The inputs of the decoder are the labels, shifted by one, after this token.
def _check_start_token(config: Any) -> None:
    if config.model_type == "t5" and getattr(config, "decoder_start_token_id", None) is None:
        raise ConfigurationError(
            f"`{type(config).__name__}` has no `decoder_start_token_id`, the first input token of "
            "the decoder. Add it to the config, or write `--arg decoder_start_token_id=0`."
        )


def _image_batch(sizes: tuple[int, ...], model: Any, task: str) -> dict[str, TensorSpec]:
    config = model.config
    if len(sizes) == 1 and getattr(config, "image_size", None) is not None:
        side = config.image_size
        height, width = side if isinstance(side, list | tuple) else (side, side)
        sizes = (sizes[0], getattr(config, "num_channels", 3), height, width)
    form = "samples x channels x height x width"
    _check_count(sizes, (4,), model, form, "8x3x224x224")
    samples, channels, height, width = sizes
    if channels != getattr(config, "num_channels", channels):
        raise ConfigurationError(
            f"`{type(model).__name__}` needs images with {config.num_channels} channels, not "
            f"{channels}. Use `{samples}x{config.num_channels}x{height}x{width}`."
        )
    labels = _class_labels(config, samples)
    if task == "semantic_segmentation":
        labels = _integers((samples, height, width), config.num_labels)
    return {"pixel_values": TensorSpec(torch.float32, sizes), "labels": labels}


def _check_count(
    sizes: tuple[int, ...], expected: tuple[int, ...], model: Any, form: str, example: str
) -> None:
    if len(sizes) not in expected:
        raise ConfigurationError(
            f"`{'x'.join(map(str, sizes))}` has {len(sizes)} sizes, but a batch of "
            f"`{type(model).__name__}` is {form}. Write for example `{example}`."
        )


# On fake tensors no index is out of bounds: a step that cannot run would be predicted.
def _check_positions(model: Any, tokens: int) -> None:
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if leaf not in ("position_embeddings", "wpe", "embed_positions") or not hasattr(
            module, "weight"
        ):
            continue
        reserved = (
            getattr(module, "offset", 0) if module.padding_idx is None else (module.padding_idx + 1)
        )
        limit = module.weight.shape[0] - reserved
        if tokens > limit:
            raise ConfigurationError(
                f"{tokens} tokens do not fit `{type(model).__name__}`: its table `{name}` has "
                f"{limit} positions. Use at most {limit} tokens, or a config with more positions."
            )


def _class_labels(config: Any, samples: int) -> TensorSpec:
    if config.problem_type == "multi_label_classification":
        return TensorSpec(torch.float32, (samples, config.num_labels))
    if config.problem_type == "regression" or config.num_labels == 1:
        return TensorSpec(torch.float32, (samples,))
    return _integers((samples,), config.num_labels)


def _integers(shape: tuple[int, ...], upper_bound: int) -> TensorSpec:
    return TensorSpec(torch.int64, shape, upper_bound=max(upper_bound, 1))


def _task_of(model: Any) -> str | None:
    from transformers.models.auto import modeling_auto  # noqa: PLC0415

    classes = {cls.__name__ for cls in type(model).__mro__}
    for task, (_, mapping) in TASK_NAMES.items():
        names = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").values()
        if not classes.isdisjoint(_flat(names)):
            return task
    return None


def _flat(names: Any) -> Iterator[str]:
    for name in names:
        yield from [name] if isinstance(name, str) else name


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
    where, separator, _ = text.strip().rpartition(":")
    if separator and (where.endswith(".py") or where.replace(".", "").isidentifier()):
        return call_for_batch(text.strip()), text.strip()
    spec = make_batch_spec(text, target)
    return spec.build(), str(spec)


def make_batch_spec(sizes: str, target: Target | None = None) -> BatchSpec:
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
