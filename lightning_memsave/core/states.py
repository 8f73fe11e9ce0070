"""States that follow each other as a table says."""

from collections.abc import Collection, Mapping
from enum import Enum
from typing import TypeVar

StateT = TypeVar("StateT", bound=Enum)


def next_state(before: StateT, after: StateT, table: Mapping[StateT, Collection[StateT]]) -> StateT:
    """Return the state that follows; a step that the table lacks is an error of this package."""
    if after not in table[before]:
        kind = type(before).__name__
        raise AssertionError(f"internal error: {kind} goes from {before.name} to {after.name}")
    return after
