"""Predict deep models from copies with fewer blocks."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from torch import nn

from lightning_memsave.core.blocks import BlockSelector, find_blocks
from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.prediction.result import MemoryPrediction, ModuleMemory, Timeline
from lightning_memsave.prediction.snapshot import StepTrace

MIN_DEPTH = 6
"""Two or three blocks underestimate by up to a tenth: the peak moves to another place."""
STEPS = (4, 3)
"""How many blocks the second copy has more than the first, and the third, which checks, more."""
TOLERANCE = 1e-3
MAX_PERIOD = 10
Choose = Callable[[list[int]], list[int]]
"""Of the numbers of blocks those whose blocks are checkpointed."""


def period_of(which: object) -> int | None:
    """How many blocks are checkpointed by a pattern that repeats.

    Args:
        which: As the argument `activation_checkpointing`.

    Returns:
        After so many blocks more the pattern is one whole longer; ``None`` where it never is.
    """
    if which in (None, "auto", "all", "selective", "nested"):
        return 1
    if isinstance(which, str) and which.startswith("every:"):
        period = int(which.removeprefix("every:"))
    elif isinstance(which, float):
        share = Fraction(which).limit_denominator(MAX_PERIOD)
        period = share.denominator if abs(share - which) < 1e-9 else MAX_PERIOD + 1
    else:
        return None
    return period if period <= MAX_PERIOD else None


def all_of(blocks: list[int]) -> list[int]:
    """Choose every block."""
    return blocks


@dataclass(frozen=True, slots=True)
class RepeatedBlocks:
    """Equal blocks in one container.

    Args:
        name: Name of the container in the model.
        num_blocks: How many there are.
        period: As `period_of` gives it.
        choose: Which blocks are checkpointed, of any number of them.
    """

    name: str
    num_blocks: int
    period: int = 1
    choose: Choose = all_of

    @property
    def depths(self) -> tuple[int, int, int]:
        """Blocks of the two copies that give the line, and of the one that checks it."""
        low = MIN_DEPTH + (self.num_blocks - MIN_DEPTH) % self.period
        high, checked = (-(-n // self.period) * self.period for n in STEPS)
        return low, low + high, low + high + checked

    @property
    def is_deep(self) -> bool:
        """Whether the copies together are cheaper than the model."""
        return self.num_blocks > sum(self.depths)

    @contextlib.contextmanager
    def cut(self, model: nn.Module, num_blocks: int) -> Iterator[None]:
        """Leave the first blocks only, until the context is left.

        Args:
            model: The model.
            num_blocks: How many to leave.
        """
        blocks = model.get_submodule(self.name)._modules
        all_blocks = dict(blocks)
        for name in list(blocks)[num_blocks:]:
            del blocks[name]
        try:
            yield
        finally:
            blocks.update(all_blocks)


def find_repeated_blocks(
    model: nn.Module,
    selectors: BlockSelector | list[BlockSelector] | None = None,
    period: int = 1,
    choose: Choose = all_of,
) -> RepeatedBlocks | None:
    """Find the container that makes a model deep.

    Args:
        model: Any module.
        selectors: What blocks are, as for `find_blocks`.
        period: As for `RepeatedBlocks`.
        choose: As for `RepeatedBlocks`.

    Returns:
        The container; ``None`` unless all blocks of the model are in one, equal in class and
        shapes, and enough for a prediction from fewer.
    """
    blocks = find_blocks(model, selectors)
    containers = {block.name.rpartition(".")[0] for block in blocks}
    if len(containers) != 1:
        return None
    repeated = RepeatedBlocks(containers.pop(), len(blocks), period, choose)
    container = model.get_submodule(repeated.name)
    if not isinstance(container, nn.ModuleList | nn.Sequential) or len(container) != len(blocks):
        return None
    if not repeated.is_deep or len({_signature(block) for block in container}) > 1:
        return None
    return repeated


def extrapolate(
    blocks: RepeatedBlocks, predict: Callable[[int, str | None], MemoryPrediction]
) -> tuple[MemoryPrediction | None, str]:
    """Predict repeated blocks from copies with fewer blocks, phase by phase.

    The memory of a step is a maximum of terms that grow linearly with the number of blocks: in each
    phase another one. So each phase has its own line, and the largest end is the peak.

    Args:
        blocks: What is deep.
        predict: Predicts the model with a number of blocks, and shows the peak of a phase, or the
            highest.

    Returns:
        The prediction, or ``None`` if the line through two depths misses a third; and one line that
        says how it went.
    """
    depths = blocks.depths
    low, high = predict(depths[0], None), predict(depths[1], None)
    line = _at(low, high, _num_steps(depths[:2], blocks.num_blocks))
    phase = _highest(line)
    checked = predict(depths[2], phase)
    expected = _at(low, high, _num_steps(depths[:2], depths[2]))
    miss = abs(_peak(expected) / _peak(checked.by_phase) - 1)
    # The deeper two give the line: the shallow one may have another moment in other phases.
    num_steps = _num_steps(depths[1:], blocks.num_blocks)
    by_phase = _at(high, checked, num_steps)
    if miss > TOLERANCE or _highest(by_phase) != phase:
        return None, (
            f"Predicted directly: with {depths[2]} blocks, the line through {depths[0]} and "
            f"{depths[1]} is {100 * miss:.2f} % off."
        )
    prediction = replace(
        checked,
        peak=by_phase[phase],
        by_phase=by_phase,
        peak_phase=phase,
        modules=_modules(checked, blocks, by_phase[phase]),
        timeline=_timeline(checked, by_phase, phase),
        trace=StepTrace(),
        **_blocks(high, checked, _peak(by_phase), num_steps),
        is_extrapolated=True,
    )
    return prediction, (
        f"Predicted from copies with {depths[1]} and {depths[2]} of {blocks.num_blocks} blocks, "
        f"checked with {depths[0]}; the time line of {depths[2]} is drawn larger, and its largest "
        "tensors are shown."
    )


def _num_steps(depths: Sequence[int], depth: int) -> float:
    return (depth - depths[1]) / (depths[1] - depths[0])


def _highest(by_phase: Mapping[str, MemoryBreakdown]) -> str:
    return max(by_phase, key=lambda name: by_phase[name].total_bytes)


def _peak(by_phase: Mapping[str, MemoryBreakdown]) -> int:
    return max(memory.total_bytes for memory in by_phase.values())


def _at(
    low: MemoryPrediction, high: MemoryPrediction, num_steps: float
) -> dict[str, MemoryBreakdown]:
    return {
        phase: memory + (memory + low.by_phase[phase] * -1) * num_steps
        for phase, memory in high.by_phase.items()
    }


# What rounding adds grows with the number of tensors; gaps between blocks of the allocator are
# about as large as the largest tensors, which depth does not change.
def _blocks(
    high: MemoryPrediction,
    checked: MemoryPrediction,
    peak_bytes: int,
    num_steps: float,
) -> dict[str, Any]:
    if checked.allocated_bytes is None:
        return {}
    first, second = (found.measurable_bytes - _peak(found.by_phase) for found in (high, checked))
    rounding = second + round((second - first) * num_steps)
    allocated = peak_bytes + max(rounding, 0)
    return {
        "allocated_bytes": allocated,
        **{
            name: allocated + (getattr(checked, name) - checked.allocated_bytes)
            for name in ("reserved_bytes", "least_reserved_bytes")
        },
    }


def _timeline(
    checked: MemoryPrediction, by_phase: Mapping[str, MemoryBreakdown], peak_phase: str
) -> Timeline:
    old = {phase: memory.by_category() for phase, memory in checked.by_phase.items()}
    new = {phase: memory.by_category() for phase, memory in by_phase.items()}
    phases = checked.timeline.phases
    by_category = {
        name: [
            round(n * new[phase][name] / old[phase][name]) if old[phase][name] else n
            for n, phase in zip(points, phases, strict=True)
        ]
        for name, points in checked.timeline.by_category.items()
    }
    totals = [sum(points) for points in zip(*by_category.values(), strict=True)]
    inside = [index for index, phase in enumerate(phases) if phase == peak_phase]
    peak_index = max(inside, key=totals.__getitem__, default=0)
    for name, points in by_category.items():
        points[peak_index] = new[peak_phase][name]
    return Timeline(phases, {k: tuple(points) for k, points in by_category.items()}, peak_index)


# The blocks that no copy had are like one from the middle of those that are checkpointed or not, as
# they are; what is left belongs to the whole.
def _modules(
    checked: MemoryPrediction, blocks: RepeatedBlocks, peak: MemoryBreakdown
) -> tuple[ModuleMemory, ...]:
    prefix, copied = f"{blocks.name}." if blocks.name else "", list(range(blocks.depths[2]))
    kinds = [n in set(blocks.choose(copied)) for n in copied]
    middles = {
        kind: [n for n in copied if kinds[n] == kind][kinds.count(kind) // 2] for kind in set(kinds)
    }
    inside = {n: [m for m in checked.modules if _is_inside(m.name, f"{prefix}{n}")] for n in copied}
    first, last = (checked.modules.index(found) for found in (inside[0][0], inside[copied[-1]][-1]))
    modules = list(checked.modules[:first])
    chosen = set(blocks.choose(list(range(blocks.num_blocks))))
    same = {n: n for n in copied[:-1]} | {blocks.num_blocks - 1: copied[-1]}
    for number in range(blocks.num_blocks):
        kind = number in chosen
        like = same.get(number, middles[kind])
        like = like if kinds[like] == kind else middles[kind]
        name = f"{prefix}{like}"
        modules += [replace(m, name=f"{prefix}{number}{m.name[len(name) :]}") for m in inside[like]]
    modules += checked.modules[last + 1 :]
    known = sum((module.memory for module in modules), MemoryBreakdown()).by_category()
    wanted = peak.by_category()
    # Where the blocks of the copy had more than those of the whole model can have on average.
    over = {name: n / known[name] for name, n in wanted.items() if known[name] > n}
    modules = [replace(m, memory=_scaled(m.memory, over)) for m in modules] if over else modules
    known = sum((module.memory for module in modules), MemoryBreakdown()).by_category()
    rest = MemoryBreakdown.from_categories({name: n - known[name] for name, n in wanted.items()})
    modules[0] = replace(modules[0], memory=modules[0].memory + rest)
    return tuple(modules)


def _scaled(memory: MemoryBreakdown, factors: Mapping[str, float]) -> MemoryBreakdown:
    sizes = memory.by_category()
    return MemoryBreakdown.from_categories(
        {name: int(size * factors.get(name, 1)) for name, size in sizes.items()}
    )


def _is_inside(name: str, block: str) -> bool:
    return name == block or name.startswith(f"{block}.")


def _signature(module: nn.Module) -> tuple[object, ...]:
    shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters())
    flags = tuple(p.requires_grad for p in module.parameters())
    return type(module), shapes, flags
