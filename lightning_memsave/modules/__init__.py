"""LightningModules with memory saving built in, their mixins, and `FSDP2Strategy`.

``CheckpointedTransformer`` and ``FSDP2Strategy`` here are those for ``lightning.pytorch``, or for
``pytorch_lightning`` if only that is installed. To choose, import the first from one of the two
modules, and give the second by its name.
"""

import functools
import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from lightning_memsave.trainer.trainer import FSDP2, PACKAGES

if TYPE_CHECKING:
    from lightning_memsave.modules.fsdp2 import FSDP2StrategyMixin as FSDP2Strategy
    from lightning_memsave.modules.lightning_pytorch import (
        CheckpointedTransformer as CheckpointedTransformer,
    )

_VARIANTS = {
    "lightning.pytorch": "lightning_memsave.modules.lightning_pytorch",
    "pytorch_lightning": "lightning_memsave.modules.pytorch_lightning",
}

__all__ = ["CheckpointedTransformer", "FSDP2Strategy"]


def register_strategies() -> None:
    """Let the Trainers of packages that have been imported know `FSDP2Strategy` by its name."""
    for package in PACKAGES:
        strategies = sys.modules.get(f"{package}.strategies")
        if strategies is not None and FSDP2 not in strategies.StrategyRegistry:
            make = functools.partial(_make_strategy, package)
            strategies.StrategyRegistry.register(FSDP2, make, "FSDP2 on the blocks of any module")


def _make_strategy(package: str, **settings: Any) -> Any:
    return _strategy_class(package)(**settings)


# FSDP2 takes a second to import.
def _strategy_class(package: str) -> Any:
    return importlib.import_module("lightning_memsave.modules.fsdp2").strategy_class(package)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # find_spec of a submodule imports its parent, so look for the top level only.
    installed = [name for name in PACKAGES if importlib.util.find_spec(name.split(".")[0])]
    if name == "FSDP2Strategy":
        return _strategy_class(installed[0])
    return importlib.import_module(_VARIANTS[installed[0]]).CheckpointedTransformer
