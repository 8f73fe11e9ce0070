"""Say in sentences what dominates the peak of a step."""

import re
from collections.abc import Callable, Mapping

from lightning_memsave.explain.dominant_parts import explain_parameters
from lightning_memsave.explain.factors import (
    are_maybe_more,
    find_outputs,
    logits_of,
    model_states_of,
)
from lightning_memsave.explain.finding import label_of
from lightning_memsave.explain.growth import scores_of
from lightning_memsave.prediction.result import MemoryPrediction, ModuleMemory, TensorMemory
from lightning_memsave.prediction.what_if import WhatIf
from lightning_memsave.units import format_bytes

_MIN_SHARE = 0.1
_NAMES = {
    "parameter": "the parameters",
    "weight_copy": "copies of weights in another precision",
    "buffer": "buffers",
    "gradient": "gradients",
    "optimizer_state": "the state of the optimizer",
    "activation": "activations",
    "input": "the batch",
    "temporary": "temporary tensors",
    "other": "other tensors",
}


def sentences_of(
    what_if: WhatIf, cardinalities: Mapping[str, int] | None = None
) -> tuple[str, ...]:
    of_parameters = explain_parameters(what_if.table, model_states_of(what_if), cardinalities)
    if not what_if.can_predict:
        return tuple(of_parameters)
    base = what_if.base()
    return (
        _peak(base),
        *_on_gpu(what_if, base),
        _categories(base),
        *_modules(base),
        *_kinds_of_tensors(what_if, base),
        *of_parameters,
    )


def _peak(base: MemoryPrediction) -> str:
    where = f" in `{base.peak_module}`" if base.peak_module else ""
    on_device = ""
    if base.device_bytes != base.peak_bytes:
        on_device = (
            f" Device memory needed: {format_bytes(base.device_bytes)}, with CUDA's context and "
            "gaps between the allocator's blocks."
        )
    return (
        f"The tensors of a step need {format_bytes(base.peak_bytes)} at the peak, which is in "
        f"{base.peak_phase}{where} (`{base.peak_op}`).{on_device}"
    )


def _on_gpu(what_if: WhatIf, base: MemoryPrediction) -> list[str]:
    if what_if.step.gpu is None:
        return []
    spare = base.fits(what_if.step.gpu).spare_bytes
    name = label_of(what_if.step.gpu)
    has = f"{name[0].upper()}{name[1:]} has {format_bytes(what_if.step.gpu.total_bytes)}"
    if spare >= 0:
        return [f"{has}: it fits, with {format_bytes(spare)} to spare."]
    return [f"{has}: it does not fit, {format_bytes(-spare)} are missing."]


def _categories(base: MemoryPrediction) -> str:
    sizes = sorted(base.peak.by_category().items(), key=lambda item: -item[1])
    large = [(name, n) for name, n in sizes if n >= _MIN_SHARE * base.peak_bytes and n]
    parts = [
        f"{_NAMES.get(name, name)} {format_bytes(n)} ({n / base.peak_bytes:.0%})"
        for name, n in large
    ]
    return f"The peak holds {', '.join(parts)}."


# Equal modules of all blocks count together: `encoder.layer.0.mlp` is `encoder.layer.*`.
def _modules(base: MemoryPrediction) -> list[str]:
    def made(module: ModuleMemory) -> int:
        return module.memory.activation_bytes + module.memory.temporary_bytes

    total = sum(made(module) for module in base.modules)
    if total < _MIN_SHARE * base.peak_bytes:
        return []
    groups = _grouped(base.modules, made)
    name, (num_blocks, num_bytes) = max(groups.items(), key=lambda item: item[1][1])
    if not name:
        return []
    each = f", {format_bytes(num_bytes // num_blocks)} in each" if num_blocks > 1 else ""
    what = f"the {num_blocks} blocks of `{name}`" if num_blocks > 1 else f"`{name}`"
    return [
        f"Of the tensors made in forward and backward, {num_bytes / total:.0%} "
        f"({format_bytes(num_bytes)}) belongs to {what}{each}."
    ]


def _grouped(
    modules: tuple[ModuleMemory, ...], made: Callable[[ModuleMemory], int]
) -> dict[str, tuple[int, int]]:
    blocks: dict[str, set[str]] = {}
    sizes: dict[str, int] = {}
    for module in modules:
        match = re.match(r"(.*?)(?:^|\.)(\d+)(?:\.|$)", module.name)
        group = f"{match[1]}.*".removeprefix(".") if match else module.name
        if match and made(module):
            blocks.setdefault(group, set()).add(match[2])
        sizes[group] = sizes.get(group, 0) + made(module)
    return {group: (len(blocks.get(group, "1")), size) for group, size in sizes.items()}


def _kinds_of_tensors(what_if: WhatIf, base: MemoryPrediction) -> list[str]:
    found = []
    outputs = find_outputs(what_if.table)
    if outputs is not None:
        logits = logits_of(base, outputs)
        what = f"of {outputs.num_outputs:,} outputs (the logits and what follows from them)"
        found += _several(base, logits, what)
    if what_if.lengths:
        of = " or ".join(f"{length:,}" for length in what_if.lengths[:2])
        what = f"for all pairs of the {of} tokens (scores of attention)"
        found += _several(base, scores_of(base, what_if.lengths), what)
    return found


def _several(base: MemoryPrediction, tensors: list[TensorMemory], what: str) -> list[str]:
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    if num_bytes < _MIN_SHARE * base.peak_bytes:
        return []
    at_least = "At least " if are_maybe_more(base, tensors) else ""
    count = f"{at_least}{len(tensors)} tensor{'s hold' if len(tensors) > 1 else ' holds'} values"
    share = f"{num_bytes / base.peak_bytes:.0%} of the peak"
    return [f"{count} {what}: {format_bytes(num_bytes)}, {share}."]
