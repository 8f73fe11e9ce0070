"""Write down what took the memory when a run ends because there is none left."""

import os
import pickle
import sys
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memsave.callbacks.memsave import MemSaveCallback
from lightning_memsave.callbacks.run_prediction import obstacle, step_of
from lightning_memsave.callbacks.settings.arguments import time_limit
from lightning_memsave.core.clock import processor_time_s
from lightning_memsave.errors import ConfigurationError, MemsaveError, Problem
from lightning_memsave.measure.storages import tensors_in
from lightning_memsave.oom.report import (
    SNAPSHOT_NAME,
    BatchTensor,
    OutOfMemoryReport,
    add_advice,
    describe_batch,
    make_report,
    out_of_memory_in,
    write_files,
)
from lightning_memsave.planning.remedies import Remedy, remedies_of
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.prediction.what_if import what_if_of
from lightning_memsave.report.page import make_page
from lightning_memsave.trainer.failures import attempted, describe, say
from lightning_memsave.trainer.hooks import CallbackBase
from lightning_memsave.trainer.trainer import first_of
from lightning_memsave.units import format_bytes

PREDICT_LIMIT_S = 60.0
_MAX_HISTORY_ENTRIES = 100_000
_NUM_LARGEST = 20
_UNCHANGED = "unchanged"
_PAGE_NAME = "memsave_oom.html"


