"""The techniques that there are, and the stacks: settings that go together under one name."""

from collections.abc import Mapping
from typing import Any

from lightning_memsave.core.technique import Technique
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.techniques.activation_checkpointing.technique import (
    ActivationCheckpointing,
)
from lightning_memsave.techniques.attention_kernel.technique import AttentionKernel
from lightning_memsave.techniques.chunked_cross_entropy.technique import ChunkedCrossEntropy
from lightning_memsave.techniques.low_bit_optimizer.technique import LowBitOptimizer
from lightning_memsave.techniques.low_precision_weights.technique import LowPrecisionWeights
from lightning_memsave.techniques.micro_batching.technique import MicroBatching
from lightning_memsave.techniques.optimizer_in_backward.technique import OptimizerInBackward

TECHNIQUES: tuple[type[Technique[Any]], ...] = (
    AttentionKernel,  # docs/techniques/attention_kernel.md
    ChunkedCrossEntropy,  # docs/techniques/chunked_cross_entropy.md
    ActivationCheckpointing,  # docs/techniques/activation_checkpointing.md
    LowBitOptimizer,  # docs/techniques/low_bit_optimizer.md
    LowPrecisionWeights,  # docs/techniques/low_precision_weights.md
    OptimizerInBackward,  # docs/techniques/optimizer_in_backward.md
    MicroBatching,  # docs/techniques/micro_batching.md
)
"""In the order in which they are applied; they are undone in reverse."""

STACKS: Mapping[str, Mapping[str, Any]] = {
    # Nothing but what is named beside it.
    "off": dict.fromkeys(
        (
            "activation_checkpointing",
            "optimizer",
            "precision",
            "micro_batch_size",
            "eval_micro_batch_size",
            "chunked_cross_entropy",
            "optimizer_in_backward",
            "low_precision_weights",
            "attention",
            "early_release",
        )
    ),
    # What everybody has; also what `MemSaveCallback()` does.
    "classic": {
        "activation_checkpointing": "all",
        "optimizer": "8bit",
        "precision": "auto",
        "micro_batch_size": "auto",
        "eval_micro_batch_size": "auto",
        "chunked_cross_entropy": None,
        "optimizer_in_backward": None,
        "low_precision_weights": None,
        "attention": None,
        "early_release": True,
    },
    # All that leaves training bit for bit as it was. A batch that does not fit is split all the
    # same, which changes the rounding of a run that would have ended.
    "bitwise": {
        "activation_checkpointing": "all",
        "optimizer": None,
        "precision": None,
        "micro_batch_size": "auto",
        "eval_micro_batch_size": "auto",
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
        "eval_micro_batch_size": "auto",
        "chunked_cross_entropy": True,
        "optimizer_in_backward": True,
        "low_precision_weights": "stochastic",
        "attention": "sdpa",
        "early_release": True,
    },
}
"""Arguments of `MemSaveCallback` by the name of their stack."""

BARE = "classic"
"""The stack of a callback that is given none."""

OFF_BY_NONE = (
    "activation_checkpointing",
    "optimizer",
    "precision",
    "micro_batch_size",
    "eval_micro_batch_size",
    "early_release",
)
"""Arguments of `MemSaveCallback` that do something unless they are ``None``."""


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
        The arguments with the values of the stack, or of `BARE`, where they were ``"auto"``; and as
        ``from_stack`` the names of those that the user has not given.

    Raises:
        ConfigurationError: If there is no such stack.
    """
    wanted = BARE if arguments["stack"] is None else arguments["stack"]
    if not isinstance(wanted, str) or wanted not in STACKS:
        raise ConfigurationError(
            f"`stack={wanted!r}` is not a valid stack. Use {', '.join(map(repr, STACKS))}, or "
            "`None`."
        )
    values = STACKS[wanted]
    missing = {name: value for name, value in values.items() if arguments[name] == "auto"}
    # Which parameters have 8 bits is the stack's choice with every 8-bit optimizer, where nothing
    # else is said; a `LowBitOptimizer` says it itself.
    optimizer = missing.get("optimizer", arguments["optimizer"])
    is_8bit = isinstance(optimizer, str) and "8bit" in optimizer
    if is_8bit and "force_8bit" in values and not arguments["force_8bit"]:
        missing["force_8bit"] = values["force_8bit"]
    return {**arguments, **missing, "from_stack": tuple(missing)}
