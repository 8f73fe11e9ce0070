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

from lightning_memsave.core.names import SAFETENSORS_DTYPES
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
    # Shapes are all that is wanted: under this mode nothing is read or allocated for them.
    with FakeTensorMode():
        found = load_without_code(
            path,
            if_code="Give the weights alone: `torch.save(model.state_dict(), path)`; or give the "
            "code in place of the checkpoint: `module:Class`.",
            if_unreadable="Give a checkpoint of Lightning, or what "
            "`torch.save(model.state_dict(), path)` has written.",
        )
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


def load_without_code(
    path: Path, *, if_code: str, if_unreadable: str, map_location: str | None = None
) -> Any:
    """Load a file of torch, but no code in it.

    Args:
        path: The file.
        if_code: What to do if it holds objects whose loading could run code.
        if_unreadable: What to do if it cannot be read.
        map_location: As for ``torch.load``.

    Returns:
        What is in it.

    Raises:
        ConfigurationError: If it cannot be loaded so.
    """
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    # Files that are no checkpoint raise all kinds.
    except Exception as error:
        code = re.search(r"GLOBAL (\S+)", str(error))
        if code is not None and isinstance(error, pickle.UnpicklingError):
            raise ConfigurationError(
                f"`{path}` holds an object of `{code[1]}`, and loading that could run code: it was "
                f"not loaded. {if_code}"
            ) from error
        reason = str(error).strip().splitlines()
        # What pickle raises on any other file may be no more than a byte.
        is_told = bool(reason) and " " in reason[0]
        why = f" ({reason[0].rstrip('.')})" if is_told else ": it is not a file of torch"
        raise ConfigurationError(
            f"`{path}` cannot be read by torch{why}. {if_unreadable}"
        ) from error


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    try:
        with FakeTensorMode(), safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: torch.empty(
                    found.get_shape(), dtype=getattr(torch, SAFETENSORS_DTYPES[found.get_dtype()])
                )
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
