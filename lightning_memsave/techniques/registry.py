"""The one list of what `MemSaveCallback` switches on: techniques, and settings of the Trainer."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_memsave.core.technique import Exactness, Offer, Technique
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


@dataclass(frozen=True)
class Entry:
    """An argument of `MemSaveCallback` that has a value in the stacks.

    Args:
        argument: Its name.
        technique: What it switches on; ``None`` for a setting of the Trainer.
        classic: Its value in the stack of that name, which a bare callback has.
        bitwise: The same.
        single_gpu: The same.
        details: Arguments that say more of it, and what they are where it is off.
        offers: As `Technique.offers`, of a setting of the Trainer.
        exactness: As `Technique.exactness`, of a setting of the Trainer.
    """

    argument: str
    technique: type[Technique[Any]] | None = None
    classic: Any = None
    bitwise: Any = None
    single_gpu: Any = None
    details: Mapping[str, Any] = field(default_factory=dict)
    offers: tuple[Offer, ...] = ()
    exactness: Exactness = Exactness.BITWISE

    @classmethod
    def of(cls, technique: type[Technique[Any]], **values: Any) -> "Entry":
        """Make the entry of a technique, with the values of its argument in stacks."""
        return cls(
            technique.argument,
            technique,
            **values,
            offers=technique.offers,
            exactness=technique.exactness,
        )


_ENTRIES = [
    Entry("precision", classic="auto", single_gpu="bf16-mixed", exactness=Exactness.APPROXIMATE),
    # A batch that does not fit is split in "bitwise", too: its run would have ended.
    Entry.of(MicroBatching, classic="auto", bitwise="auto", single_gpu="auto"),
    Entry("eval_micro_batch_size", classic="auto", bitwise="auto", single_gpu="auto"),
    Entry.of(AttentionKernel, single_gpu="sdpa"),
    Entry.of(ChunkedCrossEntropy, single_gpu=True),
    Entry.of(
        ActivationCheckpointing,
        classic="all",
        bitwise="all",
        single_gpu="nested",
        details={"blocks": None},
    ),
    Entry(
        "early_release",
        classic=True,
        bitwise=True,
        single_gpu=True,
        offers=(Offer("early release", True),),
    ),
    # In the order in which optimizers pass through them.
    Entry.of(
        LowBitOptimizer,
        classic="8bit",
        single_gpu="8bit",
        details={"optimizer_kwargs": None, "keep_32bit": (), "force_8bit": ()},
    ),
    Entry.of(LowPrecisionWeights, single_gpu="stochastic"),
    Entry.of(OptimizerInBackward, bitwise=True, single_gpu=True),
]

STACKS = ("off", "classic", "bitwise", "single_gpu")
"""Settings that go together: nothing, what everybody has, all that leaves training bit for bit as
it was, and the least memory that one GPU can do with, without that of the host."""
BARE = "classic"
"""The stack of a callback that is given none."""
_DETAILS: Mapping[str, Mapping[str, Any]] = {"single_gpu": {"force_8bit": ("*",)}}


def entries() -> tuple[Entry, ...]:
    """Give all of them, in the order in which they are applied; they are undone in reverse."""
    return tuple(_ENTRIES)


def techniques() -> tuple[type[Technique[Any]], ...]:
    """Give the techniques, in the order in which they are applied."""
    return tuple(entry.technique for entry in _ENTRIES if entry.technique is not None)


@contextlib.contextmanager
def registered(entry: Entry) -> Iterator[None]:
    """Let `MemSaveCallback` have one more technique, the last one, until the context is left.

    Args:
        entry: Of a technique that changes a module; its argument is given by name.

    Yields:
        Nothing.
    """
    _ENTRIES.append(entry)
    try:
        yield
    finally:
        _ENTRIES.remove(entry)


def values_of(stack: str) -> dict[str, Any]:
    """Give the arguments that a stack sets.

    Args:
        stack: One of `STACKS`.

    Returns:
        Values by name.
    """
    values = {e.argument: None if stack == "off" else getattr(e, stack) for e in _ENTRIES}
    return {**values, **_DETAILS.get(stack, {})}


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
    values = values_of(wanted)
    missing = {name: value for name, value in values.items() if arguments[name] == "auto"}
    # Which parameters have 8 bits is the stack's choice with every 8-bit optimizer, where nothing
    # else is said; a `LowBitOptimizer` says it itself.
    optimizer = missing.get("optimizer", arguments["optimizer"])
    is_8bit = isinstance(optimizer, str) and "8bit" in optimizer
    if is_8bit and "force_8bit" in values and not arguments["force_8bit"]:
        missing["force_8bit"] = values["force_8bit"]
    return {**arguments, **missing, "from_stack": tuple(missing)}
