"""The plans of which none is faster and needs less than another."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from lightning_memsave.planning.variant import Variant

# Of a smaller plan less than this share is not worth a line, and so many lines are enough.
_STEP, _MOST_STEPS = 0.04, 24


class _Candidate(Protocol):
    @property
    def variant(self) -> Variant: ...
    @property
    def seconds(self) -> float: ...


CandidateT = TypeVar("CandidateT", bound=_Candidate)


def frontier_of(
    candidates: Sequence[CandidateT], bytes_of: Callable[[CandidateT], float]
) -> list[CandidateT]:
    """List what nothing is better than."""
    found: list[CandidateT] = []
    least = math.inf

    def order(one: CandidateT) -> tuple[float, float, int]:
        return one.seconds, bytes_of(one), one.variant.exactness.rank

    for one in sorted(candidates, key=order):
        if bytes_of(one) < least:
            least = bytes_of(one)
            found.append(one)
    return found


def thinned_frontier(
    candidates: Sequence[CandidateT], chosen: CandidateT, bytes_of: Callable[[CandidateT], float]
) -> Iterator[CandidateT]:
    """List some of the frontier, with one that must be among them."""
    frontier = frontier_of(candidates, bytes_of)
    above = [c for c in frontier if bytes_of(c) > bytes_of(chosen) and c is not chosen]
    below = [c for c in frontier if bytes_of(c) < bytes_of(chosen)]
    share = bytes_of(frontier[-1]) / bytes_of(frontier[0])
    step = max(_STEP, 1 - share ** (1 / _MOST_STEPS))
    before = math.inf
    for candidate in (*above, chosen, *below):
        is_end = candidate is chosen or candidate is frontier[-1]
        if is_end or bytes_of(candidate) < before * (1 - step):
            before = bytes_of(candidate)
            yield candidate
