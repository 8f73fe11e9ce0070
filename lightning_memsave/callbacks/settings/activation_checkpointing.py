"""`activation_checkpointing` of `MemSaveCallback`, and `blocks`."""

from typing import Any

from torch import nn

from lightning_memsave.callbacks.settings.setting import Arguments, ModuleSetting, as_given
from lightning_memsave.core.blocks import find_blocks
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.techniques.activation_checkpointing.technique import ActivationCheckpointing
from lightning_memsave.techniques.registry import uses_blocks


class CheckpointingSetting(ModuleSetting):
    kind = ActivationCheckpointing
    runs_in_stages = True
    shown = "which"
    technique: ActivationCheckpointing

    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments)
        self.blocks = arguments["blocks"]
        planned = () if arguments["budget"] is None else arguments["from_preset"]
        is_named = self.blocks is not None and self.name not in planned
        self.is_asked = self.is_asked or is_named

    def read(self) -> Any:
        wanted, blocks = self.arguments[self.name], self.arguments["blocks"]
        if wanted is not None and not isinstance(wanted, ActivationCheckpointing):
            ActivationCheckpointing.from_value(wanted)
            return ActivationCheckpointing(wanted, blocks=blocks)
        if blocks is not None and not uses_blocks(self.arguments):
            raise ConfigurationError(
                f"`blocks={blocks!r}` is not used with {as_given(self.arguments, self.name)}. Use "
                f"`{self.name}=ActivationCheckpointing(..., blocks=...)`, or remove `blocks`."
            )
        return wanted

    def change(self, pl_module: nn.Module, which: Any) -> None:
        """Recompute other blocks from now on, between two passes."""
        self.undo()
        self.value, self.is_on = repr(which), which is not None
        if which is None:
            self.show("off", "the plan is without it")
        else:
            self.technique = ActivationCheckpointing(which, blocks=self.blocks)
            self.use(self.technique, pl_module)

    def savings(self, pl_module: Any) -> str:
        blocks = find_blocks(pl_module, self.technique.blocks)
        return f"it would free the activations of {len(blocks)} blocks" if blocks else ""
