"""Save and restore the state that a step changes, except parameters."""

import contextlib
import copy
import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_memsave.core.memory import host_copies, is_fake
from lightning_memsave.core.out_of_memory import is_out_of_memory
from lightning_memsave.core.saved_state import (
    CONTAINERS,
    RandomState,
    bytes_of,
    copy_of,
    devices_of,
    is_plain,
    is_same,
    nbytes_of,
    once,
    refill,
    with_attribute,
    write_back,
)
from lightning_memsave.errors import MemoryExhaustedError, MemsaveWarning
from lightning_memsave.techniques.micro_batching.module_state import is_metric
from lightning_memsave.techniques.residences import leave_device

_MAX_STATE_BYTES = 2**20  # larger tensors in attributes of modules are assumed to be data
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class TrainingState:
    """Snapshot of random states, buffers, modes and attributes of modules, and gradients.

    Attributes are restored to the same object, and lists, dictionaries, sets and small tensors to
    the same values; tensors that the module has released meanwhile come back without their graph.
    Deeper state, as inside the user's own objects, is not restored; nor are attributes of torch's
    own modules, which have no state there.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        gradients: Literal["keep", "drop", "leave"],
        known: "KnownChanges | None" = None,
    ) -> None:
        modules = list(module.modules()) if known is None else known.changing
        owned = [(m, p) for m in modules for p in m._parameters.values() if p is not None]
        self._module, self._known = module, known
        self._drops = gradients != "leave"
        self.devices = devices_of(module) if known is None else known.devices
        self.random = RandomState(self.devices, known is not None and not known.draws)
        self._modes = [(m, m.training) for m in modules]
        self._trained = [(m, p, p.requires_grad) for m, p in owned]
        self._attributes = [_Attributes(m) for m in modules if not _is_of_torch(m)]
        self._names = [
            (m, dict(m._buffers), set(m._non_persistent_buffers_set)) for m in modules if m._buffers
        ]
        # Each once: a buffer may be shared.
        buffers = {id(b): (m, b) for m in modules for b in m._buffers.values() if b is not None}
        # Evaluation should only write to small buffers; versions of large ones, such as masks, are
        # checked, but of those made under `torch.inference_mode`, which have none.
        versioned = (
            {} if self._drops else {k: b for k, (_, b) in buffers.items() if not b.is_inference()}
        )
        large = {key for key, b in versioned.items() if nbytes_of(b) > _MAX_STATE_BYTES}
        self._watched = [(m, b, b._version) for key, (m, b) in buffers.items() if key in large]
        # Of all buffers there are copies in watched steps only, which are few: on the host.
        copy = _host_copy if known is None else copy_of
        self._buffers = [(m, b, copy(b)) for key, (m, b) in buffers.items() if key not in large]
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        if gradients == "keep":
            with host_copies():
                self._gradients = [
                    (p, p.grad.detach().to("cpu", copy=True))
                    for p in module.parameters()
                    if p.grad is not None
                ]

    def restore(self) -> None:
        """Restore everything; may be called again."""
        if any(buffer._version != version for _, buffer, version in self._watched):
            raise MemoryExhaustedError(
                "Out of memory with a whole batch, which cannot be repeated with micro-batches: "
                "its step wrote to a buffer of the module of over 1 MiB. Use a smaller batch."
            )
        leave_device(self._module)
        if self._drops:  # first, to free memory
            for parameter in self._module.parameters():
                parameter.grad = None
        self.random.restore()
        self._restore_flags()
        for attributes in self._attributes:
            attributes.restore()
        for module, buffers, non_persistent in self._names:
            refill(module._buffers, buffers)
            refill(module._non_persistent_buffers_set, non_persistent)
        for _, buffer, before in self._buffers:
            write_back(buffer, before)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient.to(parameter.device, copy=True)
        if self._known is not None:
            self._known.warn_of_others()

    def _restore_flags(self) -> None:
        for module, is_training in self._modes:
            module.training = is_training
        for _, parameter, is_trained in self._trained:
            parameter.requires_grad = is_trained

    def changed(self) -> list[nn.Module]:
        """List the modules that have changed since, and use up the copies; waits for the device."""
        tensors = [(m, b, before) for m, b, before in self._buffers]
        found = [m for m, is_training in self._modes if m.training != is_training]
        found += [m for m, p, is_trained in self._trained if p.requires_grad != is_trained]
        found += [m for m, b, version in self._watched if b._version != version]
        found += [m for m, before, _ in self._names if not is_same(m._buffers, before)]
        for attributes in self._attributes:
            if attributes.have_changed():
                found.append(attributes.module)
            tensors += attributes.tensors()
        # By value: what is written through `.data` has the same version.
        return found + _differing(tensors)


class KnownChanges:
    """What the steps of a run change in a module, learned from steps that were watched."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.changing: list[nn.Module] = [module]
        self.devices: set[torch.device] = set()
        self.draws = False
        """A step drew random numbers of Python or NumPy."""
        self._others: list[tuple[nn.Module, object]] = []
        self._watched: TrainingState | None = None

    def save(self, gradients: Literal["keep", "drop", "leave"], is_watched: bool) -> TrainingState:
        """Save the state before a step: all of it in a watched step, else what steps change."""
        known = None if is_watched else self
        state = TrainingState(self._module, gradients=gradients, known=known)
        self._watched = state if is_watched else None
        return state

    def learn(self) -> None:
        before, self._watched = self._watched, None
        if before is None:
            return
        outside = sys.exception()
        try:
            found = [*self.changing, *before.changed()]
        except Exception as error:
            if not is_out_of_memory(error, outside):
                raise
            found = list(self._module.modules())
        self.changing = list({id(m): m for m in found}.values())
        self.devices = before.devices
        self.draws = self.draws or before.random.has_changed_beside_torch()
        known = {id(m) for m in self.changing}
        self._others = [(m, _marks(m)) for m in self._module.modules() if id(m) not in known]

    def warn_of_others(self) -> None:
        """Warn if modules have changed that steps left alone so far."""
        others = {id(m) for m, marks in self._others if _marks(m) != marks}
        names = [f"`{name}`" for name, m in self._module.named_modules() if id(m) in others]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            warnings.warn(
                f"Out of memory: a batch is repeated. {', '.join(names[:3])}{more} stay as they "
                "are: they have changed since steps were watched that left them alone. If "
                "`training_step` changes them, it has done so twice in this batch.",
                MemsaveWarning,
                stacklevel=2,
            )


