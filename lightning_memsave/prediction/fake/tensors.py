"""Copy modules and batches to fake tensors, and let training code run on them."""

import contextlib
import functools
import gc
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from lightning_memsave.core.nested import map_tensors
from lightning_memsave.core.patching import PROCESS_WIDE
from lightning_memsave.core.saved_state import RandomState
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.measure.storages import tensors_in
from lightning_memsave.prediction.fake.copies import Copier, keep_originals
from lightning_memsave.prediction.fake.values import (
    KnownInFunctions,
    KnownValues,
    copy_value,
    is_kept,
)

_Cached: TypeAlias = "functools._lru_cache_wrapper[Any]"
_TYPE = type(functools.lru_cache(lambda: None))
_known: WeakSet[_Cached] = WeakSet()
_num_modules = [0]  # when they were listed


@contextlib.contextmanager
def fake_results_forgotten() -> Iterator[None]:
    """Clear, at the end, caches of functions that hold results with fake tensors.

    Models keep what depends on shapes alone, such as the positions of patches (Sapiens2) or anchors
    (RT-DETR): training would go on with fake tensors, and its losses would be fake as well.
    """
    before = {cached: cached.cache_info().misses for cached in cached_functions()}
    try:
        yield
    finally:
        for cached in cached_functions():
            if cached.cache_info().misses != before.get(cached, 0) and _has_fake(cached):
                cached.cache_clear()


def _has_fake(cached: _Cached) -> bool:
    # Arguments and results are what it refers to.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mappings of others may warn when they are read
        found = tensors_in(gc.get_referents(cached))
        return any(isinstance(tensor, FakeTensor) for tensor in found)


def cached_functions() -> list[_Cached]:
    """List the functions with caches; not those that `gc.freeze` hid before they were listed."""
    # There are a million objects to look through, in a tenth of a second: only after imports.
    if len(sys.modules) != _num_modules[0]:
        _num_modules[0] = len(sys.modules)
        _known.update(one for one in gc.get_objects() if type(one) is _TYPE)
    return list(_known)


@contextlib.contextmanager
def allow_construction() -> Iterator[None]:
    """Let modules be constructed under the active ``FakeTensorMode``, if any."""
    modes = _get_current_dispatch_mode_stack()
    fake = next((mode for mode in modes if isinstance(mode, FakeTensorMode)), None)
    if fake is None:
        yield
        return
    # The replacements are process-wide; for real tensors they call the originals.
    with PROCESS_WIDE, contextlib.ExitStack() as stack:
        # A module that copies its layers would copy the mode too, and modes cannot be mixed.
        stack.enter_context(replaced(FakeTensorMode, "__deepcopy__", lambda mode, memo: mode))
        stack.enter_context(replaced(Tensor, "__deepcopy__", _deepcopy_fake))
        # Redraws until all values are in range, which never ends on fake tensors.
        stack.enter_context(replaced(nn.init, "_no_grad_trunc_normal_", _trunc_normal))
        if not any(isinstance(mode, KnownValues) for mode in modes):
            # Constructors read values, such as dropout rates from `torch.linspace`.
            stack.enter_context(KnownValues(fake))
        yield


_MISSING: Any = object()
_deepcopy_tensor: Any = Tensor.__deepcopy__
_real_trunc_normal: Any = vars(nn.init)["_no_grad_trunc_normal_"]


