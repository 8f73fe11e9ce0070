"""Pareto frontier of plans: time against device memory."""

import math
from collections.abc import Callable, Iterator, Sequence

from lightning_memsave.planning.constants import MOST_STEPS, STEP
from lightning_memsave.planning.variant import NOT_ADVISED, Estimate


def frontier_of(
    estimates: Sequence[Estimate], bytes_of: Callable[[Estimate], float]
) -> list[Estimate]:
    """List those of which none is faster and needs less than another, the fastest first."""
    found: list[Estimate] = []
    least = math.inf
    for one in sorted(estimates, key=lambda e: (e.seconds, bytes_of(e), e.variant.rank)):
        if bytes_of(one) < least:
            least = bytes_of(one)
            found.append(one)
    return found


def thinned_frontier(
    estimates: Sequence[Estimate],
    bytes_of: Callable[[Estimate], float],
    chosen: Estimate | None = None,
) -> Iterator[Estimate]:
    """List some of the frontier, with one that must be among them."""
    frontier = frontier_of(estimates, bytes_of)
    if chosen is not None:
        above = [c for c in frontier if bytes_of(c) > bytes_of(chosen) and c is not chosen]
        below = [c for c in frontier if bytes_of(c) < bytes_of(chosen)]
        last, frontier = frontier[-1], [*above, chosen, *below]
    else:
        last = frontier[-1]
    share = bytes_of(last) / bytes_of(frontier[0])
    step = max(STEP, 1 - share ** (1 / MOST_STEPS))
    before = math.inf
    for one in frontier:
        if one in (chosen, last) or bytes_of(one) < before * (1 - step):
            before = bytes_of(one)
            yield one


def shown_frontier(
    estimates: Sequence[Estimate], bytes_of: Callable[[Estimate], float], chosen: Estimate
) -> Iterator[Estimate]:
    """List the frontier; what is advised against comes last, where nothing else needs as little."""
    advised = [one for one in estimates if one.variant.rank < NOT_ADVISED]
    if chosen in advised:
        yield from thinned_frontier(advised, bytes_of, chosen)
        return
    yield from thinned_frontier(advised, bytes_of)
    least = min(map(bytes_of, advised))
    others = [one for one in estimates if one is chosen or bytes_of(one) < least]
    others = [one for one in others if one.variant.rank == NOT_ADVISED]
    yield from thinned_frontier(others, bytes_of, chosen)
