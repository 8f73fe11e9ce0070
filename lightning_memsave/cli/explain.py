"""``memsave explain``: what uses the memory and what would help, or why it ran out."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_memsave.cli.arguments import (
    DOES_NOT_FIT,
    add_model_arguments,
    add_step_arguments,
    notes_of,
    read_gpus,
    read_step,
    refuse_step_arguments,
    running_code_of,
    show_notes,
)
from lightning_memsave.core.names import without_controls
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.units import MIB

if TYPE_CHECKING:
    from lightning_memsave.oom.diagnosis import Diagnosis

SUMMARY = "Show what uses the memory of a model and its training, and what would lower it."
EXAMPLES = """\
memsave explain config.json
memsave explain package.module:LitModel --batch 'x=float32[8,10],y=int64[8]' --gpu T4
memsave explain config.yaml --batch 8x512 --no-remedies --json
memsave explain --oom slurm-1234.out
memsave explain --oom slurm-1234.out config.json --batch 8x512
memsave explain --oom -"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        nargs="?",
        metavar="MODEL",
        help="as for `memsave predict`; without --batch a checkpoint is enough",
    )
    parser.add_argument(
        "--oom",
        metavar="FILE",
        help="file with an out-of-memory error, such as a log, or - for standard input; with MODEL "
        "and --batch, also predict what would help",
    )
    add_model_arguments(parser)
    add_step_arguments(parser, needs_batch=False)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--no-remedies",
        action="store_true",
        help="do not look for settings that would lower the peak",
    )
    group.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Explain and print; returns 1 if the step does not fit the GPU."""
    if arguments.target is None and arguments.oom is None:
        raise ConfigurationError(
            "This command needs a model, or --oom with a file. Write for example "
            "`memsave explain config.json` or `memsave explain --oom FILE`."
        )
    diagnosis = None if arguments.oom is None else _diagnosis(arguments)
    if arguments.target is not None:
        return _explain_model(arguments, diagnosis)
    assert diagnosis is not None, "there is a message"
    if arguments.json:
        print(json.dumps(diagnosis.to_dict(), indent=2))
    else:
        print(without_controls(str(diagnosis)))
    return 0


def _diagnosis(arguments: argparse.Namespace) -> "Diagnosis":
    from lightning_memsave.oom.advice import RunFacts
    from lightning_memsave.oom.diagnosis import diagnose
    from lightning_memsave.oom.message import read_out_of_memory

    if arguments.target is not None and arguments.batch is None:
        raise ConfigurationError(
            f"To predict what would help `{arguments.target}`, add --batch with the sizes that ran "
            "out of memory. To explain the message only, remove the model."
        )
    if arguments.target is None and arguments.batch is not None:
        raise ConfigurationError(
            "--batch needs a model, and --oom alone has none. Add the model, or remove --batch."
        )
    oom = read_out_of_memory(_read(arguments.oom))
    if oom.capacity_bytes and not arguments.gpu and arguments.device == "cuda":
        arguments.gpu = [f"{oom.capacity_bytes // MIB}MiB"]
    return diagnose(oom, run=RunFacts(has_memsave=bool(arguments.memsave)))


def _read(name: str) -> str:
    if name == "-":
        # A log may have bytes of any kind around the message.
        return sys.stdin.buffer.read().decode(errors="replace")
    path = Path(name)
    if not path.is_file():
        why = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigurationError(
            f"`{name}` {why}. Pass a text file with the message, or `--oom -` and paste it."
        )
    return path.read_text(encoding="utf-8", errors="replace")


def _explain_model(arguments: argparse.Namespace, diagnosis: "Diagnosis | None") -> int:
    from lightning_memsave.prediction.what_if import what_if_of
    from lightning_memsave.report.explanation import explain_what_if
    from lightning_memsave.report.text import show

    if arguments.batch is None:
        refuse_step_arguments(arguments, "add --batch")
    target, batch, step = read_step(arguments.target, arguments)
    gpus, notes = read_gpus(arguments), notes_of(target)
    if len(gpus) > 1:
        raise ConfigurationError(
            "This command is for one GPU. Pass --gpu once; `memsave predict` compares several."
        )
    with running_code_of(target.name):
        # The parameters of a checkpoint are known without code for the model.
        explanation = explain_what_if(
            what_if_of(step, target.parameter_source()),
            remedies=not arguments.no_remedies,
        )
    prediction = explanation.prediction
    fits = [] if prediction is None else [prediction.fits(gpu) for gpu in gpus]
    if arguments.json:
        found = {
            **({} if diagnosis is None else {"out_of_memory": diagnosis.to_dict()}),
            "target": target.name,
            "batch": None if batch is None else str(batch),
            "notes": list(notes),
            **explanation.to_dict(),
            "gpus": [fit.to_dict() for fit in fits],
        }
        print(json.dumps(found, indent=2))
    else:
        if diagnosis is not None:
            print(without_controls(str(diagnosis)), end="\n\n")
        show(explanation)
        shown = [f"It {fit}." for fit in fits] + [f"note: {note}" for note in notes]
        show_notes(shown)
    return 0 if all(fit.fits for fit in fits) else DOES_NOT_FIT
