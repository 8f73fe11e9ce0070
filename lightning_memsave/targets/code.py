"""Import classes and functions by ``module:name`` or ``file.py:name``."""

import contextlib
import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml  # type: ignore[import-untyped] # it comes without types
from torch import nn

from lightning_memsave.core.names import did_you_mean
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.prediction.user_code import build_module, explained


@contextlib.contextmanager
def importable(folder: str | None = None) -> Iterator[None]:
    """Let imports find modules in a folder, as ``python file.py`` does."""
    path = str((Path(folder) if folder else Path.cwd()).resolve())
    sys.path.insert(0, path)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(path)


Factory = Callable[..., Any]


def find_factory(text: str) -> Factory:
    found = _find_object(text)
    if isinstance(found, nn.Module):
        raise ConfigurationError(
            f"`{text}` is a model that exists already and uses memory. Name its class, or a "
            "function that returns it."
        )
    if isinstance(found, type) and not issubclass(found, nn.Module):
        raise ConfigurationError(
            f"`{text}` is a class, but not an `nn.Module`. Name the model's class, or a function "
            "that returns the model."
        )
    if not callable(found):
        raise ConfigurationError(
            f"`{text}` is a `{type(found).__name__}`, which cannot be called. Name a class or a "
            "function that returns an `nn.Module`."
        )
    result: Factory = found
    return result


def call_for_batch(text: str) -> Any:
    function = _find_object(text)
    fix = "Name a function without arguments that returns a batch."
    with explained(f"`{text}`", fix), importable(_folder_of(text.rpartition(":")[0])):
        return function()


def _find_object(text: str) -> Any:
    where, _, name = text.rpartition(":")
    if not where:
        raise ConfigurationError(
            f"`{text}` does not name a class and its module. Write `module:Class`, or "
            "`path/to/file.py:Class`."
        )
    with importable(_folder_of(where)):
        module = _import_file(where) if where.endswith(".py") else _import_module(where)
        return _attribute(module, where, name)


def maker_of(text: str, factory: Factory, arguments: Mapping[str, Any]) -> Callable[[], nn.Module]:
    _check_arguments(text, factory, arguments)
    folder = _folder_of(text.rpartition(":")[0])

    def make() -> nn.Module:
        fix = "Does it run in a training script?"
        with importable(folder):
            return build_module(functools.partial(factory, **arguments), text, fix)

    return make


def load_yaml(text: str) -> Any:
    """Read YAML as LightningCLI does, which takes ``1e-3`` for a number."""
    from jsonargparse import get_loader  # noqa: PLC0415

    return get_loader("yaml")(text)


def parse_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip().isidentifier():
            raise ConfigurationError(f"{pair!r} is not an argument. Write `name=value`.")
        try:
            found[name.strip()] = load_yaml(value)
        except yaml.YAMLError as error:
            said = " ".join(str(error).split())
            raise ConfigurationError(
                f"The value of {pair!r} cannot be read as YAML ({said}). Write `name=value`, with "
                "quotes around a string with special characters."
            ) from error
    return found


def _folder_of(where: str) -> str | None:
    return str(Path(where).parent) if where.endswith(".py") else None


def _import_module(name: str) -> ModuleType:
    what = f"Importing `{name}`"
    try:
        with explained(what, "Does `python -c 'import ...'` work here?"):
            return importlib.import_module(name)
    except ConfigurationError as error:
        cause = error.__cause__
        is_missing = isinstance(cause, ModuleNotFoundError)
        if is_missing and cause.name and f"{name}.".startswith(f"{cause.name}."):  # type: ignore[union-attr]
            raise ConfigurationError(
                f"There is no module `{cause.name}` here or among the installed packages. Run "  # type: ignore[union-attr]
                "it in the folder of your project, or name the file: `path/to/file.py:Class`."
            ) from cause
        raise


# File and time of its last change, by the name of its module.
_imported: dict[str, tuple[Path, int]] = {}


def _import_file(path: str) -> ModuleType:
    if not Path(path).is_file():
        folder = Path(path).parent
        fix = files_like(Path(path)) or "Give the path from the current folder."
        if not folder.is_dir():
            fix = f"There is no folder `{folder}` either."
        raise ConfigurationError(f"`{path}` does not exist. {fix}")
    # Prefixed, as another module may have the same name.
    name = f"_memsave_target_{Path(path).stem}"
    state = Path(path).resolve(), Path(path).stat().st_mtime_ns
    # A batch may be of a class beside the model, which must not exist twice.
    if name in sys.modules and _imported.get(name) == state:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:  # pragma: no cover - not for a file named *.py
        raise ConfigurationError(f"`{path}` cannot be imported. Write `package.module:Class`.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickling, and dataclasses, look there
    fix = "If it is part of a package, write `package.module:Class` instead of its path."
    try:
        with explained(f"Importing `{path}`", fix):
            spec.loader.exec_module(module)
    except ConfigurationError:
        del sys.modules[name]
        raise
    _imported[name] = state
    return module


def _attribute(module: ModuleType, where: str, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        if not part or not hasattr(found, part):
            near = difflib.get_close_matches(part, vars(found), n=3) or [
                other
                for other, value in vars(found).items()
                if isinstance(value, type) and issubclass(value, nn.Module)
            ]
            options = " or ".join(f"`{where}:{other}`" for other in near)
            raise ConfigurationError(
                f"`{where}` has no `{name}`. Write {options or '`module:Class` with its class'}."
            )
        found = getattr(found, part)
    return found


def files_like(path: Path) -> str:
    folder = path.parent
    names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    prefix = "" if folder == Path() else f"{folder}{os.sep}"
    return did_you_mean(path.name, names, prefix=prefix, cutoff=0.8)


def _check_arguments(text: str, factory: Factory, arguments: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        required = [
            p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL
        ]
        missing = " ".join(f"`--arg {n}=...`" for n in required if n not in arguments)
        names = ", ".join(f"`{p.name}`" for p in parameters) or "none"
        raise ConfigurationError(
            f"`{text}` cannot be called with these arguments: {error}. Its arguments are {names}. "
            f"{f'Add {missing}.' if missing else 'Remove the others.'}"
        ) from error


def find_optimizer(name: str | None, pairs: Sequence[str] = ()) -> Callable[..., Any] | None:
    """Import an optimizer class or function, and try it on one parameter."""
    if name is None:
        if pairs:
            raise ConfigurationError(
                f"--optimizer-arg {pairs[0]} needs the name of an optimizer. Add --optimizer."
            )
        return None
    if "bit" in name and ":" not in name:
        raise ConfigurationError(
            f"`{name}` is no optimizer of torch. For low-bit optimizers write --set "
            f"optimizer={name}."
        )
    where, _, attribute = name.rpartition(":" if ":" in name else ".")
    found = _find_object(f"{where or 'torch.optim'}:{attribute}")
    if not callable(found):
        raise ConfigurationError(
            f"`{name}` cannot be called. Write for example torch.optim.AdamW, or module:function."
        )
    factory = functools.partial(found, **parse_arguments(pairs))
    with explained(f"Making the optimizer `{name}`", "Check its arguments: --optimizer-arg."):
        made = factory([torch.nn.Parameter(torch.zeros(1))])
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigurationError(
            f"`{name}` returned a {type(made).__name__}, which is not an optimizer. Name a class "
            "such as torch.optim.AdamW, or a function of the parameters that returns an optimizer."
        )
    return factory
