"""Predicted memory beside torch's own allocator: `python -m benchmarks.virtual_gpu accuracy`.

Sixteen architectures train three steps under each preset, on virtual GPUs of several kinds: torch's
CUDA build runs with its real allocator, and its kernels compute nothing. A fit's own prediction is
compared with what the allocator says afterwards. Run it on the virtual GPU with VGPU_COMPUTE=int.
Each fit is written down as soon as it ends, and only fits that are not in the file yet are run:
`--fresh` begins a new one.
"""

import argparse
import importlib
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks._common import (
    RESULTS,
    device_name,
    markdown_table,
    provenance,
    several_runs,
    write_results,
)
from benchmarks.virtual_gpu._architectures import ARCHITECTURES
from lightning_memsave.units import MIB

CARDS = {"rtx3060": "RTX 3060", "t4": "T4", "h100": "H100"}
"""Of the virtual GPU, and what to call them."""
SETTINGS: dict[str, dict[str, Any]] = {
    "off": {"preset": "off"},
    "classic": {},
    "bitwise": {"preset": "bitwise"},
    "single_gpu": {"preset": "single_gpu"},
    "offload": {"preset": "offload"},
}
ALLOCATORS = {
    "default": "",
    "expandable": "expandable_segments:True",
    "max_split": "max_split_size_mb:64",
}
"""Values of PYTORCH_CUDA_ALLOC_CONF."""
NUM_STEPS = 3
LIMIT_S = 900
SEGMENT_BYTES = 2 * MIB
_MEMORY = "64GiB"
MARK = "measured: "
_PATH = RESULTS / "virtual_gpu_accuracy.json"
# Preset "off" on all, then the rest: a run that is cut off has the most telling fits.
_OTHERS = ("roberta", "gpt2", "llama", "vit")


@dataclass(frozen=True)
class Case:
    """One fit.

    Args:
        architecture: Its name.
        setting: Name of the arguments of `MemSaveCallback`.
        card: Name of the virtual GPU.
        allocator: Name of the allocator's settings.
    """

    architecture: str
    setting: str
    card: str = "rtx3060"
    allocator: str = "default"


def all_cases() -> Iterator[Case]:
    """Iterate over the fits in the order of their worth."""
    for setting in SETTINGS:
        for architecture in ARCHITECTURES:
            yield Case(architecture, setting)
    for allocator in list(ALLOCATORS)[1:]:
        for setting in SETTINGS:
            for architecture in _OTHERS:
                yield Case(architecture, setting, allocator=allocator)
    for card in list(CARDS)[1:]:
        for setting in SETTINGS:
            for architecture in ARCHITECTURES:
                yield Case(architecture, setting, card)


