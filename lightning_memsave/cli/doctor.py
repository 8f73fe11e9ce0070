"""``memsave doctor``: check a model and its training for traps that cost memory or time."""

import argparse
import contextlib
import json
import sys
from dataclasses import replace

from lightning_memsave.cli.arguments import (
    add_model_arguments,
    add_settings_arguments,
    callback_settings,
    strategy_notes,
)

SUMMARY = "Check a model and its training for traps that cost memory or time."
EXAMPLES = """\
memsave doctor config.yaml
memsave doctor package.module:LitModel --arg depth=24
memsave doctor train.py:LitModel --memsave --precision bf16-mixed
memsave doctor config.yaml --json > problems.json"""
HAS_PROBLEMS = 1
"""Exit status if there is a problem."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="MODEL", help="as for `memsave predict`")
    add_model_arguments(parser)
    add_settings_arguments(parser.add_argument_group("training"))
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Check and print; returns 1 if there is a problem."""
    from lightning_memsave.api import check_training
    from lightning_memsave.targets.code import parse_arguments
    from lightning_memsave.targets.find import load_target

    # What the code prints must not end up in the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        target = load_target(
            arguments.target,
            model=arguments.model,
            arguments=parse_arguments(arguments.arg),
            task=arguments.task,
        )
        settings = callback_settings(target.settings, arguments)
        has_callback = settings != {"preset": "off"}
        check = check_training(target, settings=settings if has_callback else None)
        check = replace(check, notes=(*check.notes, *strategy_notes(target.trainer_arguments)))
    if arguments.json:
        print(json.dumps({"target": target.name, **check.to_dict()}, indent=2))
    else:
        print(check)
    return HAS_PROBLEMS if check.problems else 0
