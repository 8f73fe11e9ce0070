"""What techniques may ask about a Trainer and its module."""

import functools
from typing import Any

from lightning_memsave.core.trainer_facts import SHARDED, TrainerFacts
from lightning_memsave.trainer.hooks import gradient_readers, owners_of
from lightning_memsave.trainer.precision import gradient_scaler
from lightning_memsave.trainer.trainer import is_compiled_whole, is_strategy


def facts_of(trainer: Any, pl_module: Any) -> TrainerFacts:
    # What sharding strategies refuse does not depend on their precision.
    is_sharded = is_strategy(trainer, *SHARDED)
    return TrainerFacts(
        tuple(cls.__name__ for cls in type(trainer.strategy).__mro__),
        trainer.world_size,
        getattr(trainer.strategy, "root_device", None),
        _checkpoints_activations(trainer),
        "" if is_sharded else str(trainer.precision),
        type(pl_module).__name__ if is_compiled_whole(pl_module) else "",
        type(pl_module).__name__,
        not pl_module.automatic_optimization,
        clipping_of(trainer),
        not is_sharded and gradient_scaler(trainer) is not None,
        functools.partial(owners_of, trainer, pl_module),
        functools.partial(gradient_readers, trainer, pl_module),
    )


def clipping_of(trainer: Any) -> dict[str, Any]:
    bound = trainer.gradient_clip_val
    if bound is None or bound <= 0:  # for Lightning, both mean no bound
        return {}
    algorithm = getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm)
    # Without an algorithm, Lightning clips the norm.
    return {"clip_value" if algorithm == "value" else "clip_norm": bound}


# `FSDPStrategy(activation_checkpointing_policy=...)`. DeepSpeed's setting is in Lightning's every
# config, and says how a module that calls DeepSpeed's function checkpoints.
def _checkpoints_activations(trainer: Any) -> bool:
    strategy = trainer.strategy
    config = getattr(strategy, "config", None)
    own = config.get("activation_checkpointing") if isinstance(config, dict) else None
    is_deepspeed = is_strategy(trainer, "DeepSpeedStrategy")
    return bool(getattr(strategy, "_activation_checkpointing_kwargs", None)) or (
        is_deepspeed and any((own or {}).values())
    )
