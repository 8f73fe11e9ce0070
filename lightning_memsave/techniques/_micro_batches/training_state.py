"""What a step changes beside parameters, taken down and put back."""

import random
import sys
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_memsave.core.host_copies import host_copies


class TrainingState:
    """Random states, buffers, metrics and gradients at one moment.

    Buffers are those of modules in training mode that are in ``state_dict``: running statistics are
    among them, masks and tables that models compute once are not. What a module keeps in attributes
    of its own, such as a list of outputs, is not known and stays.

    Args:
        module: The model; metrics of torchmetrics inside it count.
        gradients: ``"keep"`` copies them to host memory; ``"drop"`` removes them when the state is
            put back; ``"leave"`` does not touch them.
    """

    def __init__(self, module: nn.Module, *, gradients: Literal["keep", "drop", "leave"]) -> None:
        parameters = list(module.parameters())
        self._random = RandomState({p.device for p in parameters if p.device.type == "cuda"})
        self._metrics = [(m, _copied(vars(m))) for m in module.modules() if _is_metric(m)]
        self._buffers = [
            (owner, name, buffer, buffer.detach().clone())
            for owner in module.modules()
            if owner.training and not _is_metric(owner)
            for name, buffer in owner._buffers.items()
            if buffer is not None and name not in owner._non_persistent_buffers_set
        ]
        self._gradients: list[tuple[nn.Parameter, Tensor | None]] = []
        if gradients != "leave":
            with host_copies():
                self._gradients = [
                    (p, p.grad.to("cpu", copy=True))
                    if gradients == "keep" and p.grad is not None
                    else (p, None)
                    for p in parameters
                ]

    def restore(self) -> None:
        """Put everything back; may be called again."""
        self._random.restore()
        with torch.no_grad():
            for owner, name, buffer, before in self._buffers:
                owner._buffers[name] = buffer.copy_(before)
        for metric, attributes in self._metrics:
            vars(metric).update(_copied(attributes))
        for parameter, gradient in self._gradients:
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)


class RandomState:
    """States of the global random number generators."""

    def __init__(self, devices: set[torch.device]) -> None:
        self._cpu = torch.get_rng_state()
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()
        self._cuda = [(device, torch.cuda.get_rng_state(device)) for device in devices]

    def restore(self) -> None:
        """Put them back; may be called again."""
        torch.set_rng_state(self._cpu)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        for device, state in self._cuda:
            torch.cuda.set_rng_state(state, device)


# torchmetrics is not imported for this: without it there is no metric.
def _is_metric(module: nn.Module) -> bool:
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(module, torchmetrics.Metric)


# States are changed in place, lists of states are appended to.
def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    copies: dict[str, Any] = {}
    for name, value in attributes.items():
        if isinstance(value, Tensor):
            copies[name] = value.detach().clone()
        else:
            copies[name] = list(value) if isinstance(value, list) else value
    return copies
