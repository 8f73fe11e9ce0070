"""Record few steps that show what each way of recomputing blocks costs."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import nn

from lightning_memsave.core.blocks import Block, find_blocks
from lightning_memsave.core.technique import Exactness
from lightning_memsave.measure.storages import tensors_in_batch
from lightning_memsave.planning.block_costs import KEEP, BlockCosts, Run
from lightning_memsave.planning.constants import MOST_NESTED
from lightning_memsave.planning.step_time import Rates
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.prediction.user_code import build_without_data
from lightning_memsave.prediction.what_if import WhatIf
from lightning_memsave.techniques.activation_checkpointing.technique import (
    ActivationCheckpointing,
    inplace_problems,
    parts_of,
)


def cut(model: nn.Module, run: Run, num_blocks: int) -> None:
    for name in run[num_blocks:]:
        container, _, key = name.rpartition(".")
        delattr(model.get_submodule(container), key)


def runs_of(model: nn.Module, blocks: Sequence[Block]) -> list[Run]:
    keys = [(block.name.rpartition(".")[0], _signature(block.module)) for block in blocks]
    starts = [0, *(i for i, (a, b) in enumerate(pairwise(keys), 1) if a != b), len(blocks)]
    return [tuple(b.name for b in blocks[i:j]) for i, j in pairwise(starts) if j > i]


def can_be_cut(model: nn.Module, run: Run) -> bool:
    """Return whether a model may run with fewer blocks: its own code loops over the container."""
    container = model.get_submodule(run[0].rpartition(".")[0])
    return isinstance(container, nn.ModuleList | nn.Sequential)


def _signature(module: nn.Module) -> tuple[object, ...]:
    shapes = tuple((n, tuple(p.shape), p.requires_grad) for n, p in module.named_parameters())
    return type(module), shapes


TILED = "tiled"
# Of a run of equal blocks so many are recorded, in this order; beside others on the host, the last
# one is on the device. With long sequences it is one more.
_RECORDED = ("nested", "full", "selective", KEEP)


@dataclass(frozen=True)
class RecordedBlocks:
    what_if: WhatIf
    runs: Sequence[Run] = ()
    kinds: tuple[str, ...] = ()
    names: Sequence[str] = ()
    sizes: Sequence[int] = ()
    block_size: int = 0
    is_cut: bool = False

    @property
    def most_resident(self) -> int:
        """How many blocks may stay on the device: those of the last run, but for its ends.

        Of fewer blocks than are recorded one step does not show all places.
        """
        number = len(self.runs[-1]) if self.runs else 0
        return number - 2 if number >= len(_RECORDED) else 0

    @classmethod
    def of(
        cls,
        what_if: WhatIf,
        selectors: Any = None,
        exactness: Exactness = Exactness.BITWISE,
        *,
        may_be_cut: bool = True,
    ) -> "RecordedBlocks":
        given = what_if.step.model
        model = given if isinstance(given, nn.Module) else build_without_data(given)
        blocks = find_blocks(model, selectors)
        if not blocks:
            return cls(what_if)
        kinds: tuple[str, ...] = _RECORDED[:-1]
        if exactness.allows(Exactness.ROUNDING) and _is_long(what_if.step.batch):
            kinds = (TILED, *kinds)
        found = cls(
            what_if,
            runs_of(model, blocks),
            tuple(kind for kind in kinds if _can(kind, blocks)),
            [block.name for block in blocks],
            [parameter.numel() for parameter in model.parameters()],
            sum(parameter.numel() for parameter in blocks[-1].module.parameters()),
        )
        most = len(_RECORDED) + (TILED in found.kinds)
        long = [r for r in found.runs if len(r) > most and can_be_cut(model, r)]
        if not long or not may_be_cut:
            return found

        def shorten(copy: nn.Module) -> None:
            for run in long:
                cut(copy, run, most)

        step = replace(what_if.step, change=shorten)
        if given is not model and not hasattr(model, "configure_model"):
            shorten(model)  # built here on fake tensors: building all blocks each time takes long
            step = replace(what_if.step, model=model)
        names = [name for run in found.runs for name in (run[:most] if run in long else run)]
        copies = replace(what_if, step=step, _known={})
        return replace(found, what_if=copies, names=names, is_cut=True)

    def moved(self, move: Callable[[WhatIf], WhatIf]) -> "RecordedBlocks":
        return replace(self, what_if=move(self.what_if))

    def record(
        self,
        predict: Callable[[Sequence[str]], MemoryPrediction],
        rates: Rates,
        first: Sequence[str] = (),
        *,
        by_place: bool = False,
        **more: Any,
    ) -> Iterator[tuple[frozenset[str], BlockCosts]]:
        """Record a few steps, one after the other, beginning with some kinds.

        Each time, give the kinds that are known by then, or none if all are, and their costs.
        """
        ways = [*enumerate(self.assignments(by_place=by_place))]
        ways.sort(key=lambda way: [*first, way[1][0]].index(way[1][0]) if first else 0)
        recorded: dict[int, tuple[dict[str, str], MemoryPrediction]] = {}
        for place, kinds in ways:
            recorded[place] = dict(zip(self.names, kinds, strict=True)), predict(kinds)
            in_order = [recorded[place] for place in sorted(recorded)]
            shown = {kind for of_all, _ in in_order for kind in of_all.values()}
            costs = BlockCosts(self.runs, in_order, self.sizes, rates, by_place=by_place, **more)
            yield frozenset(shown if len(recorded) < len(ways) else ()), costs

    def assignments(self, *, by_place: bool) -> list[list[str]]:
        """List ways to recompute the recorded blocks that show each kind for each run."""
        # Of equal blocks one step shows as many kinds as there are blocks.
        kinds = [*self.kinds, KEEP]
        number = len(self.names)
        if by_place or len(self.runs) > 1:
            return [[kind] * number for kind in kinds]
        shown = [kinds[start : start + number] for start in range(0, len(kinds), number)]
        return [some + [KEEP] * (number - len(some)) for some in shown]


# Along another dimension than that of the samples, which micro-batches split.
def _is_long(batch: Any) -> bool:
    sizes = (size for tensor in tensors_in_batch(batch) for size in tensor.shape[1:])
    return any(size > ActivationCheckpointing.tile for size in sizes)


def _can(kind: str, blocks: Sequence[Block]) -> bool:
    if kind in (TILED, "nested"):
        return bool(parts_of(blocks))
    return kind == "full" or not inplace_problems(blocks)


def value_of(kinds: Sequence[str]) -> Any:
    """Write how blocks are recomputed as the argument `activation_checkpointing`."""
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds) if kind != KEEP}
    if not counts:
        return None
    (kind, number), *others = counts.items()
    if not others and number == len(kinds):
        return "all" if kind == "full" else kind
    if not others and kind == "full":
        return number
    return ",".join(f"{kind}:{number}" for kind, number in counts.items())


def resident_choices(
    number: int, kinds: Sequence[str], most: int
) -> Iterator[tuple[tuple[str, ...], int]]:
    """List ways in which the last blocks stay on the device, recomputed as the others or kept."""
    for kind, num_resident in itertools.product((*kinds, KEEP), range(1, most + 1)):
        yield (kind,) * number, num_resident
        if kind != KEEP:
            yield (kind,) * (number - num_resident) + (KEEP,) * num_resident, num_resident


def choices(number: int, kinds: Sequence[str]) -> Iterator[tuple[str, ...]]:
    # The first blocks need recomputation most: their activations live longest. One kind follows
    # another in the order of what they save.
    for first, second in itertools.pairwise((*kinds, KEEP)):
        step = 1 if second == KEEP else max(1, number // MOST_NESTED)
        for num_first in sorted({*range(0, number, step), number}):
            for num_second in range(1 if second == KEEP else number - num_first + 1):
                rest = number - num_first - num_second
                yield (first,) * num_first + (second,) * num_second + (KEEP,) * rest
