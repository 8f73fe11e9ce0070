"""What `predict`, `explain` and `compare` are about: model, batch, settings and cards."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_memsave.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_memsave.analysis.targets import BatchSpec, Target
    from lightning_memsave.planning.gpu_fit import GpuFit
    from lightning_memsave.planning.gpus import Gpu
    from lightning_memsave.planning.prediction import MemoryPrediction

_PATTERNS = ("keep_32bit", "force_8bit")
_ONE_DEVICE = (None, "auto", "ddp", "single_device")


@dataclass(frozen=True)
class Subject:
    """A model and its training step.

    Args:
        target: The model.
        batch: The batch, if one was given.
        settings: Of `MemSaveCallback`.
        trainer_arguments: Of the Trainer.
        optimizer: For a model that is no LightningModule; ``None`` for AdamW.
        device: ``"cuda"`` or ``"cpu"``.
        attention: CUDA's attention kernel.
        gpus: The cards that were named.
        time_limit_s: Of a prediction.
        notes: What was found and is not used, one line each.
    """

    target: "Target"
    batch: "BatchSpec | None"
    settings: Mapping[str, Any] = field(default_factory=dict)
    trainer_arguments: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Callable[..., Any] | None = None
    device: str = "cuda"
    attention: str | None = None
    gpus: tuple["Gpu", ...] = ()
    time_limit_s: float | None = None
    notes: tuple[str, ...] = ()

    def predict(
        self, gpu: "Gpu | None" = None, settings: Mapping[str, Any] | None = None
    ) -> "MemoryPrediction":
        """Predict the step.

        Args:
            gpu: The card that is meant, if one is.
            settings: What to set in addition.

        Returns:
            The prediction.
        """
        from lightning_memsave.analysis.predict import predict_memory
        from lightning_memsave.cli._failures import running_code_of

        settings = {**self.settings, **(settings or {})}

        with running_code_of(self.target.name):
            return predict_memory(
                self.target.build,
                self.make_batch(),
                self.optimizer,
                settings,
                device="cpu" if self.device == "cpu" else "cuda",
                gpu=gpu,
                attention=self.attention,
                trainer_arguments=self.trainer_arguments_with(settings),
                time_limit_s=self.time_limit_s,
            )

    def trainer_arguments_with(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Give the arguments of the Trainer that go with settings.

        Args:
            settings: Of `MemSaveCallback`.

        Returns:
            The arguments, without a precision where the settings have one.
        """
        is_set = settings.get("precision") not in (None, "auto")
        return {
            n: v for n, v in self.trainer_arguments.items() if not (is_set and n == "precision")
        }

    def make_batch(self) -> Any:
        """Make the batch, with large tensors on the meta device; ``None`` if none was given."""
        return None if self.batch is None else self.batch.build_for_prediction()

    def predict_on_cards(
        self, settings: Mapping[str, Any] | None = None
    ) -> tuple["MemoryPrediction", tuple["GpuFit", ...]]:
        """Predict the step for each card that was named.

        Args:
            settings: What to set in addition.

        Returns:
            The prediction for the first card, or for none in particular; and what each card has.
        """
        from lightning_memsave.planning.gpu_fit import GpuFit

        # GPUs of one generation run the same kernels, but for those of 8.6 and 8.9 beside 8.0.
        found: dict[object, MemoryPrediction] = {}
        fits = []
        for gpu in self.gpus or (None,):
            major, minor = (gpu and gpu.compute_capability) or (8, 0)
            key = gpu and (major, minor > 0, gpu.has_bf16)
            if key not in found:
                found[key] = self.predict(gpu, settings)
            if gpu is not None:
                fits.append(GpuFit.of(gpu, found[key]))
        return next(iter(found.values())), tuple(fits)


def read_subject(name: str, arguments: argparse.Namespace) -> Subject:
    """Find the model that is named, and what is to be known about its step.

    Args:
        name: Of the model.
        arguments: As parsed.

    Returns:
        All of it.

    Raises:
        ConfigurationError: If something of it cannot be.
    """
    from lightning_memsave.analysis.targets import load_target, make_batch_spec, parse_arguments
    from lightning_memsave.cli._failures import running_code_of
    from lightning_memsave.cli._optimizers import find_optimizer
    from lightning_memsave.planning.gpus import parse_gpu

    gpus = tuple(parse_gpu(part) for text in arguments.gpu for part in text.split(","))
    _check_device(arguments)
    with running_code_of(name):
        target = load_target(
            name,
            model=arguments.model,
            arguments=parse_arguments(arguments.arg),
            task=arguments.task,
        )
        batch = None
        if arguments.batch is not None:
            if not target.can_build:
                target.build()  # says what is missing
            batch = make_batch_spec(arguments.batch, target)
        optimizer = find_optimizer(arguments.optimizer, arguments.optimizer_arg)
        if optimizer is not None:
            _check_optimizer(target)
        settings = _settings(target.settings, arguments)
    return Subject(
        target,
        batch,
        settings,
        target.trainer_arguments,
        optimizer,
        arguments.device,
        arguments.attention,
        gpus,
        arguments.time_limit,
        (*target.notes, *_strategy_notes(target.trainer_arguments)),
    )


def _check_device(arguments: argparse.Namespace) -> None:
    for option in ("gpu", "attention"):
        if arguments.device == "cpu" and getattr(arguments, option):
            raise ConfigurationError(
                f"--{option} is about CUDA, and --device=cpu is not. Remove one of the two."
            )


def _check_optimizer(target: "Target") -> None:
    module = target.module_without_data
    if any(cls.__name__ == "LightningModule" for cls in type(module).__mro__):
        raise ConfigurationError(
            f"--optimizer is for models without one, and `{type(module).__name__}` configures its "
            "own in `configure_optimizers`. Remove it; for the 8-bit form of that optimizer write "
            "--set optimizer=8bit."
        )


def read_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """Read ``NAME=VALUE`` of arguments of `MemSaveCallback`; one pattern need not be a list."""
    from lightning_memsave.analysis.targets import parse_arguments

    given = parse_arguments(pairs)
    single = {name: (given[name],) for name in _PATTERNS if isinstance(given.get(name), str)}
    return given | single


def _settings(found: Mapping[str, Any] | None, arguments: argparse.Namespace) -> dict[str, Any]:
    from lightning_memsave.analysis.predict import with_instances
    from lightning_memsave.callbacks.memsave import MemSaveCallback

    given = read_settings(arguments.set)
    precision = arguments.precision
    if precision is not None and str(given.setdefault("precision", precision)) != precision:
        raise ConfigurationError(
            f"--precision={precision} and --set precision={given['precision']} "
            "disagree. Remove one of the two."
        )
    if arguments.memsave or (found is not None and arguments.memsave is None):
        given = {**MemSaveCallback().arguments, **(found or {}), **given}
    return with_instances(given)


def _strategy_notes(found: Mapping[str, Any]) -> list[str]:
    strategy, notes = found.get("strategy"), []
    if strategy not in _ONE_DEVICE:
        name = strategy.get("class_path") if isinstance(strategy, dict) else strategy
        notes.append(f"`strategy: {name}` is not used: one device is assumed to hold everything")
    return notes
