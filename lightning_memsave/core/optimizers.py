"""What optimizers train."""

from torch import nn
from torch.optim import Optimizer


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """List the parameters of an optimizer, without a walk through the modules of its model."""
    return [p for group in optimizer.param_groups for p in group["params"]]
