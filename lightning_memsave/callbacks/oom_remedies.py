"""What would have helped when memory ran out, predicted for the batch that did not pass."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from lightning_memsave.callbacks.memsave import MemSaveCallback
from lightning_memsave.callbacks.oom_report import OutOfMemoryReport
from lightning_memsave.callbacks.run_prediction import obstacle, step_of
from lightning_memsave.core.nested import count_samples
from lightning_memsave.errors import MemsaveError
from lightning_memsave.planning.candidates import (
    Candidate,
    CurrentSettings,
    joint_candidates,
    part_candidates,
    single_candidates,
)
from lightning_memsave.prediction.predict import predict
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.prediction.training_step import TrainingStep, as_code
from lightning_memsave.report.page import make_page
from lightning_memsave.trainer.trainer import first_of
from lightning_memsave.units import format_bytes

AS_IT_IS = "as it is"
PAGE_NAME = "memsave_oom.html"
_SHARE_OF_SINGLE = 2 / 3


def predict_remedies(
    trainer: Any, pl_module: Any, batch: Any, limit_s: float
) -> dict[str, MemoryPrediction]:
    """Predict the step that ran out of memory, as it is and with what could lower its peak.

    Args:
        trainer: The Trainer.
        pl_module: Its LightningModule.
        batch: The batch that did not pass.
        limit_s: Begin with no more after this time.

    Returns:
        Predictions by what to type, the step as it is first; what does not lower the peak is left
        out. Empty if nothing can be predicted.
    """
    if obstacle(trainer, pl_module):
        return {}
    begin_s = time.monotonic()
    callback = first_of(trainer, MemSaveCallback)
    given = MemSaveCallback(stack="off") if callback is None else callback
    has_begun = callback is not None and bool(callback.rows)
    arguments = given.effective_arguments() if has_begun else dict(given.arguments)
    step = step_of(trainer, pl_module, batch, MemSaveCallback, arguments)
    typed = {"stack": "off"} if callback is None else dict(callback.arguments)
    if isinstance(arguments.get("micro_batch_size"), int):
        typed["micro_batch_size"] = arguments["micro_batch_size"]
    found: dict[str, MemoryPrediction] = {}

    def helps(changes: Mapping[str, Any], share: float) -> bool:
        left_s = begin_s + share * limit_s - time.monotonic()
        prediction = None if left_s <= 0 else _predicted(step, changes, left_s)
        if prediction is None or prediction.peak_bytes >= found[AS_IT_IS].peak_bytes:
            return False
        found[as_code(MemSaveCallback, typed | dict(changes))] = prediction
        return True

    as_it_is = _predicted(step, {}, limit_s)
    if as_it_is is None:
        return {}
    found[AS_IT_IS] = as_it_is
    now = CurrentSettings(
        step.effective_settings,
        step.precision,
        step.gpu is None or step.gpu.has_bf16,
        _num_samples(batch),
    )
    # Much is gained by all together: there has to be time left for that.
    helpful = [one for one in _single(now) if helps(one.changes, _SHARE_OF_SINGLE)]
    for candidate in joint_candidates(now, helpful):
        helps(candidate.changes, 1)
    return found


def add_predictions(report: OutOfMemoryReport, predictions: Mapping[str, MemoryPrediction]) -> None:
    """Put predictions into a report: as text, as data and as a page to look at.

    Args:
        report: What is known when memory ran out.
        predictions: What `predict_remedies` gave; not empty.
    """
    reference = predictions[AS_IT_IS]
    lines = [
        f"{AS_IT_IS}: predicted peak {format_bytes(reference.peak_bytes)}",
        *(
            f"{text}: {format_bytes(p.peak_bytes)}, "
            f"{format_bytes(reference.peak_bytes - p.peak_bytes)} less"
            for text, p in predictions.items()
            if text != AS_IT_IS
        ),
    ]
    data = {
        text: {"peak_bytes": p.peak_bytes, "device_bytes": p.device_bytes}
        for text, p in predictions.items()
    }
    report.add_section("What would have helped", lines, data)
    page = make_page(
        list(predictions.items()),
        title="The step that ran out of memory",
        device_capacity_bytes=report.diagnosis.oom.capacity_bytes,
        notes=[report.diagnosis.summary, *report.diagnosis.advice],
    )
    report.add_file(PAGE_NAME, page)


def _predicted(
    step: TrainingStep, changes: Mapping[str, Any], limit_s: float
) -> MemoryPrediction | None:
    # The Trainer of the trial has the precision that the run has by now, whoever asked for it.
    trainer_arguments = dict(step.trainer_arguments)
    precision = changes.get("precision")
    if precision not in (None, "auto"):
        trainer_arguments["precision"], precision = precision, None
    try:
        changed = replace(
            step.with_settings({**changes, "precision": precision}),
            trainer_arguments=trainer_arguments,
            time_limit_s=limit_s,
        )
        with _disable_current_modes():
            return predict(changed)
    # What does not go with this model is no remedy.
    except (MemsaveError, TimeoutError):
        return None


# Who has run out of memory does not ask for less of a technique than there is.
def _single(now: CurrentSettings) -> list[Candidate]:
    return [
        *part_candidates(now)[:1],
        *(
            one
            for one in single_candidates(now)
            if one.changes.get("activation_checkpointing", "all") == "all"
        ),
    ]


def _num_samples(batch: Any) -> int:
    try:
        return count_samples(batch)
    except MemsaveError:
        return 0
