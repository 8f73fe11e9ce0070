"""Shorten a model to a few blocks of each kind, so that recording a step is fast."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lightning_memsave.core.blocks import Block, find_blocks
from lightning_memsave.planning.block_costs import KEEP, Run, can_be_cut, runs_of
from lightning_memsave.planning.constants import MOST_NESTED
from lightning_memsave.prediction.fake.tensors import fake_tensors
from lightning_memsave.prediction.what_if import WhatIf
from lightning_memsave.techniques.activation_checkpointing.technique import (
    inplace_problems,
    parts_of,
)

# Of a run of equal blocks so many are recorded, in this order.
_RECORDED = ("nested", "full", "selective", KEEP)


@dataclass(frozen=True)
class RecordedBlocks:
    """The blocks of a model about which there is a choice, and those that are recorded of them."""

    what_if: WhatIf
    runs: Sequence[Run] = ()
    kinds: tuple[str, ...] = ()
    names: Sequence[str] = ()
    sizes: Sequence[int] = ()
    is_cut: bool = False

    @classmethod
    def of(
        cls, what_if: WhatIf, selectors: Any = None, *, may_be_cut: bool = True
    ) -> "RecordedBlocks":
        step = what_if.step
        if isinstance(step.model, nn.Module):
            return cls._of(step.model, what_if, selectors, may_be_cut=may_be_cut)
        with fake_tensors():
            assert step.model is not None, "checked before"
            module = step.model()
            if callable(configure := getattr(module, "configure_model", None)):
                configure()
        return cls._of(module, what_if, selectors, may_be_cut=may_be_cut)

    @classmethod
    def _of(
        cls, model: nn.Module, what_if: WhatIf, selectors: Any, *, may_be_cut: bool
    ) -> "RecordedBlocks":
        blocks = find_blocks(model, selectors)
        if not blocks:
            return cls(what_if)
        found = cls(
            what_if,
            runs_of(model, blocks),
            tuple(kind for kind in ("nested", "full", "selective") if _can(kind, blocks)),
            [block.name for block in blocks],
            [parameter.numel() for parameter in model.parameters()],
        )
        most = len(_RECORDED)
        long = [r for r in found.runs if len(r.names) > most and can_be_cut(model, r)]
        if not long or not may_be_cut:
            return found

        def cut(copy: nn.Module) -> None:
            for run in long:
                run.cut(copy, most)

        step = replace(what_if.step, change=cut)
        if what_if.step.model is not model and not hasattr(model, "configure_model"):
            cut(model)  # built here on fake tensors: building all blocks each time takes long
            step = replace(what_if.step, model=model)
        names = [
            name for run in found.runs for name in (run.names[:most] if run in long else run.names)
        ]
        copies = replace(what_if, step=step, _known={})
        return replace(found, what_if=copies, names=names, is_cut=True)

    def moved(self, move: Callable[[WhatIf], WhatIf]) -> "RecordedBlocks":
        return replace(self, what_if=move(self.what_if))

    def assignments(self, *, by_place: bool) -> list[list[str]]:
        """List ways to recompute the recorded blocks that show each kind for each run."""
        # Of equal blocks one step shows as many kinds as there are blocks.
        kinds = [kind for kind in _RECORDED if kind in (*self.kinds, KEEP)]
        number = len(self.names)
        if by_place or len(self.runs) > 1:
            return [[kind] * number for kind in kinds]
        shown = [kinds[start : start + number] for start in range(0, len(kinds), number)]
        return [some + [KEEP] * (number - len(some)) for some in shown]


def _can(kind: str, blocks: Sequence[Block]) -> bool:
    if kind == "nested":
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


def choices(number: int, kinds: Sequence[str]) -> Iterator[tuple[str, ...]]:
    # The first blocks need recomputation most: their activations live longest. One kind follows
    # another in the order of what they save.
    for first, second in itertools.pairwise((*kinds, KEEP)):
        step = max(1, number // MOST_NESTED) if first == "nested" else 1
        for num_first in range(0, number + 1, step):
            for num_second in range(1 if second == KEEP else number - num_first + 1):
                rest = number - num_first - num_second
                yield (first,) * num_first + (second,) * num_second + (KEEP,) * rest
