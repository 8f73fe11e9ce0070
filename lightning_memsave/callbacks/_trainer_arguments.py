"""One function for each argument of ``MemSaveCallback`` that is about Trainer and batches."""

from typing import Any

from lightning_memsave.callbacks._accumulation import Accumulation
from lightning_memsave.callbacks._argument_values import (
    Arguments,
    as_given,
    exactness_limit,
    is_asked,
    read_flag,
    refuse_technique,
    why_beyond,
)
from lightning_memsave.callbacks._evaluation_micro_batching import EvaluationMicroBatches
from lightning_memsave.callbacks._micro_batching import MicroBatches
from lightning_memsave.callbacks._precision import TrainerPrecision, full_name
from lightning_memsave.callbacks._settings import Setting, TensorFloat32
from lightning_memsave.core.technique import Exactness
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.techniques.micro_batching import MicroBatching


def _precision(arguments: Arguments) -> Setting:
    wanted, own = arguments["precision"], is_asked(arguments, "precision")
    if wanted is None:
        return TrainerPrecision(None, is_asked=own)
    has_weights = arguments["low_precision_weights"] is not None
    if wanted == "auto" and has_weights:
        wanted = "bf16-mixed"  # or layers would get weights and inputs of different types
    if wanted != "auto":
        wanted = full_name(wanted)
    # "32-true" is what Lightning does by itself; it cannot be told from no choice.
    exactness = Exactness.BITWISE if wanted == "32-true" else Exactness.APPROXIMATE
    if why := why_beyond(arguments, "precision", exactness):
        return TrainerPrecision(None, is_asked=False, off_reason=why)
    return TrainerPrecision(
        wanted,
        written=as_given({**arguments, "precision": wanted}, "precision"),
        is_for_weights=has_weights,
        is_asked=own or (has_weights and is_asked(arguments, "low_precision_weights")),
    )


def _tf32(arguments: Arguments) -> Setting:
    wanted = read_flag(arguments, "tf32", (True, False, None))
    if wanted:
        why_beyond(arguments, "tf32", Exactness.APPROXIMATE)
    return TensorFloat32(wanted)


def _accumulation(arguments: Arguments) -> Setting:
    wanted = arguments["accumulate_grad_batches"]
    if wanted is not None and (type(wanted) is not int or wanted < 1):
        raise ConfigurationError(
            f"`accumulate_grad_batches={wanted!r}` is not a number of batches: it must be a whole "
            "number of at least 1. Use `accumulate_grad_batches=4` for a step every four batches, "
            "or `None` to leave it to the Trainer."
        )
    if wanted is not None and wanted > 1:
        why_beyond(arguments, "accumulate_grad_batches", Exactness.ROUNDING)
    return Accumulation(wanted)


def _micro_batches(arguments: Arguments) -> Setting:
    technique, why = _micro_batching(arguments, "micro_batch_size")
    value = "None" if technique is None or why else repr(technique.micro_batch_size)
    return MicroBatches(
        None if why else technique,
        value,
        not why and is_asked(arguments, "micro_batch_size"),
        off_reason=why,
        limit=exactness_limit(arguments),
    )


def _evaluation_micro_batches(arguments: Arguments) -> Setting:
    technique, why = _micro_batching(arguments, "eval_micro_batch_size")
    is_own = is_asked(arguments, "eval_micro_batch_size")
    return EvaluationMicroBatches(None if why else technique, is_own, off_reason=why)


def _micro_batching(arguments: Arguments, name: str) -> tuple[MicroBatching | None, str]:
    """Read one of the two sizes, and why the limit switches it off."""
    wanted, details = arguments[name], _micro_batch_details(arguments)
    if isinstance(wanted, MicroBatching) and details:
        raise ConfigurationError(
            f"{', '.join(f'`{name}`' for name in details)} is not used with "
            f"`{name}={wanted!r}`. Pass `MicroBatching(...)` with it."
        )
    if wanted is None:
        MicroBatching(**details)  # refuses what is wrong with them
        return None, ""
    technique = wanted
    if not isinstance(wanted, MicroBatching):
        refuse_technique(name, wanted, MicroBatching)
        try:
            technique = MicroBatching(wanted, **details)
        except ConfigurationError as error:
            message = str(error).replace("`micro_batch_size=", f"`{name}=")
            raise ConfigurationError(message) from None
    return technique, why_beyond(arguments, name, technique.exactness)


def _micro_batch_details(arguments: Arguments) -> dict[str, Any]:
    defaults = {"loss_weight": "auto", "split_batch": None}
    return {n: arguments[n] for n, default in defaults.items() if arguments[n] != default}


TRAINER_MAKERS = (
    _precision,
    _tf32,
    _accumulation,
    _micro_batches,
    _evaluation_micro_batches,
)
"""In the order in which their settings are applied."""
