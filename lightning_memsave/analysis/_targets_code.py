"""Find a class or a function by ``module:name`` or ``file.py:name``."""

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml  # type: ignore[import-untyped] # it comes without types
from torch import nn

from lightning_memsave.analysis._targets_building import explained, importable
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.planning.fake_building import buildable

Factory = Callable[..., Any]


def find_factory(text: str) -> Factory:
    """Import what makes a module.

    Args:
        text: ``package.module:Class``, ``path/to/file.py:function``; the name may have dots.

    Returns:
        A class or a function.

    Raises:
        ConfigurationError: If the import fails, if there is no such name, or if what it names
            cannot make a module.
    """
    where, _, name = text.rpartition(":")
    if not where:
        raise ConfigurationError(
            f"`{text}` does not name a class and its module. Write `module:Class`, or "
            "`path/to/file.py:Class`."
        )
    with importable(_folder_of(where)):
        module = _import_file(where) if where.endswith(".py") else _import_module(where)
        found = _attribute(module, where, name)
    if isinstance(found, nn.Module):
        raise ConfigurationError(
            f"`{text}` is a model that exists already, and has taken its memory. Name the class or "
            "a function that makes it."
        )
    if isinstance(found, type) and not issubclass(found, nn.Module):
        raise ConfigurationError(
            f"`{text}` is a class, but no `nn.Module`. Name the model's class, or a function that "
            "returns the model."
        )
    if not callable(found):
        raise ConfigurationError(
            f"`{text}` is a `{type(found).__name__}`, which cannot be called. Name a class or a "
            "function that returns an `nn.Module`."
        )
    result: Factory = found
    return result


def maker_of(text: str, factory: Factory, arguments: Mapping[str, Any]) -> Callable[[], nn.Module]:
    """Bind arguments to a factory.

    Args:
        text: How it was named.
        factory: From `find_factory`.
        arguments: By name.

    Returns:
        A function that makes the module.

    Raises:
        ConfigurationError: If arguments are missing, or are none of the factory's.
    """
    _check_arguments(text, factory, arguments)
    folder = _folder_of(text.rpartition(":")[0])

    def make() -> nn.Module:
        fix = "Does it run in a training script?"
        with explained(f"`{text}`", fix), importable(folder), buildable():
            return checked_module(text, factory(**arguments))

    return make


def checked_module(name: str, made: object) -> nn.Module:
    """Make sure that a factory has given a module.

    Args:
        name: Of the factory.
        made: What it has returned.

    Returns:
        The same.

    Raises:
        ConfigurationError: If it is no module.
    """
    if isinstance(made, nn.Module):
        return made
    raise ConfigurationError(
        f"`{name}` returned a `{type(made).__name__}`, which is no `nn.Module`. Let it return the "
        "model alone."
    )


def parse_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """Read arguments such as a shell gives.

    Args:
        pairs: Each ``name=value``, with values as in YAML.

    Returns:
        The values by name.

    Raises:
        ConfigurationError: If one of them has no name, or a value that is no YAML.

    Example:
        >>> parse_arguments(["depth=4", "attn_implementation=eager", "lr=0.1", "bias=false"])
        {'depth': 4, 'attn_implementation': 'eager', 'lr': 0.1, 'bias': False}
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip().isidentifier():
            raise ConfigurationError(f"{pair!r} is not an argument. Write `name=value`.")
        try:
            found[name.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            said = " ".join(str(error).split())
            raise ConfigurationError(
                f"The value of {pair!r} cannot be read as YAML ({said}). Write `name=value`, with "
                "quotes around a text of special characters."
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


def _import_file(path: str) -> ModuleType:
    if not Path(path).is_file():
        raise ConfigurationError(f"`{path}` does not exist. {_near_files(Path(path))}")
    # Not its bare name, which another module may have.
    name = f"_memsave_target_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:  # pragma: no cover - not for a file named *.py
        raise ConfigurationError(f"`{path}` cannot be imported. Write `package.module:Class`.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickling, and dataclasses, look there
    fix = "If it is part of a package, write `package.module:Class` in place of its path."
    try:
        with explained(f"Importing `{path}`", fix):
            spec.loader.exec_module(module)
    except ConfigurationError:
        del sys.modules[name]
        raise
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


def _near_files(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"There is no folder `{folder}` either."
    near = difflib.get_close_matches(path.name, [p.name for p in folder.iterdir()], n=3)
    options = " or ".join(f"`{folder / name}`" for name in near)
    return f"Did you mean {options}?" if options else "Give the path from the current folder."


def _check_arguments(text: str, factory: Factory, arguments: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some built-in ones have none
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
            f"`{text}` cannot be called like this: {error}. It takes {names}. "
            f"{f'Add {missing}.' if missing else 'Remove what it does not take.'}"
        ) from error
