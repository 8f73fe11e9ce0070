"""Checks on a model, its optimizers and Trainer settings, environment variables and packages."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_memsave.core.names import did_you_mean
from lightning_memsave.errors import Problem
from lightning_memsave.measure.alive_tensors import is_of_library
from lightning_memsave.prediction.cuda.allocator import ALLOCATOR_VARIABLES
from lightning_memsave.techniques.micro_batching.technique import (
    BATCH_STATISTICS,
    batch_norms_of,
    size_of_batches,
)
from lightning_memsave.trainer.precision import overflows_certainly


@dataclass(frozen=True)
class Subject:
    """What is checked: a model, its training and the environment."""

    module: nn.Module
    precision: str = "32-true"
    trainer_arguments: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    optimizers: Sequence[Optimizer] = ()
    conflicts: Sequence[Problem] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


def find_batch_statistics(subject: Subject) -> Iterator[Problem]:
    """Batch normalisation with micro-batches or gradient accumulation."""
    found = batch_norms_of(subject.module)
    given = subject.trainer_arguments.get("accumulate_grad_batches")
    settings = {
        "accumulate_grad_batches": subject.settings.get("accumulate_grad_batches") or given,
        "micro_batch_size": size_of_batches(subject.settings.get("micro_batch_size")),
    }
    why = {
        "accumulate_grad_batches": BATCH_STATISTICS.replace("micro-batch", "batch"),
        "micro_batch_size": BATCH_STATISTICS,
    }
    for name, value in settings.items() if found else ():
        if isinstance(value, int) and (value > 1 or name == "micro_batch_size"):
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            yield Problem(
                f"`{name}={value}` and batch normalisation in `{found[0]}`{more}",
                f"{why[name]}, so training differs from that with the effective batch",
                "Use a normalisation without batch statistics, such as `nn.GroupNorm`; or lower "
                "memory with `activation_checkpointing` instead, which changes no result.",
            )


def find_growing_metrics(subject: Subject) -> Iterator[Problem]:
    """Metrics of training steps that keep all predictions of the epoch."""
    # Without an import of torchmetrics there is no metric.
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return
    used = _names_in_step(type(subject.module))
    for name, module in subject.module.named_modules():
        is_metric = isinstance(module, torchmetrics.Metric)
        if not is_metric or name.partition(".")[0] not in used or module.compute_on_cpu:
            continue
        lists = [state for state, value in module.metric_state.items() if isinstance(value, list)]
        if lists:
            yield Problem(
                f"`{name}`, a `{type(module).__name__}`",
                f"it keeps `{lists[0]}` of every training batch on the device until the epoch ends",
                "Give it bins instead, such as `thresholds=100`, or create it with "
                "`compute_on_cpu=True`.",
            )


_STEP_HOOKS = ("training_step", "on_train_batch_start", "on_train_batch_end", "forward")


# Names in the functions of the user that steps run, and in methods of the module that these name.
def _names_in_step(cls: type) -> set[str]:
    names: set[str] = set()
    waiting: list[Any] = [getattr(cls, hook, None) for hook in _STEP_HOOKS]
    while waiting:
        one = inspect.unwrap(waiting.pop())
        code = one if isinstance(one, CodeType) else getattr(one, "__code__", None)
        if code is None or is_of_library(getattr(one, "__module__", "")):
            continue
        waiting += [getattr(cls, name, None) for name in {*code.co_names} - names]
        waiting += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        names |= {*code.co_names}
    return names


MIN_SHARE = 0.5
"""An 8-bit optimizer that stores less of its state in 8 bits is reported."""


def find_8bit_embeddings(subject: Subject) -> Iterator[Problem]:
    """An optimizer of bitsandbytes with 8-bit state for embeddings, tied ones too."""
    for optimizer in filter(_is_8bit, subject.optimizers):
        manager: Any = getattr(optimizer, "mng", None)
        if manager is None or manager.module_weight_config_triple or manager.pid2config:
            continue  # the user has chosen what stays in 32 bits
        sizes = {p: _min_size(optimizer) for g in optimizer.param_groups for p in g["params"]}
        for name, module in subject.module.named_modules():
            weight: Any = getattr(module, "weight", None)
            is_table = isinstance(module, nn.Embedding) and weight in sizes
            if is_table and weight.requires_grad and weight.numel() >= sizes[weight]:
                tied = [n for n, m in subject.module.named_modules() if _shares(m, module)]
                also = f", tied to `{tied[0]}`" if tied else ""
                yield Problem(
                    f"`{type(optimizer).__name__}` and the embedding `{name}`{also}",
                    "its state is 8-bit, which bitsandbytes advises against for embeddings: rows "
                    "that a batch does not use have much smaller gradients than the others",
                    "Return the optimizer of torch, and set `MemSaveCallback(optimizer='8bit')`, "
                    "which keeps embeddings in 32 bits.",
                )
                break


def _shares(module: nn.Module, embedding: nn.Module) -> bool:
    return module is not embedding and getattr(module, "weight", None) is embedding.weight


def find_ineffective_8bit(subject: Subject) -> Iterator[Problem]:
    """An optimizer of bitsandbytes for tensors that are too small for 8 bits."""
    for optimizer in filter(_is_8bit, subject.optimizers):
        trained = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        total = sum(p.numel() for p in trained)
        small = [p for p in trained if p.numel() < _min_size(optimizer)]
        share = 1 - sum(p.numel() for p in small) / max(total, 1)
        if share < MIN_SHARE:
            yield Problem(
                f"`{type(optimizer).__name__}`",
                f"only {share:.0%} of its state is 8-bit, because {len(small)} of {len(trained)} "
                f"tensors have less than {_min_size(optimizer):,} elements",
                f"Use the optimizer of torch: `torch.optim.{_torch_name(optimizer)}`.",
            )


def _is_8bit(optimizer: Optimizer) -> bool:
    is_foreign = type(optimizer).__module__.startswith("bitsandbytes.")
    return is_foreign and getattr(getattr(optimizer, "args", None), "optim_bits", 32) == 8


def _min_size(optimizer: Any) -> int:
    return int(optimizer.args.min_8bit_size)


def _torch_name(optimizer: Optimizer) -> str:
    name = type(optimizer).__name__.removeprefix("Paged").removesuffix("8bit")
    return name if name in ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad") else "AdamW"


def find_float16_overflow(subject: Subject) -> Iterator[Problem]:
    """float16 for models whose activations overflow in it, such as T5."""
    if not subject.precision.startswith("16"):
        return
    if why := overflows_certainly(subject.module):
        yield Problem(
            f"`precision={subject.precision!r}`",
            f"{why}, so the loss may become NaN or infinite",
            f"Use `precision='bf16-{subject.precision.partition('-')[2]}'` on a GPU with native "
            "bfloat16, and otherwise `precision='32-true'`.",
        )


LAST_WITHOUT_BF16_CLIPPING = (2, 6, 6)
"""The last version of Lightning that refuses it: Lightning#21435 is fixed on its main branch."""


