"""The checks, in the order of their output; a new check is a function and a line here."""

from collections.abc import Iterator
from dataclasses import replace

from lightning_memsave.doctor import checkpointing_checks as checkpointing
from lightning_memsave.doctor import environment_checks as environment
from lightning_memsave.doctor import loss_checks as loss
from lightning_memsave.doctor import model_checks as model
from lightning_memsave.doctor import step_checks as step
from lightning_memsave.doctor.check import Check, LocatedProblem, Subject


def _find_conflicts(subject: Subject) -> Iterator[LocatedProblem]:
    for problem in subject.conflicts:
        yield LocatedProblem(problem.what, problem.why, problem.fix)


CHECKS: tuple[Check, ...] = (
    Check(
        "kept_graph",
        "`self.losses.append(loss)` or `self.total += loss` of a value with its graph",
        step.find_kept_graphs,
    ),
    Check(
        "growing_list",
        "a list of tensors that no hook of the class empties",
        step.find_growing_lists,
    ),
    Check(
        "retained_graph",
        "`retain_graph=True` in the last backward pass of a step",
        step.find_retained_graphs,
    ),
    Check("gradient_cycle", "`backward(create_graph=True)`", step.find_gradient_cycles),
    Check("kept_gradients", "`zero_grad(set_to_none=False)`", step.find_kept_gradients),
    Check(
        "missing_zero_grad",
        "manual optimization that never sets the gradients to zero",
        step.find_missing_zero_grad,
    ),
    Check(
        "device_wait",
        "`.item()`, `.cpu()`, `.tolist()`, `float()` or `print()` of a tensor in every step",
        step.find_waits,
    ),
    Check(
        "cache_release",
        "`torch.cuda.empty_cache()` or `gc.collect()` in every step",
        step.find_cache_releases,
    ),
    Check("pinned_in_step", "memory that every step pins", step.find_pinned_copies),
    Check("double_softmax", "softmax before `cross_entropy`", loss.find_double_softmax),
    Check(
        "logits_copy",
        "`.float()` or `log_softmax` of logits of more than 10,000 classes before `cross_entropy`",
        loss.find_copied_logits,
    ),
    Check(
        "checkpointed_twice",
        "reentrant `torch.utils.checkpoint` of blocks that `MemSaveCallback` checkpoints too",
        checkpointing.find_repeated_checkpointing,
    ),
    Check(
        "lost_dropout_mask",
        "`checkpoint(preserve_rng_state=False)` around dropout",
        checkpointing.find_lost_dropout_masks,
    ),
    Check(
        "repeated_statistics",
        "`torch.utils.checkpoint` around batch normalisation",
        checkpointing.find_repeated_statistics,
    ),
    Check(
        "batch_statistics",
        "batch normalisation with micro-batches or gradient accumulation",
        model.find_batch_statistics,
    ),
    Check(
        "growing_metric",
        "metrics of training steps that keep all predictions of the epoch",
        model.find_growing_metrics,
    ),
    Check(
        "8bit_embedding",
        "an optimizer of bitsandbytes with 8-bit state for embeddings, tied ones too",
        model.find_8bit_embeddings,
    ),
    Check(
        "8bit_small_tensors",
        "an optimizer of bitsandbytes for tensors that are too small for 8 bits",
        model.find_ineffective_8bit,
    ),
    Check(
        "float16_overflow",
        "float16 for models whose activations overflow in it, such as T5",
        model.find_float16_overflow,
    ),
    Check(
        "refused_clipping",
        "gradient clipping and a fused optimizer in mixed precision",
        model.find_refused_clipping,
    ),
    Check(
        "memsave_conflict",
        "settings of `MemSaveCallback` that it will refuse at the start of fit",
        _find_conflicts,
    ),
    Check(
        "allocator_settings",
        "wrong or harmful values in `PYTORCH_CUDA_ALLOC_CONF` and `PYTORCH_ALLOC_CONF`",
        environment.find_allocator_settings,
    ),
    Check(
        "debug_settings",
        "`PYTORCH_NO_CUDA_MEMORY_CACHING`, `CUDA_LAUNCH_BLOCKING`, `detect_anomaly`",
        environment.find_debug_settings,
    ),
    Check(
        "broken_packages",
        "`nvidia-ml-py` beside `nvidia-ml-py3`",
        environment.find_broken_packages,
    ),
)


def run_checks(subject: Subject) -> list[LocatedProblem]:
    """Run all checks."""
    found: dict[object, LocatedProblem] = {}
    for check in CHECKS:
        for problem in check.find(subject):
            key = (check.name, problem.what if problem.file is None else problem.place)
            found.setdefault(key, replace(problem, check=check.name))
    order = [check.name for check in CHECKS]
    return sorted(found.values(), key=lambda p: (order.index(p.check), p.file or "", p.line or 0))
