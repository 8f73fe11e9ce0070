"""Count what a step really asks of a GPU: `python -m benchmarks.virtual_gpu launches`.

The same steps as in `benchmarks.launches`, which counts operators of a simulated step, run here in
torch's CUDA build on the virtual GPU. Operators, waits, copied bytes and page-locked memory are
compared; launches are given beside them, and which operators need more than one.

Kernels compute nothing here (VGPU_COMPUTE=int), so that what the product tries out by value, such
as a product with a wider result, is taken to work, as it is in the simulation.
"""

import argparse
import collections
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks._common import RESULTS, markdown_table, provenance, several_runs, write_results
from benchmarks._models import BASE, OTHERS, TINY, masked_batch
from benchmarks.faults._attack import in_process
from benchmarks.launches.__main__ import ROWS, Model, Row, _gpt2_batch, _without_cache, setup_of
from benchmarks.launches._count import Counts, Setup, StepCounter, _Counted, count
from benchmarks.presets._run import SETTINGS, gpt2
from benchmarks.virtual_gpu._setup import allow_forks, be_quiet, taken_to_work
from lightning_memsave import MemSaveCallback
from lightning_memsave.errors import IncompatibleError
from lightning_memsave.units import GIB, MIB
from tests.virtual_gpu import counters

NUM_STEPS = 5  # blocks that are recomputed look at values in the first four
LIMIT_S = 600

MODELS = {
    "RoBERTa 84M, 64 x 128": Model(BASE.build, masked_batch(52_000, 64, 128)),
    "GPT-2 124M, 8 x 512": Model(
        _without_cache(gpt2(50_257, 768, 12, 12)), _gpt2_batch(50_257, 8, 512)
    ),
    "Llama 134M, 8 x 512": Model(
        _without_cache(OTHERS["Llama"].build), _gpt2_batch(32_000, 8, 512)
    ),
}
DRY = {"RoBERTa tiny, 8 x 16": Model(TINY.build, masked_batch(500, 8, 16))}
OFFLOADED = {
    "offload": Row(SETTINGS["offload"], "by hand, bf16, 8-bit"),
    'offload="optimizer"': Row({"offload": "optimizer", "precision": "bf16-mixed"}, "plain, bf16"),
    'offload="parameters"': Row(
        {"offload": "parameters", "precision": "bf16-mixed"}, "plain, bf16"
    ),
    'offload="activations"': Row({"offload": "activations"}, "plain"),
}
"""Not in the other benchmark, which shows them in `benchmarks.offloading`."""


class _Attributed(StepCounter):
    """Counts as in a simulated step, and the launches of each operator."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.launches: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = _num_launches()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if number := _num_launches() - before:
            self.launches[func._schema.name.rpartition("::")[2]] += number
        return result


def _num_launches() -> int:
    report = counters.report()
    library = sum(n for name, n in report["calls"].items() if name.startswith("library: "))
    return int(report["launches"] + library)


class _OnDevice(_Counted):
    """Counts the last step of a fit that runs."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.report: dict[str, Any] = {}
        self.by_operator: collections.Counter[str] = collections.Counter()
        self.attributes = False
        self.state_bytes = 0

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % self._accumulated == 0:
            torch.cuda.synchronize()
            kind = _Attributed if self.attributes else StepCounter
            self._counter = kind(self.trainer.optimizers)
            counters.reset()
            self._counter.__enter__()

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        counter = self._counter
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self._counter is None:
            self.report = counters.report()
            self.state_bytes = host_state_bytes(self)  # Lightning moves all of it at the end
            if isinstance(counter, _Attributed):
                self.by_operator = counter.launches


