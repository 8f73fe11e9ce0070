"""The command `memsave`: picks the subcommand and turns errors into one message."""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import lightning_memsave
from lightning_memsave.cli import compare, convert, env, explain, predict
from lightning_memsave.cli.arguments import StepError
from lightning_memsave.errors import MemsaveError


class Command(Protocol):
    """What the module of a subcommand has; it imports torch only when it runs."""

    SUMMARY: str
    """One line."""
    EXAMPLES: str
    """Shown under ``--help``, one command a line."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments.

        Args:
            parser: Of this subcommand.
        """

    def run(self, arguments: argparse.Namespace) -> int | None:
        """Do it, and print the result.

        Args:
            arguments: As parsed.

        Returns:
            The exit status; ``None`` is 0.
        """


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "predict": predict,
        "explain": explain,
        "compare": compare,
        "convert": convert,
        "env": env,
    }
)
# Of these 1 is an answer, such as "does not fit", and must not be taken for a failure.
_ANSWERING = ("predict", "explain", "compare")
_ANSWERS = (
    "0; 1 if the step does not fit a card that was named; 2 if what was given cannot be used; "
    "3 if the\n  training step fails or does not end"
)
_INTERRUPTED = 130
_TAKE_SIZES = ("--batch", "--gpu", "--time-limit")


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        args: What was typed after ``memsave``; ``None`` takes it from the process.

    Returns:
        The exit status. Of ``predict``, ``explain`` and ``compare``: 0; 1 if a step does not fit
        a card that was named; 2 if what was given cannot be used; 3 if the training step fails or
        does not end.
        Of ``convert`` and ``env``: 0, or 1 if it could not be done. Wrong arguments exit with 2 at
        once, Ctrl-C with 130.
    """
    arguments = _parser().parse_args(_joined(sys.argv[1:] if args is None else args))
    try:
        return COMMANDS[arguments.command].run(arguments) or 0
    except StepError as error:
        return _failed(arguments.command, error, 3)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (MemsaveError, OSError) as error:
        status = 2 if arguments.command in _ANSWERING else 1
        return _failed(arguments.command, error, status)


# argparse takes `-1x8` for an option, and says nothing of sizes.
def _joined(args: Sequence[str]) -> list[str]:
    joined: list[str] = []
    for arg in args:
        if joined and joined[-1] in _TAKE_SIZES and re.match(r"-[\d.]", arg):
            joined[-1] += f"={arg}"
        else:
            joined.append(arg)
    return joined


def _failed(command: str, error: Exception, status: int) -> int:
    print(f"memsave {command}: {error}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="memsave",
        description="Train models that do not fit: tools around lightning-memsave.",
        allow_abbrev=False,
    )
    version = f"lightning-memsave {lightning_memsave.__version__}"
    parser.add_argument("--version", action="version", version=version)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        examples = "".join(f"\n  {line}" for line in command.EXAMPLES.splitlines())
        statuses = _ANSWERS if name in _ANSWERING else "0; 1 if it could not be done"
        subparser = subparsers.add_parser(
            name,
            help=command.SUMMARY,
            description=command.SUMMARY,
            epilog=f"examples:{examples}\n\nexit status:\n  {statuses}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_arguments(subparser)
    return parser
