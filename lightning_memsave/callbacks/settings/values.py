"""Helpers to read the arguments of ``MemSaveCallback``."""

from collections.abc import Mapping
from typing import Any

from lightning_memsave.core.technique import Exactness, Technique
from lightning_memsave.errors import ConfigurationError

Arguments = Mapping[str, Any]
"""All arguments of ``MemSaveCallback`` by name."""


def exactness_limit(arguments: Arguments) -> Exactness:
    """Read how far results may move."""
    try:
        return Exactness(arguments["exactness"])
    except ValueError as error:
        raise ConfigurationError(
            f"`exactness={arguments['exactness']!r}` is not a valid exactness. Use "
            f"{' or '.join(repr(e.value) for e in Exactness)}."
        ) from error


def is_asked(arguments: Arguments, name: str) -> bool:
    """Say whether the user wrote an argument by name, and not the preset."""
    return name not in arguments["from_preset"] and arguments[name] != "auto"


def why_beyond(arguments: Arguments, name: str, exactness: Exactness) -> str:
    """Say why the limit switches off what is left to a preset."""
    limit = exactness_limit(arguments)
    if limit.allows(exactness):
        return ""
    if not is_asked(arguments, name):
        return f"it is {exactness.value}, which `exactness={limit.value!r}` does not allow"
    raise ConfigurationError(
        f"{as_given(arguments, name)} is {exactness.value}, which "
        f"`exactness={limit.value!r}` does not allow. Use `exactness={exactness.value!r}`, or "
        f"`{name}=None`."
    )


def as_given(arguments: Arguments, name: str) -> str:
    """Write an argument, with the preset that it comes from if the user has not given it."""
    from_preset = arguments["preset"] is not None and name in arguments["from_preset"]
    of_preset = f" of `preset={arguments['preset']!r}`" if from_preset else ""
    return f"`{name}={arguments[name]!r}`{of_preset}"


def refuse_technique(name: str, value: object, expected: type[Technique[Any]]) -> None:
    """Refuse a technique where another one or a plain value belongs."""
    if isinstance(value, Technique) or (isinstance(value, type) and issubclass(value, Technique)):
        raise ConfigurationError(
            f"`{name}={value!r}` is not an instance of `{expected.__name__}`. Use "
            f"`{name}={expected.__name__}()`."
        )


def read_flag(arguments: Arguments, name: str, allowed: tuple[bool | None, ...]) -> bool | None:
    """Read an argument that has a few values only."""
    value = arguments[name]
    if not any(value is option for option in allowed):
        options = ", ".join(f"`{name}={option}`" for option in allowed)
        raise ConfigurationError(f"`{name}={value!r}` is not a valid value. Use one of {options}.")
    result: bool | None = value
    return result


def short(value: object) -> str:
    """Write a value for the table; what switches nothing on is ``None``."""
    return "None" if value is None or value is False else repr(value)
