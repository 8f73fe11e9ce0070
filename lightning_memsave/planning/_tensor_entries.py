"""The tensors of a module or a checkpoint by name, each once, without reading their numbers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_memsave.errors import ConfigurationError
from lightning_memsave.measure.storages import storages_of

# What safetensors writes in its headers.
_SHORT_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
# A checkpoint does not say which of its tensors are buffers; these are, in torch and transformers.
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "position_ids", "inv_freq")
_BUFFER_DTYPES = ("int64", "int32", "bool")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One parameter or buffer.

    Args:
        name: The first of its names in ``named_parameters()``.
        shape: ``None`` for a lazy one, which has no shape before the first forward pass.
        dtype: Such as ``"float32"``.
        num_elements: Numbers in it.
        num_bytes: What they take.
        is_trainable: Whether it gets a gradient; ``None`` where a checkpoint does not say.
        is_buffer: Whether it is a buffer.
        aliases: Its other names, where it is tied.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: str
    num_elements: int
    num_bytes: int
    is_trainable: bool | None = None
    is_buffer: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """Name of the module that owns it."""
        return self.name.rpartition(".")[0]


_Keyed = tuple[object, TensorEntry]


def entries_of_module(module: nn.Module) -> tuple[TensorEntry, ...]:
    """Read the parameters and buffers of a module.

    Args:
        module: Any module, on any device.

    Returns:
        Each once, parameters first.
    """
    return tuple(_joined(_of_module(module)))


def entries_of_mapping(source: Mapping[str, Any]) -> tuple[TensorEntry, ...]:
    """Read what a checkpoint holds.

    Args:
        source: Tensors, shapes, pairs of shape and dtype or mappings with both, under their names.

    Returns:
        Each tensor once.

    Raises:
        ConfigurationError: If a value is none of these.
    """
    return tuple(_joined(_of_mapping(source)))


# Tied parameters come with the same key.
def _joined(keyed: Iterator[_Keyed]) -> list[TensorEntry]:
    found: dict[object, TensorEntry] = {}
    for key, entry in keyed:
        first = found.setdefault(key, entry)
        if first is not entry:
            found[key] = replace(first, aliases=(*first.aliases, entry.name))
    return list(found.values())


def _of_module(module: nn.Module) -> Iterator[_Keyed]:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield _keyed(name, parameter, parameter.requires_grad)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        yield _keyed(name, buffer, False, is_buffer=True)


def _of_mapping(source: Mapping[str, Any]) -> Iterator[_Keyed]:
    for name, value in source.items():
        if not isinstance(name, str):
            raise ConfigurationError(
                f"`{name!r}` is not the name of a tensor. Give a mapping such as "
                "`{'head.weight': (10, 4)}`, or a `state_dict`."
            )
        if name.endswith("_extra_state"):
            continue
        if isinstance(value, Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            yield _keyed(name, value, None, is_buffer=_is_buffer(name, dtype))
            continue
        try:
            shape, dtype = _shape_and_dtype(value)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ConfigurationError(
                f"`{name}` is {value!r:.80}, which is neither a tensor nor a shape. Give a tensor, "
                "a shape such as `(10, 4)`, or a pair such as `((10, 4), 'float32')`."
            ) from error
        entry = _entry(name, shape, dtype, None, is_buffer=_is_buffer(name, dtype))
        yield name, entry


def _is_buffer(name: str, dtype: str) -> bool:
    return name.rpartition(".")[2] in _BUFFERS or dtype in _BUFFER_DTYPES


def _shape_and_dtype(value: Any) -> tuple[tuple[int, ...], str]:
    if isinstance(value, Mapping):
        value = (value["shape"], value.get("dtype", "float32"))
    shape, dtype = value, "float32"
    if len(value) == 2 and isinstance(value[0], Sequence):
        shape, dtype = value[0], str(value[1]).removeprefix("torch.")
    sizes = tuple(int(size) for size in shape)
    if isinstance(shape, str) or any(size < 0 for size in sizes):
        raise ValueError(shape)
    dtype = _SHORT_DTYPES.get(dtype, dtype)
    if not isinstance(getattr(torch, dtype), torch.dtype):
        raise ValueError(dtype)
    return sizes, dtype


def _entry(
    name: str, shape: tuple[int, ...], dtype: str, is_trainable: bool | None, *, is_buffer: bool
) -> TensorEntry:
    count = torch.Size(shape).numel()
    num_bytes = count * getattr(torch, dtype).itemsize
    return TensorEntry(name, shape, dtype, count, num_bytes, is_trainable, is_buffer)


def _keyed(
    name: str, tensor: Tensor, is_trainable: bool | None, *, is_buffer: bool = False
) -> _Keyed:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if is_lazy(tensor):
        return id(tensor), TensorEntry(name, None, dtype, 0, 0, is_trainable, is_buffer)
    entry = _entry(name, tuple(tensor.shape), dtype, is_trainable, is_buffer=is_buffer)
    storages = tuple(storage._cdata for storage in storages_of(tensor))
    if not storages:
        return id(tensor), entry
    return (storages, tensor.storage_offset(), tensor.shape, tensor.stride()), entry
