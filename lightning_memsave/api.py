"""The functions of the package: predict, plan, explain, compare and check a training step."""

import inspect
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from torch import Tensor, nn

from lightning_memsave.callbacks.memsave import MemSaveCallback
from lightning_memsave.doctor.training import TrainingCheck, check_step
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.explain.memory_changes import (
    MemoryComparison,
    compare_parameters,
    compare_predictions,
)
from lightning_memsave.measure.parameters import ParameterTable
from lightning_memsave.planning.plan import MemoryPlan
from lightning_memsave.planning.plan_step import budget_of, search_of
from lightning_memsave.prediction.cuda.gpus import Gpu, as_gpu
from lightning_memsave.prediction.predict import predict
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.prediction.training_step import (
    OFF,
    TIME_LIMIT_S,
    MakeOptimizer,
    TrainingStep,
)
from lightning_memsave.prediction.user_code import build_without_data, explained
from lightning_memsave.prediction.what_if import WhatIf, what_if_of
from lightning_memsave.report.explanation import MemoryExplanation, explain_what_if
from lightning_memsave.targets.comparable import Comparable, SavedPrediction, read_comparable
from lightning_memsave.targets.find import load_target
from lightning_memsave.targets.target import Target, read_batch

PLANNED: Mapping[str, Any] = {"budget": "free"}
"""Arguments of `MemSaveCallback` with which everything is open; details of it may be given."""


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
    strategy: Literal["ddp", "fsdp2"] | None = None,
    world_size: int = 1,
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
        strategy: ``"ddp"``, or ``"fsdp2"`` for `FSDP2Strategy`: the first of their processes is
            predicted, with a batch of its own; ``None`` for one process.
        world_size: Number of processes. The others need not be there.
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
            strategy=strategy,
            world_size=world_size,
        )
    )


def plan_memory(
    model: nn.Module | Callable[[], nn.Module] | Target | str,
    batch: Any,
    optimizer: MakeOptimizer | None = None,
    settings: Mapping[str, Any] | MemSaveCallback | None = None,
    *,
    budget: str | float | None = None,
    gpu: str | Gpu | None = None,
    device: Literal["cuda", "cpu"] = "cuda",
    exactness: Literal["bitwise", "rounding", "approximate"] = "approximate",
    loss: Callable[[Any, Any], Tensor] | None = None,
    attention: str | None = None,
    trainer_arguments: Mapping[str, Any] | None = None,
    strategy: Literal["ddp", "fsdp2"] | None = None,
    world_size: int = 1,
    time_limit_s: float = TIME_LIMIT_S,
) -> MemoryPlan:
    """Find the fastest settings that fit a budget of memory, without a GPU.

    Steps of the model with some settings on are recorded on fake tensors, with few of its blocks.
    From these, peak and time follow for any number of recomputed blocks. The fastest plan that fits
    is then predicted whole, and corrected until it does.

    Args:
        model: As for `explain_memory`.
        batch: As for `explain_memory`.
        optimizer: As for `predict_memory`.
        settings: Arguments of `MemSaveCallback` that are fixed; the others are chosen.
        budget: Bytes that the process may use on the device, with the CUDA context: a number, a
            text such as ``"12GiB"``, or a share of ``gpu``; ``None`` or ``"auto"`` is all of it.
        gpu: The GPU, such as ``"RTX 3060"``; its throughput decides what is fast.
        device: Device to plan for; ``"cpu"`` measures the throughput of this machine.
        exactness: How far results may move.
        loss: As for `predict_memory`.
        attention: As for `predict_memory`.
        trainer_arguments: As for `predict_memory`.
        strategy: As for `predict_memory`.
        world_size: As for `predict_memory`.
        time_limit_s: Seconds after which nothing more is predicted.

    Returns:
        The plan, the next best one with other settings, and the frontier.

    Raises:
        ConfigurationError: If an argument is wrong.
        InfeasiblePlanError: If no settings fit; it says what the smallest peak is made of.
        MemsaveError: If the step cannot be predicted.
        TimeoutError: If there is no plan after ``time_limit_s``.

    Note:
        Times are ratios to the unchanged step, estimated from its kernels, not measured.

    Example:
        >>> import torch
        >>> layers = [nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(6)]
        >>> model, batch = nn.Sequential(*layers), torch.ones(16, 32, 32)
        >>> found = plan_memory(
        ...     model, batch, budget="6MiB", device="cpu", exactness="bitwise"
        ... )
        >>> found.plan.device_bytes <= 6 * 2**20, found.plan.exactness
        (True, 'bitwise')
    """
    what_if = make_what_if(
        model,
        batch,
        optimizer,
        settings,
        device=device,
        gpu=gpu,
        loss=loss,
        attention=attention,
        trainer_arguments=trainer_arguments,
        strategy=strategy,
        world_size=world_size,
        time_limit_s=time_limit_s,
        base=PLANNED,
    )
    budget_bytes = budget_of(what_if, budget)
    return search_of(what_if, exactness, time_limit_s).find(budget_bytes)


