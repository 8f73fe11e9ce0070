"""Find what keeps more and more from step to step, while training runs."""

import sys
from collections import Counter
from itertools import pairwise
from typing import Any

from torch import nn

from lightning_memsave.measure.alive_tensors import OWNED, AliveTensor
from lightning_memsave.measure.allocator import allocated_bytes
from lightning_memsave.units import format_bytes

_NUM_BLOCKS, _BLOCK_STEPS = 8, 8
# Of what is allocated: growth that adds up to less is no news, unless it is of graphs.
_MUCH = 0.01


class Floor:
    """The least of many readings, in eight blocks of steps that become longer.

    Neither sizes of batches nor what is freed within a block matter for it. After eight blocks two
    become one: growth that has ended ends up in the first one, and slow growth still shows itself.
    """

    def __init__(self) -> None:
        self.block_steps = _BLOCK_STEPS
        self.num_steps = 0
        self._lows: list[int] = []

    def rises(self, num_bytes: int) -> bool:
        """Add a reading; returns whether these are eight blocks, each with more than the last."""
        if self.num_steps % self.block_steps == 0:
            self._lows.append(num_bytes)
        self._lows[-1] = min(self._lows[-1], num_bytes)
        self.num_steps += 1
        if self.num_steps < _NUM_BLOCKS * self.block_steps:
            return False
        rises = all(earlier < later for earlier, later in pairwise(self._lows))
        self._lows = [min(two) for two in zip(self._lows[::2], self._lows[1::2], strict=True)]
        self.block_steps *= 2
        return rises


class MemoryGrowth:
    """Reads what is allocated after steps, and names once what keeps more and more of it.

    If the floor of what is allocated rises, what module, callbacks and others keep is noted, and
    compared with what they keep some steps later, twice: a list that each epoch empties grows too.
    """

    def __init__(self) -> None:
        self.found = ""
        self.is_over = False
        self._floor = Floor()
        self._noted: list[AliveTensor] | None = None
        self._compare_at = 0
        self._has_grown = False

    def look(self, trainer: Any, module: nn.Module, batch: object) -> None:
        """Look after a step, unless it is over: it has been found, or looking has failed."""
        self.is_over = True
        num_bytes, floor = allocated_bytes(trainer.strategy.root_device), self._floor
        rises = floor.rises(num_bytes)
        if self._noted is None and rises:
            self._noted = _find_kept(trainer, module, batch)
            self._compare_at = floor.num_steps + floor.block_steps
        elif self._noted is not None and floor.num_steps == self._compare_at:
            noted, kept = self._noted, _find_kept(trainer, module, batch)
            found = self._compare(module, noted, kept, num_bytes)
            if self._has_grown or not found:
                self.found, self._noted, self._has_grown = found, None, False
            else:
                self._noted, self._has_grown = kept, True
                self._compare_at += floor.block_steps
        self.is_over = bool(self.found)

    def _compare(
        self, module: nn.Module, noted: list[AliveTensor], kept: list[AliveTensor], num_bytes: int
    ) -> str:
        steps = self._floor.block_steps
        sizes, counts = Counter[str](), Counter[str]()
        for sign, alive in ((-1, noted), (1, kept)):
            for one in alive:
                sizes[one.owner] += sign * one.num_bytes
                counts[one.owner] += sign
        # What is replaced in each step has as many tensors as before, of another size. Variables of
        # running functions have no owner: of tensors without one, each step must add some.
        grown = [o for o, n in counts.items() if n >= (1 if o else steps) and sizes[o] > 0]
        owner = max(grown, key=lambda one: sizes[one], default="")
        in_graphs = any(one.category == "activation" for one in kept if one.owner == owner)
        is_much = sizes[owner] * self._floor.num_steps >= _MUCH * num_bytes * steps
        if not grown or not (is_much or in_graphs):
            return ""
        what = f"`{owner}` keeps" if owner else "tensors that no attribute leads to take"
        tensors = f"{counts[owner]} tensors{' with graphs' if in_graphs else ''}"
        ago = f"more than {steps} steps ago"
        if is_much:
            in_1000 = format_bytes(1000 * sizes[owner] // steps)
            more = f"{format_bytes(sizes[owner])} {ago} ({tensors}, {in_1000} in 1,000 steps)"
        else:
            more = f"{tensors} {ago}"
        advice = _advice(module, owner, in_graphs)
        return f"Memory grows from step to step: {what} {more}. {advice}"


def _find_kept(trainer: Any, module: nn.Module, batch: object) -> list[AliveTensor]:
    from lightning_memsave.oom.report import find_alive

    alive = find_alive(trainer, module, batch)
    return [one for one in alive if one.owner or one.category not in OWNED]


def _advice(module: nn.Module, owner: str, in_graphs: bool) -> str:
    from lightning_memsave.oom.advice import Kept

    # Without an import of torchmetrics there is no metric.
    metric: Any = getattr(sys.modules.get("torchmetrics"), "Metric", ())
    for name, part in module.named_modules():
        if isinstance(part, metric) and owner.startswith(f"self.{name}."):
            return (
                f"`{type(part).__name__}` keeps all values until `.reset()`, as it is meant to: at "
                "the end of the epoch if `self.log` has it. To keep less on the device, give it "
                "bins, such as `thresholds=100`, or create it with `compute_on_cpu=True`."
            )
    if not owner:
        return "Look for a list in a closure, or in a file that your project imports."
    return Kept(owner, 0, 0, 0, 0, in_graphs).advice
