"""The usual suspects when memory runs out, each answered with a figure."""

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

from lightning_memsave.errors import ConfigurationError
from lightning_memsave.explain.factors import (
    attention_kernel,
    cardinality,
    logits_copies,
    old_gradients,
    structure,
)
from lightning_memsave.explain.finding import MATTERS, Suspect, Verdict, unknown
from lightning_memsave.explain.growth import batch_size, sequence_length
from lightning_memsave.explain.what_if import WhatIf

__all__ = ["MATTERS", "SUSPECTS", "Suspect", "Verdict", "find_suspects"]

SUSPECTS: Mapping[str, Callable[[WhatIf], Suspect]] = MappingProxyType(
    {
        "batch size": batch_size,
        "sequence length": sequence_length,
        "vocabulary and labels": cardinality,
        "model structure": structure,
        "attention kernel": attention_kernel,
        "old gradients": old_gradients,
        "copies of the logits": logits_copies,
    }
)
"""Who is asked, by name."""
_WITHOUT_BATCH = ("vocabulary and labels", "model structure")


def find_suspects(what_if: WhatIf, names: Collection[str] | None = None) -> tuple[Suspect, ...]:
    """Ask all suspects, or some.

    Args:
        what_if: What predicts.
        names: Of `SUSPECTS`; ``None`` for all. Batch size, sequence length, attention kernel and
            old gradients take predictions of their own.

    Returns:
        The answers in the order of `SUSPECTS`; without a batch most of them are unknown.

    Raises:
        ConfigurationError: If there is no suspect of that name.
    """
    if names is not None and (isinstance(names, str) or not isinstance(names, Collection)):
        raise ConfigurationError(
            f'`suspects={names!r}` is not a list. Write for example `suspects=["batch size"]`.'
        )
    for name in names or ():
        if name not in SUSPECTS:
            raise ConfigurationError(
                f"`{name}` is no suspect. Use {', '.join(map(repr, SUSPECTS))}."
            )
    asked = SUSPECTS if names is None else {n: s for n, s in SUSPECTS.items() if n in names}
    return tuple(
        ask(what_if)
        if what_if.can_predict or name in _WITHOUT_BATCH
        else unknown(name, "It takes a prediction: pass a batch, and a model that has code.")
        for name, ask in asked.items()
    )
