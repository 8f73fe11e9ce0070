"""``memsave predict``: memory of a training step, and which GPUs it fits."""

import argparse
import json
import pickle
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_memsave.cli.arguments import (
    DOES_NOT_FIT,
    REPEATED,
    Case,
    add_model_arguments,
    add_step_arguments,
    notes_of,
    predict_on,
    read_gpus,
    read_settings,
    read_step,
    show_notes,
    whole_number,
    write_page_for,
)
from lightning_memsave.core.files import write_output
from lightning_memsave.errors import ConfigurationError

SUMMARY = "Predict the peak memory of training, without a GPU and without allocating the model."
EXAMPLES = """\
memsave predict config.json --batch 8x512 --gpu T4 --gpu 12GiB
memsave predict package.module:LitModel --arg depth=24 --batch 'x=float32[8,3,224,224],y=int64[8]'
memsave predict config.yaml --batch 8x512 --gpu A100-40GB --json > prediction.json
memsave predict hf:gpt2-xl --batch 1x1024 --set activation_checkpointing=all --html memory.html
memsave predict gpt2/ --batch 8x512 --variant optimizer=8bit --variant precision=bf16-mixed"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="MODEL",
        help="package.module:Class, file.py:function, a Hugging Face config.json or its folder, "
        "hf:NAME, a YAML file of LightningCLI, or a checkpoint with --model",
    )
    add_model_arguments(parser)
    add_step_arguments(parser, needs_batch=True)
    group = parser.add_argument_group("processes")
    group.add_argument(
        "--strategy",
        choices=("ddp", "fsdp2"),
        help="predict one of several processes: ddp, or fsdp2 for strategy=memsave_fsdp2",
    )
    group.add_argument(
        "--world-size",
        type=whole_number,
        metavar="N",
        help="number of processes, which need not be there; default: 1",
    )
    group = parser.add_argument_group("output")
    group.add_argument(
        "--variant",
        **REPEATED,
        metavar="'NAME=VALUE ...'",
        help="predict again with these settings of MemSaveCallback added; can be repeated",
    )
    group.add_argument("--html", metavar="FILE", help="write the result as a web page")
    group.add_argument(
        "--snapshot",
        metavar="FILE",
        help="write the allocations of the step, to view at https://pytorch.org/memory_viz",
    )
    group.add_argument("--json", action="store_true", help="print JSON")
    group.add_argument(
        "--depth", type=whole_number, default=2, help="levels of the module tree; default: 2"
    )
    group.add_argument(
        "--tensors",
        type=whole_number,
        default=10,
        help="how many of the largest tensors to list; default: 10",
    )


def run(arguments: argparse.Namespace) -> int:
    """Predict and print; returns 1 if the step does not fit one of the GPUs."""
    names = ["", *arguments.variant]
    if len(set(names)) < len(names):
        raise ConfigurationError("--variant is given twice with the same settings. Remove one.")
    target, batch, step = read_step(arguments.target, arguments)
    world_size = 1 if arguments.world_size is None else arguments.world_size
    step = replace(step, strategy=arguments.strategy, world_size=world_size)
    gpus, notes = read_gpus(arguments), notes_of(target)
    cases = [
        Case(name or "as given", *predict_on(gpus, target.name, step, settings))
        for name, settings in zip(names, map(_settings_of, names), strict=True)
    ]
    first, *variants = cases
    if arguments.html is not None:
        write_page_for(
            arguments.html,
            [(case.name, case.prediction) for case in cases],
            first.fits,
            title=f"{first.prediction.model}: memory of a training step",
            notes=(f"Batch: {batch}", *notes, *(f"It {fit}." for fit in first.fits)),
        )
    if arguments.snapshot is not None:
        # The viewer reads no later protocol.
        snapshot = pickle.dumps(first.prediction.to_snapshot(), protocol=4)
        write_output(arguments.snapshot, snapshot, "snapshot", "snapshot.pickle")
    if arguments.json:
        found = {"target": target.name, "batch": str(batch), "notes": list(notes)}
        print(json.dumps(found | _to_dict(first, variants), indent=2))
    else:
        _show(notes, first, variants, arguments)
    return 0 if all(fit.fits for fit in first.fits) else DOES_NOT_FIT


def _settings_of(variant: str) -> dict[str, Any]:
    try:
        return read_settings(shlex.split(variant))
    except ValueError as error:
        raise ConfigurationError(
            f"--variant {variant!r} cannot be read ({error}). Write settings as in a shell: "
            "'optimizer=8bit precision=bf16-mixed'."
        ) from error


def _to_dict(first: Case, variants: list[Case]) -> dict[str, Any]:
    def of(case: Case) -> dict[str, Any]:
        return {**case.prediction.to_dict(), "gpus": [fit.to_dict() for fit in case.fits]}

    return {**of(first), "variants": [{"name": case.name, **of(case)} for case in variants]}


def _show(
    notes: Sequence[str], first: Case, variants: list[Case], arguments: argparse.Namespace
) -> None:
    from rich.text import Text

    from lightning_memsave.report.text import rich_prediction, show, variants_table

    depth, number = arguments.depth, arguments.tensors
    show(rich_prediction(first.prediction, fits=first.fits, max_depth=depth, max_tensors=number))
    if variants:
        cases = [(case.name, case.prediction, case.fits) for case in (first, *variants)]
        show(Text(""), variants_table(cases))
    show_notes([f"note: {note}" for note in notes], arguments.html)
