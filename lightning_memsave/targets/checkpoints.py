"""Read names, shapes and hyper-parameters from checkpoints, without running code in them."""

import contextlib
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_memsave.errors import ConfigurationError
from lightning_memsave.units import format_bytes

_PLACES = ("state_dict", "model_state_dict", "model", "module")


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if path.suffix == ".safetensors":
        return _read_safetensors(path), {}
    # Under this mode no tensor data is read or allocated.
    with FakeTensorMode():
        found = load_without_code(
            path,
            if_code="Pass a file with the weights only: `torch.save(model.state_dict(), path)`; or "
            "name the code instead of the checkpoint: `module:Class`.",
            if_unreadable="Pass a checkpoint of Lightning, or a file written by "
            "`torch.save(model.state_dict(), path)`.",
        )
    state = found
    for _ in range(2):  # DeepSpeed and others have a second level
        place = next((p for p in _PLACES if isinstance(_get(state, p), Mapping)), None)
        state = state[place] if place else state
    tensors = {
        name: tensor
        for name, tensor in (state.items() if isinstance(state, Mapping) else ())
        if isinstance(name, str) and isinstance(tensor, Tensor)
    }
    if not tensors:
        raise ConfigurationError(
            f"`{path}` has no `state_dict` with tensors. Pass a checkpoint of Lightning, or a file "
            "written by `torch.save(model.state_dict(), path)`."
        )
    arguments = _get(found, "hyper_parameters")
    arguments = dict(arguments) if isinstance(arguments, Mapping) else {}
    arguments.pop("_instantiator", None)
    return _without_wrappers(tensors), arguments


def load_without_code(
    path: Path, *, if_code: str, if_unreadable: str, map_location: str | None = None
) -> Any:
    try:
        _refuse_zip_bomb(path)
        return torch.load(path, map_location=map_location, weights_only=True)
    # Other files raise exceptions of any class.
    except Exception as error:
        code = re.search(r"GLOBAL (\S+)", str(error))
        is_pickle = isinstance(error, pickle.UnpicklingError)
        if code is not None and is_pickle:
            raise ConfigurationError(
                f"`{path}` was not loaded: it has an object of `{code[1]}`, and loading that could "
                f"run code. {if_code}"
            ) from error
        # What torch adds to the reason is how to run the code.
        reason = str(error).partition(" In PyTorch")[0].strip().splitlines()
        # For other files, the message of pickle may be a single byte.
        is_readable = bool(reason) and " " in reason[0] and not is_pickle
        why = f" ({reason[0].rstrip('.')})" if is_readable else ": it is not a file of torch"
        raise ConfigurationError(
            f"`{path}` cannot be read by torch{why}. {if_unreadable}"
        ) from error


# torch's names of dtypes, by those of safetensors.
_DTYPES = {
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


# `torch.save` compresses nothing.
def _refuse_zip_bomb(path: Path) -> None:
    with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as file:
        num_bytes = sum(part.file_size for part in file.infolist())
        if num_bytes > path.stat().st_size:
            raise ValueError(f"it would unpack to {format_bytes(num_bytes)}, as a zip bomb does")


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    try:
        with FakeTensorMode(), safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: torch.empty(
                    found.get_shape(),
                    dtype=getattr(torch, _DTYPES[found.get_dtype()]),
                    device="cpu",
                )
                for name, found in slices.items()
            }
    except (SafetensorError, KeyError, OSError) as error:
        raise ConfigurationError(
            f"`{path}` cannot be read by safetensors ({error}). Pass a file written by "
            "`model.save_pretrained`."
        ) from error


# DDP and `torch.compile` add these prefixes to names.
def _without_wrappers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors = {name.replace("_orig_mod.", ""): tensor for name, tensor in tensors.items()}
    if all(name.startswith("module.") for name in tensors):
        return {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    return tensors


def _get(found: Any, name: str) -> Any:
    return found.get(name) if isinstance(found, Mapping) else None
