"""How memory grows with batch size and sequence length: the line through two predictions."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor

from lightning_memsave.explain.finding import Figure, Finding, finding_of, label_of, unknown_finding
from lightning_memsave.measure.parameters import ParameterTable
from lightning_memsave.measure.storages import tensors_in_batch
from lightning_memsave.prediction.cuda.gpus import Gpu
from lightning_memsave.prediction.result import MemoryPrediction, TensorMemory
from lightning_memsave.prediction.what_if import ImpossibleVariantError, WhatIf
from lightning_memsave.units import format_bytes


@dataclass(frozen=True, slots=True)
class _Line:
    """Bytes at the peak of one phase: those that are always there, and those of each sample."""

    fixed_bytes: Fraction
    bytes_per_sample: Fraction


def batch_size(what_if: WhatIf) -> Finding:
    name, num_samples, base = "batch size", what_if.num_samples, what_if.base()
    if not num_samples:
        return unknown_finding(
            name, "The tensors of the batch do not share a first size, so that it cannot be halved."
        )
    other = num_samples // 2 or 2
    try:
        found = what_if.predict(num_samples=other)
    except ImpossibleVariantError as error:
        return unknown_finding(name, f"The model fails with a batch of {other}: {error}.")
    known = {num_samples: base, other: found}
    line = _lines(known)[base.peak_phase]
    of_batch = round(line.bytes_per_sample * num_samples)
    samples = f"{num_samples} sample{'s' if num_samples > 1 else ''}"
    sentence = (
        f"Each sample needs {format_bytes(round(line.bytes_per_sample))}, {samples} "
        f"{format_bytes(of_batch)}; {format_bytes(round(line.fixed_bytes))} are needed for any "
        "batch."
    )
    figures: dict[str, Figure] = {
        "num_samples": num_samples,
        "bytes_per_sample": round(line.bytes_per_sample),
        "fixed_bytes": round(line.fixed_bytes),
    }
    if what_if.step.gpu is not None:
        gpu = what_if.step.gpu
        _check_largest(what_if, known, gpu)
        largest = max((n for n, prediction in known.items() if prediction.fits(gpu)), default=0)
        figures |= {"largest_batch": largest}
        how = "At least" if largest else "Not even"
        sentence += f" {how} {_fit(largest or min(known))} on {label_of(gpu)}."
    return finding_of(name, of_batch, sentence, base, **figures)


def _fit(num_samples: int) -> str:
    return "one sample fits" if num_samples == 1 else f"{num_samples:,} samples fit"


def _lines(known: dict[int, MemoryPrediction]) -> dict[str, _Line]:
    (here, base), (there, other), *_ = known.items()
    lines = {}
    for phase, memory in base.by_phase.items():
        of_base, of_other = memory.total_bytes, other.by_phase[phase].total_bytes
        each = Fraction(of_base - of_other, here - there)
        lines[phase] = _Line(of_base - each * here, each)
    return lines


# The peak is the highest of several lines; what the allocator needs beside it is on none, so the
# size that follows is predicted too. If it does not fit, one that is smaller by what is missing.
def _check_largest(what_if: WhatIf, known: dict[int, MemoryPrediction], gpu: Gpu) -> None:
    scale = min(p.peak_bytes / (p.device_bytes - p.context_bytes) for p in known.values())
    limit_bytes = floor((gpu.total_bytes - what_if.base().context_bytes) * scale)
    sizes = [
        floor((limit_bytes - line.fixed_bytes) / line.bytes_per_sample)
        for line in _lines(known).values()
        if line.bytes_per_sample > 0
    ]
    guess = max(min(sizes, default=1), 1)
    for _ in range(2):
        if guess in known:
            return
        try:
            known[guess] = what_if.predict(num_samples=guess)
        except ImpossibleVariantError:
            return
        missing_bytes = known[guess].device_bytes - gpu.total_bytes
        if missing_bytes <= 0:
            return
        near = min(known.keys() - {guess}, key=lambda n: abs(n - guess))
        more_bytes = known[guess].device_bytes - known[near].device_bytes
        each = max(Fraction(more_bytes, guess - near), Fraction(1))
        guess = max(guess - ceil(missing_bytes / each), 1)


# A layer of positions that are learned: it ends where they do.
_POSITIONS = re.compile(r"(^|[._])(pos|wpe|position)(_|[a-z]*$|[a-z]*_embed)", re.IGNORECASE)


def sequence_length(what_if: WhatIf) -> Finding:
    name, sequence, base = "sequence length", what_if.sequence, what_if.base()
    if sequence is None:
        return _without_axis(what_if)
    length, limit = sequence.length, max_positions(what_if.table)
    other = 2 * length if limit is None else max(min(2 * length, limit), length)
    at_other = _at(what_if, other) if 2 * other >= 3 * length else None
    if at_other is None:  # the model ends here
        if length < 4:
            return unknown_finding(name, f"Sequences of {length} are too short to be shortened.")
        other = length // 2
        try:
            at_other = what_if.predict(length=other)
        except ImpossibleVariantError as error:
            return unknown_finding(name, f"The model fails with a length of {other}: {error}.")
    what = f"with {other:,} the step would need {format_bytes(at_other.peak_bytes)}"
    if other < length or other == limit:
        most = limit if limit is not None and limit >= length else length
        what += f" ({most:,} is the longest that the model supports)"
    # Matrices of all pairs of tokens grow with the square, all else at most in proportion. Those
    # that are square at one length only are something else.
    peak_bytes, of_scores = base.peak_bytes, 0
    if scores_of(at_other, [other]):
        of_scores = sum(tensor.num_bytes for tensor in scores_of(base, [length]))
    more_bytes = at_other.by_phase[base.peak_phase].total_bytes - peak_bytes
    more_scores = Fraction(of_scores * (other**2 - length**2), length**2)
    linear = round((more_bytes - more_scores) * length / (other - length))
    linear = min(max(linear, 0), peak_bytes - of_scores)
    grows = f"{format_bytes(linear)} grow with the length"
    if of_scores:
        grows += f" and {format_bytes(of_scores)}, matrices of all pairs of tokens, with its square"
    figures: dict[str, Figure] = {
        "length": length,
        "other_length": other,
        "other_peak_bytes": at_other.peak_bytes,
        "fixed_bytes": peak_bytes - linear - of_scores,
        "linear_bytes": linear,
        "quadratic_bytes": of_scores,
        "order": "quadratic" if of_scores > linear else "linear",
    }
    sentence = f"At {length:,} tokens {grows}: {what}."
    return finding_of(name, linear + of_scores, sentence, base, **figures)


def max_positions(table: ParameterTable) -> int | None:
    rows = [
        entry.shape[0]
        for entry in table.parameters
        if entry.shape is not None
        and len(entry.shape) == 2
        and entry.shape[0] > 1
        and _POSITIONS.search(entry.module)
        and table.class_names.get(entry.module, "").lower().endswith("embedding")
    ]
    return min(rows, default=None)


def scores_of(base: MemoryPrediction, lengths: Collection[int]) -> list[TensorMemory]:
    """Find the scores of attention that are alive at the peak."""
    return [
        tensor
        for tensor in base.largest_tensors
        if tensor.category in {"activation", "temporary"}
        and len(tensor.shape) > 2
        and tensor.shape[-1] in lengths
        and tensor.shape[-1] == tensor.shape[-2]
    ]


def _without_axis(what_if: WhatIf) -> Finding:
    name, fix = "sequence length", "Pass `sequence_axis=` if an axis of the batch is a sequence."
    tensors = list(tensors_in_batch(what_if.step.batch))
    if what_if.lengths:
        return unknown_finding(
            name,
            f"The model attends to {what_if.lengths[0]:,} tokens, which is not a size of the "
            f"batch: it follows from other sizes, such as those of images. {fix}",
        )
    if not tensors or any(tensor.ndim == 3 for tensor in tensors):
        return unknown_finding(name, f"It is not known which axis is a sequence. {fix}")
    return Finding(name, "does not matter", 0, f"There are no token ids, and no attention. {fix}")


def _at(what_if: WhatIf, length: int) -> MemoryPrediction | None:
    try:
        return what_if.predict(length=length)
    except ImpossibleVariantError:
        return None
