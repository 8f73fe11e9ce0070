"""Arguments that describe model, batch, settings and GPUs, shared by several subcommands."""

import argparse
import ast
import contextlib
import math
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lightning_memsave.errors import ConfigurationError, MemsaveError

DOES_NOT_FIT = 1
"""Exit status if the step does not fit a GPU."""

_TIME_LIMIT_S = 300.0
REPEATED: dict[str, Any] = {"action": "append", "default": []}


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--arg",
        **REPEATED,
        metavar="NAME=VALUE",
        help="argument of the class or function, or a change to a config; can be repeated",
    )
    group.add_argument(
        "--model",
        metavar="MODULE:CLASS",
        help="class or function of the model, if a checkpoint or YAML file does not name it",
    )
    group.add_argument(
        "--task", help="task of a Hugging Face config without architectures, such as masked_lm"
    )


def add_step_arguments(
    parser: argparse.ArgumentParser, *, needs_batch: bool, limited: str = "each prediction"
) -> None:
    group = parser.add_argument_group("training step")
    group.add_argument(
        "--batch",
        required=needs_batch,
        metavar="SIZES",
        help="samples x tokens for a Hugging Face model, such as 8x512; or dtype and sizes of each "
        "tensor: 'x=float32[8,3,224,224],y=int64[8]<10', without names for a tuple, 'int64[8,512],'"
        " for one of a single tensor; or a function that returns the batch: module:function, "
        "file.py:function",
    )
    group.add_argument(
        "--gpu",
        **REPEATED,
        metavar="NAME",
        help="a GPU that the step should fit: T4, A100-40GB, 'RTX 3060', or a size such as 12GiB; "
        "can be repeated, or separated with commas",
    )
    add_settings_arguments(group)
    group.add_argument(
        "--optimizer",
        metavar="NAME",
        help="for a model that is not a LightningModule: torch.optim.SGD, or module:function; "
        "default: AdamW",
    )
    group.add_argument(
        "--optimizer-arg",
        **REPEATED,
        metavar="NAME=VALUE",
        help="argument of that optimizer; can be repeated",
    )
    group.add_argument(
        "--attention",
        choices=("flash", "efficient", "math"),
        help="CUDA's attention kernel; default: the one that torch would choose",
    )
    group.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="device to predict for; default: cuda",
    )
    group.add_argument(
        "--time-limit",
        type=_seconds,
        default=_TIME_LIMIT_S,
        metavar="SECONDS",
        help=f"stop {limited} after so many seconds; default: {_TIME_LIMIT_S:g}",
    )


def add_settings_arguments(parser: "argparse._ActionsContainer") -> None:
    parser.set_defaults(base={"preset": "off"})  # what is trained with without `--memsave`
    parser.add_argument(
        "--memsave",
        action=argparse.BooleanOptionalAction,
        help="train with `MemSaveCallback()`; --no-memsave ignores the callback in a YAML file",
    )
    parser.add_argument(
        "--set",
        **REPEATED,
        metavar="NAME=VALUE",
        help="argument of MemSaveCallback, such as activation_checkpointing=all, as text or "
        'JSON, techniques with class_path: \'optimizer={"class_path": '
        '"lightning_memsave.LowBitOptimizer", "init_args": {"force_8bit": ["emb*"]}}\'; '
        "can be repeated",
    )
    parser.add_argument("--precision", help="such as bf16-mixed; same as --set precision=...")


def refuse_step_arguments(arguments: argparse.Namespace, fix: str) -> None:
    """Refuse arguments of a training step if there is none; ``fix`` is a clause."""
    for name in ("gpu", "memsave", "set", "precision", "attention"):
        if getattr(arguments, name) not in (None, []):
            raise ConfigurationError(f"--{name.replace('_', '-')} needs a training step: {fix}.")


def whole_number(text: str) -> int:
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


def show_notes(notes: Sequence[str], page: str | None = None) -> None:
    from rich.text import Text

    from lightning_memsave.report.text import show

    lines = [*notes, *([] if page is None else [f"page: {page}"])]
    if lines:
        show(Text(""), *map(Text, lines))


