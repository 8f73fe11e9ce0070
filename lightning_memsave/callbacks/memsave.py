"""`MemSaveCallback`: all techniques behind one callback."""

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from lightning_memsave.callbacks import report as _report
from lightning_memsave.callbacks.memory_monitor import GPUMemoryMonitor
from lightning_memsave.callbacks.run_prediction import RunPrediction, effective_settings
from lightning_memsave.callbacks.settings.activation_checkpointing import CheckpointingSetting
from lightning_memsave.callbacks.settings.arguments import host_form, make_settings, time_limit
from lightning_memsave.callbacks.settings.budget import BudgetSetting, read_plan
from lightning_memsave.callbacks.settings.chunked_cross_entropy import ChunkedCrossEntropySetting
from lightning_memsave.callbacks.settings.micro_batch_size import MicroBatchSetting
from lightning_memsave.callbacks.settings.names import known_names_only
from lightning_memsave.callbacks.settings.offload import OffloadSetting
from lightning_memsave.callbacks.settings.optimizer_in_backward import OptimizerInBackwardSetting
from lightning_memsave.callbacks.settings.setting import Settings, warn
from lightning_memsave.callbacks.start_advice import add_start_advice, describe_open_window
from lightning_memsave.core.blocks import BlockSelector
from lightning_memsave.core.technique import Row, undo_all
from lightning_memsave.errors import IncompatibleError, MemsaveWarning
from lightning_memsave.techniques.activation_checkpointing.technique import ActivationCheckpointing
from lightning_memsave.techniques.attention_kernel.technique import AttentionKernel
from lightning_memsave.techniques.chunked_cross_entropy.technique import ChunkedCrossEntropy
from lightning_memsave.techniques.low_bit_optimizer.technique import LowBitOptimizer
from lightning_memsave.techniques.low_precision_weights.technique import LowPrecisionWeights
from lightning_memsave.techniques.micro_batching.technique import MicroBatching
from lightning_memsave.techniques.named_optimizer.technique import NamedOptimizer
from lightning_memsave.techniques.offloading.technique import Offloading
from lightning_memsave.techniques.optimizer_in_backward.technique import OptimizerInBackward
from lightning_memsave.techniques.registry import frees_early, leaves_open, with_plan, with_preset
from lightning_memsave.techniques.waiting_state import leave_on_host
from lightning_memsave.trainer.checkpoint_files import stream_checkpoints
from lightning_memsave.trainer.epoch_ends import end_together
from lightning_memsave.trainer.failures import attempted, say
from lightning_memsave.trainer.first_batch import before_strategy_setup
from lightning_memsave.trainer.hooks import CallbackBase
from lightning_memsave.trainer.lost_ranks import RankWatch, watch_ranks
from lightning_memsave.trainer.private_names import check_names
from lightning_memsave.trainer.trainer import first_of, leave_device, put_first, second_use, sets_up
from lightning_memsave.trainer.training_loop import has_open_window

if TYPE_CHECKING:  # loaded by fits that predict or plan
    from lightning_memsave.planning.plan import MemoryPlan
    from lightning_memsave.prediction.result import MemoryPrediction