def count_on_device(
    setup: Setup, *, attributes: bool = False, compiles: bool = True
) -> dict[str, Any]:
    """Train a few steps on the virtual GPU and count the last one."""
    be_quiet()
    counters.set_memory(512 * GIB)
    accumulated = setup.settings.get("accumulate_grad_batches") or 1
    lit = _OnDevice(setup.build(), accumulated)
    lit.attributes = attributes
    given = {"preset": "off", "micro_batch_size": None, **setup.settings}
    # Gradients that wait for clipping stay on the device as far as the prediction has room.
    given["predict"] = LIMIT_S if setup.clip is not None else False
    with taken_to_work(compiles=compiles):
        trainer = pl.Trainer(
            accelerator="gpu",
            devices=1,
            max_steps=NUM_STEPS,
            callbacks=[MemSaveCallback(**given, report=False)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            gradient_clip_val=setup.clip,
            **setup.trainer,
        )
        batches: Any = [setup.batch] * (NUM_STEPS * accumulated)
        trainer.fit(lit, DataLoader(batches, batch_size=None))
    counts, report = lit.found[-1], lit.report
    return {
        "counts": as_plain(counts),
        "waits": _calls(report, "wait: "),
        "launches": report["launches"],
        "library": sum(_calls(report, "library: cublas").values()),
        "copies": report["copies"],
        "pinned_bytes": report["pinned_bytes"],
        "state_bytes": lit.state_bytes,
        "by_operator": dict(lit.by_operator),
    }


def host_state_bytes(lit: pl.LightningModule) -> int:
    """Count the optimizer's state in host memory that is not page-locked: no copy reads it."""
    optimizer: Any = lit.optimizers(use_pl_optimizer=False)
    tensors = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    return sum(t.nbytes for t in tensors if not t.is_cuda and t.ndim and not t.is_pinned())


def as_plain(counts: Counts) -> dict[str, Any]:
    """Give counts as plain values."""
    return {
        "operators": dict(counts.operators),
        "waits": dict(counts.waits),
        "waits_beside": counts.waits_beside,
        "recomputed": counts.recomputed,
        "to_host_bytes": counts.to_host_bytes,
        "from_host_bytes": counts.from_host_bytes,
    }


def _calls(report: dict[str, Any], prefix: str) -> dict[str, int]:
    calls = report["calls"].items()
    return {name.removeprefix(prefix): n for name, n in calls if name.startswith(prefix)}


def simulate(setup: Setup) -> dict[str, Any]:
    """Count the step of a simulation on fake tensors."""
    with taken_to_work():  # a simulation asks this GPU for proofs too
        counts, prediction = count(setup)
    return {"counts": as_plain(counts), "host_bytes": prediction.peak.host_bytes}


def compare(
    model: Model, row: Row, *, attributes: bool = False, compiles: bool = True
) -> dict[str, Any]:
    """Count a step both ways, each in a process of its own."""
    setup = setup_of(model, row)
    found = {}
    for name, job in (
        ("simulated", functools.partial(simulate, setup)),
        (
            "real",
            functools.partial(count_on_device, setup, attributes=attributes, compiles=compiles),
        ),
    ):
        found[name] = in_process(functools.partial(_or_error, job), LIMIT_S)
    return found


def _or_error(job: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return job()
    except IncompatibleError as error:
        return {"error": str(error)}


HEADER = (
    *("step", "operators", "simulated", "launches", "products", "waits", "simulated", "beside"),
    *("copies", "to host, MiB", "from host, MiB", "page-locked, MiB", "state, MiB"),
    "host, predicted",
)


def as_line(name: str, one: dict[str, Any]) -> list[str]:
    """Lay out a step."""
    real, simulated = one["real"], one["simulated"]
    to_host, from_host = copied(real, "d2h pinned"), copied(real, "h2d pinned")
    return [
        name,
        f"{sum(real['counts']['operators'].values()):,}",
        f"{sum(simulated['counts']['operators'].values()):,}",
        f"{real['launches']:,}",
        f"{real['library']:,}",
        str(waits_of(real)),
        str(sum(simulated["counts"]["waits"].values())),
        str(beside(real["counts"])),
        str(to_host[0] + from_host[0]),
        f"{to_host[1] / MIB:,.0f}",
        f"{from_host[1] / MIB:,.0f}",
        f"{real['pinned_bytes'] / MIB:,.0f}",
        f"{real.get('state_bytes', 0) / MIB:,.0f}",
        f"{simulated['host_bytes'] / MIB:,.0f}",
    ]


def waits_of(real: dict[str, Any]) -> int:
    """Count the waits of the training thread."""
    return int(sum(real["waits"].values())) - beside(real["counts"])


def beside(counts: dict[str, Any]) -> int:
    """Count the waits of the thread that updates."""
    return int(counts.get("waits_beside", 0))


def copied(real: dict[str, Any], way: str) -> tuple[int, int]:
    """Count copies of one way and their bytes, without those of single numbers."""
    chosen = [c for name, c in real["copies"].items() if name.startswith(way)]
    number, num_bytes = (sum(values) for values in zip(*chosen, strict=True)) if chosen else (0, 0)
    scalars = real["counts"]["waits"].get("_local_scalar_dense", 0) if way == "d2h pinned" else 0
    return number - scalars, num_bytes


def differences(one: dict[str, Any]) -> list[str]:
    """Say where the simulation counts otherwise than what ran."""
    real, simulated = one["real"]["counts"], one["simulated"]["counts"]
    counted, expected = _by_name(real["operators"]), _by_name(simulated["operators"])
    found = [
        f"`{name}` {counted[name]} instead of {expected[name]}"
        for name in sorted({*counted, *expected})
        if counted[name] != expected[name]
    ]
    waits = waits_of(one["real"]), sum(simulated["waits"].values())
    if waits[0] != waits[1]:
        kinds = ", ".join(f"{n} x {name}" for name, n in one["real"]["waits"].items())
        found.append(f"{waits[0]} waits ({kinds}) instead of {waits[1]}")
    if beside(real) != beside(simulated):
        found.append(f"{beside(real)} waits beside instead of {beside(simulated)}")
    for way, key in (("d2h pinned", "to_host_bytes"), ("h2d pinned", "from_host_bytes")):
        num_bytes = copied(one["real"], way)[1]
        if abs(num_bytes - simulated[key]) > MIB:
            found.append(f"{num_bytes / MIB:,.1f} MiB {way} instead of {simulated[key] / MIB:,.1f}")
    held = one["real"]["pinned_bytes"] + one["real"].get("state_bytes", 0)
    predicted = one["simulated"]["host_bytes"]
    if abs(held - predicted) > MIB:
        found.append(f"{held / MIB:,.1f} MiB on the host instead of {predicted / MIB:,.1f}")
    return found


# On fake tensors an operator of its own stands for the product with a wider result.
def _by_name(operators: dict[str, int]) -> collections.Counter[str]:
    found = collections.Counter(operators)
    found["addmm"] += found.pop("add_product", 0)
    return found


NOTES = """\
Products are calls of cuBLAS. Of copies to the host, those of single numbers are not counted, and
what the host computes is not among the operators. Waits are those of the training thread; those
beside it are of the thread that updates, one for each piece of up to 16 MiB of gradients in another
type than their weights, which it has to convert.

Each step waits once because of the model: transformers looks whether its mask is all ones. A loss
in tiles waits for the number of labels that count, which decides shapes. With offloaded weights the
host waits once at the end of backward, as clipping and the optimizer's step may read gradients.
With a table on the host it waits in forward, too, for the ids, of which it looks up the rows.
Nothing else waits.

Beside 2 batches, the second one comes to the device. The labels that count are read from the call
before where nearly all count, which a simulation finds with `nonzero`. It takes each token of a
batch for another word, so that more rows of a table come than in a real step."""


def per_operator(found: dict[str, Any]) -> str:
    """Say which operators launch more or less than one kernel or product."""
    most: dict[str, tuple[int, int]] = {}
    for rows in found.values():
        for one in rows.values():
            numbers = one["real"]["counts"]["operators"] if "real" in one else {}
            for name, launches in one.get("real", {}).get("by_operator", {}).items():
                if numbers.get(name) and launches != numbers[name]:
                    most[name] = (launches, numbers[name])
    if not most:
        return ""
    listed = (f"`{name}` {a}/{b}" for name, (a, b) in sorted(most.items()))
    return "Launches per call where that is not one: " + ", ".join(listed) + "."


def main(argv: Sequence[str] | None = None) -> int:
    """Count, compare, print and write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.virtual_gpu launches", description=__doc__
    )
    parser.add_argument("--rows", nargs="*", help="some of them")
    parser.add_argument("--models", nargs="*", help="some of them")
    parser.add_argument("--by-operator", action="store_true", help="launches of each operator")
    parser.add_argument("--to", type=Path, help="a file to which results are added as they come")
    parser.add_argument("--read", type=Path, nargs="*", help="files that `--to` made: run nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    options = parser.parse_args(argv)
    found: dict[str, Any] = {}
    if options.read:
        for line in (line for path in options.read for line in path.read_text().splitlines()):
            one = json.loads(line)
            found.setdefault(one.pop("model"), {})[one.pop("row")] = one
    else:
        found = _count_all(options)
    _write(found, options.results)
    return 0


def _count_all(options: argparse.Namespace) -> dict[str, Any]:
    allow_forks()
    commit = provenance()["commit"]
    found: dict[str, Any] = {}
    for model in options.models or MODELS:
        for name, row in {**ROWS, **OFFLOADED}.items():
            if options.rows and name not in options.rows:
                continue
            one = compare({**MODELS, **DRY}[model], row, attributes=options.by_operator)
            one["commit"] = commit
            found.setdefault(model, {})[name] = one
            print(model, name, json.dumps(one)[:300], sep=" | ", flush=True)
            if options.to is not None:
                with options.to.open("a") as file:
                    file.write(json.dumps({"model": model, "row": name, **one}) + "\n")
    return found


def _write(found: dict[str, Any], folder: Path) -> None:
    texts = []
    for model, rows in found.items():
        counted = {n: one for n, one in rows.items() if is_counted(one)}
        texts += [f"{model}:", markdown_table(HEADER, [as_line(*row) for row in counted.items()])]
        said = [f"- {n}: {'; '.join(d)}" for n, one in counted.items() if (d := differences(one))]
        texts += ["Counted otherwise by the simulation:\n\n" + "\n".join(said)] if said else []
    texts += [per_operator(found), NOTES]
    text = "\n\n".join(filter(None, texts))
    steps = [one for rows in found.values() for one in rows.values()]
    command = several_runs("python -m benchmarks.virtual_gpu launches", "steps", steps)
    path = write_results(
        "virtual_gpu_launches",
        {"counted": found},
        text,
        folder=folder,
        put_together={"command": command},
    )
    print(f"{text}\n\nWritten to {path}")


def is_counted(one: dict[str, Any]) -> bool:
    """Return whether both ran."""
    sides = (one["simulated"], one["real"])
    return all(isinstance(side, dict) and "error" not in side for side in sides)
