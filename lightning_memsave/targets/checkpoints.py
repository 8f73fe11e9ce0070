"""Names, shapes and hyper-parameters out of checkpoints; code in them is never run."""

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_memsave.errors import ConfigurationError

_PLACES = ("state_dict", "model_state_dict", "model", "module")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a file of weights says about a model.

    Args:
        tensors: Tensors without data by name; tied ones share a storage.
        hyper_parameters: Arguments that Lightning has saved.
        class_name: Of the model, where LightningCLI has saved it.
    """

    tensors: Mapping[str, Tensor]
    hyper_parameters: Mapping[str, Any] = field(default_factory=dict)
    class_name: str | None = None


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a file of weights without loading them.

    Args:
        path: Written by Lightning, ``torch.save`` or safetensors.

    Returns:
        What it says.

    Raises:
        ConfigurationError: If it cannot be read, if it holds objects whose loading could run code,
            or if there are no tensors in it.
    """
    if path.suffix == ".safetensors":
        return Checkpoint(_read_safetensors(path))
    found = _load(path)
    state = found
    for _ in range(2):  # DeepSpeed and others nest once more
        place = next((p for p in _PLACES if isinstance(_get(state, p), Mapping)), None)
        state = state[place] if place else state
    tensors = {
        name: tensor
        for name, tensor in (state.items() if isinstance(state, Mapping) else ())
        if isinstance(name, str) and isinstance(tensor, Tensor)
    }
    if not tensors:
        raise ConfigurationError(
            f"`{path}` has no tensors under the name of a module. Give a checkpoint of Lightning, "
            "or what `torch.save(model.state_dict(), path)` has written."
        )
    arguments = _get(found, "hyper_parameters")
    arguments = dict(arguments) if isinstance(arguments, Mapping) else {}
    class_name = arguments.pop("_class_path", None)
    arguments.pop("_instantiator", None)
    return Checkpoint(_without_wrappers(tensors), arguments, class_name)


def _load(path: Path) -> Any:
    try:
        # Shapes are all that is wanted: under this mode nothing is read or allocated for them.
        with FakeTensorMode():
            return torch.load(path, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigurationError(_refusal(path, error)) from error
    # Files that are no checkpoint raise all kinds.
    except Exception as error:
        raise ConfigurationError(_unreadable(path, error)) from error


def _refusal(path: Path, error: Exception) -> str:
    found = re.search(r"GLOBAL (\S+)", str(error))
    if found is None:
        return _unreadable(path, error)
    return (
        f"`{path}` holds an object of `{found[1]}`, and loading that could run code: it was not "
        "loaded. Give the weights alone: `torch.save(model.state_dict(), path)`; or give the code "
        "in place of the checkpoint: `module:Class`."
    )


def _unreadable(path: Path, error: Exception) -> str:
    reason = str(error).strip().splitlines()
    # What pickle raises on any other file may be no more than a byte.
    why = f" ({reason[0]})" if reason and " " in reason[0] else ": it is no file of torch"
    return (
        f"`{path}` cannot be read by torch{why}. Give a checkpoint of Lightning, or what "
        "`torch.save(model.state_dict(), path)` has written."
    )


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    try:
        with FakeTensorMode(), safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: torch.empty(found.get_shape(), dtype=_DTYPES[found.get_dtype()])
                for name, found in slices.items()
            }
    except (SafetensorError, KeyError, OSError) as error:
        raise ConfigurationError(
            f"`{path}` cannot be read by safetensors ({error}). Give a file that "
            "`model.save_pretrained` has written."
        ) from error


# DDP and `torch.compile` put these around the names of the model.
def _without_wrappers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors = {name.replace("_orig_mod.", ""): tensor for name, tensor in tensors.items()}
    if all(name.startswith("module.") for name in tensors):
        return {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    return tensors


def _get(found: Any, name: str) -> Any:
    return found.get(name) if isinstance(found, Mapping) else None


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
