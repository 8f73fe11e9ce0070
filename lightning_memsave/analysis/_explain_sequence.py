"""How memory grows with the length of the sequence."""

import re
from dataclasses import dataclass
from fractions import Fraction

from lightning_memsave.analysis._explain_suspect import Figure, Suspect, answered, unknown
from lightning_memsave.analysis._explain_trials import Trials
from lightning_memsave.measure.storages import tensors_in_batch
from lightning_memsave.planning.parameter_table import ParameterTable
from lightning_memsave.planning.prediction import MemoryPrediction
from lightning_memsave.units import format_bytes

_NO_QUADRATIC = 0.01
# A layer of positions that are learned: it ends where they do.
_POSITIONS = re.compile(r"(^|[._])(pos|wpe|position)(_|[a-z]*$|[a-z]*_embed)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Growth:
    """Bytes of one moment of the step, by the length."""

    fixed: Fraction
    linear: Fraction
    quadratic: Fraction


def sequence_length(trials: Trials) -> Suspect:
    """Find how memory grows with the length of the sequence.

    Args:
        trials: What predicts.

    Returns:
        The answer: what the step would take at another length, which is predicted too, and what of
        the peak grows with the length and with its square, where the peak stays the same moment.
    """
    name, sequence, base = "sequence length", trials.sequence, trials.base()
    if sequence is None:
        return _without_axis(trials)
    length, limit = sequence.length, max_positions(trials.table)
    longest = 2 * length if limit is None else max(min(2 * length, limit), length)
    found = trials.attempt(length=longest) if 2 * longest >= 3 * length else ""
    if isinstance(found, str):  # the model ends here
        longest = length
        if length < 4:
            return unknown(name, f"Sequences of {length} are too short to be shortened.")
    other = longest if longest > length else length // 2
    at_other = trials.attempt(length=other)
    if isinstance(at_other, str):
        return unknown(name, f"The model does not take a length of {other}: {at_other}.")
    growth = _growth(trials, length, other)
    figures: dict[str, Figure] = {
        "length": length,
        "other_length": other,
        "other_peak_bytes": at_other.peak_bytes,
    }
    what = f"with {other:,} the step would take {format_bytes(at_other.peak_bytes)}"
    if other < length or other == limit:
        most = limit if limit is not None and limit >= length else length
        what += f" ({most:,} are the most that the model takes)"
    if growth is None:
        return _of_peaks(trials, base, what, figures)
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
    return answered(
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
    """Say how long a sequence may be.

    Args:
        table: The parameters.

    Returns:
        Rows of the smallest table of learned positions; ``None`` without one.
    """
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


def _without_axis(trials: Trials) -> Suspect:
    name, fix = "sequence length", "Pass `sequence_axis=` if an axis of the batch is a sequence."
    tensors = list(tensors_in_batch(trials.batch))
    if trials.lengths:
        return unknown(
            name,
            f"The model attends to {trials.lengths[0]:,} tokens, which is no size in the batch: "
            f"they follow from others, such as those of images. {fix}",
        )
    if not tensors or any(tensor.ndim == 3 for tensor in tensors):
        return unknown(name, f"It is not known which axis is a sequence. {fix}")
    return Suspect(
        name, "does not matter", 0, f"There are no token ids, and nothing is attended to. {fix}"
    )


# A parabola through three lengths, as far apart as the peak stays at the same moment of the step:
# lines of other moments say nothing of this one.
def _growth(trials: Trials, length: int, other: int) -> _Growth | None:
    spans = [other - length, -(length // 4), -(length // 8)]
    if other > length:
        spans.insert(1, length // 4)
    for span in spans:
        found = {length: trials.base()}
        for another in (length + span // 2, length + span):
            attempt = trials.attempt(length=another)
            if isinstance(attempt, str) or _moment(attempt) != _moment(trials.base()):
                break
            found[another] = attempt
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
    trials: Trials, base: MemoryPrediction, what: str, figures: dict[str, Figure]
) -> Suspect:
    length = int(str(figures["length"]))
    half = trials.attempt(length=length // 2) if length > 1 else ""
    if isinstance(half, str):
        return unknown("sequence length", f"{what[0].upper()}{what[1:]}.")
    then = "" if figures["other_length"] == length // 2 else f"; {what}"
    grows = max(base.peak_bytes - half.peak_bytes, 0)
    return answered(
        "sequence length",
        grows,
        f"At {length:,} tokens the step takes {format_bytes(grows)} more than at "
        f"{length // 2:,}{then}. The peak is at another moment of the step then.",
        base,
        **figures,
        half_peak_bytes=half.peak_bytes,
    )
