"""How memory grows with batch size and sequence length."""

import re
from dataclasses import dataclass
from fractions import Fraction
from math import floor

from lightning_memsave.explain.finding import Figure, Finding, finding_of, label_of, unknown_finding
from lightning_memsave.explain.parameters import ParameterTable
from lightning_memsave.explain.what_if import ImpossibleVariantError, WhatIf
from lightning_memsave.measure.storages import tensors_in_batch
from lightning_memsave.prediction.cuda.gpus import Gpu
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.units import format_bytes

_MAX_STEPS = 4


@dataclass(frozen=True, slots=True)
class _Line:
    """Bytes at the peak of one phase: those that are always there, and those of each sample."""

    fixed_bytes: Fraction
    bytes_per_sample: Fraction

    def at(self, num_samples: int) -> Fraction:
        return self.fixed_bytes + self.bytes_per_sample * num_samples


def batch_size(what_if: WhatIf) -> Finding:
    """Separate the memory of each sample from what any batch needs, from two batch sizes."""
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
    lines = _lines(base, num_samples, found, other)
    line = lines[base.peak_phase]
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
    if what_if.gpu is not None:
        largest, is_exact = _largest(what_if, lines, num_samples, what_if.gpu)
        figures |= {"largest_batch": largest}
        sentence += f" {_fits(label_of(what_if.gpu), largest, is_exact)}"
    return finding_of(name, of_batch, sentence, base, **figures)


def _fits(gpu: str, largest: int, is_exact: bool) -> str:
    if not largest:
        return f"Not even one sample fits on {gpu}."
    return f"{'' if is_exact else 'At least '}{largest:,} samples fit on {gpu}."


def _lines(
    base: MemoryPrediction, num_samples: int, other: MemoryPrediction, num_others: int
) -> dict[str, _Line]:
    lines = {}
    for phase, memory in base.by_phase.items():
        here, there = memory.total_bytes, other.by_phase[phase].total_bytes
        each = Fraction(here - there, num_samples - num_others)
        lines[phase] = _Line(here - each * num_samples, each)
    return lines


# The peak is the highest of several lines, and the allocator's slack is on none, so that one line
# alone promises too much: the size that it names is predicted, and changed until it fits.
def _largest(
    what_if: WhatIf, lines: dict[str, _Line], num_samples: int, gpu: Gpu
) -> tuple[int, bool]:
    tried = {num_samples: what_if.base()}
    for _ in range(_MAX_STEPS):
        fits, fails = _bounds(tried, gpu)
        if fails == fits + 1:
            break
        if fits and fails:
            low, high = tried[fits].device_bytes, tried[fails].device_bytes
            guess = fits + (fails - fits) * (gpu.total_bytes - low) // (high - low)
        else:
            nearest = tried[fits or fails]
            scale = nearest.peak_bytes / (nearest.device_bytes - nearest.context_bytes)
            guess = _guess(lines, round((gpu.total_bytes - nearest.context_bytes) * scale))
        guess = max(guess, fits + 1)
        guess = min(guess, fails - 1) if fails else guess
        try:
            tried[guess] = what_if.predict(num_samples=guess)
        except ImpossibleVariantError:
            break
    fits, fails = _bounds(tried, gpu)
    return fits, fails == fits + 1


# The largest size that fits, and the smallest that does not; 0 where none was tried.
def _bounds(tried: dict[int, MemoryPrediction], gpu: Gpu) -> tuple[int, int]:
    fits = [n for n, prediction in tried.items() if prediction.fits(gpu)]
    fails = [n for n, prediction in tried.items() if not prediction.fits(gpu)]
    return max(fits, default=0), min(fails, default=0)


def _guess(lines: dict[str, _Line], limit_bytes: int) -> int:
    sizes = [
        floor((limit_bytes - line.fixed_bytes) / line.bytes_per_sample)
        for line in lines.values()
        if line.bytes_per_sample > 0
    ]
    return min(sizes, default=1)