def explain_memory(
    model: nn.Module | Callable[[], nn.Module] | Target | str,
    batch: Any = None,
    optimizer: MakeOptimizer | None = None,
    settings: Mapping[str, Any] | MemSaveCallback | None = None,
    *,
    device: Literal["cuda", "cpu"] = "cuda",
    gpu: str | Gpu | None = None,
    sequence_axis: int | None = None,
    factors: Collection[str] | None = None,
    remedies: bool = True,
    loss: Callable[[Any, Any], Tensor] | None = None,
    attention: str | None = None,
    trainer_arguments: Mapping[str, Any] | None = None,
    time_limit_s: float | None = TIME_LIMIT_S,
) -> MemoryExplanation:
    """Explain what uses the memory of a model.

    Nothing is trained or allocated: the parameters are counted, and with a batch the training step
    is predicted, unchanged and with one thing changed at a time. So each figure is the difference
    of two predictions, or a count of tensors alive at the peak.

    Args:
        model: A module, a function that returns one, or a text as MODEL of ``memsave predict``,
            such as ``"package.module:Class"`` or the path of a config or checkpoint.
        batch: As for `predict_memory`; with a text as model also sizes such as ``"8x512"``. Without
            a batch only the parameters are explained, also of models that cannot run.
        optimizer: As for `predict_memory`.
        settings: As for `predict_memory`: settings that are already on.
        device: As for `predict_memory`.
        gpu: The GPU that the step should fit, such as ``"T4"`` or ``"12GiB"``.
        sequence_axis: Axis of the batch's tensors that is the sequence; ``None`` finds token ids.
        factors: Names of the factors to compute; ``None`` for all.
        remedies: Whether to look for settings that lower the peak, with about 15 predictions; for a
            GPU that the step does not fit, with a plan.
        loss: As for `predict_memory`.
        attention: As for `predict_memory`.
        trainer_arguments: As for `predict_memory`.
        time_limit_s: For each prediction, as for `predict_memory`.

    Returns:
        The explanation.

    Raises:
        ConfigurationError: If an argument is wrong.

    Note:
        Exceptions of the module on this batch are raised. If it fails only on a changed batch, that
        factor is unknown. Needs about 20 predictions, 6 without remedies.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Embedding(5000, 16), nn.Flatten(), nn.Linear(64, 2))
        >>> explain_memory(model).sentences[0]
        'The embedding table `0` (5,000 x 16) holds 99.8 % of the 80,130 parameters.'
        >>> ids = torch.zeros(8, 4, dtype=torch.long)
        >>> found = explain_memory(model, ids, device="cpu", factors=[])
        >>> found.prediction.peak.input_bytes
        256
    """
    what_if = make_what_if(
        model,
        batch,
        optimizer,
        settings,
        device=device,
        gpu=gpu,
        sequence_axis=sequence_axis,
        loss=loss,
        attention=attention,
        trainer_arguments=trainer_arguments,
        time_limit_s=time_limit_s,
    )
    return explain_what_if(what_if, factors=factors, remedies=remedies)


def compare_memory(
    a: Comparable, b: Comparable, *, labels: tuple[str, str] | None = None
) -> MemoryComparison:
    """Show why the second model, prediction or run needs more memory than the first.

    Models are compared by their parameters, module by module, without running or allocating them.
    Predictions are compared in bytes by category, phase and module; so are the predictions in the
    reports of runs, beside the measured peaks.

    Args:
        a: The first side: a module; a function or class that returns one without arguments; a
            `MemoryPrediction`; a mapping of names to tensors or shapes, such as a ``state_dict``;
            or the path of a Hugging Face config, a YAML file for LightningCLI, a checkpoint, a
            prediction in JSON or a ``memsave_report.json``. Also ``"package.module:Class"``.
        b: The second side.
        labels: Names of the two sides; by default the class or the path.

    Returns:
        The differences, largest first; ``print`` shows them.

    Raises:
        ConfigurationError: If a side cannot be read, or if the two cannot be compared.

    Note:
        Modules are matched by name; an additional prefix on one side does not matter, but a renamed
        module counts as removed and added. Code in a checkpoint is never run
        (``weights_only=True``).

    Example:
        >>> print(compare_memory(nn.Linear(10, 1000), nn.Linear(10, 3000), labels=("old", "new")))
        old -> new
        11,000 -> 33,000 parameters (+22,000, 3.00 times).
        Memory of the parameters: 42.97 KiB -> 128.91 KiB.
        module   before   after  difference  what
        (whole)  11,000  33,000     +22,000  weight 1,000 x 10 -> 3,000 x 10; bias 1,000 -> 3,000
    """
    given: Any = labels
    if given is not None and not (isinstance(given, tuple | list) and len(given) == 2):
        raise ConfigurationError(
            f"`labels={labels!r}` does not name both sides. Write for example "
            '`labels=("before", "after")`.'
        )
    (first, name), (second, other) = read_comparable(a), read_comparable(b)
    names = labels or (name, other)
    if isinstance(first, ParameterTable) and isinstance(second, ParameterTable):
        return compare_parameters(first, second, names)
    if isinstance(first, SavedPrediction) and isinstance(second, SavedPrediction):
        measured = first.measured_bytes, second.measured_bytes
        return compare_predictions(first.prediction, second.prediction, names, measured)
    model, step = names if isinstance(first, ParameterTable) else names[::-1]
    raise ConfigurationError(
        f"`{model}` is the parameters of a model and `{step}` a prediction: they cannot be "
        "compared. Compare two of the same kind: predict the model with "
        "`predict_memory(model, batch)`, or pass the model of the other side."
    )


