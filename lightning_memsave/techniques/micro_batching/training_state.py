"""Save and restore the state that a step changes, except parameters."""

import collections
import contextlib
import copy
import random
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_memsave.core.memory import host_copies
from lightning_memsave.core.nested import leaves_of
from lightning_memsave.errors import MemoryExhaustedError

_MAX_STATE_BYTES = 2**20  # larger tensors in attributes of modules are assumed to be data
# Exact types: subclasses may not be mutable, such as Hugging Face's model outputs.
_CONTAINERS = {
    *(list, dict, set, collections.deque),
    *(collections.OrderedDict, collections.defaultdict, collections.Counter),
}
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class TrainingState:
    """Snapshot of random states, buffers, modes and attributes of modules, and gradients.

    Attributes are restored to the same object, and lists, dictionaries, sets and small tensors to
    the same values; tensors that the module has released meanwhile come back without their graph.
    Deeper state, as inside the user's own objects, is not restored; nor are attributes of torch's
    own modules, which have no state there.

    Args:
        module: The model, including metrics of torchmetrics.
        gradients: ``"keep"`` copies them to host memory; ``"drop"`` removes them when the state is
            restored; ``"leave"``, for evaluation, ignores them, and does not copy large buffers.
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
        # Evaluation should only write to small buffers; versions of large ones, such as masks, are
        # checked.
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
        """Restore everything; may be called again.

        Raises:
            MemoryExhaustedError: If the step wrote to a large buffer, of which there is no copy.
        """
        if any(buffer._version != version for buffer, version in self._watched):
            raise MemoryExhaustedError(
                "Out of memory with a whole batch, which cannot be repeated with micro-batches: "
                "its step wrote to a buffer of the module of over 1 MiB. Use a smaller batch."
            )
        for parameter, _ in self._gradients:  # first, to free memory
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
    # Tensors made under `torch.inference_mode` have no version counter.
    return buffer.nbytes > _MAX_STATE_BYTES and not buffer.is_inference()


class _Attributes:
    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._values = dict(_own(module))
        # Detached: their graph would be alive during the whole step.
        self._of_graphs = {
            name: (weakref.ref(value), value.detach())
            for name, value in self._values.items()
            if isinstance(value, Tensor) and value.grad_fn is not None
        }
        self._values |= {name: value for name, (_, value) in self._of_graphs.items()}
        values = list(self._values.values())
        self._containers = [(v, copy.copy(v)) for v in values if type(v) in _CONTAINERS]
        is_metric = _is_metric(module)  # its tensors are state, of any size
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


# Attributes of this package record events that repeating a batch does not undo.
def _own(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name not in _OF_EVERY_MODULE and not name.startswith("_memsave"):
            yield name, value


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


# In place: other objects may refer to it.
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
    # Tensors made under `torch.inference_mode` can only be written under it.
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
        """Restore them; may be called again."""
        torch.set_rng_state(self._cpu)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        for device, state in self._cuda:
            torch.cuda.set_rng_state(state, device)


# Without an import of torchmetrics there is no metric.
def _is_metric(module: nn.Module) -> bool:
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(module, torchmetrics.Metric)


_BATCH_NORM = nn.modules.batchnorm._BatchNorm


class ModuleState:
    """Attributes of modules, the contents of their containers, and random states.

    Tensors are copied only before something writes to them: see `save_before_write`.
    """

    def __init__(self, module: nn.Module, batch: Any) -> None:
        self._containers: list[tuple[Any, Any]] = []
        self._generators: list[tuple[Any, Any]] = []
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._saved: dict[int, torch.UntypedStorage] = {}
        self._seen: set[int] = set()
        self._visit(module)
        for _, leaf in leaves_of(batch):
            self._visit(leaf)
        self._random = RandomState({p.device for p in module.parameters() if p.is_cuda})

    def owns(self, tensor: Tensor) -> bool:
        """Return whether the tensor's storage belongs to the module or the batch."""
        return _key_of(tensor) in self._storages

    def save_before_write(self, tensor: Tensor) -> None:
        """Save the values of a tensor that is about to be written to."""
        key = _key_of(tensor)
        if key in self._storages and key not in self._saved:
            self._saved[key] = self._storages[key].clone()

    def has_changed(self) -> bool:
        """Return whether a tensor was written to or a container was changed."""
        return bool(self._saved) or not all(_is_same(*pair) for pair in self._containers)

    def restore(self) -> None:
        """Restore everything."""
        for key, values in self._saved.items():
            self._storages[key].copy_(values)
        self._saved.clear()
        for container, contents in reversed(self._containers):
            if not _is_same(container, contents):
                container.clear()
                (container.extend if isinstance(container, list | deque) else container.update)(
                    contents
                )
        self.restore_random()

    def restore_random(self) -> None:
        """Restore random states."""
        for generator, state in self._generators:
            _set_generator(generator, state)
        self._random.restore()

    def _visit(self, value: Any) -> None:
        if isinstance(value, nn.Module):
            # Sharded strategies replace parameters in forward, and restore them themselves.
            self._seen.add(id(value._parameters))
            for parameter in value._parameters.values():
                self._visit(parameter)
            value = vars(value)
        if isinstance(value, Tensor):
            key = _key_of(value)
            if key is not None:
                self._storages[key] = value.untyped_storage()
        elif isinstance(value, list | dict | set | deque | tuple):
            if id(value) in self._seen:
                return
            self._seen.add(id(value))
            if not isinstance(value, tuple):
                self._containers.append((value, value.copy()))
            for item in list(value.values() if isinstance(value, dict) else value):
                self._visit(item)
        elif (state := _generator_state(value)) is not None:
            self._generators.append((value, state))


@contextlib.contextmanager
def batch_norm_on_running_statistics(module: nn.Module) -> Iterator[None]:
    """Let batch normalisation use running statistics, so that samples are independent."""
    norms = [m for m in module.modules() if isinstance(m, _BATCH_NORM) and m.training]
    for norm in norms:
        norm.training = False
    try:
        yield
    finally:
        for norm in norms:
            norm.training = True


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Disable TF32 and compilation."""
    precision, in_cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    # Only if the program compiles: another batch size would be compiled again.
    dynamo = "torch._dynamo" in sys.modules
    try:
        with torch.compiler.set_stance("force_eager") if dynamo else contextlib.nullcontext():
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = in_cudnn
        # It may hold float32 values, cast under `LossProbe`.
        torch.clear_autocast_cache()


def _key_of(tensor: Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except RuntimeError:  # sparse tensors and some subclasses have none
        return None


def _is_same(container: Any, contents: Any) -> bool:
    if len(container) != len(contents):
        return False
    if isinstance(container, set):
        return bool(container == contents)
    pairs = (
        zip([*container, *container.values()], [*contents, *contents.values()], strict=True)
        if isinstance(container, dict)
        else zip(container, contents, strict=True)
    )
    return all(now is before for now, before in pairs)


def _generator_state(value: Any) -> Any:
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return value.bit_generator.state
    return None


def _set_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
