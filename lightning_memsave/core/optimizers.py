"""What optimizers train, and what runs around their steps."""

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lightning_memsave.core.patching import is_of_this_package

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """List the parameters of an optimizer, without a walk through the modules of its model."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def foreign_hooks(optimizer: Optimizer) -> list[Any]:
    """List the hooks of others, which may use weights, around its steps."""
    hooks: list[Any] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    hooks += [getattr(optimizer, key) for key in STEP_HOOKS]
    return [hook for each in hooks for hook in each.values() if not is_of_this_package(hook)]
