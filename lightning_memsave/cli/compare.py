"""``memsave compare``: which modules grew, and by how much."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_memsave.cli.arguments import (
    DOES_NOT_FIT,
    Case,
    add_model_arguments,
    add_step_arguments,
    notes_of,
    predict_on,
    read_gpus,
    read_step,
    refuse_step_arguments,
    running_code_of,
    show_notes,
    write_page_for,
)
from lightning_memsave.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_memsave.explain.memory_changes import MemoryComparison
    from lightning_memsave.prediction.result import MemoryPrediction

SUMMARY = "Show why the second model, prediction or run needs more memory than the first."
EXAMPLES = """\
memsave compare good.ckpt bad.ckpt
memsave compare old/config.json new/config.json --batch 8x512
memsave compare before.json after.json --html changes.html
memsave compare runs/1/memsave_report.json runs/2/memsave_report.json --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "model as for `memsave predict`, output of `predict --json`, or a memsave_report.json"
    parser.add_argument("a", metavar="A", help=what)
    parser.add_argument("b", metavar="B", help="the same, to compare with A")
    add_model_arguments(parser)
    add_step_arguments(parser, needs_batch=False)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--html", metavar="FILE", help="write the result as a web page; needs predictions"
    )
    group.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Compare and print; returns 1 if B does not fit one of the GPUs."""
    from lightning_memsave.api import compare_memory

    names = (arguments.a, arguments.b)
    cases = _cases(names, arguments)
    if cases is None:
        refuse_step_arguments(arguments, "compare two models with --batch, or two predictions")
        if arguments.html is not None:
            raise ConfigurationError(
                "--html needs predictions. Add --batch, or pass two files written by "
                "`memsave predict --json`."
            )
        with running_code_of(f"{arguments.a}` or `{arguments.b}"):
            a, b = (_side(name, arguments) for name in names)
            comparison = compare_memory(a, b, labels=names)
        _print(comparison, None, arguments)
        return 0
    # A file is read again, with the measured peak of its run.
    a, b = (case.name if case.is_saved else case.prediction for case in cases)
    comparison = compare_memory(a, b, labels=names)
    if arguments.html is not None:
        first, second = cases
        name = second.name if second.name != first.name else f"{second.name} (B)"
        write_page_for(
            arguments.html,
            [(first.name, first.prediction), (name, second.prediction)],
            second.fits,
            title=f"{first.name} and {name}",
            notes=[*comparison.sentences(), *(f"{name} {fit}." for fit in second.fits)],
        )
    _print(comparison, cases, arguments)
    return 0 if all(fit.fits for fit in cases[1].fits) else DOES_NOT_FIT


def _cases(names: tuple[str, str], arguments: argparse.Namespace) -> list[Case] | None:
    from lightning_memsave.targets.comparable import read_saved

    saved = [read_saved(name) for name in names]
    models = [name for name, found in zip(names, saved, strict=True) if found is None]
    for model in models:
        if Path(model).suffix == ".json" and not Path(model).exists():
            raise ConfigurationError(
                f"`{model}` does not exist. Pass a config.json, a file written by `memsave predict "
                "--json`, or the memsave_report.json of a run."
            )
    if models and arguments.batch is None:
        if len(models) == len(names):
            return None
        other = next(name for name in names if name != models[0])
        raise ConfigurationError(
            f"`{other}` is about a training step, but of `{models[0]}` only the parameters are "
            "known: add --batch with its sizes, such as --batch 8x512, to predict its step."
        )
    return [
        _predicted(name, arguments)
        if found is None
        else _of_saved(name, found.prediction, arguments)
        for name, found in zip(names, saved, strict=True)
    ]


def _predicted(name: str, arguments: argparse.Namespace) -> Case:
    target, _, step = read_step(name, arguments)
    prediction, fits = predict_on(read_gpus(arguments), target.name, step)
    return Case(name, prediction, fits, notes_of(target))


def _of_saved(name: str, prediction: "MemoryPrediction", arguments: argparse.Namespace) -> Case:
    gpus = read_gpus(arguments)
    if gpus and prediction.device != "cuda":
        raise ConfigurationError(
            f"`{name}` is a prediction for {prediction.device}, but --gpu needs one for CUDA. "
            "Remove --gpu, or predict with --device cuda."
        )
    fits = tuple(prediction.fits(gpu) for gpu in gpus)
    return Case(name, prediction, fits, is_saved=True)


def _side(name: str, arguments: argparse.Namespace) -> Any:
    from lightning_memsave.targets.code import parse_arguments
    from lightning_memsave.targets.find import load_target

    given = parse_arguments(arguments.arg)
    target = load_target(name, model=arguments.model, arguments=given, task=arguments.task)
    return target.parameter_source()


def _print(
    comparison: "MemoryComparison", cases: list[Case] | None, arguments: argparse.Namespace
) -> None:
    from rich.text import Text

    from lightning_memsave.report.text import show, variants_table

    if arguments.json:
        found = comparison.to_dict()
        if cases is not None:
            keys = zip(("a", "b"), cases, strict=True)
            found["gpus"] = {key: [fit.to_dict() for fit in case.fits] for key, case in keys}
        print(json.dumps(found, indent=2))
        return
    show(comparison)
    if cases is not None and cases[0].fits:
        rows = [(case.name, case.prediction, case.fits) for case in cases]
        show(Text(""), variants_table(rows))
    notes = dict.fromkeys(note for case in cases or () for note in case.notes)
    show_notes([f"note: {note}" for note in notes], arguments.html)
