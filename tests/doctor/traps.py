"""For each check of the doctor projects with its trap, and projects that look nearly like them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torchmetrics import AUROC, MeanMetric

from lightning_memsave import LowBitOptimizer
from tests.doctor.trap_models import (
    BitsAndBytes,
    ExactMetric,
    Fused,
    HeadOnly,
    Lit,
    Manual,
    MetricInHelper,
    Normalised,
    Tied,
    gpt2,
    made_for_bfloat16,
    t5,
    tied,
    wide,
)


@dataclass(frozen=True)
class Project:
    """A model and its training.

    ``make``: constructs the model; the others are arguments of `check_training`.
    """

    make: Callable[[], nn.Module]
    settings: Mapping[str, Any] | None = None
    trainer_arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def _allocator(text: str, name: str = "PYTORCH_CUDA_ALLOC_CONF") -> Project:
    return Project(Lit, environment={name: text})


MIXED = {"precision": "bf16-mixed"}
FLOAT16 = {"precision": "16-mixed"}
CLIPPED = {"gradient_clip_val": 1.0, **MIXED}

TRAPS: dict[str, tuple[list[Project], list[Project]]] = {
    "batch_statistics": (
        [
            Project(Normalised, trainer_arguments={"accumulate_grad_batches": 4}),
            Project(Normalised, {"micro_batch_size": 2}),
            Project(Normalised, {"accumulate_grad_batches": 2}),
        ],
        [
            Project(Normalised, {"micro_batch_size": "auto"}, {"accumulate_grad_batches": 1}),
            Project(lambda: Normalised(lambda: nn.LayerNorm(8)), {"micro_batch_size": 2}),
        ],
    ),
    "growing_metric": (
        [Project(ExactMetric), Project(MetricInHelper)],
        [
            Project(lambda: ExactMetric(MeanMetric)),
            Project(lambda: ExactMetric(lambda: AUROC(task="binary", thresholds=50))),
            Project(lambda: ExactMetric(lambda: AUROC(task="binary", compute_on_cpu=True))),
        ],
    ),
    "8bit_embedding": (
        [
            Project(lambda: BitsAndBytes(tied)),
            Project(lambda: BitsAndBytes(tied, "PagedAdamW8bit")),
        ],
        [
            Project(lambda: BitsAndBytes(tied, "AdamW32bit")),
            Project(lambda: BitsAndBytes(wide)),
            Project(lambda: HeadOnly(tied)),
            Project(Tied, {"optimizer": LowBitOptimizer(force_8bit=("*",))}),
        ],
    ),
    "8bit_small_tensors": (
        [Project(lambda: BitsAndBytes(gpt2))],
        [Project(lambda: BitsAndBytes(wide)), Project(lambda: BitsAndBytes(gpt2, "AdamW32bit"))],
    ),
    "float16_overflow": (
        [Project(t5, trainer_arguments=FLOAT16)],
        [
            Project(t5, trainer_arguments=MIXED),
            Project(made_for_bfloat16, trainer_arguments=FLOAT16),
        ],
    ),
    "refused_clipping": (
        [Project(Fused, trainer_arguments=CLIPPED)],
        [
            Project(lambda: Fused(False), trainer_arguments=CLIPPED),
            Project(Fused, trainer_arguments=MIXED),
            Project(lambda: Fused(model=wide), {"optimizer": "8bit"}, CLIPPED),
            Project(Fused, trainer_arguments={"gradient_clip_val": 1.0}),
        ],
    ),
    "memsave_conflict": (
        [
            Project(Manual, {"accumulate_grad_batches": 4}),
            Project(Lit, {"accumulate_grad_batches": 4}, {"accumulate_grad_batches": 2}),
        ],
        [Project(Manual, {"preset": "classic"}), Project(Lit, {"accumulate_grad_batches": 4})],
    ),
    "allocator_settings": (
        [
            _allocator("max_split_sise_mb:100"),
            _allocator("expandable_segments:True,max_split_size_mb=100"),
            _allocator("expandable_segments:true", "PYTORCH_ALLOC_CONF"),
            _allocator("max_split_size_mb:10"),
            _allocator("garbage_collection_threshold:80"),
            _allocator("backend:cudaMallocAsync"),
            Project(
                Lit,
                environment={
                    "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:100",
                    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
                },
            ),
        ],
        [
            _allocator("expandable_segments:True, max_split_size_mb:100"),
            _allocator("roundup_power2_divisions:[256:1,512:2,>:4],backend:native"),
            _allocator("a_setting_of_a_later_version:1"),
            _allocator(""),
        ],
    ),
    "debug_settings": (
        [
            Project(Lit, environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
            Project(Lit, environment={"CUDA_LAUNCH_BLOCKING": "1"}),
            Project(Lit, trainer_arguments={"detect_anomaly": True}),
        ],
        [Project(Lit, environment={"CUDA_LAUNCH_BLOCKING": "0"})],
    ),
    "broken_packages": ([], []),
}
"""By the name of the check: projects with the trap, and projects that look nearly like them."""
