"""Find the settings that lower the peak, and by how much."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from lightning_memsave.core.clock import processor_time_s
from lightning_memsave.explain.dominant_parts import dominant_embedding
from lightning_memsave.planning.candidates import (
    Candidate,
    CurrentSettings,
    host_candidates,
    joint_candidates,
    micro_batch_candidates,
    single_candidates,
)
from lightning_memsave.planning.step_time import Rates, step_time
from lightning_memsave.prediction.cuda.gpus import Gpu
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.prediction.training_step import as_code
from lightning_memsave.prediction.what_if import ImpossibleVariantError, WhatIf
from lightning_memsave.units import format_bytes

_SHARE_OF_SINGLE = 2 / 3


@dataclass(frozen=True, slots=True)
class Remedy:
    """Settings that lower the peak."""

    name: str
    how: str
    peak_bytes: int
    device_bytes: int
    saved_bytes: int
    exactness: str
    cost: str
    fits: bool | None = None
    time_ratio: float | None = None
    prediction: MemoryPrediction | None = field(default=None, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain values, for JSON."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "prediction"}

    def __str__(self) -> str:
        fits = {None: "", True: "; fits", False: "; does not fit"}[self.fits]
        time = "" if self.time_ratio is None else f"; {self.time_ratio:.2f} times the time"
        return (
            f"{self.name}: -{format_bytes(self.saved_bytes)}, to {format_bytes(self.device_bytes)} "
            f"on the device{fits}{time} ({self.exactness}; {self.cost}): {self.how}"
        )


def cheapest_that_fits(remedies: list[Remedy]) -> Remedy | None:
    """Find the remedy to take."""
    return next((remedy for remedy in remedies if remedy.fits), None)


def remedies_of(
    what_if: WhatIf,
    written: Mapping[str, Any] | None = None,
    limit_s: float = math.inf,
    refused: Collection[str] = (),
) -> list[Remedy]:
    """Predict which settings lower the peak."""
    written = what_if.step.settings if written is None else written
    return _Search(what_if, written, limit_s, refused).run()


class _Search:
    def __init__(
        self,
        what_if: WhatIf,
        written: Mapping[str, Any],
        limit_s: float,
        refused: Collection[str],
    ) -> None:
        self._what_if = what_if
        self._written = written
        self._limit_s = limit_s
        self._refused = refused
        self._start_s = processor_time_s()
        self._found: list[tuple[Candidate, Remedy]] = []

    def run(self) -> list[Remedy]:
        what_if = self._what_if
        now = CurrentSettings(
            what_if.step.effective_settings,
            what_if.step.precision,
            what_if.gpu is None or what_if.gpu.has_bf16,
            what_if.num_samples or 0,
            dominant_embedding(what_if.table),
            what_if.overflows,
            what_if.device,
        )
        for candidate in single_candidates(now):
            self._try(candidate, _SHARE_OF_SINGLE)
        self._try_micro_batches(micro_batch_candidates(now))
        for candidate in joint_candidates(now, [helped for helped, _ in self._found]):
            self._try(candidate)
            # Of a large embedding most can be saved by the stack, which comes last.
            if any(r.fits for _, r in self._found) or (what_if.gpu is None and not now.embedding):
                break
        for candidate in host_candidates(now):
            # Without a GPU to fit, its techniques are shown and its stack is not tried.
            is_last = what_if.gpu is None and "stack" in candidate.changes
            if is_last or any(r.fits for _, r in self._found):
                break
            self._try(candidate)
        return [remedy for _, remedy in self._found]

    def _try(self, candidate: Candidate, share: float = 1) -> bool:
        # What a stack sets with "auto" yields by itself.
        if any(candidate.changes.get(name, "auto") != "auto" for name in self._refused):
            return False
        left_s = self._start_s + share * self._limit_s - processor_time_s()
        base = self._what_if.base()
        try:
            prediction = self._what_if.predict(candidate.changes, limit_s=left_s)
        except ImpossibleVariantError:
            return False
        if prediction.peak_bytes >= base.peak_bytes:
            return False
        self._found.append((candidate, self._remedy(candidate, base, prediction)))
        return True

    # Where one sample at once does not help, larger micro-batches do not either; and where half of
    # the batch saves as much, smaller ones are of no use.
    def _try_micro_batches(self, candidates: Sequence[Candidate]) -> None:
        if not candidates or not self._try(candidates[-1], _SHARE_OF_SINGLE):
            return
        smallest = self._found.pop()
        for candidate in candidates[:-1]:
            helped = self._try(candidate, _SHARE_OF_SINGLE)
            if helped and self._found[-1][1].peak_bytes <= smallest[1].peak_bytes:
                return
        self._found.append(smallest)

    def _remedy(
        self, candidate: Candidate, base: MemoryPrediction, prediction: MemoryPrediction
    ) -> Remedy:
        gpu = self._what_if.gpu
        return Remedy(
            candidate.name,
            as_code(self._what_if.step.make_callback, {**self._written, **candidate.changes}),
            prediction.peak_bytes,
            prediction.device_bytes,
            base.peak_bytes - prediction.peak_bytes,
            candidate.exactness,
            candidate.cost,
            None if gpu is None else prediction.fits(gpu).fits,
            None if gpu is None else _time_ratio(prediction, base, gpu),
            prediction,
        )


def _time_ratio(prediction: MemoryPrediction, base: MemoryPrediction, gpu: Gpu) -> float | None:
    if gpu.throughput is None:
        return None
    rates = Rates.of_gpu(gpu.throughput)
    return step_time(prediction.work, rates).seconds / step_time(base.work, rates).seconds