_NO_QUADRATIC = 0.01
# A layer of positions that are learned: it ends where they do.
_POSITIONS = re.compile(r"(^|[._])(pos|wpe|position)(_|[a-z]*$|[a-z]*_embed)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Growth:
    """Bytes of one moment of the step, by the length."""

    fixed: Fraction
    linear: Fraction
    quadratic: Fraction


def sequence_length(what_if: WhatIf) -> Finding:
    """Find how memory grows with the length of the sequence."""
    name, sequence, base = "sequence length", what_if.sequence, what_if.base()
    if sequence is None:
        return _without_axis(what_if)
    length, limit = sequence.length, max_positions(what_if.table)
    longest = 2 * length if limit is None else max(min(2 * length, limit), length)
    if 2 * longest < 3 * length or not _can_be(what_if, longest):  # the model ends here
        longest = length
        if length < 4:
            return unknown_finding(name, f"Sequences of {length} are too short to be shortened.")
    other = longest if longest > length else length // 2
    try:
        at_other = what_if.predict(length=other)
    except ImpossibleVariantError as error:
        return unknown_finding(name, f"The model fails with a length of {other}: {error}.")
    growth = _growth(what_if, length, other)
    figures: dict[str, Figure] = {
        "length": length,
        "other_length": other,
        "other_peak_bytes": at_other.peak_bytes,
    }
    what = f"with {other:,} the step would need {format_bytes(at_other.peak_bytes)}"
    if other < length or other == limit:
        most = limit if limit is not None and limit >= length else length
        what += f" ({most:,} is the longest that the model supports)"
    if growth is None:
        return _of_peaks(what_if, base, what, figures)
    with_length, with_square = (
        round(growth.linear * length),
        round(growth.quadratic * length**2),
    )
    both = with_length + with_square
    is_quadratic = with_square >= _NO_QUADRATIC * max(both, 1)
    grows = f"{format_bytes(both)} grow with the length"
    if is_quadratic:
        grows = (
            f"{format_bytes(with_length)} grow with the length and {format_bytes(with_square)} "
            "with its square"
        )
    return finding_of(
        name,
        both,
        f"At {length:,} tokens {grows}: {what}.",
        base,
        **figures,
        fixed_bytes=round(growth.fixed),
        linear_bytes=with_length,
        quadratic_bytes=with_square,
        order="quadratic" if is_quadratic and with_square > with_length else "linear",
    )


def max_positions(table: ParameterTable) -> int | None:
    """Say how long a sequence may be."""
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


def _without_axis(what_if: WhatIf) -> Finding:
    name, fix = "sequence length", "Pass `sequence_axis=` if an axis of the batch is a sequence."
    tensors = list(tensors_in_batch(what_if.batch))
    if what_if.lengths:
        return unknown_finding(
            name,
            f"The model attends to {what_if.lengths[0]:,} tokens, which is not a size of the "
            f"batch: it follows from other sizes, such as those of images. {fix}",
        )
    if not tensors or any(tensor.ndim == 3 for tensor in tensors):
        return unknown_finding(name, f"It is not known which axis is a sequence. {fix}")
    return Finding(name, "does not matter", 0, f"There are no token ids, and no attention. {fix}")


# A parabola through three lengths, as far apart as the peak stays at the same moment of the step:
# lines of other moments say nothing of this one.
def _can_be(what_if: WhatIf, length: int) -> bool:
    try:
        what_if.predict(length=length)
    except ImpossibleVariantError:
        return False
    return True


def _growth(what_if: WhatIf, length: int, other: int) -> _Growth | None:
    spans = [other - length, -(length // 4), -(length // 8)]
    if other > length:
        spans.insert(1, length // 4)
    for span in spans:
        found = {length: what_if.base()}
        for another in (length + span // 2, length + span):
            if not _can_be(what_if, another):
                break
            found[another] = what_if.predict(length=another)
            if _moment(found[another]) != _moment(what_if.base()):
                del found[another]
                break
        if len(found) == 3:
            growth = _parabola({n: p.peak_bytes for n, p in found.items()})
            if growth is not None:
                return growth
    return None


def _moment(found: MemoryPrediction) -> tuple[str, str, str]:
    return found.peak_phase, found.peak_module, found.peak_op


def _parabola(peaks: dict[int, int]) -> _Growth | None:
    (x, y, z), (at_x, at_y, at_z) = peaks.keys(), peaks.values()
    first, second = Fraction(at_x - at_y, x - y), Fraction(at_y - at_z, y - z)
    quadratic = (first - second) / (x - z)
    linear = first - quadratic * (x + y)
    fixed = at_x - linear * x - quadratic * x**2
    # A little less than nothing is what rounding in the kernels leaves.
    if min(linear * x, quadratic * x**2, fixed) < -Fraction(at_x, 1000):
        return None
    if quadratic < 0:
        return _Growth(at_x - first * x, first, Fraction(0))
    return _Growth(fixed, max(linear, Fraction(0)), quadratic)


# Each moment of the step grows at least in proportion, so that this much of the peak does.
def _of_peaks(
    what_if: WhatIf, base: MemoryPrediction, what: str, figures: dict[str, Figure]
) -> Finding:
    length = int(str(figures["length"]))
    if length < 2 or not _can_be(what_if, length // 2):
        return unknown_finding("sequence length", f"{what[0].upper()}{what[1:]}.")
    half = what_if.predict(length=length // 2)
    then = "" if figures["other_length"] == length // 2 else f"; {what}"
    grows = max(base.peak_bytes - half.peak_bytes, 0)
    return finding_of(
        "sequence length",
        grows,
        f"At {length:,} tokens the step needs {format_bytes(grows)} more than at "
        f"{length // 2:,}{then}. The peak is at another moment of the step then.",
        base,
        **figures,
        half_peak_bytes=half.peak_bytes,
    )
