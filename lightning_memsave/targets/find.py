"""Find the model that a user named: code, a Hugging Face config, YAML or a checkpoint."""

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_memsave.errors import ConfigurationError
from lightning_memsave.targets.checkpoints import read_checkpoint
from lightning_memsave.targets.code import files_like, find_factory, maker_of
from lightning_memsave.targets.hugging_face import maker_of_config, read_config
from lightning_memsave.targets.lightning_yaml import read_lightning_config
from lightning_memsave.targets.target import Target

_FORMS = (
    "Pass `module:Class`, `path/to/file.py:Class`, a Hugging Face config.json or its folder, "
    "`hf:NAME`, a YAML file for LightningCLI, or a checkpoint."
)
_CHECKPOINTS = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")


def load_target(
    target: str | os.PathLike[str],
    *,
    model: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    task: str | None = None,
) -> Target:
    """Find a model by name, without constructing it.

    Note:
        Code in a checkpoint is never run; code that the user names is. Only ``hf:`` accesses the
        Hub, and only for the config.
    """
    text = os.fspath(target).strip()
    path, arguments = Path(text), dict(arguments or {})
    if not text:
        raise ConfigurationError(f"The name of the model is empty. {_FORMS}")
    if text.startswith("hf:") or path.is_dir() or (path.is_file() and path.suffix == ".json"):
        _refuse(text, "a Hugging Face config", model=model)
        if path.is_dir() and not (path / "config.json").is_file():
            raise ConfigurationError(f"The folder `{text}` has no config.json. {_FORMS}")
        config = read_config(text, arguments)
        return Target(text, "hugging_face", maker_of_config(text, config, task))
    if path.is_file() and path.suffix in (".yaml", ".yml"):
        _refuse(text, "a configuration for LightningCLI", task=task)
        return read_lightning_config(text, model, arguments)
    if path.is_file() and path.suffix in _CHECKPOINTS:
        _refuse(text, "a checkpoint", task=task)
        return _target_from_checkpoint(text, model, arguments)
    if path.is_file():
        is_code = path.suffix == ".py"
        fix = f"Name the class of the model: `{text}:Class`." if is_code else _FORMS
        raise ConfigurationError(f"`{text}` does not name a model. {fix}")
    where, separator, name = text.rpartition(":")
    if separator and where and name and "//" not in text:
        _refuse(text, "code", model=model, task=task)
        factory = find_factory(text)
        return Target(text, "factory", maker_of(text, factory, arguments))
    if path.exists():
        raise ConfigurationError(f"`{text}` is not a regular file. {_FORMS}")
    raise ConfigurationError(f"`{text}` does not exist. {_suggest(path)}{_FORMS}")


def _target_from_checkpoint(path: str, model: str | None, arguments: dict[str, Any]) -> Target:
    tensors, hyper_parameters = read_checkpoint(Path(path))
    class_name = hyper_parameters.pop("_class_path", None)
    if model is None:
        named = "" if class_name is None else f": it was a `{class_name}`"
        note = f"without `--model module:Class`, only names and shapes are known{named}"
        return Target(path, "checkpoint", tensors=tensors, notes=(note,))
    factory = find_factory(model)
    make = maker_of(model, factory, _accepted(factory, hyper_parameters) | arguments)
    return Target(path, "checkpoint", make, tensors=tensors)


# As in Lightning's `load_from_checkpoint`: drop arguments that the class does not accept.
def _accepted(factory: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(factory).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


def _refuse(text: str, what: str, **given: str | None) -> None:
    for name, value in given.items():
        if value is not None:
            raise ConfigurationError(
                f"`{name}={value!r}` does not apply to `{text}`, which is {what}. Remove it."
            )


def _suggest(path: Path) -> str:
    module, _, name = str(path).rpartition(".")
    if question := files_like(path):
        return question
    if name[:1].isupper() and module.replace(".", "").isidentifier():
        return f"Did you mean `{module}:{name}`? "
    return ""