# Identities of what a module holds; its tensors in the version that they have.
def _marks(module: nn.Module) -> object:
    own = [] if _is_of_torch(module) else [*_own(module)]
    tensors = [v for _, v in [*own, *module._buffers.items()] if isinstance(v, Tensor)]
    return (
        module.training,
        [(name, id(value)) for name, value in own],
        [(id(t), None if t.is_inference() else t._version) for t in tensors],
        [p.requires_grad for p in module._parameters.values() if p is not None],
    )


def _host_copy(tensor: Tensor) -> Tensor:
    with host_copies():
        return copy_of(tensor, on_host=True)


def _differing(tensors: list[tuple[nn.Module, Tensor, Tensor]]) -> list[nn.Module]:
    found: list[nn.Module] = []
    flags: dict[torch.device, list[tuple[nn.Module, Tensor]]] = {}
    for module, tensor, before in tensors:
        now = once(tensor)
        if not is_plain(now) or now.shape != before.shape:
            found.append(module)
        # Of fake tensors a prediction needs nothing to be known.
        elif not is_fake(tensor) and not tensor.is_meta and now.numel():
            now = now if before.device == now.device else _host_copy(now)
            # In place: memory may have no room for another copy.
            flag = bytes_of(before).bitwise_xor_(bytes_of(now)).any()
            flags.setdefault(flag.device, []).append((module, flag))
    for pairs in flags.values():
        have_changed = torch.stack([flag for _, flag in pairs]).tolist()
        found += [m for (m, _), changed in zip(pairs, have_changed, strict=True) if changed]
    return found


