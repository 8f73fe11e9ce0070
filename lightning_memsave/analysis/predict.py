"""Predict the peak memory of training, without a GPU and without the memory of the model."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import Tensor, nn

from lightning_memsave.callbacks.memsave import MemSaveCallback
from lightning_memsave.prediction.cuda.gpus import Gpu, as_gpu
from lightning_memsave.prediction.predict import predict
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.prediction.training_step import (
    TIME_LIMIT_S,
    MakeOptimizer,
    TrainingStep,
)
from lightning_memsave.targets.code import explained


def predict_memory(
    module: nn.Module | Callable[[], nn.Module],
    batch: Any,
    optimizer: MakeOptimizer | None = None,
    settings: Mapping[str, Any] | MemSaveCallback | None = None,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    device: Literal["cuda", "cpu"] = "cuda",
    gpu: str | Gpu | None = None,
    attention: str | None = None,
    trainer_arguments: Mapping[str, Any] | None = None,
    may_extrapolate: bool = True,
    time_limit_s: float | None = TIME_LIMIT_S,
) -> MemoryPrediction:
    """Predict the peak memory of a training step, by category, by phase and by module.

    Two steps of the module's own training code run in a Trainer of Lightning, on tensors that have
    shapes and no data: forward, backward, optimizer, and all that `MemSaveCallback` would do. So it
    needs neither a GPU nor the memory of the model. On a CPU the result is what is counted in the
    real step, to the byte where the code does not depend on data.

    Args:
        module: A LightningModule, any other module, or a function without arguments that makes one;
            the function never allocates the model.
        batch: A batch, in any nesting, whose tensors may be real or on the meta device; or a
            function that gives one. What follows from its integers (masks of padding, numbers of
            labels) is computed from them.
        optimizer: For modules that are no LightningModule: makes the optimizer from the parameters,
            such as a class. Without it: AdamW.
        settings: Arguments of `MemSaveCallback` by name, or one. In a mapping, techniques that are
            not named are off: the step as it is.
        loss: For modules that are no LightningModule: gives the loss from output and batch. Without
            it: the ``loss`` of the output, or the mean of a tensor.
        device: Whose kernels to assume.
        gpu: The GPU that is meant, such as ``"T4"``: it decides which precision ``"auto"`` is.
        attention: CUDA's attention kernel, ``"flash"``, ``"efficient"`` or ``"math"``; without it
            the one that torch would choose.
        trainer_arguments: Arguments of the Trainer; ``precision``, accumulation, gradient
            clipping and ``deterministic`` matter for memory, others are not used.
        may_extrapolate: Whether models of 30 blocks and more may be predicted from copies with
            fewer, which takes seconds instead of minutes.
        time_limit_s: Give up after this time; ``None`` for never. A step that repeats itself until
            some number is small enough would never end on tensors without data.

    Returns:
        The prediction.

    Raises:
        ConfigurationError: If arguments are wrong, or the module cannot be made or copied.
        MemsaveError: If settings do not go with the module.
        TimeoutError: If the step does not end, or takes longer than ``time_limit_s``.

    Note:
        Whatever the module's step raises on this batch comes through, with a note. For CUDA the
        prediction rests on ``assumptions``, which the result lists. Hooks of the module run too, up
        to ``on_train_start`` and in each step: what they write to files or send away is written and
        sent. Those of the end of a fit do not run.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 10))
        >>> prediction = predict_memory(model, torch.ones(32, 100), device="cpu")
        >>> prediction.peak.parameter_bytes, prediction.peak.optimizer_state_bytes
        (88840, 177696)
    """
    return predict(
        TrainingStep(
            module,
            batch,
            MemSaveCallback,
            read_settings(settings),
            optimizer,
            loss,
            {} if trainer_arguments is None else trainer_arguments,
            device,
            as_gpu(gpu),
            attention,
            time_limit_s,
            may_extrapolate,
        )
    )


def read_settings(settings: Mapping[str, Any] | MemSaveCallback | None) -> Mapping[str, Any]:
    """Read what a verb was given as settings.

    Args:
        settings: Arguments of `MemSaveCallback` by name, of which those that are not named are off;
            or a callback, whose arguments are all meant; ``None`` for nothing.

    Returns:
        Arguments of `MemSaveCallback` by name.
    """
    if isinstance(settings, MemSaveCallback):
        return settings.arguments
    if settings is not None and not isinstance(settings, Mapping):
        return settings  # type: ignore[unreachable] # `TrainingStep` refuses it
    return {"stack": "off", **(settings or {})}


def with_instances(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Make the techniques that arguments of `MemSaveCallback` name by their ``class_path``.

    Args:
        settings: Arguments of `MemSaveCallback`, as YAML has them.

    Returns:
        The arguments with instances in place of their descriptions.

    Raises:
        ConfigurationError: If a class or one of its arguments is wrong.
    """
    nested = {n for n, v in settings.items() if isinstance(v, dict) and "class_path" in v}
    if not nested:
        return dict(settings)
    from jsonargparse import ArgumentParser  # noqa: PLC0415

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(MemSaveCallback, "memsave", fail_untyped=False, sub_configs=True)
    with explained("Reading the settings of `MemSaveCallback`", "Check classes and arguments."):
        config = parser.parse_object({"memsave": settings})
        # The old name is deprecated from 4.49 on.
        instantiate: Any = getattr(parser, "instantiate", None) or parser.instantiate_classes
        callback = instantiate(config).memsave
    return dict(settings) | {name: callback.arguments[name] for name in nested}