def run(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Run fits on one card with one setting of the allocator, each in a process of its own.

    Args:
        cases: The fits.

    Yields:
        For each what `measure` returns, or ``error``, as soon as it is known.
    """
    settings = ALLOCATORS[cases[0].allocator]
    environment = os.environ | {"VGPU": cases[0].card, "VGPU_MEMORY": _MEMORY}
    environment |= {"PYTORCH_CUDA_ALLOC_CONF": settings} if settings else {}
    names = [f"{case.architecture}:{case.setting}" for case in cases]
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.virtual_gpu", "accuracy", "--forked", *names],
        cwd=RESULTS.parents[1],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                yield json.loads(line.removeprefix(MARK))


# Forked from one process that has imported everything, which takes longer than a fit.
def _fork(names: Sequence[str]) -> None:
    for module in ("lightning.pytorch", "lightning_memsave", "transformers.models.auto"):
        importlib.import_module(module)
    context = multiprocessing.get_context("fork")
    for name in names:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_send_measured, args=(*name.split(":"), sender))
        process.start()
        found = {"error": f"stopped after {LIMIT_S} s"}
        if receiver.poll(LIMIT_S):
            try:
                found = receiver.recv()
            except EOFError:
                found = {"error": "died"}
        process.kill()
        process.join()
        print(MARK + json.dumps(found), flush=True)


def _send_measured(architecture: str, setting: str, sender: Any) -> None:
    try:
        sender.send(measure(architecture, setting))
    except Exception as error:  # it is written down, and the others are run
        sender.send({"error": f"{type(error).__name__}: {error}".splitlines()[0]})


def measure(architecture: str, setting: str) -> dict[str, Any]:
    """Train an architecture for some steps, and read its prediction and torch's allocator.

    Args:
        architecture: Its name.
        setting: Name of the arguments of `MemSaveCallback`.

    Returns:
        Predicted and real peaks in bytes.
    """
    import lightning.pytorch as pl  # noqa: PLC0415
    from torch.utils.data import DataLoader  # noqa: PLC0415

    from lightning_memsave import MemSaveCallback  # noqa: PLC0415

    if device_name().startswith("virtual"):
        _take_as_proven()
        # cuDNN's own memory is not torch's; the virtual GPU does not have it.
        torch.backends.cudnn.enabled = False
    chosen = ARCHITECTURES[architecture]
    torch.manual_seed(0)
    callback = MemSaveCallback(**SETTINGS[setting], predict=LIMIT_S)
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **dict(chosen.trainer_arguments),
    )
    trainer.fit(chosen.make(), DataLoader([chosen.batch()] * NUM_STEPS, batch_size=None))  # type: ignore[arg-type]
    found: Any = callback.prediction
    monitor: Any = callback.monitor
    summary = monitor.summary
    if found is None:
        raise RuntimeError(f"no prediction: {callback._prediction.note}")
    return {
        "allocated": summary.peak_bytes,
        "predicted_allocated": found.allocated_bytes,
        "reserved": summary.peak_reserved_bytes,
        "predicted_reserved": found.reserved_bytes,
    }


# Kernels compute nothing here, and so would fail the proofs by values that a GPU passes; where all
# losses are 0, the proof of a later batch would empty the allocator's cache between the steps.
def _take_as_proven() -> None:
    from lightning_memsave.techniques.chunked_cross_entropy import wide_products  # noqa: PLC0415
    from lightning_memsave.techniques.low_precision_weights import fused_steps  # noqa: PLC0415
    from lightning_memsave.techniques.micro_batching import loss_observed  # noqa: PLC0415

    observe: Any = loss_observed._observe

    def observe_equal_losses(*args: Any, **kwargs: Any) -> Any:
        seen = observe(*args, **kwargs)
        return seen and replace(seen, losses=[1.0] * len(seen.losses))

    changes: list[tuple[Any, str, Any]] = [
        (loss_observed, "_observe", observe_equal_losses),
        (wide_products, "find_product", lambda *_: wide_products._add_by_addmm),
        (fused_steps, "_is_proven", lambda _: True),
    ]
    for module, name, value in changes:
        assert hasattr(module, name)
        setattr(module, name, value)


def make_text(found: Sequence[dict[str, Any]]) -> str:
    """Lay out what was found.

    Args:
        found: Each fit with what `run` returned.

    Returns:
        Markdown: a table of deviations by architecture and preset for each card and setting of the
        allocator, then all figures.
    """
    good = [one for one in found if "error" not in one]
    exact = sum(one["predicted_reserved"] == one["reserved"] for one in good)
    near = sum(abs(one["predicted_reserved"] - one["reserved"]) <= SEGMENT_BYTES for one in good)
    within = sum(abs(_error(one, "allocated")) < 0.001 for one in good)
    parts = [
        f"{len(good)} fits. Reserved memory is predicted to the byte in {exact}, within one "
        f"segment of 2 MiB in {near}; allocated memory within 0.1 % in {within}."
    ]
    for card, allocator in dict.fromkeys((one["card"], one["allocator"]) for one in found):
        chosen = [o for o in found if (o["card"], o["allocator"]) == (card, allocator)]
        settings = list(dict.fromkeys(one["setting"] for one in chosen))
        rows = []
        for name in dict.fromkeys(one["architecture"] for one in chosen):
            by_setting = {o["setting"]: o for o in chosen if o["architecture"] == name}
            rows.append([name, *(cell(by_setting.get(setting)) for setting in settings)])
        conf = f", `{ALLOCATORS[allocator]}`" if ALLOCATORS[allocator] else ""
        parts += [
            f"{CARDS[card]}{conf}: deviation of the predicted peak of reserved memory in MiB, and "
            "of allocated memory in %.",
            markdown_table(["architecture", *settings], rows),
        ]
    header = ["fit", "allocated (MiB)", "predicted", "reserved (MiB)", "predicted"]
    rows = [[_name(one), *map(_mib, _figures(one))] for one in good]
    failed = [f"- {_name(one)}: {one['error']}" for one in found if "error" in one]
    return "\n\n".join([*parts, "All figures:", markdown_table(header, rows), *failed])


def _name(one: dict[str, Any]) -> str:
    allocator = "" if one["allocator"] == "default" else f", {one['allocator']}"
    return f"{one['architecture']}, {one['setting']}, {CARDS[one['card']]}{allocator}"


def _figures(one: dict[str, Any]) -> list[int]:
    names = ("allocated", "predicted_allocated", "reserved", "predicted_reserved")
    return [one[name] for name in names]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.2f}"


def _error(one: dict[str, Any], name: str) -> float:
    deviation: float = one[f"predicted_{name}"] / one[name] - 1
    return deviation


def cell(one: dict[str, Any] | None) -> str:
    """Say how far a prediction was off: reserved memory in MiB, allocated memory in %."""
    if one is None:
        return ""
    if "error" in one:
        return "-"
    deviation = (one["predicted_reserved"] - one["reserved"]) / MIB
    return (
        f"{deviation:+.0f} / {_error(one, 'allocated'):+.2%}"
        if deviation
        else (f"0 / {_error(one, 'allocated'):+.2%}")
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is not in the result file yet, and write it.

    Args:
        arguments: Of the command line.

    Returns:
        0, also if there are deviations.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.virtual_gpu accuracy", description=__doc__
    )
    parser.add_argument("--architectures", nargs="+", metavar="NAME", choices=ARCHITECTURES)
    parser.add_argument("--settings", nargs="+", metavar="NAME", choices=SETTINGS)
    parser.add_argument("--cards", nargs="+", metavar="NAME", choices=CARDS)
    parser.add_argument("--allocators", nargs="+", metavar="NAME", choices=ALLOCATORS)
    parser.add_argument("--fresh", action="store_true", help="forget what was found before")
    parser.add_argument("--results", type=Path, default=_PATH.parent, help="folder of the files")
    parser.add_argument("--forked", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if options.forked:
        _fork(options.forked)
        return 0
    path = options.results / _PATH.name
    found = [] if options.fresh or not path.exists() else json.loads(path.read_text())["fits"]
    known = {Case(**{name: one[name] for name in Case.__annotations__}) for one in found}
    wanted = [case for case in all_cases() if case not in known and _is_chosen(case, options)]
    commit = provenance()["commit"]
    for _, group in itertools.groupby(wanted, lambda case: (case.card, case.allocator)):
        cases = list(group)
        for case, result in zip(cases, run(cases), strict=False):
            found.append(asdict(case) | result | {"commit": commit})
            print(_name(found[-1]), found[-1].get("error") or cell(found[-1]), flush=True)
            _write(found, options.results)
    if not wanted:
        _write(found, options.results)
    return 0


def _write(found: Sequence[dict[str, Any]], folder: Path) -> None:
    put_together = {
        "command": several_runs("python -m benchmarks.virtual_gpu accuracy", "fits", found),
        "device": "virtual " + ", ".join(CARDS[card] for card in {o["card"]: 0 for o in found}),
    }
    text = make_text(found)
    write_results(_PATH.stem, {"fits": found}, text, folder=folder, put_together=put_together)


def _is_chosen(case: Case, options: argparse.Namespace) -> bool:
    return (
        not ARCHITECTURES[case.architecture].missing
        and case.architecture in (options.architectures or [case.architecture])
        and case.setting in (options.settings or [case.setting])
        and case.card in (options.cards or [case.card])
        and case.allocator in (options.allocators or [case.allocator])
    )
