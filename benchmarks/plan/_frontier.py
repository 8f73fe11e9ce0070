"""Plan large models for GPUs of the table, each in a process of its own: `--frontier`, `--host`."""

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

from benchmarks._common import markdown_table, run_in_process
from benchmarks._models import OTHERS, TINY, masked_batch
from benchmarks.presets._run import MODELS as LANGUAGE_MODELS
from lightning_memsave import plan_memory, predict_memory
from lightning_memsave.errors import InfeasiblePlanError
from lightning_memsave.planning.plan import MemoryPlan, Plan
from lightning_memsave.techniques.registry import current_settings
from lightning_memsave.units import MIB, parse_bytes

MAX_SEARCH_S = 20.0
"""For GPT-2 XL, on a machine with nothing else to do."""
_LIMIT_S = 900
_XL, _RTX_3060, _RTX_3090 = "GPT-2 XL, 8 x 1024", "RTX-3060-12GB", "RTX-3090"
_RTX_A6000, _RTX_4090 = "RTX-A6000", "RTX-4090"
_LLAMA_8B, _LONG = "Llama 8B, 2 x 2048", "Llama 8B, 1 x 32768"
_CNN = dataclasses.replace(OTHERS["ResNet"], batch={"pixel_values": (64, 3, 224, 224)})
MAX_HOST_SEARCH_S = 60.0
"""Of processor time, for each budget of host memory: what is best by then is the plan."""
_LLAMA: Any = transformers.LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
)


def _tokens(batch_size: int, num_tokens: int) -> dict[str, Any]:
    tokens = torch.zeros(batch_size, num_tokens, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


_OFF: dict[str, Any] = {"preset": "off"}

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    **{name: (model.build, model.batch) for name, model in LANGUAGE_MODELS.items()},
    "ResNet-50, 64 x 224 x 224": (_CNN.build, _CNN.make_batch),
    _LLAMA_8B: (lambda: transformers.LlamaForCausalLM(_LLAMA), lambda: _tokens(2, 2048)),
    _LONG: (lambda: transformers.LlamaForCausalLM(_LLAMA), lambda: _tokens(1, 32768)),
    "RoBERTa tiny, 8 x 16": (TINY.build, lambda: masked_batch(500, 8, 16)),
}


class Case(NamedTuple):
    """What is planned.

    Args:
        model: One of `MODELS`.
        gpu: Name of a GPU.
        budget: A size, ``"all"`` of the GPU, or ``"third"`` of what the unchanged step needs.
        exactness: How far results may move.
        host: Host memory that a plan may use; empty for no limit.
    """

    model: str
    gpu: str
    budget: str
    exactness: str = "approximate"
    host: str = ""

    def __str__(self) -> str:
        host = self.host and f", {self.host} on the host"
        return f"{self.model}, {self.gpu}, {self.budget}, {self.exactness}{host}"


_ROBERTA, _LARGE_ROBERTA, _RESNET = (
    "RoBERTa 84M, 64 x 128",
    "RoBERTa 1.1B, 64 x 128",
    "ResNet-50, 64 x 224 x 224",
)
CASES = [
    Case(_ROBERTA, _RTX_3060, "1GiB"),
    Case(_ROBERTA, _RTX_3060, "2GiB"),
    Case(_ROBERTA, _RTX_3060, "all"),
    Case(_ROBERTA, _RTX_3060, "3GiB", "bitwise"),
    Case(_LARGE_ROBERTA, _RTX_3060, "all"),
    Case(_LARGE_ROBERTA, _RTX_3090, "all", "bitwise"),
    Case(_XL, _RTX_3060, "all"),
    Case(_XL, _RTX_3090, "all"),
    Case(_XL, _RTX_A6000, "all", "bitwise"),
    Case(_RESNET, _RTX_3060, "third"),
    Case(_RESNET, _RTX_3060, "third", "bitwise"),
]
DRY = [Case([*MODELS][-1], _RTX_3060, "1GiB", "bitwise")]
HOSTS = [
    *(Case(_XL, _RTX_3060, "all", host=f"{size}GiB") for size in (16, 24, 32, 64)),
    *(Case(_LLAMA_8B, _RTX_4090, "all", host=f"{size}GiB") for size in (56, 64, 96, 192)),
    Case(_LLAMA_8B, _RTX_4090, "8GiB", host="192GiB"),
    Case(_LLAMA_8B, _RTX_3060, "all", host="192GiB"),
    Case(_LONG, _RTX_4090, "all", host="192GiB"),
]
DRY_HOST = [DRY[0]._replace(host="1GiB")]