# Options that are something else than the argument of `MemSaveCallback` with their name.
_NO_SETTINGS = ("attention", "optimizer")


def as_typed(message: str, arguments: argparse.Namespace) -> str:
    """Write arguments of Python, such as `budget="12GiB"`, as options; not those of a YAML file."""

    def option(found: re.Match[str]) -> str:
        name, text = found.groups()
        if name in _NO_SETTINGS or getattr(arguments, name, None) is None:
            return found[0]
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):  # an object
            return found[0]
        is_plain = isinstance(value, str | int | float)
        return f"--{name.replace('_', '-')} {shlex.quote(str(value))}" if is_plain else found[0]

    return re.sub(r"`(\w+)=([^`]*)`", option, message)


class StepError(MemsaveError):
    """The training step of the user's model failed on fake tensors."""


@contextlib.contextmanager
def running_code_of(name: str) -> Iterator[None]:
    """Run the user's model: its output goes to standard error, its errors become `StepError`."""
    # What the code prints must not end up in the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            yield
        except MemsaveError:
            raise
        except TimeoutError as error:
            raise StepError(
                f"The training step of `{name}` does not end: {error}. If it is only slow, use a "
                "longer --time-limit."
            ) from error
        except (Exception, SystemExit) as error:
            raise StepError(_in_one_line(name, error)) from error


def _in_one_line(name: str, failure: BaseException) -> str:
    from lightning_memsave.prediction.user_code import explained

    fix = (
        "Check that --batch lists the tensors that the model expects, with their dtypes and sizes."
    )
    try:
        with explained(f"The training step of `{name}`", fix):
            raise failure
    except ConfigurationError as error:
        return str(error)


if TYPE_CHECKING:
    from lightning_memsave.prediction.cuda.gpus import Gpu
    from lightning_memsave.prediction.result import GpuFit, MemoryPrediction
    from lightning_memsave.prediction.training_step import TrainingStep
    from lightning_memsave.targets.target import Target

_ONE_DEVICE = (None, "auto", "ddp", "single_device")


def read_gpus(arguments: argparse.Namespace) -> tuple["Gpu", ...]:
    from lightning_memsave.prediction.cuda.gpus import parse_gpu

    return tuple(parse_gpu(part) for text in arguments.gpu for part in text.split(","))


@dataclass(frozen=True)
class Case:
    name: str
    prediction: "MemoryPrediction"
    fits: tuple["GpuFit", ...]
    notes: tuple[str, ...] = ()
    is_saved: bool = False


def predict_on(
    gpus: Sequence["Gpu"],
    name: str,
    step: "TrainingStep",
    settings: Mapping[str, Any] | None = None,
) -> tuple["MemoryPrediction", tuple["GpuFit", ...]]:
    from lightning_memsave.api import with_instances
    from lightning_memsave.prediction.predict import predict

    step = _with_settings(step, with_instances(settings or {}))
    found: dict[object, MemoryPrediction] = {}
    fits = []
    for gpu in gpus or (None,):
        key = kernels_of(gpu)
        if key not in found:
            with running_code_of(name):
                found[key] = predict(replace(step, gpu=gpu))
        if gpu is not None:
            fits.append(found[key].fits(gpu))
    return next(iter(found.values())), tuple(fits)


def write_page_for(
    path: str, predictions: Any, fits: Sequence["GpuFit"], *, title: str, **more: Any
) -> None:
    from lightning_memsave.report.page import write_page

    size, name = (fits[0].gpu.total_bytes, fits[0].gpu.known_name) if fits else (None, "")
    write_page(path, predictions, title=title, device_capacity_bytes=size, device_name=name, **more)


# GPUs of one generation run the same kernels, but for those of 8.6 and 8.9 beside 8.0.
def kernels_of(gpu: "Gpu | None") -> object:
    """Give a key that is equal for GPUs whose predictions are equal."""
    major, minor = (gpu and gpu.compute_capability) or (8, 0)
    return gpu and (major, minor > 0, gpu.has_bf16)


