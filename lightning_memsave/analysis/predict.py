"""Predict the peak memory of training, without a GPU and without allocating the model."""

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

OFF: Mapping[str, Any] = {"stack": "off"}
"""Arguments of `MemSaveCallback` with which nothing is on."""


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
    time_limit_s: float | None = TIME_LIMIT_S,
) -> MemoryPrediction:
    """Predict the peak memory of a training step, by category, by phase and by module.

    Two steps of your own training code run in a Lightning Trainer on fake tensors, which have
    shapes but no values: forward, backward, optimizer, and everything that `MemSaveCallback` does.
    You need neither a GPU nor enough memory for the model. For a CPU the result equals the measured
    peak of the real step, to the byte if your code does not depend on values.

    Args:
        module: A LightningModule, any other module, or a function without arguments that returns
            one. With a function the model is never allocated.
        batch: A batch, in any nesting, with real or meta tensors; or a function that returns one.
            Values that follow from its integers (padding masks, numbers of labels) are computed.
        optimizer: For modules that are not LightningModules: a class or function that gets the
            parameters. Default: AdamW.
        settings: Arguments of `MemSaveCallback` by name, or a `MemSaveCallback`. In a mapping,
            techniques that are not named are off.
        loss: For modules that are not LightningModules: a function of output and batch. Default:
            the ``loss`` of the output, or the mean of its first tensor.
        device: Device to predict for.
        gpu: GPU to predict for, such as ``"T4"``; it decides, for example, what precision
            ``"auto"`` is.
        attention: CUDA's attention kernel, ``"flash"``, ``"efficient"`` or ``"math"``; ``None`` is
            the one that torch would choose.
        trainer_arguments: Arguments of the Trainer. Only ``precision``, accumulation, gradient
            clipping and ``deterministic`` affect memory; others are ignored.
        time_limit_s: Stop after this time; ``None`` for never. A step that loops until a value is
            small enough would never end on fake tensors.

    Returns:
        The prediction.

    Raises:
        ConfigurationError: If arguments are wrong, or the module cannot be created or copied.
        MemsaveError: If settings conflict with the module.
        TimeoutError: If the step does not end, or takes longer than ``time_limit_s``.

    Note:
        Exceptions of the training step on this batch are raised, with a note. For CUDA the result
        lists its ``assumptions``. Hooks of the module run too, up to ``on_train_start`` and in each
        step, so anything that they write to files or send over the network really happens. Hooks of
        the end of a fit do not run.

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
        )
    )


def read_settings(
    settings: Mapping[str, Any] | MemSaveCallback | None, base: Mapping[str, Any] = OFF
) -> Mapping[str, Any]:
    """Return arguments of `MemSaveCallback`; a mapping with a stack lacks those in ``base``."""
    if isinstance(settings, MemSaveCallback):
        return settings.arguments
    if settings is not None and not isinstance(settings, Mapping):
        return settings  # type: ignore[unreachable] # `TrainingStep` refuses it
    settings = settings or {}
    return {**({} if "stack" in settings else base), **settings}


def with_instances(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Create the techniques that settings from YAML describe by their ``class_path``."""
    if settings.get("stack") is False:  # YAML's `off`, which LightningCLI passes as text
        settings = {**settings, "stack": "off"}
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
