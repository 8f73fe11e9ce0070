"""Read a budget of memory, and the rates to plan with."""

import contextlib
import functools
import math
from dataclasses import replace
from typing import Any, NoReturn

import torch

from lightning_memsave.errors import ConfigurationError
from lightning_memsave.planning.constants import TYPICAL_GPU
from lightning_memsave.planning.step_time import Rates, host_memory_rate, measure_cpu_rates
from lightning_memsave.prediction.cuda.constants import margin_bytes
from lightning_memsave.prediction.cuda.gpus import GPUS, Gpu
from lightning_memsave.units import MIB, format_bytes, parse_bytes


def margin_of(budget_bytes: int, device: str) -> int:
    """Say how much of a budget a plan leaves free: nothing where predictions are exact."""
    return margin_bytes(budget_bytes) if device == "cuda" else 0


def check_budget(budget: Any) -> None:
    is_size = type(budget) is int and budget >= MIB
    is_share = isinstance(budget, float) and 0 < budget <= 1
    if isinstance(budget, str):
        with contextlib.suppress(ConfigurationError):
            is_size = budget == "free" or parse_bytes(budget) >= MIB
    if not is_size and not is_share:
        _refuse(
            budget,
            "is neither a size of at least 1 MiB with its unit nor a share above 0 and up to 1",
        )


def read_budget(budget: Any, total_bytes: int | None, name: str = "") -> int:
    check_budget(budget)
    if isinstance(budget, float) or budget == "free":
        if total_bytes is None:
            why = "is a part of a device whose memory is not known"
            _refuse(budget, why, 'also `gpu="T4"`, or a size such as `budget="12GiB"`')
        num_bytes = total_bytes if budget == "free" else math.floor(budget * total_bytes)
    else:
        num_bytes = parse_bytes(budget) if isinstance(budget, str) else budget
    if total_bytes is not None and num_bytes > total_bytes:
        _refuse(
            budget,
            f"is more than the {format_bytes(total_bytes)} of the {name or 'device'}",
            "at most that, or a share of it such as `budget=0.9`",
        )
    return num_bytes


_ANY = (
    'a size such as `budget="12GiB"`, a share of the device such as `budget=0.9`, or '
    '`budget="free"`'
)


def _refuse(budget: Any, why: str, use: str = _ANY) -> NoReturn:
    raise ConfigurationError(f"`budget={budget!r}` {why}. Use {use}.")


def rates_of(gpu: Gpu | None, device: str, *, is_local: bool = False) -> Rates:
    if device == "cpu":
        return _rates_of_cpu(torch.get_num_threads())
    throughput = None if gpu is None else gpu.throughput
    rates = Rates.of_gpu(throughput or GPUS[TYPICAL_GPU].throughput)  # type: ignore[arg-type]
    return replace(rates, host_memory_bytes=host_memory_rate()) if is_local else rates


@functools.cache
def _rates_of_cpu(num_threads: int) -> Rates:
    """Measure them once for each number of threads: a process may plan several fits."""
    return measure_cpu_rates()
