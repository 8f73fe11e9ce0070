"""``memsave plan``: the fastest settings that fit a budget of memory or a GPU."""

import argparse
import json
import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lightning_memsave.cli.arguments import (
    DOES_NOT_FIT,
    StepError,
    add_model_arguments,
    add_step_arguments,
    as_typed,
    kernels_of,
    notes_of,
    read_gpus,
    read_settings,
    read_step,
    running_code_of,
    show_notes,
    whole_number,
)
from lightning_memsave.errors import ConfigurationError, InfeasiblePlanError

if TYPE_CHECKING:
    from rich.table import Table

    from lightning_memsave.planning.plan import MemoryPlan, Plan
    from lightning_memsave.planning.search import PlanSearch
    from lightning_memsave.prediction.cuda.gpus import Gpu
    from lightning_memsave.prediction.result import MemoryPrediction
    from lightning_memsave.prediction.training_step import TrainingStep
    from lightning_memsave.targets.target import Target

SUMMARY = "Find the fastest settings that fit a GPU or a budget of memory, without a GPU."
EXAMPLES = """\
memsave plan config.json --batch 64x128 --gpu RTX-3060-12GB
memsave plan config.json --batch 64x128 --gpu T4,RTX-3060-12GB,A100-40GB
memsave plan package.module:LitModel --batch 8x512 --budget 10GiB --exactness bitwise
memsave plan config.yaml --batch 8x512 --gpu T4 --budget 0.9 --set optimizer=8bit
memsave plan config.json --batch 8x512 --gpu RTX-4090 --world-size 2
memsave plan gpt2/ --batch 8x512 --gpu T4 --html plan.html --json > plan.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="MODEL", help="as for `memsave predict`")
    add_model_arguments(parser)
    add_step_arguments(parser, needs_batch=True, limited="each search, one per GPU,")
    parser.set_defaults(base={"budget": "free"})  # details may be given of what is planned
    group = parser.add_argument_group("plan")
    group.add_argument(
        "--budget",
        metavar="SIZE",
        help="memory that the process may use on the device, with the CUDA context: 12GiB, or a "
        "share of the GPU such as 0.9; default: that in a YAML file, else all of the GPU",
    )
    group.add_argument(
        "--exactness",
        choices=("bitwise", "rounding", "approximate"),
        help="how far results may move; default: that in a YAML file, else approximate",
    )
    group = parser.add_argument_group("processes")
    group.add_argument(
        "--world-size",
        type=whole_number,
        default=1,
        metavar="N",
        help="number of processes that train together, each with such a batch; default: 1",
    )
    group.add_argument(
        "--strategy",
        metavar="NAMES",
        help="how they train: ddp, fsdp2 for strategy=memsave_fsdp2, or one for a process alone; "
        "separated with commas to compare them; default with --world-size: all",
    )
    group = parser.add_argument_group("output")
    group.add_argument("--html", metavar="FILE", help="write the result as a web page")
    group.add_argument("--json", action="store_true", help="print JSON")


_ALONE = "one"
_STRATEGIES = (_ALONE, "ddp", "fsdp2")


def run(arguments: argparse.Namespace) -> int:
    """Plan and print; returns 1 if no plan fits the budget or one of the GPUs."""
    if "budget" in read_settings(arguments.set):
        raise ConfigurationError("--set budget=... is not for a plan. Use --budget.")
    target, batch, step = read_step(arguments.target, arguments)
    step, exactness = _with_exactness(step, arguments.exactness)
    cases = _cases(target, step, _budget(arguments, target), exactness, arguments)
    shown = _smallest_that_fits(cases) or cases[0]
    if arguments.html is not None:
        _write_page(arguments.html, shown, (f"Batch: {batch}", *notes_of(target)))
    if arguments.json:
        found = {"target": target.name, "batch": str(batch), "notes": list(notes_of(target))}
        found |= _to_dict(target, cases, shown, arguments) | {"exactness": exactness}
        print(json.dumps(found, indent=2, default=repr))
    else:
        _show(target, cases, shown, arguments)
    return DOES_NOT_FIT if any(case.found is None for case in cases) else 0


@dataclass(frozen=True)
class _Case:
    gpu: "Gpu | None"
    strategy: str
    world_size: int
    budget_bytes: int
    margin_bytes: int
    unchanged: "MemoryPrediction"
    found: "MemoryPlan | None" = None
    refusal: InfeasiblePlanError | None = None

    @property
    def name(self) -> str:
        gpu = "the budget" if self.gpu is None else self.gpu.name
        return gpu if self.strategy == _ALONE else f"{self.world_size} x {gpu}, {self.strategy}"

    @property
    def sample_seconds(self) -> float:
        """Seconds for each sample, by the least that a step should take."""
        least_s = math.inf if self.found is None else self.found.step_seconds(self.best)[0]
        return least_s / self.world_size

    @property
    def best(self) -> "Plan":
        """The plan, or the smallest one if none fits."""
        if self.found is not None:
            return self.found.plan
        assert self.refusal is not None, "one of the two is there"
        plan: Plan = self.refusal.smallest
        return plan


def _budget(arguments: argparse.Namespace, target: "Target") -> Any:
    given = arguments.budget
    if given is None:
        # That of `MemSaveCallback` in a YAML file.
        in_file = (target.settings or {}).get("budget")
        if in_file is not None:
            return in_file
        if arguments.device == "cpu" and not arguments.gpu:
            raise ConfigurationError("--device=cpu needs a budget. Add for example --budget 8GiB.")
        if not arguments.gpu:
            raise ConfigurationError(
                "A plan needs memory to fit. Add --gpu, such as --gpu T4, or --budget 12GiB."
            )
        return None
    is_share = re.fullmatch(r"-?\d*\.\d+", given.strip())
    if not is_share and given.strip() != "free":
        return str(given)
    if not arguments.gpu:
        fix = "a size, such as --budget 8GiB"
        fix += "" if arguments.device == "cpu" else ", or add --gpu, such as --gpu T4"
        raise ConfigurationError(
            f"--budget {given} is a part of a GPU, but there is none. Use {fix}."
        )
    return float(given) if is_share else None


# What is typed replaces that of `MemSaveCallback` in a YAML file, which would refuse plans.
def _with_exactness(step: "TrainingStep", typed: str | None) -> tuple["TrainingStep", str]:
    settings = dict(step.settings)
    if typed is None:
        return step, settings.get("exactness", "approximate")
    settings.pop("exactness", None)
    return replace(step, settings=settings), typed


def _cases(
    target: "Target",
    step: "TrainingStep",
    budget: Any,
    exactness: str,
    arguments: argparse.Namespace,
) -> list[_Case]:
    from lightning_memsave.planning.budget import margin_of
    from lightning_memsave.planning.plan_step import budget_of, search_of, unchanged_step
    from lightning_memsave.prediction.what_if import what_if_of

    unchanged: dict[object, MemoryPrediction] = {}
    searches: dict[object, PlanSearch] = {}
    found = []
    with running_code_of(target.name):
        first = what_if_of(step, target.parameter_source())
        gpus = read_gpus(arguments) or (None,)
        steps = [
            (name, replace(first, step=replace(one, gpu=gpu)))
            for name, one in _with_processes(step, arguments)
            for gpu in gpus
        ]
        # A wrong budget is an error before anything is predicted.
        budgets = [budget_of(what_if, budget) for _, what_if in steps]
        for (name, what_if), budget_bytes in zip(steps, budgets, strict=True):
            gpu = what_if.step.gpu
            kernels = name, kernels_of(gpu)
            if kernels not in unchanged:
                unchanged[kernels] = unchanged_step(what_if)
            # What one GPU's kernels need is predicted once.
            search = searches.get(kernels)
            if search is not None and gpu is not None:
                search = search.on(gpu, arguments.time_limit)
            else:
                search = search_of(what_if, exactness, arguments.time_limit)
            searches[kernels] = search
            margin_bytes = margin_of(budget_bytes, what_if.step.device)
            number = what_if.step.world_size
            case = _Case(gpu, name, number, budget_bytes, margin_bytes, unchanged[kernels])
            found.append(_planned(case, search, target.name, arguments))
    return found


def _with_processes(
    step: "TrainingStep", arguments: argparse.Namespace
) -> list[tuple[str, "TrainingStep"]]:
    number = arguments.world_size
    names = [_ALONE] if number == 1 else [*_STRATEGIES]
    if arguments.strategy is not None:
        names = arguments.strategy.split(",")
        if not {*names} <= {*_STRATEGIES}:
            raise ConfigurationError(
                f"--strategy {arguments.strategy} is not known. Use one or several of "
                f"{', '.join(_STRATEGIES)}, separated with commas."
            )
    return [
        (name, step if name == _ALONE else replace(step, strategy=name, world_size=number))
        for name in names
    ]


def _planned(case: _Case, search: "PlanSearch", name: str, arguments: argparse.Namespace) -> _Case:
    try:
        return replace(case, found=search.find(case.budget_bytes))
    except InfeasiblePlanError as error:
        said = as_typed(str(error), arguments)
        return replace(case, refusal=InfeasiblePlanError(said, error.smallest))
    except TimeoutError as error:
        limit_s = arguments.time_limit
        raise StepError(
            f"The search for a plan of `{name}` ended after {limit_s:g} seconds without one. Use a "
            f"longer time, such as --time-limit {2 * limit_s:g}, or fix some settings with --set."
        ) from error


# The fewest and smallest GPUs; of several strategies the fastest.
def _smallest_that_fits(cases: list[_Case]) -> _Case | None:
    return min(
        (case for case in cases if case.found is not None),
        key=lambda case: (case.budget_bytes, case.sample_seconds),
        default=None,
    )


def _yaml(case: _Case, target: "Target", arguments: argparse.Namespace) -> str:
    import yaml  # type: ignore[import-untyped] # it comes without types

    from lightning_memsave.callbacks.memsave import MemSaveCallback
    from lightning_memsave.planning.plan import plain, short_settings

    # Techniques with a `class_path` are written as they were read.
    given = {**(target.settings or {}), **read_settings(arguments.set)}
    shown = short_settings(MemSaveCallback, case.best.settings, case.best.exactness)
    shown |= {n: given[n] for n in shown if isinstance(given.get(n), dict)}
    found = {n: v if isinstance(v, dict) else plain(v) for n, v in shown.items()}
    callback = {"class_path": "lightning_memsave.MemSaveCallback", "init_args": found}
    text: str = yaml.safe_dump(
        {"trainer": {**_trainer(case), "callbacks": [callback]}}, sort_keys=False
    )
    return text


def _trainer(case: _Case) -> dict[str, Any]:
    if case.strategy == _ALONE:
        return {}
    from lightning_memsave.prediction.training_step import STRATEGIES

    return {"strategy": STRATEGIES[case.strategy], "devices": case.world_size}


def _to_dict(
    target: "Target", cases: list[_Case], shown: _Case, arguments: argparse.Namespace
) -> dict[str, Any]:
    def of(case: _Case) -> dict[str, Any]:
        refusal = case.refusal
        found = {} if case.found is None else case.found.to_dict()
        notes = found.pop("notes", [])  # those of the target are beside it
        nothing = dict.fromkeys(
            ("plan", "runner_up", "seconds", "num_predictions", "unchanged_seconds", "precision")
        )
        return {
            "strategy": None if case.strategy == _ALONE else case.strategy,
            "world_size": case.world_size,
            "unchanged_bytes": case.unchanged.device_bytes,
            "budget_bytes": case.budget_bytes,
            "margin_bytes": case.margin_bytes,
            **(nothing | {"frontier": []} if case.found is None else found),
            "search_notes": notes,
            "reason": None if refusal is None else str(refusal),
            "smallest": None if refusal is None else refusal.smallest.to_dict(),
        }

    return {
        "gpu": shown.gpu and shown.gpu.name,
        **of(shown),
        "yaml": _yaml(shown, target, arguments),
        "gpus": [
            {
                "name": case.gpu and case.gpu.name,
                "total_bytes": case.gpu and case.gpu.total_bytes,
                **of(case),
            }
            for case in cases
            if case.gpu is not None or len(cases) > 1
        ],
    }


def _show(
    target: "Target", cases: list[_Case], shown: _Case, arguments: argparse.Namespace
) -> None:
    from rich.console import RenderableType
    from rich.text import Text

    from lightning_memsave.report.text import show
    from lightning_memsave.units import format_bytes

    parts: list[RenderableType] = []
    if len(cases) > 1:
        parts += [_gpu_table(cases), Text()]
        parts += [Text(f"{case.name}: {case.best.short}") for case in cases]
        parts += [Text(), Text(_verdict(cases)), Text()]
    if shown.refusal is not None:
        parts.append(Text(str(shown.refusal)))
    else:
        assert shown.found is not None, "one of the two is there"
        parts.append(shown.found)
        parts += [Text(), Text("In the YAML file of LightningCLI:"), Text()]
        parts.append(Text(_yaml(shown, target, arguments)))
    unchanged_bytes = shown.unchanged.device_bytes
    how = "fits too" if unchanged_bytes <= shown.budget_bytes else "does not fit"
    if shown.budget_bytes - shown.margin_bytes < unchanged_bytes <= shown.budget_bytes:
        how = f"fits only without the {format_bytes(shown.margin_bytes)} that stay free"
    show(*parts, Text(f"The unchanged step {how}: it needs {format_bytes(unchanged_bytes)}."))
    show_notes([f"note: {note}" for note in notes_of(target)], arguments.html)


def _verdict(cases: list[_Case]) -> str:
    smallest = _smallest_that_fits(cases)
    if smallest is None:
        return f"None of these is enough. For {cases[0].name}:"
    why = "the fastest of them" if _in_processes(cases) else "the smallest of them"
    return f"{smallest.name} is enough, {why}. Its plan:"


def _in_processes(cases: list[_Case]) -> bool:
    return len({case.strategy for case in cases}) > 1


def _gpu_table(cases: list[_Case]) -> "Table":
    from rich.text import Text

    from lightning_memsave.core.plain_text import figure_table
    from lightning_memsave.units import format_bytes

    numbers = ["budget", "unchanged", "plan", "time"]
    numbers += ["samples/s"] if _in_processes(cases) else []
    table = figure_table("GPU", "fits", *numbers, "exactness", numbers=numbers)
    fastest_s = min(case.sample_seconds for case in cases)
    for case in cases:
        best = case.best
        sizes = (format_bytes(n) for n in (case.budget_bytes, case.unchanged.device_bytes))
        time = f"{best.time_ratio:.2f}"
        speed = [f"{fastest_s / case.sample_seconds:.2f}"] if case.found else ["-"]
        speed = speed if _in_processes(cases) else []
        fits = "NO" if case.found is None else "yes"
        cells = (case.name, fits, *sizes, best.size, time, *speed)
        style = "bold red" if case.found is None else ""
        table.add_row(*map(Text, (*cells, best.exactness)), style=style)
    return table


def _write_page(path: str, case: _Case, notes: tuple[str, ...]) -> None:
    from lightning_memsave.planning.plan import step_in
    from lightning_memsave.report.page import write_page
    from lightning_memsave.units import format_bytes

    gpu, found = case.gpu, case.found
    predictions = [("unchanged", case.unchanged)]
    if case.best.prediction is not None:
        predictions.insert(0, ("the plan" if found else "the smallest", case.best.prediction))
    is_all = gpu is not None and case.budget_bytes == gpu.total_bytes
    unchanged = step_in("" if found is None else found.precision)
    margin = (
        f"A plan leaves {format_bytes(case.margin_bytes)} of the budget free, as predictions for "
        f"CUDA may be off. Times are ratios to {unchanged}, estimated from its kernels."
    )
    write_page(
        path,
        predictions,
        title=f"{case.unchanged.model}: the fastest plan for {format_bytes(case.budget_bytes)}",
        device_capacity_bytes=case.budget_bytes,
        device_name=gpu.known_name if gpu is not None and is_all else "budget",
        notes=(
            *notes,
            *(() if found is None else (margin,)),
            *(() if case.refusal is None else (str(case.refusal),)),
        ),
        plan=found,
        unchanged_bytes=case.unchanged.device_bytes,
    )
