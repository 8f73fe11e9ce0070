"""Read model, Trainer arguments and callback settings from a config for LightningCLI."""

import functools
import importlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped] # it comes without types
from torch import nn
from torch.optim import Optimizer

from lightning_memsave.errors import ConfigurationError
from lightning_memsave.prediction.user_code import build_module, explained
from lightning_memsave.targets.code import find_factory, importable, load_yaml
from lightning_memsave.targets.target import Target

# Objects that do not affect the memory of a step.
_NOT_ARGUMENTS = ("callbacks", "logger", "profiler")


def read_lightning_config(path: str, model: str | None, arguments: Mapping[str, Any]) -> Target:
    found = _section(path, _load(Path(path)), "")
    for subcommand in ("fit", "validate"):
        if "model" not in found and "trainer" not in found and subcommand in found:
            found = _section(path, found, subcommand)
    trainer = _section(path, found, "trainer")
    notes = []
    if "data" in found:
        notes.append("`data` is not used: the batch is the one that you describe")
    optimizer = found.get("optimizer")
    if isinstance(optimizer, str):
        optimizer = {"class_path": optimizer}
    optimizer = _section(path, {"optimizer": optimizer}, "optimizer") or None
    if optimizer is not None and "class_path" not in optimizer:
        notes.append("`optimizer` names no class: the model's `configure_optimizers` is used")
        optimizer = None
    return Target(
        path,
        "lightning_cli",
        _maker(path, found, model, arguments, optimizer),
        _settings(path, found, trainer),
        {name: value for name, value in trainer.items() if name not in _NOT_ARGUMENTS},
        notes=tuple(notes),
    )


def _maker(
    path: str,
    found: dict[str, Any],
    model: str | None,
    arguments: Mapping[str, Any],
    optimizer: Any,
) -> Callable[[], nn.Module]:
    section = found.get("model")
    if isinstance(section, str):
        file = Path(path).parent / section
        section = _load(file) if file.is_file() else {"class_path": section}
    if not isinstance(section, dict) and (model is None or section is not None):
        raise ConfigurationError(
            f"`{path}` has no `model`. Add `model: {{class_path: module.Class}}`, or name its "
            "class: `--model module:Class`."
        )
    section = dict(section or {})
    if model is None and "class_path" not in section:
        raise ConfigurationError(
            f"`model` in `{path}` has no `class_path`: its class is in the code that calls "
            "`LightningCLI`. Name it too: `--model module:Class`."
        )
    if "class_path" in section:
        section["init_args"] = {**_section(path, section, "init_args"), **arguments}
    else:
        section |= arguments
    return _parsed(path, section, model, optimizer)


def _parsed(
    path: str, section: dict[str, Any], model: str | None, optimizer: Any
) -> Callable[[], nn.Module]:
    from jsonargparse import ArgumentError, ArgumentParser  # noqa: PLC0415

    parser = ArgumentParser(exit_on_error=False)
    fix = "Check the class and its arguments; `python train.py fit --config ...` fails likewise."
    with importable(), explained(f"Reading `model` of `{path}`", fix):
        if "class_path" in section:
            parser.add_subclass_arguments(nn.Module, "model", fail_untyped=False, required=True)
        else:
            # Not None: without a class in the file it is required.
            cls: Any = find_factory(str(model))
            parser.add_class_arguments(cls, "model", fail_untyped=False, sub_configs=True)
        try:
            config = parser.parse_object({"model": section})
        except ArgumentError as error:
            found = re.search(r"given class_path (.+?)(?:\n\s*- Expected|$)", str(error), re.DOTALL)
            said = " ".join((found[1] if found else str(error)).split())
            raise ConfigurationError(
                f"`model` of `{path}` cannot be constructed: {said}. {fix}"
            ) from error
    # jsonargparse deprecated the old name in 4.49.
    instantiate: Any = getattr(parser, "instantiate", None) or parser.instantiate_classes

    def make() -> nn.Module:
        with importable():
            made = build_module(lambda: instantiate(config.clone()).model, f"model of {path}", fix)
        if optimizer is not None:
            # As LightningCLI does for an optimizer in the file.
            configure: Any = functools.partial(_make_optimizer, made, path, optimizer)
            made.configure_optimizers = configure
        return made

    return make


def _make_optimizer(module: nn.Module, path: str, optimizer: dict[str, Any]) -> Any:
    with importable(), explained(f"`optimizer` of `{path}`", "Check its class and arguments."):
        # LightningCLI accepts names without a package for torch's own optimizers.
        where, _, name = optimizer["class_path"].rpartition(".")
        cls = getattr(importlib.import_module(where or "torch.optim"), name)
        if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
            raise ConfigurationError(
                f"`optimizer` of `{path}` is {where}.{name}, which is not a class of optimizers. "
                "Write for example `class_path: torch.optim.AdamW`."
            )
        return cls(module.parameters(), **(optimizer.get("init_args") or {}))


def _settings(path: str, found: dict[str, Any], trainer: dict[str, Any]) -> dict[str, Any] | None:
    if found.get("memsave") is not None:
        settings = dict(_section(path, found, "memsave"))
        return settings if settings.pop("enabled", True) else None
    callbacks = trainer.get("callbacks") or []
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        given: Any = {"class_path": callback} if isinstance(callback, str) else callback
        given = _section(path, {"trainer.callbacks": given}, "trainer.callbacks")
        if str(given.get("class_path", "")).rpartition(".")[2] == "MemSaveCallback":
            return dict(_section(path, given, "init_args"))
    return None


def _section(path: str, found: Any, name: str) -> dict[str, Any]:
    section = found.get(name) or {} if name else found
    if not isinstance(section, dict):
        what = f"`{name}` in `{path}`" if name else f"`{path}`"
        raise ConfigurationError(
            f"{what} is a {type(section).__name__}, not a mapping of names to values. Write it as "
            "`python train.py fit --print_config` does."
        )
    return section


_MAX_VALUES = 100_000


# Aliases written out, as every reader of the values does: nine lines can stand for a billion.
def _num_values(found: Any, known: dict[int, int]) -> int:
    if not isinstance(found, dict | list):
        return 1
    if id(found) not in known:
        known[id(found)] = _MAX_VALUES + 1  # for what contains itself
        parts = found.values() if isinstance(found, dict) else found
        known[id(found)] = 1 + sum(_num_values(part, known) for part in parts)
    return known[id(found)]


def _load(path: Path) -> Any:
    try:
        found = load_yaml(path.read_text(encoding="utf-8"))
        if _num_values(found, {}) > _MAX_VALUES:
            raise ValueError(f"with its aliases written out it has over {_MAX_VALUES:,} values")
        return found
    except (yaml.YAMLError, ValueError, RecursionError, OSError) as error:
        said = " ".join(str(error).split())
        raise ConfigurationError(
            f"`{path}` cannot be read as YAML ({said}). Write it as "
            "`python train.py fit --print_config` does."
        ) from error
