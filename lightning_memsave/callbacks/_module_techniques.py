"""Techniques that change the module, behind the methods of a `Setting`."""

import dataclasses
import warnings
from typing import Any

from torch import nn

from lightning_memsave import host
from lightning_memsave.callbacks._settings import AS_IT_IS, Row, Setting, warn
from lightning_memsave.core.technique import Handle, Technique
from lightning_memsave.errors import NoEffectWarning, Problem
from lightning_memsave.techniques._logits.numbers_after_all import compute_kept_logits
from lightning_memsave.techniques.attention_kernel import AttentionKernel


class ModuleTechnique(Setting):
    """A technique that changes the module.

    Args:
        name: Name of the argument that sets it.
        technique: The technique, or ``None`` to leave the module as it is.
        value: What the user wrote for it.
        is_auto: The user did not ask for it by name: conflicts switch it off with a reason.
        is_of_stack: The user did not ask for it by itself: no line for ``None``, no warning where
            it finds nothing to do.
    """

    def __init__(
        self,
        name: str,
        technique: Technique[nn.Module] | None,
        value: str,
        is_auto: bool,
        is_of_stack: bool = False,
    ) -> None:
        super().__init__()
        self.name = name
        self.technique = technique
        self.value = value
        self.is_auto = is_auto
        self.is_of_stack = is_of_stack
        self._handle: Handle[nn.Module] | None = None

    def check(self, trainer: Any, pl_module: Any) -> list[Problem]:
        """Find conflicts with the strategy and the module as far as it is built.

        Args:
            trainer: The Trainer.
            pl_module: Its LightningModule.

        Returns:
            All problems; none for a choice of our own, which gives way.
        """
        if self.technique is None or self.is_auto:
            return []
        technique = self._for_trainer(self.technique, trainer)
        return technique.check(pl_module) + self._conflicts(trainer)

    def apply(self, trainer: Any, pl_module: Any) -> None:
        """Change the module, unless it makes its layers later.

        Args:
            trainer: The Trainer.
            pl_module: Its LightningModule.
        """
        self.rows = []  # those of an earlier Trainer
        if self.technique is None:
            self.rows = [] if self.is_of_stack else [off_row(self.name)]
        elif self._gives_way(trainer):
            reason = self._conflicts(trainer)[0].why
            self.rows = [Row(self.name, self.value, "unchanged", (reason,))]
        elif not host.builds_model_late(pl_module):
            self._use(self._for_trainer(self.technique, trainer), pl_module)

    def start(self, trainer: Any, pl_module: Any) -> None:
        """Change a module that made its layers after ``setup``.

        Args:
            trainer: The Trainer.
            pl_module: Its LightningModule.
        """
        is_done = self._handle is not None and bool(self._handle.changes)
        if self.technique is None or is_done or self._gives_way(trainer):
            return
        handle = self._use(self._for_trainer(self.technique, trainer), pl_module)
        if not handle.changes and not self.is_of_stack:
            reasons = "; ".join(handle.skipped)
            warn(trainer, f"{self.name} changed nothing: {reasons}.", NoEffectWarning)

    def undo(self) -> None:
        """Restore the module; a second call does nothing."""
        self._handle = None
        super().undo()

    def _conflicts(self, trainer: Any) -> list[Problem]:
        return []

    # With what only the Trainer knows.
    def _for_trainer(self, technique: Technique[nn.Module], trainer: Any) -> Technique[nn.Module]:
        return technique

    def _gives_way(self, trainer: Any) -> bool:
        return self.is_auto and bool(self._conflicts(trainer))

    def _use(self, technique: Technique[nn.Module], pl_module: nn.Module) -> Handle[nn.Module]:
        with warnings.catch_warnings():
            # A module may make its layers later, and each rank would say it.
            warnings.simplefilter("ignore", NoEffectWarning)
            handle = self._handle = technique.apply(pl_module)
        self._undo.append(handle.undo)
        self.rows = [row_of(self.name, self.value, handle, technique.exactness.value)]
        return handle


class Checkpointing(ModuleTechnique):
    """Activation checkpointing, which a strategy may do already."""

    def _conflicts(self, trainer: Any) -> list[Problem]:
        if not host.checkpoints_activations_itself(trainer):
            return []
        strategy = type(trainer.strategy).__name__
        return [
            Problem(
                f"`{self.name}={self.value}`",
                f"`{strategy}` was told to checkpoint activations, and twice is too much",
                f"Remove that setting from `{strategy}`, or set `{self.name}=None` here.",
            )
        ]


class LossWithoutLogits(ModuleTechnique):
    """Chunked cross-entropy, which reads the head's weight after its forward pass."""

    is_for_evaluation = True

    def before_backward(self, pl_module: Any) -> None:
        """Compute the logits that somebody kept: they are those of the weights before the step.

        Args:
            pl_module: The LightningModule.
        """
        # In its own optimization the step is not over, and may look at its logits as it likes.
        if self._handle is not None and pl_module.automatic_optimization:
            compute_kept_logits(pl_module)

    def _conflicts(self, trainer: Any) -> list[Problem]:
        if not host.is_strategy(trainer, "FSDPStrategy", "DeepSpeedStrategy"):
            return []
        return [
            Problem(
                f"`{self.name}={self.value}`",
                f"`{type(trainer.strategy).__name__}` may have freed the head's weight when the "
                "loss is computed",
                f"Set `{self.name}=None`.",
            )
        ]


class FusedAttention(ModuleTechnique):
    """Attention kernels, of which some run on a GPU only; the module moves there after `setup`."""

    def _for_trainer(self, technique: Technique[nn.Module], trainer: Any) -> Technique[nn.Module]:
        assert isinstance(technique, AttentionKernel), "the argument takes no other"
        return dataclasses.replace(technique, device=trainer.strategy.root_device)


def off_row(name: str) -> Row:
    """Write that the user wants nothing done.

    Args:
        name: Name of the argument.

    Returns:
        A line of the table.
    """
    return Row(name, "None", "unchanged", (AS_IT_IS,))


def row_of(name: str, value: str, handle: Handle[Any], exactness: str) -> Row:
    """Write what became of a technique.

    Args:
        name: Name of the argument that sets it.
        value: What the user wrote for it.
        handle: What its ``apply`` returned.
        exactness: What it declares.

    Returns:
        A line of the table.
    """
    if not handle.changes:
        return Row(name, value, "off", handle.skipped)
    return Row(name, value, "on", (handle.summary, *handle.skipped), exactness)
