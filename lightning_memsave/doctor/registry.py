"""The checks, in the order of their output; a new check is a function and a line here."""

from lightning_memsave.doctor import environment_checks as environment
from lightning_memsave.doctor import model_checks as model
from lightning_memsave.doctor.check import Check, FoundProblem, Subject

CHECKS: tuple[Check, ...] = (
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
        lambda subject: subject.conflicts,
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


def run_checks(subject: Subject) -> list[FoundProblem]:
    found = (
        FoundProblem(problem.what, problem.why, problem.fix, check.name)
        for check in CHECKS
        for problem in check.find(subject)
    )
    return list(dict.fromkeys(found))
