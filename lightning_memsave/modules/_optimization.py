"""Parameter groups and learning rates of `CheckpointedTransformer`."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_memsave.errors import IncompatibleError, Problem

SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}
"""Our names of schedules, and those of transformers."""


def weight_decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Sort the trained parameters of a model into those with and those without weight decay.

    Norms, biases, embeddings (and heads that share their weight), and all else that has a single
    axis, are not decayed.

    Args:
        model: Any module.
        weight_decay: For the others.

    Returns:
        Groups for an optimizer. Each trained parameter is in one of them; none is empty.

    Example:
        >>> model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.LayerNorm(8))
        >>> [(len(g["params"]), g["weight_decay"]) for g in weight_decay_groups(model, 0.1)]
        [(1, 0.1), (4, 0.0)]
    """
    plain = {
        id(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if _is_plain(module, name, parameter)
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if id(p) not in plain], "weight_decay": weight_decay},
        {"params": [p for p in trained if id(p) in plain], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _is_plain(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) or name.endswith("bias"):
        return True
    if "norm" in type(module).__name__.lower():
        return True
    # FSDP1 makes one axis of every weight, so that the number of axes says nothing there.
    return parameter.ndim < 2 and not hasattr(parameter, "_fsdp_flattened")


def make_scheduler(
    owner: str,
    optimizer: Optimizer,
    schedule: str,
    warmup: int | float,
    num_steps: float,
) -> Any:
    """Make a scheduler that warms up and then goes down to zero, or stays.

    Args:
        owner: Name of the class that asks, for messages.
        optimizer: With the highest learning rates.
        schedule: A key of `SCHEDULES`.
        warmup: Optimizer steps, or as a ``float`` the share of all.
        num_steps: Optimizer steps in all; infinite if they are not known.

    Returns:
        A scheduler of torch, to be stepped after each optimizer step.

    Raises:
        IncompatibleError: If the number of steps is needed and not known, or if nothing is left
            of it after the warm-up.
    """
    from transformers import get_scheduler  # noqa: PLC0415

    is_needed = schedule != "constant" or isinstance(warmup, float)
    if is_needed and num_steps == float("inf"):
        problem = Problem(
            f"`lr_schedule={schedule!r}` with `warmup={warmup!r}`",
            "the Trainer does not know how many optimizer steps there will be",
            "Use `max_steps=...` here or in the Trainer, or "
            '`lr_schedule="constant"` with a whole number as `warmup`.',
        )
        raise IncompatibleError(owner, [problem])
    num_warmup_steps = round(warmup * num_steps) if isinstance(warmup, float) else warmup
    if schedule != "constant" and num_warmup_steps > num_steps:
        problem = Problem(
            f"`warmup={warmup!r}`",
            f"training ends after {num_steps:.0f} optimizer steps",
            "Use a smaller number, or a share such as `warmup=0.1`.",
        )
        raise IncompatibleError(owner, [problem])
    return get_scheduler(
        SCHEDULES[schedule],
        optimizer,
        num_warmup_steps=num_warmup_steps,
        num_training_steps=int(num_steps) if is_needed else None,
    )