# A precision in the settings replaces that of the target's Trainer.
def _with_settings(step: "TrainingStep", settings: Mapping[str, Any]) -> "TrainingStep":
    step, given = step.with_settings(settings), dict(step.trainer_arguments)
    if step.settings.get("precision") not in (None, "auto"):
        given.pop("precision", None)
    return replace(step, trainer_arguments=given)


def read_step(
    name: str, arguments: argparse.Namespace
) -> tuple["Target", str | None, "TrainingStep"]:
    from lightning_memsave.callbacks.memsave import MemSaveCallback
    from lightning_memsave.prediction.training_step import TrainingStep
    from lightning_memsave.targets.code import find_optimizer, parse_arguments
    from lightning_memsave.targets.find import load_target
    from lightning_memsave.targets.target import read_batch

    gpus = read_gpus(arguments)
    _check_device(arguments)
    with running_code_of(name):
        target = load_target(
            name,
            model=arguments.model,
            arguments=parse_arguments(arguments.arg),
            task=arguments.task,
        )
        batch = described = None
        if arguments.batch is not None:
            if not target.can_build:
                target.build()  # says what is missing
            batch, described = read_batch(arguments.batch, target)
        optimizer = find_optimizer(arguments.optimizer, arguments.optimizer_arg)
        if optimizer is not None:
            _check_optimizer(target)
        step = TrainingStep(
            target.make,
            batch,
            MemSaveCallback,
            optimizer=optimizer,
            trainer_arguments=target.trainer_arguments,
            device=arguments.device,
            gpu=gpus[0] if gpus else None,
            attention=arguments.attention,
            time_limit_s=arguments.time_limit,
        )
        step = _with_settings(step, callback_settings(target.settings, arguments))
    return target, described, step


def _check_device(arguments: argparse.Namespace) -> None:
    for option in ("gpu", "attention"):
        if arguments.device == "cpu" and getattr(arguments, option):
            raise ConfigurationError(
                f"--{option} is for CUDA and conflicts with --device=cpu. Remove one of the two."
            )


def _check_optimizer(target: "Target") -> None:
    from lightning_memsave.prediction.wrapped_module import is_lightning

    module = target.module_without_data
    if is_lightning(module):
        raise ConfigurationError(
            f"--optimizer is for models without one, but `{type(module).__name__}` has its own in "
            "`configure_optimizers`. Remove it; for the 8-bit form of that optimizer write "
            "--set optimizer=8bit."
        )


def read_settings(pairs: Sequence[str]) -> dict[str, Any]:
    from lightning_memsave.targets.code import parse_arguments

    return parse_arguments(pairs)


def callback_settings(
    found: Mapping[str, Any] | None, arguments: argparse.Namespace
) -> dict[str, Any]:
    from lightning_memsave.api import with_instances
    from lightning_memsave.callbacks.memsave import MemSaveCallback

    given = read_settings(arguments.set)
    precision = arguments.precision
    if precision is not None and str(given.setdefault("precision", precision)) != precision:
        raise ConfigurationError(
            f"--precision={precision} and --set precision={given['precision']} "
            "disagree. Remove one of the two."
        )
    base = {} if "preset" in given else arguments.base
    is_wanted = arguments.memsave or (found is not None and arguments.memsave is None)
    base = {**MemSaveCallback().arguments, **(found or {})} if is_wanted else base
    return with_instances({**base, **given})


def notes_of(target: "Target") -> tuple[str, ...]:
    return (*target.notes, *strategy_notes(target.trainer_arguments))


def strategy_notes(found: Mapping[str, Any]) -> list[str]:
    strategy, notes = found.get("strategy"), []
    if strategy not in _ONE_DEVICE:
        name = strategy.get("class_path") if isinstance(strategy, dict) else strategy
        notes.append(f"`strategy: {name}` is ignored: everything is assumed to be on one device")
    return notes