class OOMObserver(CallbackBase):
    """Write down what took the memory when a run ends because there is none left.

    Writes ``memsave_oom.txt`` and ``memsave_oom.json``: why memory ran out (full, fragmented,
    another process, one request that is too large) and what to do; which tensors were alive, by
    category, and the largest by name; the batch, epoch and step; what torch's allocator and the
    driver say. On CUDA also ``memsave_oom_snapshot.pickle``, for https://pytorch.org/memory_viz.
    With several processes, each one that ran out of memory writes its own files, with ``_rank0``
    and so on in their names. Costs nothing while training goes well but noting the shapes of each
    batch.

    Args:
        dirpath: Where to write, also a remote folder; ``None`` is the run's log directory, or
            ``Trainer(default_root_dir=...)`` without a logger.
        record_history: Let CUDA's allocator note which line of Python made each tensor, from the
            start of fit on; the snapshot then shows the way to the peak. Makes each allocation
            slower and uses host memory.
        predict: Predict on fake tensors which settings would have helped, for about a minute, and
            show them in ``memsave_oom.html``; ``False`` disables it, a number limits the seconds.

    Raises:
        ConfigurationError: If an argument is wrong.

    Note:
        The exception propagates unchanged: what fails in here is logged, not raised. Nothing
        is written for other exceptions, nor when `MemSaveCallback` repeats a batch with success.
        When it gives up with `MemoryExhaustedError`, it has freed the activations before.

    Example:
        >>> observer = OOMObserver(record_history=True)
        >>> observer.report is None  # until memory runs out
        True
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        *,
        record_history: bool = False,
        predict: bool | float = True,
    ) -> None:
        super().__init__()
        _check_arguments(type(self).__name__, dirpath, record_history)
        limit_s = time_limit(predict)
        self.predict_limit_s = PREDICT_LIMIT_S if predict is True else limit_s
        self.dirpath = None if dirpath is None else os.fspath(dirpath)
        self.record_history = record_history
        self._report: OutOfMemoryReport | None = None
        self._directory = self.dirpath
        self._is_recording = False
        self._is_written = False
        self._outside: BaseException | None = None  # what is handled where the fit was started
        self._batch_idx: int | None = None
        self._batch: tuple[BatchTensor, ...] = ()
        self._batch_at_hand: Any = None

    @property
    def report(self) -> OutOfMemoryReport | None:
        """What was written when memory last ran out; ``None`` until then."""
        return self._report

    def extend(self, report: OutOfMemoryReport, trainer: Any, pl_module: Any) -> None:
        """Add to a report with ``add_section`` and ``add_file``; override it to add more.

        Args:
            report: Complete, and written already: what fails in here loses nothing.
            trainer: The Trainer.
            pl_module: Its LightningModule; ``None`` if memory ran out before there was one.
        """
        limit_s, batch = self.predict_limit_s, self._batch_at_hand
        if limit_s is not None and pl_module is not None and trainer.training and batch is not None:
            predicted = _predict_remedies(trainer, pl_module, batch, limit_s)
            if predicted is not None:
                _add_predictions(report, *predicted)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_batch_at_hand": None, "_outside": None}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Find the directory while all ranks are alive, and begin to record."""
        self._forget_batch()
        self._is_written, self._outside = False, sys.exception()
        # Asks rank zero, which must not be done in `on_exception`: it may be gone by then.
        self._directory = self.dirpath or trainer.log_dir or trainer.default_root_dir
        if self.record_history and trainer.strategy.root_device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=_MAX_HISTORY_ENTRIES)
            self._is_recording = True

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Note the shapes of the batch."""
        self._batch_idx, self._batch = batch_idx, tuple(describe_batch(batch))
        self._batch_at_hand = batch  # Lightning has it as long, so that it lives no longer

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """Forget the batch."""
        self._batch_idx, self._batch, self._batch_at_hand = None, (), None

    _forget_batch = on_validation_batch_end

    on_train_batch_start = on_validation_batch_start
    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_train_batch_end = on_validation_batch_end
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Write the report if memory ran out, and add to it; never raises."""
        self.write_before_undo(trainer, pl_module, exception)
        self._is_written = False
        error = out_of_memory_in(exception, self._outside)
        with attempted(trainer, "The report on memory is not complete"):
            if error is not None and self._report is not None:
                self._extend(self._report, trainer, pl_module)
        self._stop_recording()

    def write_before_undo(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Write what is known while all of it is still in place: `MemSaveCallback` calls it first.

        Args:
            trainer: The Trainer.
            pl_module: Its LightningModule.
            exception: What ends the run.
        """
        if self._is_written:
            return
        self._is_written, self._report = True, None
        error = out_of_memory_in(exception, self._outside)
        if error is None:
            return
        with attempted(trainer, "The report on memory is not complete"):
            self._write(trainer, pl_module, error)
        with attempted(trainer, "There is no advice on memory"):
            report = self.report
            diagnosis = None if report is None else report.diagnosis
            add_advice(trainer, pl_module, exception, error, diagnosis)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stop recording."""
        self._outside = None
        self._stop_recording()

    def _write(self, trainer: Any, pl_module: Any, error: BaseException) -> None:
        batch = list(tensors_in(self._batch_at_hand))
        self._report = report = make_report(trainer, pl_module, error, batch, _NUM_LARGEST)
        report.batch = self._batch
        report.where["batch"] = self._batch_idx
        if report.allocator is not None:
            with attempted(trainer, f"`{SNAPSHOT_NAME}` is not written"):
                report.add_file(SNAPSHOT_NAME, pickle.dumps(torch.cuda.memory._snapshot()))
        where = self._save(report, trainer)
        say(trainer, f"{report.diagnosis.summary}{where}")

    # Gives the sentence that names the text, if there is one.
    def _save(self, report: OutOfMemoryReport, trainer: Any) -> str:
        directory = self._directory or trainer.default_root_dir
        rank = trainer.global_rank if trainer.world_size > 1 else None
        written = write_files(report, directory, rank)
        failed = {path: why for path, why in written.items() if why}
        if failed:
            names, reasons = (", ".join(dict.fromkeys(part)) for part in (failed, failed.values()))
            say(
                trainer,
                f"Not written: {names} ({reasons}). Use `OOMObserver(dirpath=...)` with a folder "
                "that can be written.",
            )
        text = next(iter(written))
        return "" if text in failed else f" See `{text}`."

    # Afterwards: predictions take time, and are about the module as the user wrote it.
    def _extend(self, report: OutOfMemoryReport, trainer: Any, pl_module: Any) -> None:
        before = report.to_dict(), set(report.files)
        try:
            self.extend(report, trainer, pl_module)
        except Exception as failure:
            report.notes.append(f"An addition to this report failed: {describe(failure)}")
        if before != (report.to_dict(), set(report.files)):
            self._save(report, trainer)

    def _stop_recording(self) -> None:
        self._forget_batch()
        if self._is_recording:
            self._is_recording = False
            torch.cuda.memory._record_memory_history(enabled=None)


def _check_arguments(owner: str, dirpath: object, record_history: object) -> None:
    problems = []
    if dirpath is not None and not isinstance(dirpath, (str, os.PathLike)):
        fix = 'Use `dirpath="reports"`, or `None` for the log directory of the run.'
        problems.append(Problem(f"`dirpath={dirpath!r}`", "it is not a path", fix))
    if not isinstance(record_history, bool):
        fix = "Use `record_history=True` to see which line made each tensor."
        what = f"`record_history={record_history!r}`"
        problems.append(Problem(what, "it must be True or False", fix))
    if problems:
        raise ConfigurationError.from_problems(owner, problems)


def _predict_remedies(
    trainer: Any, pl_module: Any, batch: Any, limit_s: float
) -> tuple[MemoryPrediction, list[Remedy]] | None:
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
    what_if = what_if_of(replace(step, time_limit_s=limit_s), pl_module)
    # The error may have been raised inside of a mode, such as one that counts operators.
    with _disable_current_modes():
        try:
            base = what_if.base()
        except (MemsaveError, TimeoutError):
            return None
        refused = {row.name for row in given.rows if row.status == "off"}
        left_s = start_s + limit_s - processor_time_s()
        return base, remedies_of(what_if, written, left_s, refused)


def _add_predictions(
    report: OutOfMemoryReport, base: MemoryPrediction, remedies: list[Remedy]
) -> None:
    kept, beyond = report.diagnosis.kept, []
    if kept is not None:
        beyond = [
            f"beside it: {format_bytes(kept.before_bytes - kept.expected_bytes)} that were alive "
            "before the step and that no step needs, "
            f"{format_bytes(kept.num_bytes)} of it in `{kept.owner}`"
        ]
    lines = [
        f"{_UNCHANGED}: predicted peak {format_bytes(base.peak_bytes)}, "
        f"{format_bytes(base.device_bytes)} on the device",
        *beyond,
        *map(str, remedies),
    ]
    data: dict[str, Any] = {
        _UNCHANGED: {"peak_bytes": base.peak_bytes, "device_bytes": base.device_bytes}
    }
    data |= {remedy.how: remedy.to_dict() for remedy in remedies}
    report.add_section("What would have helped", lines, data)
    predictions = {_UNCHANGED: base} | {r.how: r.prediction for r in remedies if r.prediction}
    page = make_page(
        list(predictions.items()),
        title="The step that ran out of memory",
        device_capacity_bytes=report.diagnosis.oom.capacity_bytes,
        notes=[report.diagnosis.summary, *report.diagnosis.advice],
    )
    report.add_file(_PAGE_NAME, page)