class MemSaveCallback(CallbackBase):
    """Train with less memory, by one line in an existing project.

    Without arguments, as with ``preset="classic"``: the activations of every repeated block are
    recomputed in backward, the optimizer that the module configures keeps its state in 8 bits
    (embeddings, norms and biases stay 32-bit), mixed precision is switched on where the device is a
    CUDA GPU with native bfloat16 and the Trainer names no other, a batch that does not fit is
    repeated in micro-batches, and memory is measured. At the start of fit one table shows what was
    switched on, what was not, and why; ``memsave_report.json`` in the run's log directory repeats
    it with the memory that was measured.

    The gradients of the step before are freed before the forward pass, outputs that nothing reads
    before backward, and checkpoints are written through to their file, without a copy of it in host
    memory, unless ``preset="off"`` is all that is written.

    Each argument from ``activation_checkpointing`` to ``attention`` can be ``"auto"``, which
    means the value of the preset, ``None``, which leaves the project unchanged, or a value, which
    is set or refused; only ``accumulate_grad_batches`` is off unless it is given. A setting of a
    preset stays off where it conflicts with the project or finds nothing to change; the table shows
    the reason.

    Args:
        activation_checkpointing: Which blocks to recompute: ``"all"``, ``"nested"``, ``"tiled"``,
            ``"selective"``, ``"every:k"``, a number, a share, or `ActivationCheckpointing`.
        optimizer: ``"8bit"`` or ``"paged_8bit"`` for the 8-bit form of the configured optimizer, a
            name such as ``"lion_8bit"``, or `LowBitOptimizer` with settings of its own. Another
            optimizer: ``"muon"``, ``"adamw_bf16_state"``, ``"package:Class"`` or `NamedOptimizer`.
        precision: Any precision of Lightning's Trainer, also for validation, test and prediction.
        micro_batch_size: Samples of a training batch that pass forward and backward at once; or
            `MicroBatching`. ``"halve"``, of all presets but ``"off"``, begins with the batch; when
            memory runs out, the batch is repeated with half the size, which is kept and saved in
            checkpoints. Evaluation does so where a few samples prove that it only rounds. With
            ``MicroBatching(1, of="blocks")`` weights that ``offload`` streams come once per batch.
        accumulate_grad_batches: Batches per optimizer step, as the Trainer's argument, but with the
            last window of an epoch scaled by its real length.
        chunked_cross_entropy: Compute the loss of a linear head without its logits; True, a number
            of rows at once, or `ChunkedCrossEntropy`.
        optimizer_in_backward: Update each parameter as soon as its gradient is complete and free
            the gradient; True or `OptimizerInBackward`.
        low_precision_weights: Keep weights in bfloat16, and round updates ``"stochastic"`` or with
            ``"kahan"`` compensation, or beside ``offload`` to nearest, with a ``"master"`` (or its
            ``"split"`` form) on the host; or `LowPrecisionWeights`. Computes in ``"bf16-mixed"``.
        offload: What waits in host memory: ``"optimizer"`` (its state, gradients, and the weights
            that the host updates), ``"parameters"`` (also the weights of blocks),
            ``"activations"``, ``"embeddings"``, several with ``+`` between them, True for
            ``"parameters+activations"``; or `Offloading`.
        attention: Kernel of Hugging Face models, such as ``"sdpa"``; or `AttentionKernel`.
        preset: Settings that go together: ``"classic"`` (checkpointing, mixed precision, 8-bit
            optimizer, micro-batches), ``"bitwise"`` (all that keeps training the same bit for bit),
            ``"single_gpu"`` (the least GPU memory without host memory), ``"offload"`` (the least
            with it) or ``"off"`` (only the arguments given beside it). Arguments given beside a
            preset win. ``None`` is ``"classic"``.
        budget: Device memory that training may take: bytes, a text such as ``"12GiB"``, a share of
            the device's memory, or ``"free"`` for what is free. The fastest settings that fit are
            chosen from the first batch, among those that ``exactness`` allows and that are not
            given; when memory runs out, the next faster ones take their place.
        blocks: What the blocks are, where they cannot be found: a class name, a class, ``"re:"``
            and a regular expression over module names, a function of name and module, or several.
        host_budget: Host memory for ``offload``, such as ``"16GiB"``; ``None``: half of the free.
        exactness: How far results may move: ``"bitwise"``, ``"rounding"`` or ``"approximate"``.
            Settings that move them further are off in a preset, and refused if they are given.
        predict: Predict peak memory before the first step, by training two steps on fake tensors,
            for 20 seconds at most; ``False`` disables it, a number is another limit in seconds.
        report: Print the table and write ``memsave_report.json``. Without this, ``predict`` and
            ``budget`` memory is not measured, but by a `GPUMemoryMonitor` of the Trainer's list.

    Raises:
        ConfigurationError: If arguments are wrong on their own; the message lists all that are.

    Note:
        Conflicts of what is given with the Trainer and the module end in an `IncompatibleError` at
        the start of fit that lists all of them; nothing has been changed then. A second
        `MemSaveCallback` in one Trainer does nothing; one object serves one Trainer at a time.
        After fit, or an exception, the module is as it was.

    Example:
        >>> MemSaveCallback(activation_checkpointing="all", optimizer=None)
        MemSaveCallback(activation_checkpointing='all', optimizer=None)
    """

    @known_names_only
    def __init__(
        self,
        activation_checkpointing: int | float | str | ActivationCheckpointing | None = "auto",
        *,
        optimizer: str | LowBitOptimizer | NamedOptimizer | None = "auto",
        precision: int | str | None = "auto",
        micro_batch_size: int | str | MicroBatching | None = "auto",
        accumulate_grad_batches: int | None = None,
        chunked_cross_entropy: bool | int | str | ChunkedCrossEntropy | None = "auto",
        optimizer_in_backward: bool | str | OptimizerInBackward | None = "auto",
        low_precision_weights: str | LowPrecisionWeights | None = "auto",
        offload: bool | str | Offloading | None = "auto",
        attention: str | AttentionKernel | None = "auto",
        preset: Literal["off", "classic", "bitwise", "single_gpu", "offload"] | None = None,
        budget: int | float | str | None = None,
        blocks: Sequence[BlockSelector] | BlockSelector | None = None,
        host_budget: int | str | None = None,
        exactness: Literal["bitwise", "rounding", "approximate"] = "approximate",
        predict: bool | float = True,
        report: bool = True,
    ) -> None:
        given = {**locals()}
        super().__init__()
        self.arguments = {name: given[name] for name in _DEFAULTS}
        self._settings = make_settings(type(self).__name__, self.arguments)
        is_measured = report or predict is not False or budget is not None
        self.monitor = GPUMemoryMonitor() if is_measured else None
        """What measures a fit, unless the Trainer has a monitor among its callbacks."""
        self._in_force: Mapping[str, Any] = with_preset(self.arguments)
        self.plan: MemoryPlan | None = None
        """What was planned for the budget in the latest fit; of a checkpoint until it is used."""
        self._undo_setup: list[Callable[[], None]] = []
        self._prediction = RunPrediction(time_limit(predict))
        self._is_disabled = self._has_warned_of_window = False
        # The Trainer between `setup` and the end of its run; its id, as callbacks are pickled.
        self._user: int | None = None
        # Whose figures we report: a monitor among the Trainer's own callbacks takes the place of
        # ours, which is added to them for the time of a fit.
        self._reported: GPUMemoryMonitor | None = None
        # Known from setup to the end; asking the Trainer for it needs all ranks.
        self._directory: str | None = None
        self._has_started = self._has_trained = False
        self._outside: BaseException | None = None  # what is handled where the fit was started
        self._ranks: RankWatch | None = None

    def __repr__(self) -> str:
        given = {name: v for name, v in self.arguments.items() if v != _DEFAULTS[name]}
        arguments = ", ".join(f"{name}={value!r}" for name, value in given.items())
        return f"{type(self).__name__}({arguments})"

    @property
    def rows(self) -> list[Row]:
        """What was switched on and what was not, as the table at the start of fit shows it."""
        return self._settings.rows

    @property
    def prediction(self) -> "MemoryPrediction | None":
        """The prediction of the latest fit; ``None`` without one."""
        return self._prediction.prediction

    def effective_arguments(self) -> dict[str, Any]:
        """Give the arguments of a callback that would do what this fit does.

        Returns:
            All arguments by name, with the values of the preset; what yielded is off.
        """
        updates = self._settings.find(OptimizerInBackwardSetting).effective
        arguments = {**self._in_force, "optimizer_in_backward": updates}
        arguments |= self._settings.find(OffloadSetting).corrected
        return effective_settings(arguments, self.rows, self._micro_batches.size)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check everything, then change what can be changed before the model is set up.

        Args:
            trainer: The Trainer.
            pl_module: Its LightningModule.
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.

        Raises:
            IncompatibleError: If a setting conflicts with the Trainer or the module; the message
                lists every conflict, and nothing has been changed.
        """
        if problems := second_use(trainer, self._user):
            raise IncompatibleError(type(self).__name__, problems)
        self._is_disabled = first_of(trainer, MemSaveCallback) is not self
        if self._is_disabled:
            warnings.warn(
                "This Trainer has two `MemSaveCallback`s: the second one does nothing. Remove one.",
                MemsaveWarning,
                stacklevel=2,
            )
            return
        self._outside = sys.exception()
        self._directory = trainer.log_dir or trainer.default_root_dir
        is_fit = stage == "fit"
        self._ranks = watch_ranks(trainer) if is_fit and trainer.world_size > 1 else None
        apply = self._decide_late(trainer, pl_module) if is_fit else None
        if is_fit:
            self._choose_form(trainer, pl_module)
        if not (problems := check_names(trainer, self._used(apply))):
            if apply == self._apply_plan:
                problems = self._budget.check(trainer, pl_module)
            elif apply is None:
                problems = self._settings.apply(trainer, pl_module, is_fit)
        if problems:
            raise IncompatibleError(type(self).__name__, problems)
        self._user = id(trainer)
        if not is_fit:
            return
        if apply is None:
            self._undo_setup += self._prediction.setup(trainer)
        else:
            function = functools.partial(self._apply_late, apply, trainer, pl_module)
            self._undo_setup.append(before_strategy_setup(trainer, function))
        with self._settings.undone_on_error():
            self._prepare(trainer, pl_module)

    def _prepare(self, trainer: Any, pl_module: Any) -> None:
        if frees_early(self._in_force):
            stream_checkpoints(trainer)
        own = first_of(trainer, GPUMemoryMonitor)
        self._reported = own or self.monitor
        added = [self.monitor] if own is None and self.monitor is not None else []
        self._undo_setup.append(put_first(trainer, self, *added))
        for monitor in added:  # the hook that is running does not know of it
            monitor.setup(trainer, pl_module, "fit")

    def _use(self, settings: Settings, in_force: Mapping[str, Any]) -> None:
        size = self._micro_batches.size
        self._settings, self._in_force = settings, in_force
        self._micro_batches.size = size

    def _used(self, apply: object) -> list[str]:
        if apply == self._apply_plan:  # which may switch all on
            return [*self.arguments]
        return [n for n, v in self._in_force.items() if v is not None and v is not False]

    def _decide_late(self, trainer: Any, pl_module: Any) -> Callable[[Any, Any], None] | None:
        self.plan = None
        if self.arguments["budget"] is not None:
            return self._apply_plan
        if leaves_open(with_preset(self.arguments)[OffloadSetting.name]):
            return self._fill_device
        # Its `setup` runs after ours, and may make or replace layers.
        return self._choose_form if sets_up(trainer, pl_module) else None

    def _choose_form(self, trainer: Any, pl_module: Any) -> None:
        if (found := host_form(self.arguments, trainer, pl_module)) is not None:
            self._use(*found)

    def _apply_plan(self, trainer: Any, pl_module: Any) -> None:
        from lightning_memsave.callbacks.run_plan import plan_fit

        size = self._micro_batches.size
        self.plan = plan_fit(trainer, MemSaveCallback, self.arguments, self.plan)
        chosen = self.plan.plan.settings
        self._settings = make_settings(type(self).__name__, self.arguments, chosen)
        self._in_force = with_plan(self.arguments, chosen)
        self._budget.use(self.plan)
        self._settings.find(OffloadSetting).is_open = leaves_open(self.arguments["offload"])
        self._settings.find(CheckpointingSetting).blocks = self.arguments["blocks"]
        if self._micro_batches.is_auto:
            needed = None if self.plan.frontier else size  # of the checkpoint
            self._micro_batches.plan(chosen.get("micro_batch_size"), needed)

    def _fill_device(self, trainer: Any, pl_module: Any) -> None:
        from lightning_memsave.callbacks.run_plan import fill_device

        chosen, note, block_bytes = fill_device(trainer, MemSaveCallback, self.arguments)
        arguments = self.arguments | chosen
        self._use(make_settings(type(self).__name__, arguments), with_preset(arguments))
        self._settings.find(OffloadSetting).explain(note, block_bytes)

    def _apply_late(self, choose: Callable[[Any, Any], None], trainer: Any, module: Any) -> None:
        choose(trainer, module)
        if problems := self._settings.apply(trainer, module, True):
            raise IncompatibleError(type(self).__name__, problems)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Change what exists only now, and show the table.

        Raises:
            IncompatibleError: If a value that was given finds nothing to change.
        """
        if self._is_disabled:
            return
        if problems := self._settings.start(trainer, pl_module):
            raise IncompatibleError(type(self).__name__, problems)
        self._prediction.begin()
        if self.plan is not None:
            self._budget.allow_changes(self._settings)
            if self.plan.plan.prediction is not None:
                self._prediction.use(self.plan.plan.prediction)
                self._use_prediction()
        offload, idle_bytes = self._settings.find(OffloadSetting), self._micro_batches.idle_bytes
        offload.when_corrected = self._prediction.outdate
        if self._reported is not None:
            self._reported.compare(self._prediction, offload.held_bytes, idle_bytes)
        self._has_started = True
        if self.arguments["report"] and trainer.is_global_zero:
            with attempted(trainer, "The table cannot be printed to standard output"):
                _report.print_table(self.rows)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Let optimizer state of a checkpoint wait on the host, as a fresh run has none yet."""
        if self._is_disabled:
            return
        if trainer.world_size > 1:
            self._undo_setup += end_together(trainer)
        elif resumed := [each for each in trainer.optimizers if getattr(each, "state", None)]:
            leave_on_host(resumed)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Predict the memory of the fit when its first batch is there."""
        self._settings.watch(trainer, is_start=True)
        if not self._is_disabled and self._prediction.is_due:
            arguments = self.effective_arguments()
            self._prediction.before_batch(trainer, batch, MemSaveCallback, arguments)
            self._use_prediction()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Change the plan, or what is offloaded, where CUDA's allocator has measured otherwise."""
        self._has_trained = True
        self._settings.watch(trainer, is_start=False)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Finish updates on the host before hooks that may read weights."""
        if (offload := self._settings.find(OffloadSetting)).is_on:
            offload.wait()

    on_validation_start = on_train_epoch_end

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Materialize logits that are still referenced."""
        chunked = self._settings.find(ChunkedCrossEntropySetting)
        if chunked.is_on:
            chunked.before_backward(pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Write what is known and restore the module, as ``teardown`` is not called; never raises.

        Where memory ran out, nothing after this needs any on the device: gradients are dropped and
        the module moves to the host, as Lightning moves it afterwards.
        """
        if self._user not in (None, id(trainer)):
            return  # another Trainer is in a run with it
        self._user = None
        self._leave_ranks(exception)
        from lightning_memsave.oom.report import add_advice, out_of_memory_in

        error = out_of_memory_in(exception, self._outside)
        if error is not None:
            for callback in trainer.callbacks:
                if hasattr(callback, "write_before_undo"):
                    callback.write_before_undo(trainer, pl_module, exception)
            with attempted(trainer, "There is no advice on memory"):
                add_advice(trainer, pl_module, exception, error)
        else:
            with attempted(trainer, "There is no advice on settings"):
                rows = self.rows if self._has_started else ()
                add_start_advice(exception, trainer.ckpt_path, rows, has_trained=self._has_trained)
        with attempted(trainer, "What was measured is lost"):
            if self._reported is not None:
                self._reported.on_exception(trainer, pl_module, exception)
        if error is not None and pl_module is not None:
            with attempted(trainer, "The module stays on the device"):
                leave_device(trainer, pl_module)
        self._undo(trainer)
        with attempted(trainer, f"`{_report.REPORT_NAME}` is not written"):
            self._write_report(trainer, exception, is_always=error is not None)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Restore the module and write the report, after all monitors have finished."""
        self._user = None
        self._leave_ranks()
        self._undo(trainer)
        self._write_report(trainer)

    def _leave_ranks(self, error: BaseException | None = None) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close(error)

    def _undo(self, trainer: Any) -> None:
        self._outside, self._has_trained = None, False
        undo_all(self._undo_setup)
        for failure in self._settings.undo():
            say(trainer, failure)

    # Not `state_dict`, as Lightning refuses a second callback that has one. With this, it names the
    # callback where a run is resumed without it.
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Save the micro-batch size that memory was enough for, for a resumed run."""
        if not self._is_disabled:
            if not self._has_warned_of_window and has_open_window(trainer):
                self._has_warned_of_window = True
                warn(trainer, describe_open_window(trainer), MemsaveWarning)
            state: dict[str, Any] = {"micro_batch_size": self._micro_batches.size}
            if self.plan is not None:
                state["plan"] = self._budget.state()
            checkpoint.setdefault("callbacks", {})[self.state_key] = state

    def load_state_dict(self, state_dict: Any) -> None:
        """Continue with the micro-batch size and the plan of the run that wrote the checkpoint."""
        if isinstance(state_dict, Mapping) and self.arguments["budget"] is not None:
            self.plan = read_plan(state_dict.get("plan"))
        size = state_dict.get("micro_batch_size") if isinstance(state_dict, Mapping) else state_dict
        if type(size) is int and size >= 1:
            self._micro_batches.size = size if self._micro_batches.is_auto else None  # or given
        elif size is not None:
            warnings.warn(
                f"The checkpoint has `micro_batch_size={size!r}` for `{self.state_key}`, which is "
                "not a number of samples, and is ignored.",
                MemsaveWarning,
                stacklevel=2,
            )

    def _use_prediction(self) -> None:
        if self.prediction is not None:
            updates = self._settings.find(OptimizerInBackwardSetting)
            updates.keep_gradients(self.prediction.kept_gradient_bytes)
            if self.plan is None:
                self._micro_batches.peak_bytes = self.prediction.peak_bytes

    @property
    def _budget(self) -> BudgetSetting:
        return self._settings.find(BudgetSetting)

    @property
    def _micro_batches(self) -> MicroBatchSetting:
        return self._settings.find(MicroBatchSetting)

    def _write_report(
        self, trainer: Any, error: BaseException | None = None, is_always: bool = False
    ) -> None:
        directory, self._directory = self._directory, None
        has_started, self._has_started = self._has_started, False
        is_due = (has_started or is_always) and self.arguments["report"]
        if directory is None or not (is_due and trainer.is_global_zero):
            return
        # In an evaluation the figures are those of an earlier fit.
        summary = self._reported.summary if has_started and self._reported is not None else None
        error_of_prediction = None if summary is None else summary.prediction_error
        _report.write_report(
            directory,
            {name: _report.plain(value) for name, value in self.arguments.items()},
            self.rows,
            measured=None if summary is None else summary.to_dict(),
            predicted=self._prediction.to_dict(error_of_prediction) if has_started else None,
            error=error,
            device=trainer.strategy.root_device,
            plan=None if self.plan is None else self._budget.report(),
        )


_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(MemSaveCallback).parameters.items()
}
