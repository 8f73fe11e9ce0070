"""What reading the arguments of ``MemSaveCallback`` has in common."""

from collections.abc import Mapping
from typing import Any

from lightning_memsave.callbacks._settings import Row
from lightning_memsave.core.technique import Exactness, Technique
from lightning_memsave.errors import ConfigurationError

Arguments = Mapping[str, Any]
"""All arguments of ``MemSaveCallback`` by name."""


def exactness_limit(arguments: Arguments) -> Exactness:
    """Read how far numbers may move.

    Args:
        arguments: All arguments of ``MemSaveCallback`` by name.

    Returns:
        The limit.

    Raises:
        ConfigurationError: If it is no exactness.
    """
    try:
        return Exactness(arguments["exactness"])
    except ValueError as error:
        raise ConfigurationError(
            f"`exactness={arguments['exactness']!r}` is no exactness. Use "
            f"{' or '.join(repr(e.value) for e in Exactness)}."
        ) from error


def is_beyond(arguments: Arguments, name: str, exactness: Exactness) -> bool:
    """Say whether the limit switches off what was left to us.

    Args:
        arguments: All arguments of ``MemSaveCallback`` by name.
        name: Name of a setting.
        exactness: What its value declares.

    Returns:
        True if it is to be off.

    Raises:
        ConfigurationError: If the user asked for it by name.
    """
    limit = exactness_limit(arguments)
    if limit.allows(exactness):
        return False
    if arguments[name] == "auto":
        return True
    raise ConfigurationError(
        f"{as_given(arguments, name)} is {exactness.value}, which "
        f"`exactness={limit.value!r}` does not allow. Use `exactness={exactness.value!r}`, or "
        f"`{name}=None`."
    )


def as_given(arguments: Arguments, name: str) -> str:
    """Write an argument, with the stack that it comes from if the user has not given it.

    Args:
        arguments: All arguments of ``MemSaveCallback`` by name, with those of its stack.
        name: Name of the argument.

    Returns:
        Code for a message.
    """
    is_own = arguments["stack"] is None or name not in arguments.get("from_stack", ())
    of_stack = "" if is_own else f" of `stack={arguments['stack']!r}`"
    return f"`{name}={arguments[name]!r}`{of_stack}"


def off_row(arguments: Arguments, name: str) -> Row:
    """Write that the limit has switched a setting off.

    Args:
        arguments: All arguments of ``MemSaveCallback`` by name.
        name: Name of the setting.

    Returns:
        A line of the table.
    """
    reason = f"`exactness={arguments['exactness']!r}` does not allow it"
    return Row(name, "auto", "off", (reason,))


def refuse_technique(name: str, value: object, expected: type[Technique[Any]]) -> None:
    """Refuse a technique where another one or a plain value belongs.

    Args:
        name: Name of a setting.
        value: Its value.
        expected: The technique that belongs there.

    Raises:
        ConfigurationError: If it is another technique, or a class.
    """
    if isinstance(value, Technique) or (isinstance(value, type) and issubclass(value, Technique)):
        raise ConfigurationError(
            f"`{name}={value!r}` is not an instance of `{expected.__name__}`. Use "
            f"`{name}={expected.__name__}()`."
        )


def read_flag(arguments: Arguments, name: str, allowed: tuple[bool | None, ...]) -> bool | None:
    """Read an argument that takes a few values only.

    Args:
        arguments: All arguments of ``MemSaveCallback`` by name.
        name: Its name.
        allowed: Its values.

    Returns:
        The value.

    Raises:
        ConfigurationError: If it is none of these.
    """
    value = arguments[name]
    if not any(value is option for option in allowed):
        options = ", ".join(f"`{name}={option}`" for option in allowed)
        raise ConfigurationError(f"`{name}={value!r}` is not a choice. Use one of {options}.")
    result: bool | None = value
    return result
