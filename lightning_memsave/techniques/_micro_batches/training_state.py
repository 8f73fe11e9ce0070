"""What a step changes beside parameters, saved and put back."""

import collections
import copy
import random
import sys
import weakref
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_memsave.core.host_copies import host_copies
from lightning_memsave.errors import MemoryExhaustedError

_MAX_STATE_BYTES = 2**20  # of a tensor that a module keeps as an attribute; a larger one is data
# Not their subclasses, which may refuse to be changed, as outputs of Hugging Face's models do.
_CONTAINERS = {
    *(list, dict, set, collections.deque),
    *(collections.OrderedDict, collections.defaultdict, collections.Counter),
}
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class TrainingState:
    """Random states, buffers, modes and attributes of modules, and gradients at one moment.

    An attribute is put back as it was: the same object, and in lists, dictionaries, sets and small
    tensors the same values; a tensor that the module has dropped meanwhile, without its graph. What
    lies deeper, as in an object of the user's own, is not known and stays; so do attributes of
    torch's own modules, which keep no state there.

    Args:
        module: The model; metrics of torchmetrics inside it count.
        gradients: ``"keep"`` copies them to host memory; ``"drop"`` removes them when the state is
            put back; ``"leave"``, for evaluation, does not touch them, and copies no large buffer.
    """

    def __init__(self, module: nn.Module, *, gradients: Literal["keep", "drop", "leave"]) -> None:
        parameters, modules = list(module.parameters()), list(module.modules())
        self._random = RandomState({p.device for p in parameters if p.device.type == "cuda"})
        self._modes = [(m, m.training) for m in modules]
        self._trained = [(p, p.requires_grad) for p in parameters]
        self._attributes = [_Attributes(m) for m in modules if not _is_of_torch(m)]
        self._names = [
            (m, dict(m._buffers), set(m._non_persistent_buffers_set)) for m in modules if m._buffers
        ]
        # Evaluation writes to small ones at most; those that are large, such as masks, are watched.
        large = {id(b) for b in module.buffers() if gradients == "leave" and _is_large(b)}
        self._watched = [(b, b._version) for b in module.buffers() if id(b) in large]
        self._buffers = [(b, b.detach().clone()) for b in module.buffers() if id(b) not in large]
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
        """Put everything back; may be called again.

        Raises:
            MemoryExhaustedError: If a large buffer was written, of which there is no copy.
        """
        if any(buffer._version != version for buffer, version in self._watched):
            raise MemoryExhaustedError(
                "A whole batch was too large, and it cannot be repeated in parts: its step has "
                "written to a buffer of the module of over 1 MiB. Use a smaller batch."
            )
        for parameter, _ in self._gradients:  # first: what follows needs memory
            parameter.grad = None
        self._random.restore()
        for module, is_training in self._modes:
            module.training = is_training
        for parameter, is_trained in self._trained:
            parameter.requires_grad = is_trained
        for attributes in self._attributes:
            attributes.restore()
        for module, buffers, non_persistent in self._names:
            _refill(module._buffers, buffers)
            _refill(module._non_persistent_buffers_set, non_persistent)
        for buffer, before in self._buffers:
            _write(buffer, before)
        for parameter, gradient in self._gradients:
            if gradient is not None:
                parameter.grad = gradient.to(parameter.device, copy=True)


def _is_large(buffer: Tensor) -> bool:
    # Those made under `torch.inference_mode` do not count what is written to them.
    return buffer.nbytes > _MAX_STATE_BYTES and not buffer.is_inference()


class _Attributes:
    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._values = dict(_own(module))
        # Without the graph behind them, which would be alive during the whole step.
        self._of_graphs = {
            name: (weakref.ref(value), value.detach())
            for name, value in self._values.items()
            if isinstance(value, Tensor) and value.grad_fn is not None
        }
        self._values |= {name: value for name, (_, value) in self._of_graphs.items()}
        values = list(self._values.values())
        self._containers = [(v, copy.copy(v)) for v in values if type(v) in _CONTAINERS]
        is_metric = _is_metric(module)  # its tensors are state, whatever their size
        self._tensors = [
            (value, value.detach().clone())
            for value in values
            if isinstance(value, Tensor) and (is_metric or value.nbytes <= _MAX_STATE_BYTES)
        ]

    def restore(self) -> None:
        attributes = vars(self._module)
        for name, _ in list(_own(self._module)):
            del attributes[name]
        attributes.update(self._values)
        alive = {name: tensor() for name, (tensor, _) in self._of_graphs.items()}
        attributes.update({name: tensor for name, tensor in alive.items() if tensor is not None})
        for container, items in self._containers:
            _refill(container, items)
        for tensor, values in self._tensors:
            _write(tensor, values)


# Marks of this package are about what has happened, which a repeated batch does not undo.
def _own(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name not in _OF_EVERY_MODULE and not name.startswith("_memsave"):
            yield name, value


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


# In place: others may refer to it.
def _refill(container: Any, before: Any) -> None:
    if isinstance(container, list):
        container[:] = before
        return
    container.clear()
    if isinstance(container, collections.deque):
        container.extend(before)
    else:
        container.update(before)


def _write(tensor: Tensor, before: Tensor) -> None:
    # Those made under `torch.inference_mode` can be written under it only.
    with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
        tensor.copy_(before)


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
