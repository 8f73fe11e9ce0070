"""How many parameters each module has, without running the model or having its code."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_memsave.errors import ConfigurationError
from lightning_memsave.measure.storages import storages_of

# A checkpoint does not say which of its tensors are buffers; these are, in torch and transformers.
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "position_ids", "inv_freq")
_BUFFER_DTYPES = ("int64", "int32", "bool")


@dataclass(frozen=True, slots=True)
class TensorEntry:
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
        return self.name.rpartition(".")[0]


_Keyed = tuple[object, TensorEntry]


# Tied parameters come with the same key.
def _joined(keyed: Iterator[_Keyed]) -> tuple[TensorEntry, ...]:
    found: dict[object, TensorEntry] = {}
    for key, entry in keyed:
        first = found.setdefault(key, entry)
        if first is not entry:
            found[key] = replace(first, aliases=(*first.aliases, entry.name))
    return tuple(found.values())


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
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise ConfigurationError(
                f"`{name}` is {value!r:.80}, which is neither a tensor nor a shape. Give a tensor, "
                "a shape such as `(10, 4)`, or a pair such as `((10, 4), 'float32')`."
            ) from error
        entry = _entry(name, shape, dtype, None, is_buffer=_is_buffer(name, dtype))
        yield name, entry


def _is_buffer(name: str, dtype: str) -> bool:
    return name.rpartition(".")[2] in _BUFFERS or dtype in _BUFFER_DTYPES


def _shape_and_dtype(value: Any) -> tuple[tuple[int, ...], str]:
    shape, dtype = value, "float32"
    if len(value) == 2 and isinstance(value[0], Sequence):
        shape, dtype = value[0], str(value[1]).removeprefix("torch.")
    sizes = tuple(int(size) for size in shape)
    if isinstance(shape, str) or any(size < 0 for size in sizes):
        raise ValueError(shape)
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


@dataclass(frozen=True, slots=True)
class ModuleParameters:
    name: str
    class_name: str
    num_parameters: int = 0
    num_bytes: int = 0
    buffer_bytes: int = 0


@dataclass(frozen=True)
class ParameterTable:
    model: str
    entries: tuple[TensorEntry, ...]
    class_names: Mapping[str, str] = field(default_factory=dict)

    @property
    def parameters(self) -> tuple[TensorEntry, ...]:
        return tuple(entry for entry in self.entries if not entry.is_buffer)

    @property
    def num_parameters(self) -> int:
        """Numbers in all parameters; tied ones count once."""
        return sum(entry.num_elements for entry in self.parameters)

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.parameters)

    @property
    def buffer_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries if entry.is_buffer)

    @property
    def num_lazy(self) -> int:
        """How many parameters have no shape yet and count as nothing."""
        return sum(entry.shape is None for entry in self.parameters)

    @cached_property
    def modules(self) -> tuple[ModuleParameters, ...]:
        found = {name: ModuleParameters(name, kind) for name, kind in self.class_names.items()}
        for entry in self.entries:
            for name in ancestors(entry.module):
                row = found.get(name) or ModuleParameters(name, "")
                found[name] = _with_entry(row, entry)
        return tuple(found.values())

    def to_dict(self) -> dict[str, Any]:
        names = ("model", "num_parameters", "num_bytes", "buffer_bytes", "num_lazy")
        return {name: getattr(self, name) for name in names} | {
            "modules": [asdict(row) for row in self.modules],
            "tensors": [asdict(entry) for entry in self.entries],
        }


def parameter_table(source: nn.Module | Mapping[str, Any], model: str = "") -> ParameterTable:
    """Count the parameters of every module; nothing is run, and no values are read.

    Note:
        Tied parameters of a mapping are recognised if its values are tensors that share memory. A
        DTensor counts as the whole of it, not as the part that this process has. A parameter that
        is packed, such as a 4-bit one, counts as the elements that are stored.
    """
    if isinstance(source, nn.Module):
        # Not without duplicates: under its second name a shared module would be missing.
        classes = {
            name: type(module).__name__
            for name, module in source.named_modules(remove_duplicate=False)
        }
        return ParameterTable(model or type(source).__name__, _joined(_of_module(source)), classes)
    if not isinstance(source, Mapping):
        raise ConfigurationError(
            f"A {type(source).__name__} has no parameters to count. Pass a module, or a mapping of "
            "names to tensors or shapes such as `module.state_dict()`."
        )
    return ParameterTable(model or "checkpoint", _joined(_of_mapping(source)))


def ancestors(name: str) -> Iterator[str]:
    yield ""
    parts = name.split(".") if name else []
    for i in range(len(parts)):
        yield ".".join(parts[: i + 1])


def _with_entry(row: ModuleParameters, entry: TensorEntry) -> ModuleParameters:
    if entry.is_buffer:
        return replace(row, buffer_bytes=row.buffer_bytes + entry.num_bytes)
    return replace(
        row,
        num_parameters=row.num_parameters + entry.num_elements,
        num_bytes=row.num_bytes + entry.num_bytes,
    )
