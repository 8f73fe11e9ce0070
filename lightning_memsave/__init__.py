"""Memory-saving callbacks and techniques for PyTorch Lightning.

Names are imported on first use: ``import lightning_memsave`` is fast, and bitsandbytes,
transformers and NVML are loaded only if they are needed.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_memsave.api import check_training as check_training
    from lightning_memsave.api import compare_memory as compare_memory
    from lightning_memsave.api import explain_memory as explain_memory
    from lightning_memsave.api import plan_memory as plan_memory
    from lightning_memsave.api import predict_memory as predict_memory
    from lightning_memsave.callbacks.memory_monitor import GPUMemoryMonitor as GPUMemoryMonitor
    from lightning_memsave.callbacks.memsave import MemSaveCallback as MemSaveCallback
    from lightning_memsave.callbacks.oom_observer import OOMObserver as OOMObserver
    from lightning_memsave.cli.lightning_cli import MemSaveCLIMixin as MemSaveCLIMixin
    from lightning_memsave.cli.lightning_pytorch import MemSaveCLI as MemSaveCLI
    from lightning_memsave.core.blocks import find_blocks as find_blocks
    from lightning_memsave.core.memory import MemoryBreakdown as MemoryBreakdown
    from lightning_memsave.core.technique import Exactness as Exactness
    from lightning_memsave.errors import ConfigurationError as ConfigurationError
    from lightning_memsave.errors import ExactnessWarning as ExactnessWarning
    from lightning_memsave.errors import IncompatibleError as IncompatibleError
    from lightning_memsave.errors import InfeasiblePlanError as InfeasiblePlanError
    from lightning_memsave.errors import MemoryExhaustedError as MemoryExhaustedError
    from lightning_memsave.errors import MemsaveError as MemsaveError
    from lightning_memsave.errors import MemsaveWarning as MemsaveWarning
    from lightning_memsave.errors import MissingDependencyError as MissingDependencyError
    from lightning_memsave.errors import NoEffectWarning as NoEffectWarning
    from lightning_memsave.measure.peak import PeakMemory as PeakMemory
    from lightning_memsave.modules.checkpointed_transformer import (
        CheckpointedTransformerMixin as CheckpointedTransformerMixin,
    )
    from lightning_memsave.modules.lightning_pytorch import (
        CheckpointedTransformer as CheckpointedTransformer,
    )
    from lightning_memsave.modules.mixins import (
        ActivationCheckpointingMixin as ActivationCheckpointingMixin,
    )
    from lightning_memsave.modules.mixins import LowBitOptimizerMixin as LowBitOptimizerMixin
    from lightning_memsave.modules.mixins import MemoryLoggingMixin as MemoryLoggingMixin
    from lightning_memsave.modules.strategies import FSDP2Strategy as FSDP2Strategy
    from lightning_memsave.modules.strategies import PipelineStrategy as PipelineStrategy
    from lightning_memsave.planning.plan import MemoryPlan as MemoryPlan
    from lightning_memsave.prediction.result import MemoryPrediction as MemoryPrediction
    from lightning_memsave.report.page import write_page as write_page
    from lightning_memsave.techniques.activation_checkpointing.technique import (
        ActivationCheckpointing as ActivationCheckpointing,
    )
    from lightning_memsave.techniques.attention_kernel.technique import (
        AttentionKernel as AttentionKernel,
    )
    from lightning_memsave.techniques.chunked_cross_entropy.technique import (
        ChunkedCrossEntropy as ChunkedCrossEntropy,
    )
    from lightning_memsave.techniques.low_bit_optimizer.technique import (
        LowBitOptimizer as LowBitOptimizer,
    )
    from lightning_memsave.techniques.low_precision_weights.technique import (
        LowPrecisionWeights as LowPrecisionWeights,
    )
    from lightning_memsave.techniques.micro_batching.in_blocks import (
        BlockMicroBatching as BlockMicroBatching,
    )
    from lightning_memsave.techniques.micro_batching.technique import (
        MicroBatching as MicroBatching,
    )
    from lightning_memsave.techniques.named_optimizer.technique import (
        NamedOptimizer as NamedOptimizer,
    )
    from lightning_memsave.techniques.offloading.technique import Offloading as Offloading
    from lightning_memsave.techniques.optimizer_in_backward.technique import (
        OptimizerInBackward as OptimizerInBackward,
    )

_MODULES = {
    "ActivationCheckpointing": "techniques.activation_checkpointing.technique",
    "ActivationCheckpointingMixin": "modules.mixins",
    "AttentionKernel": "techniques.attention_kernel.technique",
    "BlockMicroBatching": "techniques.micro_batching.in_blocks",
    "CheckpointedTransformer": "modules",
    "CheckpointedTransformerMixin": "modules.checkpointed_transformer",
    "ChunkedCrossEntropy": "techniques.chunked_cross_entropy.technique",
    "ConfigurationError": "errors",
    "Exactness": "core.technique",
    "ExactnessWarning": "errors",
    "FSDP2Strategy": "modules.strategies",
    "GPUMemoryMonitor": "callbacks.memory_monitor",
    "IncompatibleError": "errors",
    "InfeasiblePlanError": "errors",
    "LowBitOptimizer": "techniques.low_bit_optimizer.technique",
    "LowBitOptimizerMixin": "modules.mixins",
    "LowPrecisionWeights": "techniques.low_precision_weights.technique",
    "MemSaveCLI": "cli.lightning_pytorch",
    "MemSaveCLIMixin": "cli.lightning_cli",
    "MemSaveCallback": "callbacks.memsave",
    "MemoryBreakdown": "core.memory",
    "MemoryExhaustedError": "errors",
    "MemoryLoggingMixin": "modules.mixins",
    "MemoryPlan": "planning.plan",
    "MemoryPrediction": "prediction.result",
    "MemsaveError": "errors",
    "MemsaveWarning": "errors",
    "MicroBatching": "techniques.micro_batching.technique",
    "MissingDependencyError": "errors",
    "NamedOptimizer": "techniques.named_optimizer.technique",
    "NoEffectWarning": "errors",
    "OOMObserver": "callbacks.oom_observer",
    "Offloading": "techniques.offloading.technique",
    "OptimizerInBackward": "techniques.optimizer_in_backward.technique",
    "PeakMemory": "measure.peak",
    "PipelineStrategy": "modules.strategies",
    "check_training": "api",
    "compare_memory": "api",
    "explain_memory": "api",
    "find_blocks": "core.blocks",
    "plan_memory": "api",
    "predict_memory": "api",
    "write_page": "report.page",
}

__all__ = sorted(_MODULES)  # noqa: PLE0605 - sorted() gives a list
try:
    __version__ = importlib.metadata.version("lightning-memsave")
except importlib.metadata.PackageNotFoundError:  # a copy of the source, not installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    if name == "MemSaveCallback":  # LightningCLI looks it up here, each time
        names = importlib.import_module(f"{__name__}.callbacks.settings.names")
        names.advise_in_parsers(value)
        importlib.import_module(f"{__name__}.modules.strategies").register_strategies()
    else:
        globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
