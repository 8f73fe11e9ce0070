"""Modules with memory saving built in (`CheckpointedTransformer`, mixins), and our strategies.

``CheckpointedTransformer`` here is the one for ``lightning.pytorch``, or for ``pytorch_lightning``
if only that is installed. To choose, import it from one of the two modules.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from lightning_memsave.trainer.trainer import PACKAGES

if TYPE_CHECKING:
    from lightning_memsave.modules.lightning_pytorch import (
        CheckpointedTransformer as CheckpointedTransformer,
    )

_VARIANTS = {
    "lightning.pytorch": "lightning_memsave.modules.lightning_pytorch",
    "pytorch_lightning": "lightning_memsave.modules.pytorch_lightning",
}

__all__ = ["CheckpointedTransformer"]


def __getattr__(name: str) -> Any:
    if name != "CheckpointedTransformer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # find_spec of a submodule imports its parent, so look for the top level only.
    installed = [name for name in PACKAGES if importlib.util.find_spec(name.split(".")[0])]
    return importlib.import_module(_VARIANTS[installed[0]]).CheckpointedTransformer
