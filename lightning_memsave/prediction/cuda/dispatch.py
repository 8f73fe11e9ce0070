"""Override ATen CPU kernels for fake tensors only."""

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._subclasses.fake_tensor import FakeTensor

from lightning_memsave.core.memory import is_host
from lightning_memsave.measure.storages import operands

Kernel = Callable[..., Any]


class Overrides:
    """Kernels registered for fake tensors in torch's dispatcher, until ``undo``.

    As they are in the dispatcher, they also apply to calls from C++, backward and recomputation.
    Real tensors keep torch's kernels. Only one instance can be active: torch holds one Python
    function per operator and key.
    """

    def __init__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")

    def add(self, name: str, key: str, kernel: Kernel | None) -> None:
        below = functools.partial(_call_below, name, key)
        of_torch = _kernel_of_torch(name, key) or below

        def call(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            if not any_fake(args):
                return of_torch(keyset, *args, **kwargs)
            if kernel is None:
                return below(keyset, *args, **kwargs)
            return kernel(*args, **kwargs)

        self._put(name, key, call)

    def add_scratch(
        self,
        name: str,
        sizes: Callable[..., Sequence[int]],
        before: Callable[..., Sequence[int]] = lambda *_, **__: (),
    ) -> None:
        key = "AutogradCPU"
        of_torch = _kernel_of_torch(name, key)
        assert of_torch is not None, "every operator has a kernel there"

        def call(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            if not any_fake(args) or is_host(args[0].untyped_storage()):
                return of_torch(keyset, *args, **kwargs)
            first = [_block(size) for size in before(*args, **kwargs)]
            result = of_torch(keyset, *args, **kwargs)
            scratch: list[Tensor | None] = []
            for size in sizes(*args, **kwargs):
                if size < 0:
                    scratch[-1 - size] = None
                else:
                    scratch.append(_block(size))
            del scratch, first
            return result

        self._put(name, key, call)

    def undo(self) -> None:
        self._library._destroy()

    def _put(self, name: str, key: str, function: Kernel) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns once per process of an override
            self._library.impl(name, function, key, with_keyset=True)


def _block(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def operator_named(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def any_fake(args: Iterable[Any]) -> bool:
    return any(isinstance(tensor, FakeTensor) for tensor in operands(args))


def _kernel_of_torch(name: str, key: str) -> Kernel | None:
    is_listed = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)
    if key == "AutocastCPU" and not is_listed:
        return None
    kernel: Kernel = torch.library.get_kernel(operator_named(name), key).call_boxed
    return kernel


def _call_below(name: str, key: str, keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
    keys = keyset & torch._C._dispatch_keyset_full_after(getattr(DispatchKey, key))
    return operator_named(name).redispatch(keys, *args, **kwargs)