class _Attributes:
    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._values = dict(_own(module))
        # Detached: their graph would be alive during the whole step.
        self._of_graphs = {
            name: (weakref.ref(value), value.detach())
            for name, value in self._values.items()
            if isinstance(value, Tensor) and value.grad_fn is not None
        }
        self._values |= {name: value for name, (_, value) in self._of_graphs.items()}
        values = list(self._values.values())
        self._containers = [(v, copy.copy(v)) for v in values if type(v) in CONTAINERS]
        is_state = is_metric(module)  # its tensors are state, of any size
        self._tensors = [
            (value, copy_of(value))
            for value in values
            if isinstance(value, Tensor) and (is_state or nbytes_of(value) <= _MAX_STATE_BYTES)
        ]

    def tensors(self) -> list[tuple[nn.Module, Tensor, Tensor]]:
        """Pairs of a tensor and the copy of its values."""
        return [(self.module, tensor, before) for tensor, before in self._tensors]

    def have_changed(self) -> bool:
        """Whether an attribute is another object, or a container has other items."""
        before = self._values | {name: alive() for name, (alive, _) in self._of_graphs.items()}
        return not is_same(dict(_own(self.module)), before) or not all(
            is_same(container, items) for container, items in self._containers
        )

    def restore(self) -> None:
        attributes = vars(self.module)
        for name, _ in list(_own(self.module)):
            del attributes[name]
        attributes.update(self._values)
        alive = {name: tensor() for name, (tensor, _) in self._of_graphs.items()}
        attributes.update({name: tensor for name, tensor in alive.items() if tensor is not None})
        for container, items in self._containers:
            refill(container, items)
        for tensor, values in self._tensors:
            write_back(tensor, values)


# Attributes of this package record events that repeating a batch does not undo.
_OF_THIS_PACKAGE = ("_memsave", "__getstate__", "__deepcopy__")


def _own(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name not in _OF_EVERY_MODULE and not name.startswith(_OF_THIS_PACKAGE):
            yield name, value


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


_BATCH_NORM = nn.modules.batchnorm._BatchNorm


def batch_norm_on_running_statistics(
    module: nn.Module,
) -> contextlib.AbstractContextManager[None]:
    norms = [m for m in module.modules() if isinstance(m, _BATCH_NORM)]
    return with_attribute(norms, "training", False)


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Disable TF32 and compilation."""
    allow_tf32 = _forbid_tf32()
    # Only if the program compiles: another batch size would be compiled again.
    dynamo = "torch._dynamo" in sys.modules
    try:
        with torch.compiler.set_stance("force_eager") if dynamo else contextlib.nullcontext():
            yield
    finally:
        allow_tf32()
        # It may hold float32 values, cast under `LossProbe`.
        torch.clear_autocast_cache()


def _forbid_tf32() -> Callable[[], None]:
    """Compute float32 products in float32; returns what restores torch's settings."""
    cudnn: Any = torch.backends.cudnn
    try:
        precision, in_cudnn = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError:  # a project that uses `fp32_precision` must not read or set the old names
        backends = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
        before = [backend.fp32_precision for backend in backends]
        _set_fp32_precision(backends, ["ieee"] * len(backends))
        return functools.partial(_set_fp32_precision, backends, before)
    torch.set_float32_matmul_precision("highest")
    cudnn.allow_tf32 = False

    def restore() -> None:
        torch.set_float32_matmul_precision(precision)
        cudnn.allow_tf32 = in_cudnn

    return restore


def _set_fp32_precision(backends: Sequence[Any], precisions: Sequence[str]) -> None:
    for backend, precision in zip(backends, precisions, strict=True):
        backend.fp32_precision = precision
