"""How memory grows with the batch."""

from dataclasses import dataclass
from fractions import Fraction
from math import floor

from lightning_memsave.analysis._explain_suspect import (
    Figure,
    Suspect,
    answered,
    label_of,
    unknown,
)
from lightning_memsave.analysis._explain_trials import Trials
from lightning_memsave.planning.prediction import MemoryPrediction
from lightning_memsave.units import format_bytes

_MAX_STEPS = 4


@dataclass(frozen=True, slots=True)
class _Line:
    """Bytes at the peak of one phase: those that are always there, and those of each sample."""

    fixed_bytes: Fraction
    bytes_per_sample: Fraction

    def at(self, num_samples: int) -> Fraction:
        return self.fixed_bytes + self.bytes_per_sample * num_samples


def batch_size(trials: Trials) -> Suspect:
    """Tell what each sample takes from what is there without any, from two batch sizes.

    Args:
        trials: What predicts.

    Returns:
        The answer; with a GPU also the largest batch that is predicted to fit.
    """
    name, num_samples, base = "batch size", trials.num_samples, trials.base()
    if not num_samples:
        return unknown(
            name, "The tensors of the batch do not share a first size, so that it cannot be halved."
        )
    other = num_samples // 2 or 2
    found = trials.attempt(num_samples=other)
    if isinstance(found, str):
        return unknown(name, f"The model does not take a batch of {other}: {found}.")
    lines = _lines(base, num_samples, found, other)
    line = lines[base.peak_phase]
    of_batch = round(line.bytes_per_sample * num_samples)
    samples = f"{num_samples} sample{'s' if num_samples > 1 else ''}"
    sentence = (
        f"Each sample takes {format_bytes(round(line.bytes_per_sample))} and {samples} "
        f"{format_bytes(of_batch)}; {format_bytes(round(line.fixed_bytes))} are there with any "
        "batch."
    )
    figures: dict[str, Figure] = {
        "num_samples": num_samples,
        "bytes_per_sample": round(line.bytes_per_sample),
        "fixed_bytes": round(line.fixed_bytes),
    }
    if trials.gpu is not None:
        largest, is_exact = _largest(trials, lines, num_samples, trials.gpu.total_bytes)
        figures |= {"largest_batch": largest}
        sentence += f" {_fits(label_of(trials.gpu), largest, is_exact)}"
    return answered(name, of_batch, sentence, base, **figures)


def _fits(gpu: str, largest: int, is_exact: bool) -> str:
    if not largest:
        return f"Not even one fits on {gpu}."
    return f"On {gpu} {'' if is_exact else 'at least '}{largest} fit."


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
    trials: Trials, lines: dict[str, _Line], num_samples: int, capacity_bytes: int
) -> tuple[int, bool]:
    tried = {num_samples: trials.base()}
    for _ in range(_MAX_STEPS):
        fits, fails = _bounds(tried, capacity_bytes)
        if fails == fits + 1:
            break
        if fits and fails:
            low, high = tried[fits].device_bytes, tried[fails].device_bytes
            guess = fits + (fails - fits) * (capacity_bytes - low) // (high - low)
        else:
            nearest = tried[fits or fails]
            scale = nearest.peak_bytes / (nearest.device_bytes - nearest.context_bytes)
            guess = _guess(lines, round((capacity_bytes - nearest.context_bytes) * scale))
        guess = max(guess, fits + 1)
        guess = min(guess, fails - 1) if fails else guess
        found = trials.attempt(num_samples=guess)
        if isinstance(found, str):
            break
        tried[guess] = found
    fits, fails = _bounds(tried, capacity_bytes)
    return fits, fails == fits + 1


# The largest size that fits, and the smallest that does not; 0 where none was tried.
def _bounds(tried: dict[int, MemoryPrediction], capacity_bytes: int) -> tuple[int, int]:
    fits = [n for n, found in tried.items() if found.device_bytes <= capacity_bytes]
    fails = [n for n, found in tried.items() if found.device_bytes > capacity_bytes]
    return max(fits, default=0), min(fails, default=0)


def _guess(lines: dict[str, _Line], limit_bytes: int) -> int:
    sizes = [
        floor((limit_bytes - line.fixed_bytes) / line.bytes_per_sample)
        for line in lines.values()
        if line.bytes_per_sample > 0
    ]
    return min(sizes, default=1)
