"""The factors of peak memory: batch, sequence, vocabulary, model, attention, gradients, logits."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from lightning_memsave.errors import ConfigurationError
from lightning_memsave.explain.dominant_parts import (
    ModelStates,
    embedding_tables,
    explain_parameters,
    model_states,
)
from lightning_memsave.explain.finding import (
    Figure,
    Finding,
    finding_of,
    unknown_finding,
    verdict_of,
)
from lightning_memsave.explain.growth import batch_size, scores_of, sequence_length
from lightning_memsave.measure.parameters import ParameterTable, TensorEntry
from lightning_memsave.prediction.peaks import NUM_LARGEST
from lightning_memsave.prediction.result import MemoryPrediction, TensorMemory
from lightning_memsave.prediction.what_if import ImpossibleVariantError, WhatIf
from lightning_memsave.techniques.registry import frees_early
from lightning_memsave.units import format_bytes

_MADE = ("activation", "temporary", "other")
_MATRIX = 2
_SMALL = 0.1


@dataclass(frozen=True, slots=True)
class Outputs:
    num_outputs: int
    num_inputs: int
    name: str


def find_outputs(table: ParameterTable) -> Outputs | None:
    matrices = [e for e in table.parameters if e.shape is not None and len(e.shape) == _MATRIX]
    tied = [e for e in matrices if any(_is_layer(table, alias) for alias in e.aliases)]
    last = [e for e in matrices if _is_layer(table, e.name)][-1:]
    # Of other layers the last one may well be inside.
    inputs = {e.shape[1] for e in matrices if e.shape}
    free = [e for e in last if e.shape and e.shape[0] not in inputs]
    for entry in [*tied, *free]:
        if entry.shape is not None and entry.shape[0] > 1:
            return Outputs(entry.shape[0], entry.shape[1], entry.name)
    return None


def _is_layer(table: ParameterTable, name: str) -> bool:
    kind = table.class_names.get(name.rpartition(".")[0], "")
    return not kind.lower().endswith(("embedding", "embeddingbag"))


def logits_of(base: MemoryPrediction, outputs: Outputs) -> list[TensorMemory]:
    return [
        tensor
        for tensor in base.largest_tensors
        if tensor.category in _MADE
        and len(tensor.shape) >= _MATRIX
        and tensor.shape[-1] == outputs.num_outputs
        and tensor.shape != (outputs.num_inputs, outputs.num_outputs)
        and not (len(tensor.shape) > _MATRIX and tensor.shape[-2] == outputs.num_outputs)
    ]


def logits_copies(what_if: WhatIf) -> Finding:
    name, base, outputs = "copies of the logits", what_if.base(), find_outputs(what_if.table)
    if outputs is None:
        return finding_of(name, 0, "The model has no layer that computes logits.", base)
    logits = logits_of(base, outputs)
    num_bytes = sum(tensor.num_bytes for tensor in logits)
    count = f"{len(logits)} tensor{'' if len(logits) == 1 else 's'}"
    sentence = f"Nothing with {outputs.num_outputs:,} outputs is alive at the peak."
    if logits:
        made = ", ".join(dict.fromkeys(tensor.op.removeprefix("aten.") for tensor in logits))
        sentence = (
            f"{count} of {outputs.num_outputs:,} outputs per position or sample, "
            f"{format_bytes(num_bytes)} together, are alive at the peak ({made})."
        )
    return finding_of(name, num_bytes, sentence, base, num_copies=len(logits))


def model_states_of(what_if: WhatIf) -> ModelStates:
    if what_if.can_predict:
        return ModelStates.from_prediction(what_if.base(), what_if.optimizer_name)
    optimizer = what_if.step.optimizer
    return model_states(what_if.table, optimizer) if optimizer else model_states(what_if.table)


def cardinality(what_if: WhatIf) -> Finding:
    name, table = "vocabulary and labels", what_if.table
    outputs, tables = find_outputs(table), embedding_tables(table)
    if outputs is None and not tables:
        return Finding(name, "does not matter", 0, "The model has neither a vocabulary nor labels.")
    # Positions and kinds of tokens have tables, too: small ones.
    large = [e for e in tables if e.num_elements >= _SMALL * tables[0].num_elements]
    chosen = {e.module: e for e in large}
    if outputs is not None:
        chosen |= {e.module: e for e in table.parameters if e.name == outputs.name}
    costs = model_states_of(what_if)
    of_tables = costs.of(chosen)
    logits = []
    if outputs is not None and what_if.can_predict:
        logits = logits_of(what_if.base(), outputs)
    of_logits = sum(tensor.num_bytes for tensor in logits)
    num_bytes = of_tables + of_logits
    sentence = f"{_named(list(chosen.values()))}: {_with_name(costs)} {format_bytes(of_tables)}"
    if logits:
        sentence += f", and {format_bytes(of_logits)} of logits"
    whole = what_if.base().peak_bytes if what_if.can_predict else costs.total_bytes
    figures = {"table_bytes": of_tables, "logits_bytes": of_logits}
    return Finding(name, verdict_of(num_bytes, whole), num_bytes, f"{sentence}.", figures)


def _with_name(costs: ModelStates) -> str:
    return costs.summary.replace("optimizer state", f"state of {costs.optimizer}")


def _named(entries: list[TensorEntry]) -> str:
    shown = [
        f"`{e.module or e.name}` ({' x '.join(f'{n:,}' for n in e.shape or ())})" for e in entries
    ]
    more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return f"{', '.join(shown[:3])}{more}"


def structure(what_if: WhatIf) -> Finding:
    costs = model_states_of(what_if)
    total = costs.total_bytes
    largest = explain_parameters(what_if.table)[0]
    what = _with_name(costs)
    remark = f" at the peak; {costs.remark}" if costs.remark else ""
    sentence = f"{what[0].upper()}{what[1:]}: {format_bytes(total)}{remark}."
    whole = what_if.base().peak_bytes if what_if.can_predict else total
    figures = {"num_parameters": what_if.table.num_parameters}
    return Finding(
        "model structure", verdict_of(total, whole), total, f"{sentence} {largest}", figures
    )


_NAME = "attention kernel"


def attention_kernel(what_if: WhatIf) -> Finding:
    base, now = what_if.base(), what_if.attention
    if now is None:
        return _of_scores(what_if)
    figures: dict[str, Figure] = {"attention": now}
    if now != "eager":
        return finding_of(_NAME, 0, f"It is `{now}` already.", base, **figures)
    try:
        found = what_if.predict({"attention": "sdpa"})
    except ImpossibleVariantError as error:
        return unknown_finding(_NAME, f"The model fails with `sdpa`: {error}.")
    saved = max(base.peak_bytes - found.peak_bytes, 0)
    sentence = "It is `eager`, and `sdpa` would not lower the peak here."
    if saved:
        sentence = (
            "It is `eager`, which keeps the scores of all pairs of tokens: `sdpa` would save "
            f"{format_bytes(saved)} of {format_bytes(base.peak_bytes)} "
            f'({saved / base.peak_bytes:.0%}). Type `model.set_attn_implementation("sdpa")`.'
        )
    figures |= {"other_peak_bytes": found.peak_bytes, "saved_bytes": saved}
    return finding_of(_NAME, saved, sentence, base, **figures)


def _of_scores(what_if: WhatIf) -> Finding:
    base = what_if.base()
    if not what_if.lengths:
        return Finding(_NAME, "does not matter", 0, "This step has no attention.")
    scores = scores_of(base, what_if.lengths)
    num_bytes = sum(tensor.num_bytes for tensor in scores)
    if not scores:
        pairs = f"No matrix of all pairs of {what_if.lengths[0]:,} tokens is alive at the peak."
        return finding_of(_NAME, 0, pairs, base)
    at_least = "At least " if are_maybe_more(base, scores) else ""
    return finding_of(
        _NAME,
        num_bytes,
        f"{at_least}{len(scores)} matrices of all pairs of tokens use {format_bytes(num_bytes)} "
        "at the peak: `torch.nn.functional.scaled_dot_product_attention` keeps none.",
        base,
        num_matrices=len(scores),
    )


def are_maybe_more(base: MemoryPrediction, tensors: Sequence[TensorMemory]) -> bool:
    listed = base.largest_tensors
    if not tensors or len(listed) < NUM_LARGEST:
        return False
    return tensors[-1].num_bytes <= listed[-1].num_bytes


def previous_gradients(what_if: WhatIf) -> Finding:
    name, base = "previous gradients", what_if.base()
    in_forward = base.by_phase.get("forward")
    alive = 0
    if base.peak_phase == "forward" and in_forward is not None:
        alive = base.peak.gradient_bytes
    if frees_early(what_if.step.effective_settings):
        return finding_of(
            name, alive, "`MemSaveCallback` frees them before the forward pass.", base
        )
    try:
        found = what_if.predict({"micro_batch_size": "halve"})
        why = "" if "micro_batch_size" in found.settings else "the module runs its own steps"
    except ImpossibleVariantError as error:
        why = str(error)
    if why:
        return unknown_finding(name, f"What freeing them earlier would save is unknown: {why}.")
    saved = max(base.peak_bytes - found.peak_bytes, 0)
    if not alive:
        sentence = "None are alive at the peak."
    else:
        sentence = (
            f"Lightning frees gradients after the forward pass, so that {format_bytes(alive)} of "
            "the previous step are alive beside the activations. Freeing them earlier saves "
            f"{format_bytes(saved)}: `MemSaveCallback` does it beside everything else."
        )
    return finding_of(name, alive, sentence, base, alive_bytes=alive, saved_bytes=saved)


FACTORS: Mapping[str, Callable[[WhatIf], Finding]] = MappingProxyType(
    {
        "batch size": batch_size,
        "sequence length": sequence_length,
        "vocabulary and labels": cardinality,
        "model structure": structure,
        "attention kernel": attention_kernel,
        "previous gradients": previous_gradients,
        "copies of the logits": logits_copies,
    }
)
"""What computes the finding of each factor, by name."""
_WITHOUT_BATCH = ("vocabulary and labels", "model structure")


def explain_factors(what_if: WhatIf, names: Collection[str] | None = None) -> tuple[Finding, ...]:
    if names is not None and (isinstance(names, str) or not isinstance(names, Collection)):
        raise ConfigurationError(
            f'`factors={names!r}` is not a list. Write for example `factors=["batch size"]`.'
        )
    for name in names or ():
        if name not in FACTORS:
            raise ConfigurationError(
                f"`{name}` is not a factor. Use {', '.join(map(repr, FACTORS))}."
            )
    asked = FACTORS if names is None else {n: s for n, s in FACTORS.items() if n in names}
    return tuple(
        ask(what_if)
        if what_if.can_predict or name in _WITHOUT_BATCH
        else unknown_finding(
            name, "This needs a prediction: pass a batch, and a model whose code can run."
        )
        for name, ask in asked.items()
    )
