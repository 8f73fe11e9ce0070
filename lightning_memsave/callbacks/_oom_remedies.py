"""What would have helped when memory ran out, predicted for the batch that did not pass."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from lightning_memsave import host
from lightning_memsave.callbacks._oom_report import OutOfMemoryReport
from lightning_memsave.callbacks._prediction import predict
from lightning_memsave.callbacks._run_prediction import obstacle, question_of
from lightning_memsave.callbacks._stacks import OFF_BY_NONE
from lightning_memsave.callbacks.memsave import MemSaveCallback
from lightning_memsave.core.batches import count_samples
from lightning_memsave.errors import MemsaveError
from lightning_memsave.planning.page import make_page
from lightning_memsave.planning.prediction import MemoryPrediction
from lightning_memsave.units import format_bytes

AS_IT_IS = "as it is"
PAGE_NAME = "memsave_oom.html"
_NO_TECHNIQUE: dict[str, Any] = dict.fromkeys(OFF_BY_NONE)


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
    end_s = time.monotonic() + limit_s
    callback = host.first_of(trainer, MemSaveCallback)
    given = MemSaveCallback(**_NO_TECHNIQUE) if callback is None else callback
    has_begun = callback is not None and bool(callback.rows)
    arguments = given.arguments_in_force() if has_begun else dict(given.arguments)
    question = question_of(trainer, pl_module, batch, MemSaveCallback)
    question = replace(question, arguments=arguments)
    found: dict[str, MemoryPrediction] = {}
    for text, changes in _candidates(arguments, question.trainer_arguments, batch):
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            break
        trainer_arguments = dict(question.trainer_arguments)
        if "precision" in changes:
            trainer_arguments["precision"] = changes["precision"]
        asked = replace(
            question,
            arguments={**question.arguments, **changes, "precision": None},
            trainer_arguments=trainer_arguments,
            time_limit_s=left_s,
        )
        try:
            with _disable_current_modes():
                prediction = predict(asked)
        # What does not go with this model is no remedy.
        except (MemsaveError, TimeoutError):
            continue
        if not found or prediction.peak_bytes < found[AS_IT_IS].peak_bytes:
            found[text] = prediction
        if AS_IT_IS not in found:
            break
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


def _candidates(
    arguments: Mapping[str, Any], trainer_arguments: Mapping[str, Any], batch: Any
) -> Iterator[tuple[str, dict[str, Any]]]:
    yield AS_IT_IS, {}
    single: list[dict[str, Any]] = []
    size = arguments["micro_batch_size"]
    half = (size if isinstance(size, int) else _num_samples(batch)) // 2
    if half:
        single.append({"micro_batch_size": half})
    if arguments["activation_checkpointing"] is None:
        single.append({"activation_checkpointing": "all"})
    if arguments["optimizer"] is None:
        single.append({"optimizer": "8bit"})
    if trainer_arguments["precision"] == "32-true":
        single.append({"precision": "bf16-mixed"})
    for changes in single:
        yield _typed(changes), changes
    if len(single) > 1:
        together = {name: value for changes in single for name, value in changes.items()}
        if half:
            together["micro_batch_size"] = 1
        yield _typed(together), together


def _typed(changes: Mapping[str, Any]) -> str:
    arguments = ", ".join(f"{name}={value!r}" for name, value in changes.items())
    return f"MemSaveCallback({arguments})"


def _num_samples(batch: Any) -> int:
    try:
        return count_samples(batch)
    except MemsaveError:
        return 0
