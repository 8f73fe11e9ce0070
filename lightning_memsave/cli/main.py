"""The command `memsave`: run a subcommand, and print errors as one message."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import lightning_memsave
from lightning_memsave.cli import compare, convert, doctor, env, explain, plan, predict
from lightning_memsave.cli.arguments import StepError, as_typed
from lightning_memsave.core.names import without_controls
from lightning_memsave.errors import MemsaveError

# Each has SUMMARY, EXAMPLES, `add_arguments` and `run`, and imports torch only in the last.
_MODULES = (predict, explain, compare, plan, doctor, convert, env)
COMMANDS: Mapping[str, Any] = MappingProxyType(
    {module.__name__.rpartition(".")[2]: module for module in _MODULES}
)
_FITS = (
    "0 done; 1 the step does not fit a --gpu; 2 wrong or unusable arguments;\n"
    "  3 the training step fails or does not end"
)
# Their status 1 is an answer; errors have other statuses.
_ANSWERS = {
    "predict": _FITS,
    "explain": _FITS,
    "compare": _FITS,
    "plan": (
        "0 done; 1 no plan fits the budget or a --gpu; 2 wrong or unusable arguments;\n"
        "  3 the training step fails or does not end"
    ),
    "doctor": "0 done; 1 there is a problem; 2 wrong or unusable arguments",
}
_INTERRUPTED = 130


def main(args: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(args)
    try:
        return COMMANDS[arguments.command].run(arguments) or 0
    except StepError as error:
        return _failed(arguments, error, 3)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (MemsaveError, OSError) as error:
        status = 2 if arguments.command in _ANSWERS else 1
        return _failed(arguments, error, status)


def _failed(arguments: argparse.Namespace, error: Exception, status: int) -> int:
    said = without_controls(as_typed(str(error), arguments))
    print(f"memsave {arguments.command}: {said}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="memsave",
        description="Predict, plan, explain, compare and check the memory of training, without a "
        "GPU.",
        allow_abbrev=False,
    )
    version = f"lightning-memsave {lightning_memsave.__version__}"
    parser.add_argument("--version", action="version", version=version)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        examples = "".join(f"\n  {line}" for line in command.EXAMPLES.splitlines())
        statuses = _ANSWERS.get(name, "0 done; 1 failed; 2 wrong arguments")
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
