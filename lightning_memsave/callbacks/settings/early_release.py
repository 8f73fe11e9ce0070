"""Free gradients before forward, and unused outputs before backward."""

from typing import Any

from lightning_memsave.callbacks.settings.setting import Arguments, Setting
from lightning_memsave.techniques.registry import frees_early
from lightning_memsave.trainer.hooks import find_zero_grad_override, owner_of
from lightning_memsave.trainer.training_loop import release_early


class EarlyReleaseSetting(Setting):
    name = "early_release"
    runs_in_stages = True

    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments)
        self.value, self.is_on = "True", frees_early(arguments)

    def stay_off(self, trainer: Any, pl_module: Any) -> None:
        """Without a row: nothing has been given."""

    def apply(self, trainer: Any, pl_module: Any) -> None:
        if not pl_module.automatic_optimization:
            name = f"`{type(pl_module).__name__}.automatic_optimization=False`"
            self.show("off", f"{name}: the module runs its own steps")
            return
        # Callbacks of Lightning and of this package do not read outputs.
        viewer = owner_of(trainer, pl_module, "on_train_batch_end")
        zeroing = find_zero_grad_override(trainer, pl_module)
        outputs = "outputs of `training_step` other than the loss are freed before backward"
        if viewer:
            outputs = f"outputs are kept, as `{viewer}` may read them"
        gradients = "gradients of the previous step are freed before the forward pass"
        if zeroing:
            why = f"as `{zeroing}` may read them"
            gradients = f"gradients of the previous step are kept in the forward pass, {why}"
        if viewer and zeroing:
            self.show("off", gradients, outputs)
            return
        self.show("on", gradients, outputs, exactness="bitwise")
        self._undo.append(release_early(trainer, gradients=not zeroing, outputs=not viewer))
