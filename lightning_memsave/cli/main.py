"""The command `memsave`: picks the subcommand and turns errors into one message."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import lightning_memsave
from lightning_memsave.cli import convert, env
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

    def run(self, arguments: argparse.Namespace) -> None:
        """Do it, and print the result.

        Args:
            arguments: As parsed.
        """


COMMANDS: Mapping[str, Command] = MappingProxyType({"convert": convert, "env": env})


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        args: What was typed after ``memsave``; ``None`` takes it from the process.

    Returns:
        The exit status: 0, or 1 if it could not be done. Wrong arguments exit with 2 at once.
    """
    arguments = _parser().parse_args(args)
    try:
        COMMANDS[arguments.command].run(arguments)
    except (MemsaveError, OSError) as error:
        print(f"memsave {arguments.command}: {error}", file=sys.stderr)
        return 1
    return 0


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
        subparser = subparsers.add_parser(
            name,
            help=command.SUMMARY,
            description=command.SUMMARY,
            epilog=f"examples:{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_arguments(subparser)
    return parser
