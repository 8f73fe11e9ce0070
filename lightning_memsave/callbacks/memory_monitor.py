"""Log the memory of training."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lightning_memsave.callbacks.memory_growth import MemoryGrowth
from lightning_memsave.callbacks.memory_probes import PEAKS, CudaProbe, LiveTensorsProbe
from lightning_memsave.callbacks.memory_summary import MemorySummary, print_summary
from lightning_memsave.core.nested import first_size
from lightning_memsave.core.patching import patch_method, previous_method
from lightning_memsave.core.plot import memory_axes
from lightning_memsave.errors import ConfigurationError, Problem
from lightning_memsave.trainer.distributed import reduce_over_ranks
from lightning_memsave.trainer.failures import attempted, describe, say
from lightning_memsave.trainer.hooks import CallbackBase, log_info
from lightning_memsave.trainer.trainer import first_of, logged_step
from lightning_memsave.units import format_bytes

if TYPE_CHECKING:  # it comes with `MemSaveCallback`
    from lightning_memsave.callbacks.run_prediction import RunPrediction


@dataclass
class _Run:
    probe: CudaProbe | LiveTensorsProbe
    start_s: float
    # End of the last batch: what comes after it, such as writing checkpoints, is no training.
    end_s: float | None = None
    validation_start_s: float | None = None
    validation_s: float = 0.0
    # `Trainer.global_step` before the first batch of the step; None between steps.
    step_before: int | None = None
    is_logged: bool = False
    num_notes_said: int = 0
    has_failed_to_log: bool = False
    growth: MemoryGrowth = field(default_factory=MemoryGrowth)
    num_steps: int = 0
    num_samples: int = 0

    def seconds(self) -> float:
        return 0.0 if self.end_s is None else self.end_s - self.start_s - self.validation_s


class GPUMemoryMonitor(CallbackBase):
    """Log the memory of training to every logger, and sum it up at the end of fit.

    On CUDA the allocator is read, and its peaks are reset, around the first two optimizer steps and
    those that are logged, when the driver is asked through NVML too; the peak of other steps counts
    in the summary. On other devices the bytes of live tensors are counted, which makes a step
    slower: it is done in the first two steps and in logged ones.

    What is allocated after a step is read each time, which takes microseconds. If it rises from
    step to step, a warning says once what keeps it, such as a list of losses, and what to type.

    **Logged metrics**, in GiB (2**30 bytes) where the key says so. What is not known, for example
    without NVML, is left out.

    | key                           | device | meaning                                           |
    |-------------------------------|--------|---------------------------------------------------|
    | ``memory/allocated_gib``      | CUDA   | in tensors after the step                         |
    | ``memory/reserved_gib``       | CUDA   | taken from the driver by torch's allocator        |
    | ``memory/peak_allocated_gib`` | CUDA   | largest allocated during the step, over all ranks |
    | ``memory/peak_reserved_gib``  | CUDA   | largest reserved during the step, over all ranks  |
    | ``memory/num_alloc_retries``  | CUDA   | times that the allocator had to free its reserve  |
    | ``memory/num_ooms``           | CUDA   | out-of-memory errors, caught ones too             |
    | ``memory/nvml_used_gib``      | CUDA   | taken on the GPU by all processes                 |
    | ``memory/nvml_total_gib``     | CUDA   | what the GPU has                                  |
    | ``memory/nvml_process_gib``   | CUDA   | taken by this process; not in most containers     |
    | ``memory/cuda_context_gib``   | CUDA   | of that, what torch's allocator did not reserve   |
    | ``memory/live_gib``           | others | in live tensors after the step                    |
    | ``memory/peak_live_gib``      | others | largest live in the step, over all ranks          |
    | ``memory/host_rss_gib``       | all    | resident host memory of this process              |
    | ``memory/host_pinned_gib``    | CUDA   | page-locked host memory that torch holds          |

    Retries and out-of-memory errors are counts since the process began. The progress bar, if there
    is one, shows the highest peak of this process so far as ``peak_memory``.

    Args:
        every_n_steps: Log at every n-th optimizer step, as Lightning counts its ``step`` for
            loggers; ``None`` for the Trainer's ``log_every_n_steps``.
        print_summary: Print peak, time, steps and samples per second at the end of fit.

    Raises:
        ConfigurationError: If an argument is wrong.

    Note:
        Training is the same bit for bit with and without. Values do not enter
        ``Trainer.callback_metrics``. Time includes the steps that counting makes slower.
        Because peaks are reset, ``torch.cuda.max_memory_allocated()`` in your own code means the
        steps since they were; peaks of validation are left out. Modules with ``torch.compile`` are
        not counted outside CUDA. In one Trainer the first monitor works and others do nothing.

    Example:
        >>> monitor = GPUMemoryMonitor(every_n_steps=10)
        >>> monitor.summary is None  # until the end of a fit
        True
    """

    def __init__(self, every_n_steps: int | None = None, *, print_summary: bool = True) -> None:
        super().__init__()
        _check_arguments(type(self).__name__, every_n_steps, print_summary)
        self.every_n_steps = every_n_steps
        self.print_summary = print_summary
        self._run: _Run | None = None
        self._summary: MemorySummary | None = None
        self._peaks: list[tuple[int, int]] = []
        self._undo_bar: Callable[[], None] | None = None
        # `MemSaveCallback` gives its own.
        self.run_prediction: RunPrediction | None = None
        self.host_bytes_of: Callable[[Any], int] | None = None
        self.idle_bytes_of: Callable[[Any], int] | None = None

    def __repr__(self) -> str:
        arguments = f"every_n_steps={self.every_n_steps}, print_summary={self.print_summary}"
        return f"{type(self).__name__}({arguments})"

    @property
    def summary(self) -> MemorySummary | None:
        """What the last fit needed; ``None`` before the end of the first one."""
        return self._summary

    def __getstate__(self) -> dict[str, Any]:
        # A run holds handles of the driver.
        others = dict.fromkeys(
            ("_run", "_undo_bar", "run_prediction", "host_bytes_of", "idle_bytes_of")
        )
        return self.__dict__ | others

    def plot(self, ax: Any = None) -> tuple[Any, Any]:
        """Plot the peaks of the last fit over its steps; needs matplotlib.

        Args:
            ax: Axes of matplotlib to plot on, such as those of another fit; ``None`` for a new
                figure.

        Returns:
            The figure and its axes.

        Raises:
            ConfigurationError: If no step was measured, or ``ax`` is something else.
            MissingDependencyError: If matplotlib is not installed.
        """
        if not self._peaks:
            raise ConfigurationError(
                "`GPUMemoryMonitor.plot()`: this monitor has not measured a step yet. Call it "
                "after `trainer.fit(...)`; of several monitors, that of the first one."
            )
        fig, ax = memory_axes(type(self).__name__, ax)
        ax.plot(*zip(*self._peaks, strict=True), marker=".", label="measured peak")
        prediction = None if self._summary is None else self._summary.prediction
        if prediction is not None:
            ax.axhline(prediction.measurable_bytes, ls="--", c="gray", label="predicted peak")
        ax.set_xlabel("step")
        ax.set_ylim(bottom=0)
        ax.legend()
        return fig, ax

    def compare(
        self,
        prediction: "RunPrediction",
        host_bytes_of: Callable[[Any], int],
        idle_bytes_of: Callable[[Any], int],
    ) -> None:
        """Show what was predicted, and what is on the host, beside what is measured in this fit.

        Args:
            prediction: Of the fit.
            host_bytes_of: Gives the bytes that are in the memory of the host, for a Trainer.
            idle_bytes_of: Gives the bytes that are there and that the next batch does not touch.
        """
        self.run_prediction, self.host_bytes_of = prediction, host_bytes_of
        self.idle_bytes_of = idle_bytes_of

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forget the fit before."""
        if stage == "fit":
            self._close()
            self._summary = self.run_prediction = self.host_bytes_of = self.idle_bytes_of = None
            self._peaks = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to measure, unless another monitor of this Trainer does."""
        first = first_of(trainer, GPUMemoryMonitor)
        if first is not None and first is not self:
            log_info(trainer, "Another `GPUMemoryMonitor` measures already: this one does nothing.")
            return
        device = trainer.strategy.root_device
        is_cuda = device.type == "cuda"
        probe = CudaProbe(device) if is_cuda else LiveTensorsProbe(device, pl_module)
        self._run = _Run(probe, time.perf_counter())
        self._peaks = probe.peaks
        _say_notes(trainer, self._run)
        if trainer.progress_bar_callback is not None:
            self._undo_bar = patch_method(trainer.progress_bar_callback, get_metrics)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Begin an optimizer step, if this is its first batch, and measure the batch."""
        if (run := self._run) is None:
            return
        if run.step_before is None:
            run.step_before = trainer.global_step
            every = self.every_n_steps or trainer.log_every_n_steps
            run.is_logged = every > 0 and (logged_step(trainer) + 1) % every == 0
            run.probe.begin_step(run.is_logged)
        run.probe.idle_bytes = 0 if self.idle_bytes_of is None else self.idle_bytes_of(trainer)
        run.probe.begin_batch(pl_module, trainer.optimizers, batch)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the measurement of a batch and, after the last one of a step, log."""
        if (run := self._run) is None:
            return
        run.probe.end_batch()
        run.num_samples += first_size(batch)
        run.end_s = time.perf_counter()
        if trainer.global_step == run.step_before:
            return  # gradients are still being accumulated
        run.step_before = None
        run.num_steps += 1
        run.probe.end_step()
        if run.is_logged:
            metrics = run.probe.metrics()
            # Loggers write on rank zero only, so that the peaks of the others must come to it.
            peaks = {key: metrics.get(key) for key in PEAKS}
            metrics |= reduce_over_ranks(trainer, "max", peaks)
            _log(trainer, run, metrics)
            _say_notes(trainer, run)
        if trainer.is_global_zero and not run.growth.is_over:
            with attempted(trainer, "What grows in memory cannot be found"):
                run.growth.look(trainer, pl_module, batch)
            if run.growth.found:
                say(trainer, run.growth.found)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Stop the clock."""
        if self._run is not None:
            self._run.probe.end_batch()
            self._run.probe.pause()
            self._run.validation_start_s = time.perf_counter()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Let the clock go on."""
        run = self._run
        if run is not None and run.validation_start_s is not None:
            now_s = time.perf_counter()
            run.validation_s += now_s - run.validation_start_s
            run.validation_start_s = None
            run.probe.resume()
            # So that what is subtracted lies before the end, also after the last batch.
            if run.end_s is not None:
                run.end_s = now_s

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop counting in case the module broke off the epoch in the middle of a batch."""
        if self._run is not None:
            self._run.probe.end_batch()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the device, and read it while the module is there."""
        if (run := self._run) is None:
            return
        run.probe.end_batch()
        start_s = time.perf_counter()
        run.probe.finish()
        if run.end_s is not None:  # what the device still had to do was training
            run.end_s += time.perf_counter() - start_s

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Sum up, over all ranks."""
        if (run := self._run) is None:
            return
        host_bytes = 0 if self.host_bytes_of is None else self.host_bytes_of(trainer)
        summary = replace(_summarize(run, self.run_prediction), host_bytes=host_bytes)
        self._close()
        # The driver told of a whole GPU on one rank: the highest may be its.
        names = ("peak_bytes", "peak_reserved_bytes", "nvml_peak_bytes", "is_nvml_of_gpu")
        highest = reduce_over_ranks(trainer, "max", {n: getattr(summary, n) for n in names})
        total = reduce_over_ranks(trainer, "sum", {"num_samples": summary.num_samples})
        # Processes of tensor parallelism have the same samples.
        share = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
        replicas = share.get("num_replicas", trainer.world_size)
        whole: dict[str, Any] = {n: int(value) for n, value in (highest | total).items()}
        whole["num_samples"] = whole["num_samples"] * replicas // trainer.world_size
        whole["is_nvml_of_gpu"] = bool(whole["is_nvml_of_gpu"])
        self._summary = replace(summary, **whole)
        self._print(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop measuring and sum up what there is, of this rank alone: others may be gone."""
        if (run := self._run) is None:
            return
        run.probe.end_batch()
        run.probe.notes.append(f"fit was ended by {type(exception).__name__}")
        self._summary = _summarize(run, self.run_prediction)
        self._close()
        if isinstance(exception, KeyboardInterrupt):  # otherwise the traceback matters
            self._print(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stop measuring."""
        self._close()

    def _close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.probe.close()
        if self._undo_bar is not None:
            self._undo_bar()
            self._undo_bar = None

    def _print(self, trainer: Any) -> None:
        if self.print_summary and trainer.is_global_zero and self._summary is not None:
            with attempted(trainer, "The memory of this fit cannot be printed to standard output"):
                print_summary(self._summary)


# In place of the progress bar's, or of a project's own.
def get_metrics(bar: Any, trainer: Any, pl_module: Any) -> Any:
    shown = previous_method(bar, "get_metrics")(trainer, pl_module)
    run = getattr(first_of(trainer, GPUMemoryMonitor), "_run", None)
    if run is not None and run.probe.highest.peak_bytes is not None:
        shown["peak_memory"] = format_bytes(run.probe.highest.peak_bytes)
    return shown


# What can be read may change in the middle, such as a driver that is lost.
def _say_notes(trainer: Any, run: _Run) -> None:
    for note in run.probe.notes[run.num_notes_said :]:
        log_info(trainer, f"GPUMemoryMonitor: {note}.")
    run.num_notes_said = len(run.probe.notes)


# A logger whose folder is gone ends a run where the project logs to it, and not where we do.
def _log(trainer: Any, run: _Run, metrics: dict[str, float]) -> None:
    for logger in trainer.loggers:
        try:
            logger.log_metrics(metrics, step=logged_step(trainer))
        except Exception as failure:  # each logger has its own classes
            if not run.has_failed_to_log:
                run.has_failed_to_log = True
                name = type(logger).__name__
                say(trainer, f"Memory is not logged by `{name}`: {describe(failure)}")


def _check_arguments(owner: str, every_n_steps: object, print_summary: object) -> None:
    problems = []
    if every_n_steps is not None and (type(every_n_steps) is not int or every_n_steps < 1):
        why = "it must be a whole number of optimizer steps, at least 1"
        other = "`None` for the Trainer's `log_every_n_steps`"
        fix = f"Use `every_n_steps=1` to log at every step, or {other}."
        problems.append(Problem(f"`every_n_steps={every_n_steps!r}`", why, fix))
    if not isinstance(print_summary, bool):
        what, fix = (
            f"`print_summary={print_summary!r}`",
            "Use `print_summary=False` to print nothing.",
        )
        problems.append(Problem(what, "it must be True or False", fix))
    if problems:
        raise ConfigurationError.from_problems(owner, problems)


def _summarize(run: _Run, predicted: "RunPrediction | None") -> MemorySummary:
    highest = run.probe.highest
    return MemorySummary(
        device=run.probe.name,
        peak_bytes=highest.peak_bytes,
        by_category=highest.by_category,
        peak_reserved_bytes=highest.reserved_bytes,
        nvml_peak_bytes=highest.nvml_bytes,
        is_nvml_of_gpu=highest.is_nvml_of_gpu,
        num_steps=run.num_steps,
        num_samples=run.num_samples,
        seconds=max(run.seconds() - (predicted.seconds if predicted else 0.0), 0.0),
        num_counted_steps=highest.num_counted_steps,
        had_larger_batches=highest.had_larger_batches,
        notes=(*run.probe.notes, *filter(None, [run.growth.found])),
        prediction=predicted.prediction if predicted else None,
        no_prediction=predicted.note if predicted else "",
    )
