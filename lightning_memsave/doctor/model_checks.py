"""Checks on a model, its optimizers and its Trainer settings."""

import inspect
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_memsave.doctor.subject import Subject
from lightning_memsave.errors import Problem
from lightning_memsave.measure.alive_tensors import is_of_library
from lightning_memsave.techniques.micro_batching.technique import size_of_batches
from lightning_memsave.trainer.precision import overflows_certainly


def find_batch_statistics(subject: Subject) -> Iterator[Problem]:
    """Batch normalisation with micro-batches or gradient accumulation."""
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    found = [name for name, m in subject.module.named_modules() if isinstance(m, norms)]
    given = subject.trainer_arguments.get("accumulate_grad_batches")
    settings = {
        "accumulate_grad_batches": subject.settings.get("accumulate_grad_batches") or given,
        "micro_batch_size": size_of_batches(subject.settings.get("micro_batch_size")),
    }
    for name, value in settings.items() if found else ():
        if isinstance(value, int) and (value > 1 or name == "micro_batch_size"):
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            yield Problem(
                f"`{name}={value}` and batch normalisation in `{found[0]}`{more}",
                "statistics come from the samples that pass forward at once, not from the "
                "effective batch, so training differs from that with the whole batch",
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
