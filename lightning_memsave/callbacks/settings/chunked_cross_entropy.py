"""`chunked_cross_entropy` of `MemSaveCallback`."""

from typing import Any

import torch

from lightning_memsave.callbacks.settings.setting import ModuleSetting
from lightning_memsave.techniques.chunked_cross_entropy.deferred_logits import (
    materialize_referenced_logits,
)
from lightning_memsave.techniques.chunked_cross_entropy.heads import find_heads
from lightning_memsave.techniques.chunked_cross_entropy.technique import ChunkedCrossEntropy
from lightning_memsave.techniques.chunked_cross_entropy.wide_products import (
    describe_missing_product,
)
from lightning_memsave.units import format_bytes


class ChunkedCrossEntropySetting(ModuleSetting):
    """The loss of a head without its logits, which reads the weight after its forward pass."""

    kind = ChunkedCrossEntropy
    is_for_evaluation = True

    def start(self, trainer: Any, pl_module: Any) -> None:
        super().start(trainer, pl_module)
        device, precision = trainer.strategy.root_device, str(trainer.precision)
        narrow = torch.bfloat16 if "bf16" in precision else torch.float16
        if self._handle is not None and device.type == "cuda" and "16" in precision:
            self.add_details(describe_missing_product(device, narrow))

    def before_backward(self, pl_module: Any) -> None:
        """Materialize logits that are still referenced, with the weights from before the step."""
        # With manual optimization the step is not over, and may still use its logits.
        if self._handle is not None and pl_module.automatic_optimization:
            materialize_referenced_logits(pl_module)

    def savings(self, pl_module: Any) -> str:
        heads, _ = find_heads(pl_module, None)
        widths = [len(head.module.weight) for head in heads]  # type: ignore[arg-type]
        size = format_bytes(16 * max(widths, default=0))
        return f"it would save up to {size} for each token of a batch" if widths else ""
