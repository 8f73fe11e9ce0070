"""The prediction that a run makes of itself, before its first step."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from lightning_memsave import host
from lightning_memsave.callbacks._memory_probes import is_compiled
from lightning_memsave.callbacks._prediction import Question, predict
from lightning_memsave.core.patching import unpatch
from lightning_memsave.planning.fake_models import FakeTensors
from lightning_memsave.planning.prediction import MemoryPrediction

TIME_LIMIT_S = 20.0

# Each process has a share of the model, which tensors without data cannot be cut into.
_SHARDED = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")
_PREDICTABLE = ("32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")


class RunPrediction:
    """Predicts once per fit, on rank zero, when the first batch is there.

    Args:
        limit_s: Give up after this time; ``None`` to leave it out.
    """

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self.prediction: MemoryPrediction | None = None
        self.note = ""
        """Why there is none."""
        self._is_due = False

    def begin(self) -> None:
        """A fit begins."""
        self.prediction, self.note = None, ""
        self._is_due = self.limit_s is not None

    def before_batch(
        self,
        trainer: Any,
        pl_module: Any,
        batch: Any,
        make_callback: Callable[..., Any],
        arguments: Mapping[str, Any],
    ) -> None:
        """Predict, if this is the first batch.

        Args:
            trainer: The Trainer.
            pl_module: Its LightningModule.
            batch: The batch.
            make_callback: Makes a `MemSaveCallback`.
            arguments: Its arguments.
        """
        if not self._is_due:
            return
        self._is_due = False
        if not trainer.is_global_zero:
            return
        self.note = _obstacle(trainer, pl_module)
        if self.note:
            return
        try:
            question = _question(trainer, pl_module, batch, make_callback)
            # The precision is in force already, whoever has set it.
            arguments = {**arguments, "precision": None}
            self.prediction = predict(
                replace(question, arguments=arguments, time_limit_s=self.limit_s)
            )
        except TimeoutError:
            self.note = f"it takes more than {self.limit_s:g} seconds; `predict=` sets the limit"
        # Whatever the user's code does on tensors without data must not end a run that would train.
        except Exception as error:
            first_line = (str(error).strip().splitlines() or [""])[0]
            self.note = f"{type(error).__name__}: {first_line}"

    def to_dict(self, measured_bytes: int | None) -> dict[str, Any] | None:
        """Give what the report says of it.

        Args:
            measured_bytes: The measured peak; ``None`` if it is not known.

        Returns:
            ``peak_bytes``, ``by_category`` and ``error``, the predicted peak over the measured one
            less 1; or why there is no prediction.
        """
        if self.prediction is None:
            return {"note": self.note} if self.note else None
        predicted = self.prediction
        return {
            "peak_bytes": predicted.peak_bytes,
            "by_category": predicted.peak.by_category(),
            "reserved_bytes": predicted.reserved_bytes,
            "error": predicted.peak_bytes / measured_bytes - 1 if measured_bytes else None,
            "seconds": predicted.seconds,
            "is_extrapolated": predicted.is_extrapolated,
            "assumptions": list(predicted.assumptions),
            "guesses": list(predicted.guesses),
        }


def _obstacle(trainer: Any, pl_module: Any) -> str:
    if is_compiled(pl_module):
        return "the graphs of `torch.compile` allocate in their own way"
    if host.is_strategy(trainer, *_SHARDED):
        return f"not for `{type(trainer.strategy).__name__}`, which shards the model"
    if trainer.strategy.root_device.type not in ("cpu", "cuda"):
        return f"not for {trainer.strategy.root_device.type}"
    if str(trainer.precision) not in _PREDICTABLE:
        return f"not for precision {trainer.precision}"
    return ""


def _question(
    trainer: Any, pl_module: Any, batch: Any, make_callback: Callable[..., Any]
) -> Question:
    def build(fakes: FakeTensors) -> tuple[Any, Any]:
        twin = fakes.copy_module(pl_module, without=[trainer])
        for part in twin.modules():
            unpatch(part)
        return twin, fakes.copy_batch(batch)

    device = trainer.strategy.root_device
    return Question(
        build,
        make_callback,
        {},
        host.package_of(trainer),
        device.type,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0),
        trainer_arguments={
            "precision": str(trainer.precision),
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": trainer.gradient_clip_val,
            "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
        },
        num_batches=_finite(trainer.num_training_batches),
        is_running=True,
    )


def _finite(num_batches: float) -> int:
    return 1000 if num_batches == float("inf") else max(int(num_batches), 4)