def find_refused_clipping(subject: Subject) -> Iterator[Problem]:
    """Gradient clipping and a fused optimizer in mixed precision."""
    is_mixed = subject.precision.endswith("mixed")
    is_replaced = bool(subject.settings.get("optimizer"))  # by an 8-bit form, which is not fused
    if not subject.trainer_arguments.get("gradient_clip_val") or not is_mixed or is_replaced:
        return
    is_bf16 = subject.precision.startswith("bf16")
    installed = [subject.versions.get(name) for name in ("lightning", "pytorch-lightning")]
    versions = [_version(version) for version in installed if version is not None]
    if is_bf16 and versions and min(versions) > LAST_WITHOUT_BF16_CLIPPING:
        return
    for optimizer in subject.optimizers:
        if any(group.get("fused") for group in optimizer.param_groups):
            cause = " (Lightning#21435)" if is_bf16 else ""
            yield Problem(
                f"`gradient_clip_val` and `{type(optimizer).__name__}(fused=True)`",
                f"Lightning refuses to clip gradients of fused optimizers in "
                f"`precision={subject.precision!r}`{cause}, and the first step fails",
                "Create the optimizer without `fused=True`.",
            )


def _version(text: str) -> tuple[int, ...]:
    parts = text.partition("+")[0].split(".")[:3]
    return tuple(int(part) for part in parts if part.isdecimal())


