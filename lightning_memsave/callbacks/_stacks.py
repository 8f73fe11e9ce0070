"""Settings that go together, under one name."""

from collections.abc import Mapping
from typing import Any

from lightning_memsave.callbacks._settings import Row, Setting
from lightning_memsave.errors import ConfigurationError

STACKS: Mapping[str, Mapping[str, Any]] = {
    # What everybody has; also what `MemSaveCallback()` does on a GPU.
    "classic": {
        "activation_checkpointing": "all",
        "optimizer": "8bit",
        "precision": "auto",
        "micro_batch_size": "auto",
        "chunked_cross_entropy": None,
        "optimizer_in_backward": None,
        "low_precision_weights": None,
        "attention": None,
        "early_release": True,
    },
    # All that leaves training bit for bit as it was.
    "bitwise": {
        "activation_checkpointing": "all",
        "optimizer": None,
        "precision": None,
        "micro_batch_size": None,
        "chunked_cross_entropy": None,
        "optimizer_in_backward": True,
        "low_precision_weights": None,
        "attention": None,
        "early_release": True,
    },
    # The least memory that one GPU can do with, without that of the host.
    "single_gpu": {
        "activation_checkpointing": "nested",
        "optimizer": "8bit",
        "force_8bit": ("*",),
        "precision": "bf16-mixed",
        "micro_batch_size": "auto",
        "chunked_cross_entropy": True,
        "optimizer_in_backward": True,
        "low_precision_weights": "stochastic",
        "attention": "sdpa",
        "early_release": True,
    },
}
"""Arguments of `MemSaveCallback` by the name of their stack."""

OFF_BY_NONE = (
    "activation_checkpointing",
    "optimizer",
    "precision",
    "micro_batch_size",
    "early_release",
)
"""Arguments of `MemSaveCallback` that do something unless they are ``None``."""

# Of a bare `MemSaveCallback()`, which asks for none of what is new to a project.
_WITHOUT_STACK = {
    "chunked_cross_entropy": None,
    "optimizer_in_backward": None,
    "low_precision_weights": None,
    "attention": None,
    "early_release": True,
}


def with_rest_off(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Switch off what is not named; a stack says itself what is on.

    Args:
        settings: Some arguments of `MemSaveCallback` by name.

    Returns:
        Those, and ``None`` for the ones that would do something by themselves.
    """
    off = {} if settings.get("stack") else dict.fromkeys(OFF_BY_NONE)
    return off | dict(settings)


def with_stack(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Put the settings of the stack where the user gave none.

    Args:
        arguments: All arguments of `MemSaveCallback` by name.

    Returns:
        The arguments, none of which is ``"auto"`` where the stack or a bare callback has a value;
        and as ``from_stack`` the names of those that the user has not given.

    Raises:
        ConfigurationError: If there is no such stack.
    """
    missing = _missing(arguments)
    return {**arguments, **missing, "from_stack": tuple(missing)}


def _missing(arguments: Mapping[str, Any]) -> dict[str, Any]:
    wanted = arguments["stack"]
    if wanted is None:
        values: Mapping[str, Any] = _WITHOUT_STACK
    elif isinstance(wanted, str) and wanted in STACKS:
        values = STACKS[wanted]
    else:
        raise ConfigurationError(
            f"`stack={wanted!r}` is no stack. Use {', '.join(map(repr, STACKS))}, or `None`."
        )
    missing = {name: value for name, value in values.items() if arguments[name] == "auto"}
    # Which parameters have 8 bits is the stack's choice with every 8-bit optimizer, where nothing
    # else is said; a `LowBitOptimizer` says it itself.
    optimizer = missing.get("optimizer", arguments["optimizer"])
    is_8bit = isinstance(optimizer, str) and "8bit" in optimizer
    if is_8bit and "force_8bit" in values and not arguments["force_8bit"]:
        missing["force_8bit"] = values["force_8bit"]
    return missing


class Stack(Setting):
    """Says what a stack stands for; the settings themselves do the work.

    Args:
        arguments: As the user gave them.
    """

    name = "stack"

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        settings = _missing(arguments)
        if arguments["stack"] is None:
            unused = ", ".join(name for name, value in settings.items() if value is None)
            row = Row(self.name, "None", "unchanged", (f"not used: {unused}",))
            self._rows = [row] if unused else []
        else:
            given = sorted(set(STACKS[arguments["stack"]]) - set(settings) - {"force_8bit"})
            details = [", ".join(f"{name}={value!r}" for name, value in settings.items())]
            if given:
                details.append(f"set beside it: {', '.join(given)}")
            self._rows = [Row(self.name, repr(arguments["stack"]), "on", tuple(details))]

    def apply(self, trainer: Any, pl_module: Any) -> None:
        """Say what the stack stands for.

        Args:
            trainer: Not used.
            pl_module: Not used.
        """
        self.rows = self._rows