def check_training(
    model: str | os.PathLike[str] | Target | nn.Module | Callable[[], nn.Module],
    optimizer: MakeOptimizer | None = None,
    settings: Mapping[str, Any] | MemSaveCallback | None = None,
    *,
    trainer_arguments: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> TrainingCheck:
    """Check a model and its training for traps that cost memory or time.

    The model, its optimizers, environment variables and installed packages are looked at, after
    the start of a fit on fake tensors. No batch and no GPU is needed, and no training step runs.

    Args:
        model: A LightningModule, any other module, or a function without arguments that returns
            one; or the name of one, as for ``memsave doctor``.
        optimizer: For modules that are not LightningModules: a class or function that gets the
            parameters. Default: AdamW.
        settings: Arguments of `MemSaveCallback` by name, or a `MemSaveCallback`; in a mapping,
            techniques that are not named are off. Default: those of the YAML file; without a
            callback, its settings are not checked.
        trainer_arguments: Arguments of the Trainer, such as ``precision``, added to those of the
            YAML file.
        environment: Environment variables. Default: those of this process.

    Returns:
        The problems.

    Raises:
        ConfigurationError: If arguments are wrong, or the module cannot be created or copied.

    Note:
        What your code does in a step is not looked at: `GPUMemoryMonitor` finds memory that grows
        while it runs. The hooks of the module up to ``on_fit_start`` run, except for
        ``prepare_data``.

    Example:
        >>> import torch
        >>> check = check_training(nn.Linear(2, 2), environment={"CUDA_LAUNCH_BLOCKING": "1"})
        >>> [problem.check for problem in check.problems]
        ['debug_settings']
    """
    make, settings, trainer_arguments = _read_model(model, settings, trainer_arguments)
    if isinstance(make, Target):
        make.module_without_data  # noqa: B018 - says what is missing
        make = make.make
    step = TrainingStep(
        make,
        None,
        MemSaveCallback,
        read_settings(settings),
        optimizer,
        trainer_arguments=trainer_arguments,
    )
    return check_step(step, has_callback=settings is not None, environment=environment)


def make_what_if(
    model: Any,
    batch: Any = None,
    optimizer: Any = None,
    settings: Mapping[str, Any] | MemSaveCallback | None = None,
    *,
    device: str = "cuda",
    gpu: str | Gpu | None = None,
    sequence_axis: int | None = None,
    base: Mapping[str, Any] = OFF,
    **options: Any,
) -> WhatIf:
    """Read the arguments of `explain_memory`; predicts nothing yet."""
    given = options.pop("trainer_arguments", None)
    model, settings, trainer_arguments = _read_model(model, settings, given)
    source: Any = model
    if isinstance(model, Target):
        if isinstance(batch, str):
            batch, _ = read_batch(batch, model)
        source, model = model.parameter_source(), model.make
    elif not isinstance(model, nn.Module):
        source = build_without_data(model)
    if isinstance(batch, str):
        batch, _ = read_batch(batch)
    elif inspect.isroutine(batch):
        batch = batch()
    step = TrainingStep(
        model,
        batch,
        MemSaveCallback,
        read_settings(settings, base),
        optimizer,
        device=device,
        gpu=as_gpu(gpu),
        trainer_arguments=trainer_arguments,
        **options,
    )
    return what_if_of(step, source, sequence_axis)


# Settings and Trainer arguments are those of a file, unless they are given.
def _read_model(
    model: Any,
    settings: Mapping[str, Any] | MemSaveCallback | None,
    trainer_arguments: Mapping[str, Any] | None,
) -> tuple[Any, Mapping[str, Any] | MemSaveCallback | None, dict[str, Any]]:
    if isinstance(model, str | os.PathLike):
        model = load_target(model)
    given = dict(trainer_arguments or {})
    if isinstance(model, Target):
        given = {**model.trainer_arguments, **given}
        if settings is None and model.settings is not None:
            settings = MemSaveCallback(**with_instances(model.settings))
    return model, settings, given


def read_settings(
    settings: Mapping[str, Any] | MemSaveCallback | None, base: Mapping[str, Any] = OFF
) -> Mapping[str, Any]:
    """Return arguments of `MemSaveCallback`; a mapping with a preset lacks those in ``base``."""
    if isinstance(settings, MemSaveCallback):
        return settings.arguments
    if settings is not None and not isinstance(settings, Mapping):
        return settings  # type: ignore[unreachable] # `TrainingStep` refuses it
    settings = settings or {}
    return {**({} if "preset" in settings else base), **settings}


def with_instances(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Create the techniques that settings from YAML describe by their ``class_path``."""
    if settings.get("preset") is False:  # YAML's `off`, which LightningCLI passes as text
        settings = {**settings, "preset": "off"}
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
