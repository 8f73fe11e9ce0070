"""Predict which settings would have fitted the batch that ran out of memory."""

from dataclasses import replace
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from lightning_memsave.callbacks.memsave import MemSaveCallback
from lightning_memsave.callbacks.run_prediction import obstacle, step_of
from lightning_memsave.core.clock import processor_time_s
from lightning_memsave.errors import MemsaveError
from lightning_memsave.measure.parameters import parameter_table
from lightning_memsave.oom.report import OutOfMemoryReport
from lightning_memsave.planning.remedies import Remedy, remedies_of
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.prediction.what_if import WhatIf
from lightning_memsave.report.page import make_page
from lightning_memsave.trainer.precision import overflows_in_float16
from lightning_memsave.trainer.trainer import first_of
from lightning_memsave.units import format_bytes

UNCHANGED = "unchanged"
PAGE_NAME = "memsave_oom.html"


def predict_remedies(
    trainer: Any, pl_module: Any, batch: Any, limit_s: float
) -> tuple[MemoryPrediction, list[Remedy]] | None:
    """Predict the step that ran out of memory, and the settings that lower its peak."""
    if obstacle(trainer, pl_module):
        return None
    start_s = processor_time_s()
    callback = first_of(trainer, MemSaveCallback)
    given = MemSaveCallback(preset="off") if callback is None else callback
    has_begun = callback is not None and bool(callback.rows)
    arguments = given.effective_arguments() if has_begun else dict(given.arguments)
    written = {"preset": "off"} if callback is None else dict(callback.arguments)
    if isinstance(arguments.get("micro_batch_size"), int):
        written["micro_batch_size"] = arguments["micro_batch_size"]
    step = step_of(trainer, pl_module, batch, MemSaveCallback, arguments)
    what_if = WhatIf(
        replace(step, time_limit_s=limit_s),
        parameter_table(pl_module),
        overflows=bool(overflows_in_float16(pl_module)),
    )
    # The error may have been raised inside of a mode, such as one that counts operators.
    with _disable_current_modes():
        try:
            base = what_if.base()
        except (MemsaveError, TimeoutError):
            return None
        refused = {row.name for row in given.rows if row.status == "off"}
        left_s = start_s + limit_s - processor_time_s()
        return base, remedies_of(what_if, written, left_s, refused)


def add_predictions(
    report: OutOfMemoryReport, base: MemoryPrediction, remedies: list[Remedy]
) -> None:
    """Add predictions to a report: as text, as data and as an HTML page."""
    lines = [
        f"{UNCHANGED}: predicted peak {format_bytes(base.peak_bytes)}, "
        f"{format_bytes(base.device_bytes)} on the device",
        *_beyond(report),
        *map(str, remedies),
    ]
    data: dict[str, Any] = {
        UNCHANGED: {"peak_bytes": base.peak_bytes, "device_bytes": base.device_bytes}
    }
    data |= {remedy.how: remedy.to_dict() for remedy in remedies}
    report.add_section("What would have helped", lines, data)
    predictions = {UNCHANGED: base} | {r.how: r.prediction for r in remedies if r.prediction}
    page = make_page(
        list(predictions.items()),
        title="The step that ran out of memory",
        device_capacity_bytes=report.diagnosis.oom.capacity_bytes,
        notes=[report.diagnosis.summary, *report.diagnosis.advice],
    )
    report.add_file(PAGE_NAME, page)


def _beyond(report: OutOfMemoryReport) -> list[str]:
    kept = report.diagnosis.kept
    if kept is None:
        return []
    more_bytes = kept.before_bytes - kept.expected_bytes
    return [
        f"beside it: {format_bytes(more_bytes)} that were alive before the step and that no step "
        f"needs, {format_bytes(kept.num_bytes)} of it in `{kept.owner}`"
    ]
