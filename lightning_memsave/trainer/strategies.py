"""`FSDP2Strategy` for the Trainers of both packages, imported on first use.

``FSDP2Strategy`` here is that of ``lightning.pytorch``, or of ``pytorch_lightning`` if only this is
installed. By its name a Trainer gets the one of its package.
"""

import functools
import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from lightning_memsave.trainer.trainer import PACKAGES

if TYPE_CHECKING:
    from lightning_memsave.trainer.fsdp2 import FSDP2StrategyMixin as FSDP2Strategy

__all__ = ["FSDP2Strategy"]

FSDP2 = "memsave_fsdp2"
"""The name of `FSDP2Strategy` for ``Trainer(strategy=...)``."""


def register_strategies() -> None:
    """Let the Trainers of packages that have been imported know `FSDP2Strategy` by its name."""
    for package in PACKAGES:
        strategies = sys.modules.get(f"{package}.strategies")
        if strategies is not None and FSDP2 not in strategies.StrategyRegistry:
            make = functools.partial(_make, package)
            strategies.StrategyRegistry.register(FSDP2, make, "FSDP2 on the blocks of any module")


def _make(package: str, **settings: Any) -> Any:
    return _class_of(package)(**settings)


# FSDP2 takes a second to import.
def _class_of(package: str) -> Any:
    return importlib.import_module("lightning_memsave.trainer.fsdp2").strategy_class(package)


def __getattr__(name: str) -> Any:
    if name != "FSDP2Strategy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # find_spec of a submodule imports its parent, so look for the top level only.
    installed = [name for name in PACKAGES if importlib.util.find_spec(name.split(".")[0])]
    return _class_of(installed[0])
