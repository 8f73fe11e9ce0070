"""Results that functions keep by `functools.lru_cache` must not be fake once it is over."""

import contextlib
import functools
import gc
import sys
from collections.abc import Iterator
from typing import Any, TypeAlias
from weakref import WeakSet

from torch._subclasses.fake_tensor import FakeTensor

from lightning_memsave.measure.storages import tensors_in

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
    found = tensors_in(gc.get_referents(cached))
    return any(isinstance(tensor, FakeTensor) for tensor in found)


def cached_functions() -> list[_Cached]:
    """List the functions with caches; not those that `gc.freeze` hid before they were listed."""
    # There are a million objects to look through, in a tenth of a second: only after imports.
    if len(sys.modules) != _num_modules[0]:
        _num_modules[0] = len(sys.modules)
        _known.update(one for one in gc.get_objects() if type(one) is _TYPE)
    return list(_known)
