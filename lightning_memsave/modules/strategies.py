"""Our strategies for the Trainers of both packages, imported on first use.

``FSDP2Strategy`` and ``PipelineStrategy`` here are those of ``lightning.pytorch``, or of
``pytorch_lightning`` if only this is installed. By their names a Trainer gets those of its package.
"""

import functools
import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_memsave.trainer.trainer import PACKAGES

if TYPE_CHECKING:
    from lightning_memsave.modules.pipeline import PipelineStrategyMixin as PipelineStrategy
    from lightning_memsave.trainer.fsdp2 import FSDP2StrategyMixin as FSDP2Strategy

__all__ = ["FSDP2Strategy", "PipelineStrategy"]


class _Entry(NamedTuple):
    name: str
    """For ``Trainer(strategy=...)``."""
    module: str
    what: str


# They take a second to import.
_STRATEGIES = {
    "FSDP2Strategy": _Entry("memsave_fsdp2", "trainer.fsdp2", "FSDP2 on the blocks of any module"),
    "PipelineStrategy": _Entry("memsave_pipeline", "modules.pipeline", "stages of any module"),
}


def register_strategies() -> None:
    """Let the Trainers of packages that have been imported know our strategies by their names."""
    for package in PACKAGES:
        strategies = sys.modules.get(f"{package}.strategies")
        for cls, (name, _, what) in _STRATEGIES.items():
            if strategies is not None and name not in strategies.StrategyRegistry:
                make = functools.partial(_make, cls, package)
                strategies.StrategyRegistry.register(name, make, what)


def _make(cls: str, package: str, **settings: Any) -> Any:
    return _class_of(cls, package)(**settings)


def _class_of(cls: str, package: str) -> Any:
    module = importlib.import_module(f"lightning_memsave.{_STRATEGIES[cls].module}")
    return module.strategy_class(package)


def __getattr__(name: str) -> Any:
    if name not in _STRATEGIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # find_spec of a submodule imports its parent, so look for the top level only.
    installed = [name for name in PACKAGES if importlib.util.find_spec(name.split(".")[0])]
    return _class_of(name, installed[0])
