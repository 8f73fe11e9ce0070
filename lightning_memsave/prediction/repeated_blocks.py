"""Predict deep models from copies with fewer blocks."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lightning_memsave.core.blocks import BlockSelector, find_blocks
from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.prediction.result import MemoryPrediction, ModuleMemory, Timeline

DEPTHS = (6, 10)
"""Two or three blocks underestimate by up to a tenth: the peak moves to another place."""
CHECKED_DEPTH = 13
TOLERANCE = 1e-3
MIN_NUM_BLOCKS = 30
"""Below, the copies together are no cheaper than the model."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Equal blocks in one container.

    Args:
        name: Name of the container in the model.
        num_blocks: How many there are.
    """

    name: str
    num_blocks: int

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


def find_stack(
    model: nn.Module, selectors: BlockSelector | list[BlockSelector] | None = None
) -> Stack | None:
    """Find the container that makes a model deep.

    Args:
        model: Any module.
        selectors: What blocks are, as for `find_blocks`.

    Returns:
        The container; ``None`` unless all blocks of the model are in one, equal in class and
        shapes, and enough for a prediction from fewer.
    """
    blocks = find_blocks(model, selectors)
    containers = {block.name.rpartition(".")[0] for block in blocks}
    if len(blocks) < MIN_NUM_BLOCKS or len(containers) != 1:
        return None
    name = containers.pop()
    container = model.get_submodule(name)
    if not isinstance(container, nn.ModuleList | nn.Sequential) or len(container) != len(blocks):
        return None
    if len({_signature(block) for block in container}) > 1:
        return None
    return Stack(name, len(blocks))


def extrapolate(
    stack: Stack, predict: Callable[[int, str | None], MemoryPrediction]
) -> tuple[MemoryPrediction | None, str]:
    """Predict a stack from copies with fewer blocks, phase by phase.

    The memory of a step is a maximum of terms that grow linearly with the number of blocks: in each
    phase another one. So each phase has its own line, and the largest end is the peak.

    Args:
        stack: What is deep.
        predict: Predicts the model with a number of blocks, and shows the peak of a phase, or the
            highest.

    Returns:
        The prediction, or ``None`` if the line through two depths misses a third; and one line that
        says how it went.
    """
    low, high = (predict(depth, None) for depth in DEPTHS)
    by_phase = _at(low, high, stack.num_blocks)
    phase = max(by_phase, key=lambda name: by_phase[name].total_bytes)
    checked = predict(CHECKED_DEPTH, phase)
    expected = _at(low, high, CHECKED_DEPTH)
    miss = abs(_peak(expected) / _peak(checked.by_phase) - 1)
    if miss > TOLERANCE:
        return None, (
            f"Predicted directly: with {CHECKED_DEPTH} blocks, the line through "
            f"{DEPTHS[0]} and {DEPTHS[1]} is {100 * miss:.2f} % off."
        )
    prediction = replace(
        checked,
        peak=by_phase[phase],
        by_phase=by_phase,
        peak_phase=phase,
        modules=_modules(checked, stack, by_phase[phase]),
        timeline=_timeline(checked, by_phase, phase),
        **_blocks(low, high, checked, _peak(by_phase), stack.num_blocks),
        is_extrapolated=True,
    )
    return prediction, (
        f"Predicted from copies with {DEPTHS[0]} and {DEPTHS[1]} of {stack.num_blocks} blocks, "
        f"checked with {CHECKED_DEPTH}, whose time line is drawn larger and whose largest tensors "
        "are shown."
    )


def _peak(by_phase: Mapping[str, MemoryBreakdown]) -> int:
    return max(memory.total_bytes for memory in by_phase.values())


def _steps_to(depth: int) -> float:
    return (depth - DEPTHS[1]) / (DEPTHS[1] - DEPTHS[0])


def _at(low: MemoryPrediction, high: MemoryPrediction, depth: int) -> dict[str, MemoryBreakdown]:
    return {
        phase: memory + (memory + low.by_phase[phase] * -1) * _steps_to(depth)
        for phase, memory in high.by_phase.items()
    }


# What rounding adds grows with the number of tensors; gaps between blocks of the allocator are
# about as large as the largest tensors, which depth does not change.
def _blocks(
    low: MemoryPrediction,
    high: MemoryPrediction,
    checked: MemoryPrediction,
    peak_bytes: int,
    depth: int,
) -> dict[str, Any]:
    if checked.allocated_bytes is None:
        return {}
    first, second = (found.measurable_bytes - _peak(found.by_phase) for found in (low, high))
    rounding = second + round((second - first) * _steps_to(depth))
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


# The blocks that no copy had are like one from the middle; what is left belongs to the whole.
def _modules(
    checked: MemoryPrediction, stack: Stack, peak: MemoryBreakdown
) -> tuple[ModuleMemory, ...]:
    prefix = f"{stack.name}." if stack.name else ""
    middle, last = f"{prefix}{DEPTHS[0] // 2}", f"{prefix}{CHECKED_DEPTH - 1}"
    typical = [m for m in checked.modules if _is_inside(m.name, middle)]
    modules = []
    for index, module in enumerate(checked.modules):
        modules.append(module)
        following = checked.modules[index + 1 : index + 2]
        is_last = _is_inside(module.name, last)
        if is_last and not (following and _is_inside(following[0].name, last)):
            for number in range(CHECKED_DEPTH, stack.num_blocks):
                modules += [
                    replace(m, name=f"{prefix}{number}{m.name[len(middle) :]}") for m in typical
                ]
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
