"""Find out what model and batch an explanation is about."""

import inspect
import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_memsave.analysis._explain_attention import attention_of
from lightning_memsave.analysis._explain_trials import Trials
from lightning_memsave.analysis._predict_checks import check_arguments
from lightning_memsave.analysis._targets_building import explained
from lightning_memsave.analysis.predict import predict_memory, with_instances
from lightning_memsave.analysis.targets import BatchSpec, Target, load_target, make_batch_spec
from lightning_memsave.callbacks._stacks import with_rest_off
from lightning_memsave.callbacks.memsave import MemSaveCallback
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.measure.storages import tensors_in_batch
from lightning_memsave.planning.batch_sizes import find_sequence
from lightning_memsave.planning.fake_models import fake_tensors
from lightning_memsave.planning.gpus import Gpu, as_gpu
from lightning_memsave.planning.parameter_table import parameter_table


def make_trials(
    model: Any,
    batch: Any = None,
    optimizer: Any = None,
    settings: Mapping[str, Any] | MemSaveCallback | None = None,
    *,
    device: str = "cuda",
    gpu: str | Gpu | None = None,
    sequence_axis: int | None = None,
    **options: Any,
) -> Trials:
    """Find out what a model and its batch are.

    Args:
        model: A module, a function that makes one, a `Target`, or what `load_target` takes.
        batch: A batch, a function that gives one, or a text that `make_batch_spec` takes; for a
            target whatever that takes.
        optimizer: As for `predict_memory`.
        settings: As for `predict_memory`; without them those of the target.
        device: As for `predict_memory`.
        gpu: As for `predict_memory`.
        sequence_axis: As for `find_sequence`.
        **options: More arguments of `predict_memory`.

    Returns:
        What predicts; nothing has been predicted yet.

    Raises:
        ConfigurationError: If an argument is wrong.
    """
    check_arguments(device, options.get("time_limit_s"))
    if isinstance(model, str | os.PathLike):
        model = load_target(model)
    source: Any = model
    if isinstance(model, Target):
        if settings is None and model.settings is not None:
            settings = MemSaveCallback(**with_instances(model.settings))
        given = options.get("trainer_arguments") or {}
        options["trainer_arguments"] = {**model.trainer_arguments, **given}
        if isinstance(batch, str | Mapping | list | tuple) and not _has_tensors(batch):
            batch = make_batch_spec(batch, model)
        source, model = model.parameter_source(), model.make
    elif not isinstance(model, nn.Module):
        source = _made_without_data(model)
    if isinstance(batch, str):
        batch = make_batch_spec(batch)
    if isinstance(batch, BatchSpec):
        batch = batch.build_for_prediction()
    elif inspect.isroutine(batch):
        batch = batch()
    arguments = (
        dict(settings.arguments)
        if isinstance(settings, MemSaveCallback)
        else with_rest_off(settings or {})
    )
    is_module = isinstance(source, nn.Module)
    return Trials(
        predict_memory,
        MemSaveCallback,
        model,
        batch,
        arguments,
        parameter_table(source),
        _name_of(optimizer, source),
        attention_of(source) if is_module else None,
        None if batch is None else find_sequence(batch, sequence_axis),
        as_gpu(gpu),
        device,
        {"optimizer": optimizer, **options},
    )


def _has_tensors(batch: Any) -> bool:
    return next(tensors_in_batch(batch), None) is not None


def _made_without_data(make: Any) -> nn.Module:
    name = getattr(make, "__name__", type(make).__name__)
    fix = "Pass a function without arguments that makes the module, or the module itself."
    if not callable(make):
        raise ConfigurationError(f"A {type(make).__name__} has no memory to explain. {fix}")
    with fake_tensors(), explained(f"`{name}()`", fix):
        module = make()
        if not isinstance(module, nn.Module):
            raise ConfigurationError(f"`{name}()` gave a {type(module).__name__}. {fix}")
        if callable(configure := getattr(module, "configure_model", None)):
            configure()
        return module


def _name_of(optimizer: Any, source: Any) -> str:
    if optimizer is not None:
        return str(getattr(optimizer, "__name__", type(optimizer).__name__))
    return "" if hasattr(source, "configure_optimizers") else "AdamW"
