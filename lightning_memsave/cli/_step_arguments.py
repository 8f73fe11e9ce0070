"""Arguments that `predict`, `explain` and `compare` share."""

import argparse
import math
from collections.abc import Sequence

from lightning_memsave.errors import ConfigurationError

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

    from lightning_memsave.planning.prediction_text import show

    lines = [*notes, *([] if page is None else [f"page: {page}"])]
    if lines:
        show(Text(""), *map(Text, lines))
