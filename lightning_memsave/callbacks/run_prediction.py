"""The prediction that a run makes of itself, before its first step."""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import _disable_current_modes

from lightning_memsave.callbacks.memory_probes import is_compiled
from lightning_memsave.callbacks.memory_summary import shortened
from lightning_memsave.callbacks.settings.setting import Arguments
from lightning_memsave.core.clock import processor_time_s
from lightning_memsave.core.technique import Row
from lightning_memsave.core.trainer_facts import SHARDED
from lightning_memsave.errors import MemsaveError
from lightning_memsave.techniques.registry import entries, frees_early, unused_details
from lightning_memsave.techniques.waiting_state import waiting_bytes
from lightning_memsave.trainer.distributed import copies_gradients
from lightning_memsave.trainer.failures import attempted
from lightning_memsave.trainer.first_batch import before_strategy_setup
from lightning_memsave.trainer.hooks import log_info
from lightning_memsave.trainer.trainer import is_strategy
from lightning_memsave.units import format_bytes

if TYPE_CHECKING:  # loaded by fits that predict
    from lightning_memsave.prediction.result import MemoryPrediction
    from lightning_memsave.prediction.training_step import TrainingStep

TIME_LIMIT_S = 20.0

_PREDICTABLE = ("32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
# The Trainer has its precision by now; the others do not change training steps.
_FSDP2 = "FSDP2StrategyMixin"
_LEFT_OUT = ("precision", "preset", "budget")


class RunPrediction:
    """Predicts once per fit, on rank zero, when the first batch is there."""

    def __init__(self, limit_s: float | None) -> None:
        self.prediction: MemoryPrediction | None = None
        self.note = ""
        """Why there is none."""
        self.seconds = 0.0
        """What it took, also if there is none."""
        self.limit_s = limit_s
        self.is_due = False
        """The first batch has not come yet."""
        self._whole: Any = None
        """A copy, without values, of a module that has been sharded since."""

    def setup(self, trainer: Any) -> list[Callable[[], None]]:
        """Copy the module before `FSDP2Strategy` shards it; give what undoes this."""
        if self.limit_s is None or not is_strategy(trainer, _FSDP2):
            return []
        undo = before_strategy_setup(trainer, functools.partial(self._keep_whole, trainer))
        return [undo, functools.partial(setattr, self, "_whole", None)]

    def _keep_whole(self, trainer: Any) -> None:
        if not trainer.is_global_zero or obstacle(trainer, trainer.lightning_module):
            return
        from lightning_memsave.prediction.fake.tensors import fake_tensors

        deadline_s = processor_time_s() + (self.limit_s or 0)
        with (
            attempted(trainer, "The module cannot be copied for a prediction"),
            _disable_current_modes(),
            fake_tensors(deadline_s) as fakes,
        ):
            self._whole = fakes.copy_module(trainer.lightning_module, without=[trainer])

    def begin(self) -> None:
        self.prediction, self.note, self.seconds = None, "", 0.0
        self.is_due = self.limit_s is not None

    def use(self, prediction: "MemoryPrediction") -> None:
        self.prediction, self.is_due = prediction, False

    def outdate(self, why: str) -> None:
        """Forget the prediction, as training needs other memory from now on."""
        if self.prediction is not None:
            self.prediction, self.note = None, why

    def before_batch(
        self, trainer: Any, batch: Any, make_callback: Callable[..., Any], arguments: Arguments
    ) -> None:
        self.is_due, whole, self._whole = False, self._whole, None
        pl_module = trainer.lightning_module if whole is None else whole
        if not trainer.is_global_zero:
            return
        from lightning_memsave.prediction.predict import predict

        start_s, start_of_limit_s = time.perf_counter(), processor_time_s()
        self.note = obstacle(trainer, pl_module)
        try:
            if not self.note:
                # The user's own modes, such as one that counts operations, must not see it.
                with _disable_current_modes():
                    step = step_of(
                        trainer,
                        pl_module,
                        batch,
                        make_callback,
                        arguments,
                        has_started=whole is None,
                    )
                    found = predict(replace(step, time_limit_s=self.limit_s))
                self.prediction = _of_resumed(found, waiting_bytes(trainer.optimizers))
        # The user's code may fail on fake tensors; that must not end a run that would train.
        except (Exception, SystemExit) as error:
            # A Trainer makes the one of the other.
            if isinstance(error.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from error
            is_over = processor_time_s() - start_of_limit_s > (self.limit_s or 0)
            self.note = _reason(error)
            if isinstance(error, TimeoutError) and is_over:
                self.note = (
                    f"it takes more than {self.limit_s:g} seconds; `predict=` sets the limit"
                )
        finally:
            self.seconds = time.perf_counter() - start_s
        if self.prediction is None:
            log_info(trainer, f"Memory is not predicted: {self.note}.")
        else:
            guessed = "; ".join(shortened(self.prediction.guesses))
            size = format_bytes(self.prediction.measurable_bytes)
            guessed = guessed and f", guessing: {guessed}"
            log_info(trainer, f"Predicted peak memory: {size}{guessed}.")

    def to_dict(self, error: float | None) -> dict[str, Any] | None:
        if self.prediction is None:
            return {"note": self.note} if self.note else None
        return self.prediction.to_dict() | {"error": error, "seconds": self.seconds}


def effective_settings(
    arguments: Arguments, rows: Sequence[Row], micro_batch_size: int | None
) -> dict[str, Any]:
    on = {row.name for row in rows if row.status == "on"}
    result = {**arguments, **dict.fromkeys(_LEFT_OUT)}
    if not frees_early(arguments):
        result["preset"] = arguments["preset"]
    result.pop("from_preset", None)
    # The run has decided already, by facts that a prediction lacks, such as the strategy.
    for entry in entries():
        if entry.argument not in on:
            result[entry.argument] = None
    result |= unused_details(result, [entry.argument for entry in entries()])
    if micro_batch_size is not None and "micro_batch_size" in on:
        result["micro_batch_size"] = micro_batch_size
    return result


def obstacle(trainer: Any, pl_module: Any) -> str:
    if is_compiled(pl_module):
        return "the graphs of `torch.compile` allocate in their own way"
    is_ours = is_strategy(trainer, _FSDP2)
    if is_ours and (why := trainer.strategy.obstacle(pl_module)):
        return str(why)
    if is_strategy(trainer, *SHARDED) and not is_ours:
        return f"not for `{type(trainer.strategy).__name__}`, which shards the model"
    if trainer.strategy.root_device.type not in ("cpu", "cuda"):
        return f"not for {trainer.strategy.root_device.type}"
    if str(trainer.precision) not in _PREDICTABLE:
        return f"not for precision {trainer.precision}"
    return ""


def _of_resumed(prediction: "MemoryPrediction", num_bytes: int) -> "MemoryPrediction":
    if not num_bytes:
        return prediction
    line = (
        f"resumed as from the start: optimizer state of the checkpoint ({format_bytes(num_bytes)}) "
        "waits on the host until the first update"
    )
    return replace(prediction, assumptions=(*prediction.assumptions, line))


# In words of the project: which of its lines ends the prediction, and not what torch says.
def _reason(error: BaseException) -> str:
    what = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    what = f"{type(error).__name__}: {what}" if what else type(error).__name__
    if isinstance(error, MemsaveError | TimeoutError):
        return what
    from lightning_memsave.prediction.user_code import own_frame

    if (frame := own_frame(error)) is None:
        return what
    where = f"{Path(frame.filename).name}, line {frame.lineno}"
    if type(error).__name__ in _OF_VALUES or any(text in str(error) for text in _WITHOUT_VALUES):
        return f"{where} needs the values of a tensor, which only a real step has: `{frame.line}`"
    return f"{where} raises {what} where the step runs on fake tensors, which have no values"


_OF_VALUES = {"DataDependentOutputException", "DynamicOutputShapeException"}
_WITHOUT_VALUES = (
    *("data is not allocated", "unallocated storage", "data pointer", "meta tensor"),
    "not supported for tensor subclasses",
)


def step_of(
    trainer: Any,
    pl_module: Any,
    batch: Any,
    make_callback: Any,
    settings: Arguments,
    *,
    has_started: bool = True,
) -> "TrainingStep":
    from lightning_memsave.prediction.cuda.gpus import local_gpu
    from lightning_memsave.prediction.training_step import RunningFit, TrainingStep

    device, num_batches = trainer.strategy.root_device, trainer.num_training_batches
    num_batches = 1000 if num_batches == float("inf") else max(int(num_batches), 4)
    strategy = trainer.strategy
    is_sharded, is_shared = (is_strategy(trainer, name) for name in (_FSDP2, "DDPStrategy"))
    return TrainingStep(
        pl_module,
        batch,
        make_callback,
        settings,
        trainer_arguments={
            "precision": str(trainer.precision),
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": trainer.gradient_clip_val,
            "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
            # Schedules ask for them.
            "max_epochs": trainer.max_epochs,
            "max_steps": trainer.max_steps if trainer.max_steps < 0 else max(trainer.max_steps, 3),
        },
        device=device.type,
        gpu=local_gpu(device) if device.type == "cuda" else None,
        fit=RunningFit(
            num_batches,
            has_buckets=copies_gradients(trainer),
            has_started=has_started,
            num_processes=trainer.world_size,
            strategy_arguments=strategy.settings if is_sharded else {},
        ),
        strategy="fsdp2" if is_sharded else ("ddp" if is_shared else None),
        world_size=trainer.world_size if is_sharded or is_shared else 1,
    )
