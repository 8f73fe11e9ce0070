"""The factors of peak memory: batch, sequence, vocabulary, model, attention, gradients, logits."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from math import floor
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from lightning_memsave.errors import ConfigurationError
from lightning_memsave.explain.dominant_parts import (
    ModelStates,
    embedding_tables,
    explain_parameters,
    model_states,
    shape_of,
)
from lightning_memsave.measure.parameters import ParameterTable, TensorEntry
from lightning_memsave.measure.storages import tensors_in_batch
from lightning_memsave.prediction.cuda.gpus import Gpu
from lightning_memsave.prediction.peaks import NUM_LARGEST
from lightning_memsave.prediction.result import MemoryPrediction, TensorMemory
from lightning_memsave.prediction.what_if import ImpossibleVariantError, WhatIf
from lightning_memsave.techniques.registry import frees_early
from lightning_memsave.units import format_bytes

_MATTERS = 0.05
"""A factor matters from this share of the peak on."""
_MADE = ("activation", "temporary", "other")
_MATRIX = 2
_SMALL = 0.1

Verdict = Literal["matters", "does not matter", "unknown"]
Figure: TypeAlias = int | float | bool | str | None


@dataclass(frozen=True, slots=True)
class Finding:
    """How much one factor contributes to the peak."""

    name: str
    verdict: Verdict
    num_bytes: int | None
    sentence: str
    figures: Mapping[str, Figure] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# Bytes, a sentence and figures; bytes are compared with those of the peak.
_Answer: TypeAlias = tuple[int, str, Mapping[str, Figure]]


class _UnknownError(Exception):
    """Why a factor is not known."""


def _predict(what_if: WhatIf, with_what: str, **changed: Any) -> MemoryPrediction:
    try:
        return what_if.predict(**changed)
    except ImpossibleVariantError as error:
        raise _UnknownError(f"The model fails with {with_what}: {error}.") from error


def label_of(gpu: Gpu) -> str:
    return "the GPU" if gpu.compute_capability is None else gpu.name


def _batch_size(what_if: WhatIf) -> _Answer:
    num_samples, base = what_if.num_samples, what_if.base()
    if not num_samples:
        raise _UnknownError(
            "The tensors of the batch do not share a first size, so that it cannot be halved."
        )
    other = num_samples // 2 or 2
    found = _predict(what_if, f"a batch of {other}", num_samples=other)
    known = {num_samples: base, other: found}
    fixed, each = _lines(known)[base.peak_phase]
    of_batch = round(each * num_samples)
    samples = f"{num_samples} sample{'s' if num_samples > 1 else ''}"
    sentence = (
        f"Each sample needs {format_bytes(round(each))}, {samples} {format_bytes(of_batch)}; "
        f"{format_bytes(round(fixed))} are needed for any batch."
    )
    figures: dict[str, Figure] = {
        "num_samples": num_samples,
        "bytes_per_sample": round(each),
        "fixed_bytes": round(fixed),
    }
    gpu = what_if.step.gpu
    if gpu is not None:
        _check_largest(what_if, known, gpu)
        largest = max((n for n, prediction in known.items() if prediction.fits(gpu)), default=0)
        figures |= {"largest_batch": largest}
        number = largest or min(known)
        fit = "one sample fits" if number == 1 else f"{number:,} samples fit"
        sentence += f" {'At least' if largest else 'Not even'} {fit} on {label_of(gpu)}."
    return of_batch, sentence, figures


# By phase: the bytes that are always there, and those of each sample.
def _lines(known: Mapping[int, MemoryPrediction]) -> dict[str, tuple[Fraction, Fraction]]:
    (here, base), (there, other), *_ = known.items()
    lines = {}
    for phase, memory in base.by_phase.items():
        of_base, of_other = memory.total_bytes, other.by_phase[phase].total_bytes
        each = Fraction(of_base - of_other, here - there)
        lines[phase] = of_base - each * here, each
    return lines


# The peak is the highest of several lines; what the allocator needs beside it is on none, so the
# size that follows is predicted too. If it does not fit, one that is smaller in proportion.
def _check_largest(what_if: WhatIf, known: dict[int, MemoryPrediction], gpu: Gpu) -> None:
    scale = min(p.peak_bytes / (p.device_bytes - p.context_bytes) for p in known.values())
    limit_bytes = gpu.total_bytes - what_if.base().context_bytes
    lines = [line for line in _lines(known).values() if line[1] > 0]
    sizes = [floor((floor(limit_bytes * scale) - fixed) / each) for fixed, each in lines]
    guess = max(min(sizes, default=1), 1)
    for _ in range(2):
        if guess in known:
            return
        try:
            known[guess] = found = what_if.predict(num_samples=guess)
        except ImpossibleVariantError:
            return
        if found.device_bytes <= gpu.total_bytes:
            return
        guess = max(guess * limit_bytes // (found.device_bytes - found.context_bytes), 1)


def _sequence_length(what_if: WhatIf) -> _Answer:
    sequence, base = what_if.sequence, what_if.base()
    if sequence is None:
        return _without_axis(what_if)
    length, other = sequence.length, sequence.length // 2
    if not other:
        raise _UnknownError(f"Sequences of {length} are too short to be shortened.")
    at_other = _predict(what_if, f"a length of {other}", length=other)
    # Matrices of all pairs of tokens grow with the square, all else at most in proportion. Those
    # that are square at one length only are something else.
    peak_bytes, of_scores = base.peak_bytes, 0
    if scores_of(at_other, [other]):
        of_scores = sum(tensor.num_bytes for tensor in scores_of(base, [length]))
    more_bytes = peak_bytes - at_other.by_phase[base.peak_phase].total_bytes
    more_scores = Fraction(of_scores * (length**2 - other**2), length**2)
    linear = round((more_bytes - more_scores) * length / (length - other))
    linear = min(max(linear, 0), peak_bytes - of_scores)
    grows = f"{format_bytes(linear)} grow with the length"
    if of_scores:
        grows += f" and {format_bytes(of_scores)}, matrices of all pairs of tokens, with its square"
    sentence = (
        f"At {length:,} tokens {grows}: with {other:,} the step would need "
        f"{format_bytes(at_other.peak_bytes)}."
    )
    figures: dict[str, Figure] = {
        "length": length,
        "other_length": other,
        "other_peak_bytes": at_other.peak_bytes,
        "fixed_bytes": peak_bytes - linear - of_scores,
        "linear_bytes": linear,
        "quadratic_bytes": of_scores,
        "order": "quadratic" if of_scores > linear else "linear",
    }
    return linear + of_scores, sentence, figures


def scores_of(base: MemoryPrediction, lengths: Collection[int]) -> list[TensorMemory]:
    """Find the scores of attention that are alive at the peak."""
    return [
        tensor
        for tensor in base.largest_tensors
        if tensor.category in {"activation", "temporary"}
        and len(tensor.shape) > _MATRIX
        and tensor.shape[-1] in lengths
        and tensor.shape[-1] == tensor.shape[-2]
    ]


def _without_axis(what_if: WhatIf) -> _Answer:
    fix = "Pass `sequence_axis=` if an axis of the batch is a sequence."
    tensors = list(tensors_in_batch(what_if.step.batch))
    if what_if.lengths:
        raise _UnknownError(
            f"The model attends to {what_if.lengths[0]:,} tokens, which is not a size of the "
            f"batch: it follows from other sizes, such as those of images. {fix}"
        )
    if not tensors or any(tensor.ndim == 3 for tensor in tensors):
        raise _UnknownError(f"It is not known which axis is a sequence. {fix}")
    return 0, f"There are no token ids, and no attention. {fix}", {}


# The layer that computes logits.
def _output_layer(table: ParameterTable) -> TensorEntry | None:
    matrices = [e for e in table.parameters if e.shape is not None and len(e.shape) == _MATRIX]
    tied = [e for e in matrices if any(_is_layer(table, alias) for alias in e.aliases)]
    last = [e for e in matrices if _is_layer(table, e.name)][-1:]
    # Of other layers the last one may well be inside.
    inputs = {e.shape[1] for e in matrices if e.shape}
    free = [e for e in last if e.shape and e.shape[0] not in inputs]
    return next((e for e in (*tied, *free) if e.shape and e.shape[0] > 1), None)


def _is_layer(table: ParameterTable, name: str) -> bool:
    kind = table.class_names.get(name.rpartition(".")[0], "")
    return not kind.lower().endswith(("embedding", "embeddingbag"))


def _logits_of(base: MemoryPrediction, layer: TensorEntry | None) -> list[TensorMemory]:
    num_outputs, num_inputs = (layer and layer.shape) or (0, 0)
    return [
        tensor
        for tensor in base.largest_tensors
        if tensor.category in _MADE
        and len(tensor.shape) >= _MATRIX
        and tensor.shape[-1] == num_outputs
        and tensor.shape != (num_inputs, num_outputs)
        and not (len(tensor.shape) > _MATRIX and tensor.shape[-2] == num_outputs)
    ]


def _logits_copies(what_if: WhatIf) -> _Answer:
    layer = _output_layer(what_if.table)
    if layer is None or layer.shape is None:
        return 0, "The model has no layer that computes logits.", {}
    num_outputs, logits = layer.shape[0], _logits_of(what_if.base(), layer)
    num_bytes = sum(tensor.num_bytes for tensor in logits)
    sentence = f"Nothing with {num_outputs:,} outputs is alive at the peak."
    if logits:
        count = f"{len(logits)} tensor{'' if len(logits) == 1 else 's'}"
        made = ", ".join(dict.fromkeys(tensor.op.removeprefix("aten.") for tensor in logits))
        sentence = (
            f"{count} of {num_outputs:,} outputs per position or sample, "
            f"{format_bytes(num_bytes)} together, are alive at the peak ({made})."
        )
    return num_bytes, sentence, {"num_copies": len(logits)}


def model_states_of(what_if: WhatIf) -> ModelStates:
    if what_if.can_predict:
        return ModelStates.from_prediction(what_if.base(), what_if.optimizer_name)
    return model_states(what_if.table)


def _cardinality(what_if: WhatIf) -> _Answer:
    layer, tables = _output_layer(what_if.table), embedding_tables(what_if.table)
    if layer is None and not tables:
        return 0, "The model has neither a vocabulary nor labels.", {}
    # Positions and kinds of tokens have tables, too: small ones.
    large = [e for e in tables if e.num_elements >= _SMALL * tables[0].num_elements]
    chosen = {e.module: e for e in (*large, *([] if layer is None else [layer]))}
    costs = model_states_of(what_if)
    of_tables = costs.of(chosen)
    logits = _logits_of(what_if.base(), layer) if what_if.can_predict else []
    of_logits = sum(tensor.num_bytes for tensor in logits)
    shown = [f"`{e.module or e.name}` ({shape_of(e)})" for e in chosen.values()]
    more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    named = f"{', '.join(shown[:3])}{more}"
    sentence = f"{named}: {_with_name(costs)} {format_bytes(of_tables)}"
    if logits:
        sentence += f", and {format_bytes(of_logits)} of logits"
    figures = {"table_bytes": of_tables, "logits_bytes": of_logits}
    return of_tables + of_logits, f"{sentence}.", figures


def _with_name(costs: ModelStates) -> str:
    return costs.summary.replace("optimizer state", f"state of {costs.optimizer}")


def _structure(what_if: WhatIf) -> _Answer:
    costs = model_states_of(what_if)
    what = _with_name(costs)
    remark = f" at the peak; {costs.remark}" if costs.remark else ""
    sentence = f"{what[0].upper()}{what[1:]}: {format_bytes(costs.total_bytes)}{remark}."
    largest = explain_parameters(what_if.table)[0]
    figures = {"num_parameters": what_if.table.num_parameters}
    return costs.total_bytes, f"{sentence} {largest}", figures


def _attention_kernel(what_if: WhatIf) -> _Answer:
    base, now = what_if.base(), what_if.attention
    if now is None:
        return _of_scores(what_if)
    if now != "eager":
        return 0, f"It is `{now}` already.", {"attention": now}
    found = _predict(what_if, "`sdpa`", changes={"attention": "sdpa"})
    saved = max(base.peak_bytes - found.peak_bytes, 0)
    sentence = "It is `eager`, and `sdpa` would not lower the peak here."
    if saved:
        sentence = (
            "It is `eager`, which keeps the scores of all pairs of tokens: `sdpa` would save "
            f"{format_bytes(saved)} of {format_bytes(base.peak_bytes)} "
            f'({saved / base.peak_bytes:.0%}). Type `model.set_attn_implementation("sdpa")`.'
        )
    figures: dict[str, Figure] = {"attention": now, "other_peak_bytes": found.peak_bytes}
    return saved, sentence, figures | {"saved_bytes": saved}


def _of_scores(what_if: WhatIf) -> _Answer:
    base = what_if.base()
    if not what_if.lengths:
        return 0, "This step has no attention.", {}
    scores = scores_of(base, what_if.lengths)
    if not scores:
        length = what_if.lengths[0]
        return 0, f"No matrix of all pairs of {length:,} tokens is alive at the peak.", {}
    num_bytes = sum(tensor.num_bytes for tensor in scores)
    listed = base.largest_tensors
    are_maybe_more = len(listed) >= NUM_LARGEST and scores[-1].num_bytes <= listed[-1].num_bytes
    sentence = (
        f"{'At least ' if are_maybe_more else ''}{len(scores)} matrices of all pairs of tokens use "
        f"{format_bytes(num_bytes)} at the peak: "
        "`torch.nn.functional.scaled_dot_product_attention` keeps none."
    )
    return num_bytes, sentence, {"num_matrices": len(scores)}


def _previous_gradients(what_if: WhatIf) -> _Answer:
    base = what_if.base()
    alive = base.peak.gradient_bytes if base.peak_phase == "forward" else 0
    if frees_early(what_if.step.effective_settings):
        return alive, "`MemSaveCallback` frees them before the forward pass.", {}
    found = _predict(what_if, "micro-batches", changes={"micro_batch_size": "halve"})
    if "micro_batch_size" not in found.settings:
        raise _UnknownError(
            "What freeing them earlier would save is unknown: the module runs its own steps."
        )
    saved = max(base.peak_bytes - found.peak_bytes, 0)
    sentence = "None are alive at the peak."
    if alive:
        sentence = (
            f"Lightning frees gradients after the forward pass, so that {format_bytes(alive)} of "
            "the previous step are alive beside the activations. Freeing them earlier saves "
            f"{format_bytes(saved)}: `MemSaveCallback` does it beside everything else."
        )
    return alive, sentence, {"alive_bytes": alive, "saved_bytes": saved}


FACTORS: Mapping[str, Callable[[WhatIf], _Answer]] = MappingProxyType(
    {
        "batch size": _batch_size,
        "sequence length": _sequence_length,
        "vocabulary and labels": _cardinality,
        "model structure": _structure,
        "attention kernel": _attention_kernel,
        "previous gradients": _previous_gradients,
        "copies of the logits": _logits_copies,
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
    return tuple(_finding(what_if, n) for n in FACTORS if names is None or n in names)


def _finding(what_if: WhatIf, name: str) -> Finding:
    try:
        if not what_if.can_predict and name not in _WITHOUT_BATCH:
            raise _UnknownError(
                "This needs a prediction: pass a batch, and a model whose code can run."
            )
        num_bytes, sentence, figures = FACTORS[name](what_if)
    except _UnknownError as why:
        return Finding(name, "unknown", None, str(why))
    whole = (
        what_if.base().peak_bytes if what_if.can_predict else model_states_of(what_if).total_bytes
    )
    matters = num_bytes and num_bytes >= _MATTERS * whole
    verdict: Verdict = "matters" if matters else "does not matter"
    return Finding(name, verdict, num_bytes, sentence, figures)
