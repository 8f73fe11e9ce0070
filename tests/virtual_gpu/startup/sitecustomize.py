"""Makes the virtual GPU's kernels compute in every Python that `run` starts with VGPU_COMPUTE."""

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

OPERATORS_OF = {"torch": "aten", "bitsandbytes": "bitsandbytes"}


class Finder(importlib.abc.MetaPathFinder):
    """Replaces the kernels of a library as soon as it is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in OPERATORS_OF:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            from tests.virtual_gpu import kernels

            kernels.compute_operators_of(OPERATORS_OF[name])

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("VGPU_COMPUTE", "0") != "0":
    sys.meta_path.insert(0, Finder())