def plan(case: Case) -> dict[str, Any]:
    """Plan one case in this process."""
    build, batch = MODELS[case.model][0], MODELS[case.model][1]()
    known: dict[str, Any] = {"load": os.getloadavg()[0]}
    budget: int | str = "free" if case.budget == "all" else case.budget
    more: dict[str, Any] = {}
    if case.host:
        more = {"settings": {"host_budget": case.host}, "time_limit_s": MAX_HOST_SEARCH_S}
    else:
        plain = predict_memory(build, batch, settings=_OFF, gpu=case.gpu)
        known["plain_bytes"] = plain.device_bytes
        budget = plain.device_bytes // 3 if budget == "third" else budget
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    try:
        found: MemoryPlan | None = plan_memory(
            build,
            batch,
            budget=budget,
            gpu=case.gpu,
            exactness=case.exactness,  # type: ignore[arg-type] # one of the three
            **more,
        )
    except (InfeasiblePlanError, TimeoutError) as error:
        found, known["refused"] = None, str(error)
    known["seconds"] = time.monotonic() - start_s
    known["processor_s"] = time.process_time() - start_cpu_s
    return known if found is None else found.to_dict() | known


def run(cases: Sequence[Case], *, in_process: bool = False) -> dict[str, dict[str, Any]]:
    """Plan each case, in a process of its own if not in this one."""
    found = {}
    for case in cases:
        found[str(case)] = (
            plan(case)
            if in_process
            else run_in_process("benchmarks.plan._frontier", *case, limit_s=_LIMIT_S)
        )
        error = found[str(case)].get("error")
        if error:
            raise RuntimeError(f"{case}: {error}")
        print(f"{case}: {found[str(case)]['seconds']:.1f} s", flush=True)
    return found


def make_text(found: dict[str, dict[str, Any]]) -> str:
    """Lay out what was found."""
    rows, texts = [], []
    for name, one in found.items():
        model, gpu, budget, exactness = name.rsplit(", ", 3)
        numbers = [
            f"{one['seconds']:.1f}",
            f"{one['processor_s']:.1f}",
        ]
        what = [name.removesuffix(f", {exactness}"), exactness]
        if "refused" in one:
            rows.append([*what, "", "refused", "", "", "", *numbers])
            texts.append(f"{name}: {one['refused']}")
            continue
        chosen = one["plan"]
        rows.append(
            [
                *what,
                f"{(one['budget_bytes'] - one['margin_bytes']) / MIB:,.0f}",
                f"{chosen['device_bytes'] / MIB:,.0f}",
                f"{chosen['time_ratio']:.2f}",
                chosen["exactness"],
                str(one["num_predictions"]),
                *numbers,
            ]
        )
        texts.append(f"{model} on {gpu}, budget {budget}, {exactness}:\n\n{_frontier(one)}")
    header = ["planned", "may be", "room, MiB", "plan, MiB", "time", "is", "predictions"]
    loads = [one["load"] for one in found.values()]
    return "\n\n".join(
        [
            "Predicted for GPUs, on a CPU: room is the budget without what stays free, `plan` what "
            "the device must have for the chosen plan, by a prediction of the whole step, `time` "
            "its estimated time over that of the unchanged step. Seconds and processor seconds are "
            "those of the search.",
            markdown_table([*header, "seconds", "processor"], rows),
            f"The machine was loaded by other work: {min(loads):.1f} to {max(loads):.1f} processes "
            f"wanted its {os.cpu_count()} cores when a search began.",
            "The frontiers; the chosen plan is marked with `*`, `~` is estimated and not predicted "
            "whole:",
            *texts,
        ]
    )


