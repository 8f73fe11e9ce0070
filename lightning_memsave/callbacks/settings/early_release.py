"""Free gradients before forward, and unused outputs before backward."""

from typing import Any

from lightning_memsave.callbacks.settings.setting import Setting
from lightning_memsave.callbacks.settings.values import Arguments
from lightning_memsave.core.technique import Row, Status
from lightning_memsave.techniques.registry import frees_early
from lightning_memsave.trainer.hooks import find_zero_grad_override, owner_of
from lightning_memsave.trainer.training_loop import release_early


class EarlyReleaseSetting(Setting):
    """The last step's gradients are freed before forward, unused outputs before backward."""

    name = "early_release"

    def __init__(self, is_on: bool) -> None:
        super().__init__()
        self.is_on = is_on

    @classmethod
    def read(cls, arguments: Arguments) -> "EarlyReleaseSetting":
        """Make the setting that the arguments describe."""
        return cls(frees_early(arguments))

    def apply(self, trainer: Any, pl_module: Any) -> None:
        """Change the training loop."""
        self.rows = []
        if not self.is_on:
            return
        if not pl_module.automatic_optimization:
            name = type(pl_module).__name__
            reason = f"`{name}.automatic_optimization=False`: the module runs its own steps"
            self.rows = [Row(self.name, "True", "off", (reason,))]
        else:
            self._release(trainer, pl_module)

    def _release(self, trainer: Any, pl_module: Any) -> None:
        # Callbacks of Lightning and of this package do not read outputs.
        viewer = owner_of(trainer, pl_module, "on_train_batch_end")
        zeroing = find_zero_grad_override(trainer, pl_module)
        outputs = (
            f"outputs are kept, as `{viewer}` may read them"
            if viewer
            else "outputs of `training_step` other than the loss are freed before backward"
        )
        gradients = (
            "gradients of the previous step are kept in the forward pass, as "
            f"`{zeroing}` may read them"
            if zeroing
            else "gradients of the previous step are freed before the forward pass"
        )
        is_off = bool(viewer and zeroing)
        status: Status = "off" if is_off else "on"
        exactness = "" if is_off else "bitwise"
        self.rows = [Row(self.name, "True", status, (gradients, outputs), exactness)]
        if not is_off:
            self._undo.append(release_early(trainer, gradients=not zeroing, outputs=not viewer))