def _trunc_normal(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    if hasattr(tensor, "fake_mode"):
        return tensor
    return _real_trunc_normal(tensor, *args, **kwargs)


# torch's own reads the data pointer, and warns.
def _deepcopy_fake(tensor: Any, memo: dict[int, Any]) -> Any:
    if not hasattr(tensor, "fake_mode") or not tensor.is_leaf:
        return _deepcopy_tensor(tensor, memo)
    if id(tensor) not in memo:
        copy = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            copy = nn.Parameter(copy, tensor.requires_grad)
        memo[id(tensor)] = copy.requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


_ABOUT_GPU = re.compile(
    r"\bcuda\b|\bnvidia\b|\bhip\b|\bcudnn\b|no gpus? |accelerator device", re.IGNORECASE
)
_ABOUT_DATA = re.compile(r"\.numpy\(\)|data pointer|data_ptr")
ModuleT = TypeVar("ModuleT", bound=nn.Module)


@dataclass
class FakeTensors:
    values: KnownValues
    deadline_s: float = math.inf
    gradients: list[tuple[nn.Parameter, Tensor | None]] = field(default_factory=list)

    @property
    def guesses(self) -> tuple[str, ...]:
        return self.values.guesses

    def copy_module(self, module: ModuleT, without: Sequence[object] = ()) -> ModuleT:
        memo: dict[int, Any] = {id(thing): None for thing in without}
        storages: dict[Any, Tensor] = {}

        def make(tensor: Tensor) -> Tensor:
            if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
                raise ConfigurationError(
                    f"`{type(module).__name__}` has lazy parameters, whose shapes are not known "
                    "yet. Run one batch through the module first."
                )
            return self._like(tensor, storages)

        # A global, or an object that the copy shares, may still train the original.
        self.gradients += [(p, p.grad) for p in module.parameters()]
        copier = Copier(make, memo, self.deadline_s)
        for tensor in (*module.parameters(), *module.buffers()):
            copier(tensor)
        try:
            copy: ModuleT = copier(module)
        except (ConfigurationError, TimeoutError):
            raise
        except Exception as error:
            raise ConfigurationError(
                f"`{type(module).__name__}` cannot be copied ({type(error).__name__}: {error}). "
                "Make `copy.deepcopy` of the module work."
            ) from error
        return copy

    def copy_batch(self, batch: Any) -> Any:
        return map_tensors(batch, self._make_once, in_objects=True)

    def copy_whole_batch(self, batch: Any) -> Any:
        """Copy a batch with all its non-tensor objects, which steps may change too."""
        return Copier(self._make_once, {}, self.deadline_s, max_items=sys.maxsize)(batch)

    def _make_once(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._make(tensor)

    def _make(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cuda" and is_kept(tensor):
            # A small copy: masks and lengths determine shapes in the step.
            with _disable_current_modes():
                tensor = tensor.detach().cpu()
        if tensor.device.type == "cpu":
            return self.values.make(tensor)
        with torch.no_grad():
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    def _like(self, tensor: Tensor, storages: dict[Any, Tensor]) -> Tensor:
        # In a storage of its own, which is freed with the copy.
        is_fake = isinstance(tensor, FakeTensor)
        fake = _clone_fake(tensor, storages) if is_fake else self._make(tensor)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else fake


def real_tensors() -> contextlib.AbstractContextManager[None]:
    return _disable_current_modes()


def clone_batch(batch: Any) -> Any:
    storages: dict[Any, Tensor] = {}
    return map_tensors(batch, lambda tensor: _clone_fake(tensor, storages), in_objects=True)


def _clone_fake(tensor: Tensor, storages: dict[Any, Tensor]) -> Tensor:
    storage = tensor.untyped_storage()
    key = storage._cdata, tensor.dtype
    if key not in storages:
        numel = storage.nbytes() // tensor.element_size()
        storages[key] = torch.empty(numel, dtype=tensor.dtype)
    place = tensor.shape, tensor.stride(), tensor.storage_offset()
    with torch.no_grad():
        return copy_value(storages[key].as_strided(*place), tensor)


@contextlib.contextmanager
def fake_tensors(deadline_s: float = math.inf) -> Iterator[FakeTensors]:
    """Construct and train modules on fake tensors, without their memory and compute.

    Random states of torch, Python and numpy are restored afterwards.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with contextlib.ExitStack() as stack:
        # Training that meets a fake tensor in a global variable fails: it would be fake, too.
        stack.callback(setattr, mode, "allow_non_fake_inputs", False)
        stack.enter_context(fake_results_forgotten())
        stack.callback(RandomState(set()).restore)
        for context in (_modules_convertible(), _no_tracing(), mode):
            stack.enter_context(context)
        values = KnownValues(mode)
        with values, allow_construction(), KnownInFunctions():
            fakes = FakeTensors(values, deadline_s)
            try:
                yield fakes
            finally:
                for parameter, gradient in fakes.gradients:
                    if parameter.grad is not gradient:
                        parameter.grad = gradient


# `Module.to` replaces `.data` of parameters, which torch refuses for fake tensors.
@contextlib.contextmanager
def _modules_convertible() -> Iterator[None]:
    original: Any = nn.Module._apply  # untyped in torch
    # Converted tensors by the id of the original, to keep ties; originals are kept alive so that
    # their ids stay unique.
    converted: dict[int, tuple[Tensor, Tensor]] = {}
    num_running = 0

    def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        nonlocal num_running
        tables = (table for m in self.modules() for table in (m._parameters, m._buffers))
        if not any(isinstance(t, FakeTensor) for table in tables for t in table.values()):
            original(self, fn, recurse)
            return self
        num_running += 1
        try:
            # By their own methods: metrics also convert their states, recurrent layers a list.
            for child in self.children() if recurse else ():
                child._apply(fn)
            for table in (self._parameters, self._buffers):
                for name, tensor in table.items():
                    if tensor is not None and not isinstance(tensor, UninitializedParameter):
                        if id(tensor) not in converted:
                            converted[id(tensor)] = tensor, _converted(tensor, fn)
                        table[name] = converted[id(tensor)][1]  # type: ignore[assignment]
        finally:
            num_running -= 1
            if not num_running:
                converted.clear()
        return self

    with replaced(nn.Module, "_apply", _apply):
        yield


def _converted(tensor: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    with torch.no_grad():
        new = fn(tensor)
    if new.dtype == tensor.dtype and new.device == tensor.device:
        return tensor
    if not isinstance(tensor, nn.Parameter):
        return new
    parameter = nn.Parameter(new, tensor.requires_grad)
    keep_originals(tensor, parameter)
    return parameter


# transformers mistakes fake tensors for graph tracing, and then builds masks that a real step does
# not need.
@contextlib.contextmanager
def _no_tracing() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("transformers.") and "is_tracing" in vars(module):
                stack.enter_context(replaced(module, "is_tracing", lambda tensor=None: False))
        yield


def remedy_for(error: BaseException) -> str:
    """Return a remedy for errors of user code that only occur on fake tensors or without a GPU."""
    if _ABOUT_GPU.search(str(error)):
        return (
            "The code requires a GPU, and predictions run without one. Make the device an "
            "argument, guard it with `torch.cuda.is_available()`, or leave it to the Trainer."
        )
    if _ABOUT_DATA.search(str(error)):
        return (
            "The code reads the data of a tensor, and fake tensors have none. Compute with torch "
            "instead of numpy or custom kernels."
        )
    return ""
