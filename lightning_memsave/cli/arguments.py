"""What `predict`, `explain` and `compare` are about: model, batch, settings and cards."""

import argparse
import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_memsave.errors import ConfigurationError, MemsaveError

DOES_NOT_FIT = 1
"""Exit status of a step that does not fit a card."""

_TIME_LIMIT_S = 300.0


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what belongs to the naming of a model.

    Args:
        parser: Of a subcommand.
    """
    group = parser.add_argument_group("model")
    group.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="argument of the class or function, or what to change in a config; repeat it",
    )
    group.add_argument(
        "--model",
        metavar="MODULE:CLASS",
        help="the code, where a checkpoint or a YAML file does not name it",
    )
    group.add_argument(
        "--task", help="of a Hugging Face config that names no architecture, such as masked_lm"
    )


def add_step_arguments(parser: argparse.ArgumentParser, *, needs_batch: bool) -> None:
    """Declare what belongs to a training step.

    Args:
        parser: Of a subcommand.
        needs_batch: Whether there is nothing to do without a batch.
    """
    group = parser.add_argument_group("training step")
    group.add_argument(
        "--batch",
        required=needs_batch,
        metavar="SIZES",
        help="samples x tokens of a Hugging Face model, such as 8x512, or each tensor: "
        "'x=float32[8,3,224,224],y=int64[8]<10', or 'float32[8,10],int64[8]' for a tuple",
    )
    group.add_argument(
        "--gpu",
        action="append",
        default=[],
        metavar="NAME",
        help="does it fit? T4, A100-40GB, 'RTX 3060', or a size such as 12GiB; repeat it, or "
        "separate with commas",
    )
    group.add_argument(
        "--memsave",
        action=argparse.BooleanOptionalAction,
        help="train with `MemSaveCallback()`; without it too where the YAML file has it: "
        "--no-memsave",
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of MemSaveCallback, such as activation_checkpointing=all, as text or as "
        "JSON: 'force_8bit=emb*' or 'force_8bit=[\"emb*\", \"head*\"]'; repeat it",
    )
    group.add_argument("--precision", help="such as bf16-mixed; the same as --set precision=...")
    group.add_argument(
        "--optimizer",
        metavar="NAME",
        help="for a model that is no LightningModule: torch.optim.SGD, or module:function; "
        "without it AdamW",
    )
    group.add_argument(
        "--optimizer-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of that optimizer; repeat it",
    )
    group.add_argument(
        "--attention",
        choices=("flash", "efficient", "math"),
        help="CUDA's kernel; without it the one that torch would choose",
    )
    group.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="whose kernels; default: cuda"
    )
    group.add_argument(
        "--time-limit",
        type=_seconds,
        default=_TIME_LIMIT_S,
        metavar="SECONDS",
        help=f"of a prediction, after which it is given up; default: {_TIME_LIMIT_S:g}",
    )


def refuse_step_arguments(arguments: argparse.Namespace, fix: str) -> None:
    """Refuse what is about a step where there is none.

    Args:
        arguments: As parsed.
        fix: What to do instead, as a clause.

    Raises:
        ConfigurationError: If there is such an argument.
    """
    for name in ("gpu", "memsave", "set", "precision", "attention"):
        if getattr(arguments, name) not in (None, []):
            raise ConfigurationError(
                f"--{name.replace('_', '-')} is about a training step, and there is none: {fix}."
            )


def whole_number(text: str) -> int:
    """Read a number that is not negative.

    Args:
        text: What was typed.

    Returns:
        The number.

    Raises:
        argparse.ArgumentTypeError: If it is none.
    """
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def show_notes(notes: Sequence[str], page: str | None) -> None:
    """Print what is left to say.

    Args:
        notes: One line each.
        page: The path of the page that was written, if one was.
    """
    from rich.text import Text

    from lightning_memsave.report.text import show

    lines = [*notes, *([] if page is None else [f"page: {page}"])]
    if lines:
        show(Text(""), *map(Text, lines))


class StepError(MemsaveError):
    """The training step of the user's model failed on tensors without data."""


@contextlib.contextmanager
def running_code_of(name: str) -> Iterator[None]:
    """Run the user's model: its output goes to standard error, its exceptions become one line.

    Args:
        name: Of the model, as it was given.

    Yields:
        Nothing.

    Raises:
        MemsaveError: If the code raises one, or if we do.
        StepError: If the code raises anything else, or ends the process.
    """
    # What the code prints must not end up in the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            yield
        except MemsaveError:
            raise
        except TimeoutError as error:
            raise StepError(f"The training step of `{name}` does not end: {error}.") from error
        except (Exception, SystemExit) as error:
            raise StepError(_in_one_line(name, error)) from error


def _in_one_line(name: str, failure: BaseException) -> str:
    from lightning_memsave.targets.code import explained

    fix = "Does this batch go with the model? Name its tensors with --batch as the step takes them."
    try:
        with explained(f"The training step of `{name}`", fix):
            raise failure
    except ConfigurationError as error:
        return str(error)


if TYPE_CHECKING:
    from lightning_memsave.prediction.cuda.gpus import Gpu, GpuFit
    from lightning_memsave.prediction.result import MemoryPrediction
    from lightning_memsave.targets.batches import BatchSpec
    from lightning_memsave.targets.target import Target

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
        from lightning_memsave.prediction.cuda.gpus import GpuFit

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
    from lightning_memsave.prediction.cuda.gpus import parse_gpu
    from lightning_memsave.targets.code import find_optimizer, parse_arguments
    from lightning_memsave.targets.find import load_target
    from lightning_memsave.targets.target import make_batch_spec

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
    from lightning_memsave.targets.code import parse_arguments

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