def _plan_of(point: dict[str, Any]) -> Plan:
    names = {field.name for field in dataclasses.fields(Plan)}
    known = {name: value for name, value in point.items() if name in names}
    return Plan(**known | {"settings": current_settings(point["settings"])})


def _frontier(one: dict[str, Any]) -> str:
    rows = [
        [
            f"{_plan_of(point).short}{' *' if point == one['plan'] else ''}",
            f"{'' if point['is_verified'] else '~'}{point['device_bytes'] / MIB:,.0f}",
            f"{point['time_ratio']:.2f}",
            point["exactness"],
        ]
        for point in one["frontier"]
    ]
    return markdown_table(["settings", "MiB", "time", "exactness"], rows)


def make_host_text(found: dict[str, dict[str, Any]]) -> str:
    """Lay out what was found for hosts with little memory."""
    rows = []
    for name, one in found.items():
        model, gpu, budget, _, host = name.rsplit(", ", 4)
        of_gpu = gpu if budget == "all" else f"{budget} of {gpu}"
        limits = [f"{model}, {of_gpu}", host.removesuffix(" on the host")]
        if "refused" in one:
            rows.append([*limits, "refused", "", "", one["refused"], f"{one['processor_s']:.0f}"])
            continue
        chosen = one["plan"]
        plan = _plan_of(chosen)
        about = "" if plan.is_verified else "~"
        rows.append(
            [
                *limits,
                f"{about}{plan.device_bytes / MIB:,.0f}",
                f"{about}{plan.host_bytes / MIB:,.0f}",
                f"{chosen['time_ratio']:.2f}",
                plan.short,
                f"{one['processor_s']:.0f}",
            ]
        )
    header = ["planned", "host", "device, MiB", "on the host, MiB", "time", "settings", "processor"]
    loads = [one["load"] for one in found.values()]
    return "\n\n".join(
        [
            "Plans for all of a GPU and a budget of host memory, predicted whole, on a CPU; `~` is "
            "estimated and not predicted whole. `time` is the estimated time over that of the "
            "unchanged step, processor seconds are those of the search, which ends after "
            f"{MAX_HOST_SEARCH_S:.0f} with the best plan so far.",
            markdown_table(header, rows),
            f"The machine was loaded by other work: {min(loads):.1f} to {max(loads):.1f} processes "
            f"wanted its {os.cpu_count()} cores when a search began.",
        ]
    )


def check_host_claims(found: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Say which claims hold of plans for hosts with little memory."""
    claims = {}
    for name, one in found.items():
        chosen = one.get("plan")
        fits = (
            chosen is not None
            and chosen["is_verified"]
            and chosen["device_bytes"] + one["margin_bytes"] <= one["budget_bytes"]
            and chosen["host_bytes"] <= parse_bytes(name.rsplit(", ", 1)[1].split(" ")[0])
        )
        claims[f"{name}: a plan that was predicted whole fits both budgets"] = fits
        limit = f"{MAX_HOST_SEARCH_S:.0f} s"
        claims[f"{name}: found in {limit} of processor time ({one['processor_s']:.0f} s)"] = (
            fits and one["processor_s"] <= 1.05 * MAX_HOST_SEARCH_S
        )
    return claims


def check_claims(found: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Say which claims hold."""
    claims = {}
    for name, one in found.items():
        if "refused" in one:
            continue  # that no plan fits is in the table
        chosen = one["plan"]
        claims[f"{name}: the plan was predicted whole and fits"] = (
            chosen["is_verified"]
            and chosen["device_bytes"] + one["margin_bytes"] <= one["budget_bytes"]
            and chosen in one["frontier"]
        )
        if name.startswith(_XL):
            limit = f"{MAX_SEARCH_S:.0f} s"
            claims[f"{name}: found within {limit} ({one['seconds']:.1f} s)"] = (
                one["seconds"] <= MAX_SEARCH_S
            )
        if "bitwise" in name:
            exact = {point["exactness"] for point in (chosen, *one["frontier"])}
            claims[f"{name}: every plan is bitwise"] = exact == {"bitwise"}
    return claims


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan._frontier")
    for field in Case._fields:
        parser.add_argument(field, nargs="?", default="")
    print(json.dumps(plan(Case(**vars(parser.parse_args())))))
