"""The batches that models of Hugging Face take in training."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lightning_memsave.analysis._targets_batches import TensorSpec, checked
from lightning_memsave.analysis._targets_hugging_face import TASK_NAMES, TASKS
from lightning_memsave.errors import ConfigurationError


def find_hugging_face_model(module: nn.Module) -> Any:
    """Look for a Hugging Face model in a module.

    Args:
        module: Any module.

    Returns:
        The outermost one whose task is known, such as that inside a wrapper of peft; else the
        outermost one; ``None`` if there is none.
    """
    found = [
        part
        for part in module.modules()
        if hasattr(part, "config") and hasattr(part, "main_input_name")
    ]
    return next((part for part in found if _task_of(part) is not None), next(iter(found), None))


def batch_of(sizes: tuple[int, ...], model: Any) -> dict[str, TensorSpec]:
    """Describe the batch that a Hugging Face model takes in training.

    Args:
        sizes: Samples x tokens, or samples x channels x height x width for images; a
            multiple-choice model takes samples x choices x tokens, a translating one may have the
            tokens of the labels as a third size.
        model: With random weights, or without data.

    Returns:
        Inputs and labels by name.

    Raises:
        ConfigurationError: If its task is not known, or the sizes do not go with it.
    """
    name, task = type(model).__name__, _task_of(model)
    if task is None or model.main_input_name not in ("input_ids", "pixel_values"):
        raise ConfigurationError(
            f"What a batch of `{name}` looks like is not known. Name each of its tensors, such as "
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


# The labels, moved by one behind this token, are what the decoder reads.
def _check_start_token(config: Any) -> None:
    if config.model_type == "t5" and getattr(config, "decoder_start_token_id", None) is None:
        raise ConfigurationError(
            f"`{type(config).__name__}` has no `decoder_start_token_id`, with which labels begin "
            "for the decoder. Add it to the config, or write `--arg decoder_start_token_id=0`."
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
            f"`{type(model).__name__}` takes images of {config.num_channels} channels, not "
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


# Without data nothing is out of bounds, so that a step would be predicted that cannot run.
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
