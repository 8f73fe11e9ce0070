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
"""With two or three blocks the peak is elsewhere, and predictions are up to a tenth too low."""
STEPS = (4, 3)
"""Further blocks of the second copy, and of the third, which checks the extrapolation."""
TOLERANCE = 1e-3
MAX_PERIOD = 10
Choose = Callable[[list[int]], list[int]]
"""Selects, from the indices of all blocks, those that are checkpointed."""


def checkpointing_period(which: object) -> int | None:
    """Return the period of the checkpointing pattern over blocks.

    Args:
        which: The argument `activation_checkpointing`.

    Returns:
        Number of blocks after which the pattern repeats; ``None`` if it does not.
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
        num_blocks: Number of blocks.
        period: Result of `checkpointing_period`.
        choose: Selects the checkpointed blocks, for any number of blocks.
    """

    name: str
    num_blocks: int
    period: int = 1
    choose: Choose = all_of

    @property
    def depths(self) -> tuple[int, int, int]:
        """Number of blocks of the copies: two for the extrapolation, one to check it."""
        low = MIN_DEPTH + (self.num_blocks - MIN_DEPTH) % self.period
        high, checked = (-(-n // self.period) * self.period for n in STEPS)
        return low, low + high, low + high + checked

    @property
    def is_deep(self) -> bool:
        """Whether the copies have fewer blocks in total than the model."""
        return self.num_blocks > sum(self.depths)

    @contextlib.contextmanager
    def cut(self, model: nn.Module, num_blocks: int) -> Iterator[None]:
        """Remove all but the first blocks inside the context.

        Args:
            model: The model.
            num_blocks: Number of blocks to keep.
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
    """Find the container of the repeated blocks.

    Args:
        model: Any module.
        selectors: Selectors of blocks, as for `find_blocks`.
        period: As for `RepeatedBlocks`.
        choose: As for `RepeatedBlocks`.

    Returns:
        The container; ``None`` unless all blocks are in one container, have equal class and
        shapes, and are enough for extrapolation.
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
    """Extrapolate a prediction from copies with fewer blocks, phase by phase.

    The peak of each phase grows linearly with the number of blocks, so each phase is extrapolated
    on its own, and the largest result is the peak.

    Args:
        blocks: The repeated blocks.
        predict: Predicts the model with a number of blocks, at the peak of a phase or (``None``)
            at the highest peak.

    Returns:
        The prediction, or ``None`` if the line through two copies misses the third; and a sentence
        for the assumptions.
    """
    depths = blocks.depths
    low, high = predict(depths[0], None), predict(depths[1], None)
    line = _at(low, high, _num_steps(depths[:2], blocks.num_blocks))
    phase = _highest(line)
    checked = predict(depths[2], phase)
    expected = _at(low, high, _num_steps(depths[:2], depths[2]))
    miss = abs(_peak(expected) / _peak(checked.by_phase) - 1)
    # From the deeper two: in other phases the shallow copy may peak at another operator.
    num_steps = _num_steps(depths[1:], blocks.num_blocks)
    by_phase = _at(high, checked, num_steps)
    if miss > TOLERANCE or _highest(by_phase) != phase:
        return None, (
            f"Predicted directly: the extrapolation from {depths[0]} and {depths[1]} to "
            f"{depths[2]} blocks is {100 * miss:.2f} % off."
        )
    prediction = replace(
        checked,
        peak=by_phase[phase],
        by_phase=by_phase,
        peak_phase=phase,
        modules=_modules(checked, blocks, by_phase[phase]),
        timeline=_timeline(checked, by_phase, phase),
        trace=StepTrace(),
        kept_gradient_bytes=_kept_gradients(checked, by_phase[phase]),
        **_blocks(high, checked, _peak(by_phase), num_steps),
        is_extrapolated=True,
    )
    return prediction, (
        f"Extrapolated from copies with {depths[1]} and {depths[2]} of {blocks.num_blocks} blocks, "
        f"checked with {depths[0]}; the timeline is scaled up from {depths[2]} blocks, and the "
        "largest tensors are those of that copy."
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


# Each block adds w bytes of gradients and a of activations to the peak. Below it there is room for
# as many as in the copy, and for a / (a + w) of those of the further blocks: where that many blocks
# are left in backward, the activations of the others are gone.
def _kept_gradients(checked: MemoryPrediction, peak: MemoryBreakdown) -> int:
    activations = max(0, peak.activation_bytes - checked.peak.activation_bytes)
    gradients = max(0, peak.parameter_bytes - checked.peak.parameter_bytes)
    kept = checked.kept_gradient_bytes
    return kept and kept + activations * gradients // max(1, activations + gradients)


# Rounding grows with the number of tensors. Gaps between allocator blocks are about as large as the
# largest tensors, which do not depend on depth.
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


# Blocks missing in the copies get the memory of a middle block of their kind (checkpointed or not);
# the remainder goes to the root module.
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
    assigned = sum((module.memory for module in modules), MemoryBreakdown()).by_category()
    total = peak.by_category()
    # Categories in which the blocks of the copy add up to more than the whole model has.
    over = {name: n / assigned[name] for name, n in total.items() if assigned[name] > n}
    modules = [replace(m, memory=_scaled(m.memory, over)) for m in modules] if over else modules
    assigned = sum((module.memory for module in modules), MemoryBreakdown()).by_category()
    rest = MemoryBreakdown.from_categories({name: n - assigned[name] for name, n in total.items()})
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