# Of torch 2.10 to 2.13.
_KEYS = frozenset(
    {
        *("backend", "max_split_size_mb", "max_non_split_rounding_mb", "large_segment_size_mb"),
        *("garbage_collection_threshold", "roundup_power2_divisions", "expandable_segments"),
        *("release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "throw_on_cudamalloc_oom"),
        *("graph_capture_record_stream_reuse", "per_process_memory_fraction"),
        *("pinned_use_background_threads", "pinned_use_cuda_host_register"),
        *("pinned_use_hip_host_register", "pinned_num_register_threads"),
        *("pinned_reserve_segment_size_mb", "pinned_max_round_threshold_mb"),
        *("pinned_max_cached_size_mb", "pinned_free_catch_all"),
    }
)
_FLAGS = frozenset(
    {
        *("expandable_segments", "release_lock_on_cudamalloc", "throw_on_cudamalloc_oom"),
        *("pinned_use_background_threads", "pinned_use_cuda_host_register"),
        "graph_capture_record_stream_reuse",
    }
)
_MIN_SPLIT_MIB = 20


def find_allocator_settings(subject: Subject) -> Iterator[Problem]:
    """Wrong or harmful values in `PYTORCH_CUDA_ALLOC_CONF` and `PYTORCH_ALLOC_CONF`."""
    found = {name: subject.environment.get(name) for name in ALLOCATOR_VARIABLES}
    given = {name: text for name, text in found.items() if text is not None}
    if len(set(given.values())) == 2:
        first, second = given
        yield Problem(
            f"`{first}` and `{second}`",
            f"they differ, and torch reads only `{first}`",
            f"Run `unset {first}`, and write all settings into `{second}`.",
        )
    for name, text in list(given.items())[:1]:
        # Values in brackets have commas, too: their parts are no names of settings.
        for item in filter(None, text.replace(" ", "").split(",")):
            why, fix = _wrong_setting(*item.partition(":"))
            if why:
                yield Problem(f"`{name}={text}`", why, fix)


def _wrong_setting(key: str, colon: str, value: str) -> tuple[str, str]:
    if not colon:
        name, _, rest = key.partition("=")
        return f"`{key}` has no colon", f"Write `{name}:{rest or 'VALUE'}`."
    near = did_you_mean(key, _KEYS)
    if key not in _KEYS and near:  # a later version of torch may know other keys
        return f"torch has no setting `{key}`, and refuses it on CUDA", near.strip()
    if key in _FLAGS and value not in ("True", "False"):
        return (
            f"`{key}` is `True` or `False`, with a capital letter, and torch refuses `{value}`",
            f"Write `{key}:{'False' if value.lower() in ('0', 'false') else 'True'}`.",
        )
    if key in _VALUES:
        is_right, why, fix = _VALUES[key]
        return ("", "") if is_right(value) else (why.format(value), fix)
    return "", ""


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


# Whether a value is right, why it is not, and what to do.
_VALUES: Mapping[str, tuple[Callable[[str], bool], str, str]] = {
    "max_split_size_mb": (
        lambda value: not value.isdecimal() or int(value) >= _MIN_SPLIT_MIB,
        f"torch refuses a `max_split_size_mb` below {_MIN_SPLIT_MIB}",
        "Write `expandable_segments:True` instead, which avoids fragmentation without a limit.",
    ),
    "garbage_collection_threshold": (
        lambda value: 0 < _number(value) < 1,
        "`garbage_collection_threshold` is a share between 0 and 1, and torch refuses `{}`",
        "Write for example `garbage_collection_threshold:0.8`.",
    ),
    "backend": (
        lambda value: value != "cudaMallocAsync",
        "this allocator has no `expandable_segments` and no memory snapshots, which `OOMObserver` "
        "and `torch.cuda.memory` use, and predictions are for the other one",
        "Remove `backend:cudaMallocAsync`; against fragmentation write `expandable_segments:True`.",
    ),
}


_SLOW = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "each tensor is allocated and freed by the driver, which "
    "waits for the GPU; torch's documentation recommends it for memory checkers only",
    "CUDA_LAUNCH_BLOCKING": "each kernel is waited for, so the CPU and the GPU take turns",
}


def find_debug_settings(subject: Subject) -> Iterator[Problem]:
    """`PYTORCH_NO_CUDA_MEMORY_CACHING`, `CUDA_LAUNCH_BLOCKING`, `detect_anomaly`."""
    for name, why in _SLOW.items():
        value = subject.environment.get(name, "")
        if value not in ("", "0"):
            yield Problem(f"`{name}={value}`", why, f"Run `unset {name}`.")
    if subject.trainer_arguments.get("detect_anomaly"):
        yield Problem(
            "`Trainer(detect_anomaly=True)`",
            "autograd keeps a stack trace of each operation, and reads every gradient to look for "
            "NaN, which waits for the GPU",
            "Remove it when the NaN is found.",
        )


def find_broken_packages(subject: Subject) -> Iterator[Problem]:
    """`nvidia-ml-py` beside `nvidia-ml-py3`."""
    if {"nvidia-ml-py", "nvidia-ml-py3"} <= {name.lower() for name in subject.versions}:
        yield Problem(
            "the packages `nvidia-ml-py` and `nvidia-ml-py3`",
            "both install `pynvml.py`, and the older one may have replaced the other's",
            "Run `pip uninstall nvidia-ml-py3`, then `pip install --force-reinstall nvidia-ml-py`.",
        )
