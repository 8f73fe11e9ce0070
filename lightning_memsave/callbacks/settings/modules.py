"""Techniques that change the module, behind the methods of a `Setting`."""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_memsave.callbacks.settings.setting import Setting, off_rows, row_of
from lightning_memsave.callbacks.settings.values import (
    Arguments,
    as_given,
    is_asked,
    refuse_technique,
    short,
    why_beyond,
)
from lightning_memsave.core.blocks import find_blocks
from lightning_memsave.core.technique import Handle, Row, Technique
from lightning_memsave.errors import ConfigurationError, IncompatibleError, NoEffectWarning, Problem
from lightning_memsave.techniques.activation_checkpointing.technique import (
    ActivationCheckpointing,
)
from lightning_memsave.techniques.attention_kernel.technique import AttentionKernel
from lightning_memsave.techniques.chunked_cross_entropy.deferred_logits import (
    materialize_referenced_logits,
)
from lightning_memsave.techniques.chunked_cross_entropy.heads import find_heads
from lightning_memsave.techniques.chunked_cross_entropy.technique import ChunkedCrossEntropy
from lightning_memsave.techniques.chunked_cross_entropy.wide_products import (
    describe_missing_product,
)
from lightning_memsave.techniques.micro_batching.in_blocks import (
    BlockMicroBatching,
    compiled_problem,
)
from lightning_memsave.techniques.offloading.technique import Offloading
from lightning_memsave.techniques.registry import Entry
from lightning_memsave.trainer.trainer import builds_model_late, facts_of, is_compiled_whole
from lightning_memsave.units import format_bytes


class ModuleSetting(Setting):
    """A technique that changes the module."""

    def __init__(
        self,
        name: str,
        technique: Technique[nn.Module] | None,
        value: str,
        is_asked: bool,
        off_reason: str = "",
    ) -> None:
        super().__init__()
        self.name = name
        self.technique = technique
        self.value = value
        self.written = f"`{name}={value}`"
        self.is_asked = is_asked
        self.off_reason = off_reason
        self._handle: Handle[nn.Module] | None = None

    def check(self, trainer: Any, pl_module: Any) -> list[Problem]:
        """Find conflicts with the strategy and with the module, as far as it is built."""
        if self.technique is None:
            return []
        facts = facts_of(trainer)
        return self.technique.check(pl_module) + self.technique.conflicts(facts, self.written)

    def apply(self, trainer: Any, pl_module: Any) -> None:
        """Change the module, unless it makes its layers later."""
        self.rows = []  # those of an earlier Trainer
        if self.technique is None:
            self.rows = off_rows(self)
        elif not builds_model_late(pl_module):
            self._use(self.technique, pl_module)

    def start(self, trainer: Any, pl_module: Any) -> None:
        """Change a module that made its layers after ``setup``."""
        is_done = self._handle is not None and bool(self._handle.changes)
        if self.technique is None or is_done:
            return
        if not self.is_asked and (problems := self.technique.check(pl_module)):
            self.yield_to(problems, trainer, pl_module)
            return
        self._use(self.technique, pl_module)

    def undo(self) -> None:
        """Restore the module; a second call does nothing."""
        self._handle = None
        super().undo()

    def _is_served(self, pl_module: nn.Module) -> bool:
        """Return whether the module has what is asked for without any change."""
        return False

    def _advice(self) -> str:
        return f"Set `{self.name}=None`."

    def _use(self, technique: Technique[nn.Module], pl_module: nn.Module) -> Handle[nn.Module]:
        with warnings.catch_warnings():
            # What is left to a preset has a line in the table; what is not is refused.
            warnings.simplefilter("ignore", NoEffectWarning)
            handle = self._handle = technique.apply(pl_module)
        self._undo.append(handle.undo)
        if not handle.changes and self.is_asked and not self._is_served(pl_module):
            what, why = f"`{self.name}={self.value}`", "; ".join(handle.skipped)
            raise IncompatibleError("MemSaveCallback", [Problem(what, why, self._advice())])
        self.rows = [row_of(self.name, self.value, handle, technique.exactness.value)]
        return handle


class ActivationCheckpointingSetting(ModuleSetting):
    """Activation checkpointing, which a strategy may do already."""

    name = "activation_checkpointing"
    technique: ActivationCheckpointing | None
    blocks: Any = None
    """What the user named as blocks."""

    @classmethod
    def read(cls, arguments: Arguments) -> "ActivationCheckpointingSetting":
        """Make the setting that the arguments describe."""
        name = "activation_checkpointing"
        wanted, blocks = arguments[name], arguments["blocks"]
        planned = () if arguments["budget"] is None else arguments["from_preset"]
        if wanted is None or isinstance(wanted, ActivationCheckpointing):
            in_blocks = BlockMicroBatching.from_value(arguments[BlockMicroBatching.argument])
            if blocks is not None and not (arguments[Offloading.argument] or in_blocks):
                raise ConfigurationError(
                    f"`blocks={blocks!r}` is not used with {as_given(arguments, name)}. Use "
                    f"`{name}=ActivationCheckpointing(..., blocks=...)`, or remove `blocks`."
                )
            technique = wanted
        else:
            refuse_technique(name, wanted, ActivationCheckpointing)
            technique = ActivationCheckpointing(wanted, blocks=blocks)
        value = "None" if technique is None else repr(technique.which)
        own = is_asked(arguments, name) or (blocks is not None and name not in planned)
        setting = cls(name, technique, value, own)
        setting.blocks = blocks
        return setting

    def change(self, pl_module: nn.Module, which: Any) -> None:
        """Recompute other blocks from now on, between two passes."""
        self.undo()
        self.value, self.technique = repr(which), None
        if which is None:
            self.rows = [Row(self.name, self.value, "off", ("the plan is without it",))]
        else:
            self.technique = ActivationCheckpointing(which, blocks=self.blocks)
            self._use(self.technique, pl_module)

    def savings(self, pl_module: Any) -> str:
        """Say which blocks would have been recomputed."""
        assert self.technique is not None, "only what is on can yield"
        blocks = find_blocks(pl_module, self.technique.blocks)
        return f"it would free the activations of {len(blocks)} blocks" if blocks else ""

    def _is_served(self, pl_module: nn.Module) -> bool:
        assert self.technique is not None, "it was applied"
        return bool(find_blocks(pl_module, self.technique.blocks))

    def _advice(self) -> str:
        return f"Use `blocks=` with the class of the blocks, or set `{self.name}=None`."


class ChunkedCrossEntropySetting(ModuleSetting):
    """Chunked cross-entropy, which reads the head's weight after its forward pass."""

    is_for_evaluation = True

    def check(self, trainer: Any, pl_module: Any) -> list[Problem]:
        """Find conflicts; a head that is compiled alone is found when it is applied."""
        problems = super().check(trainer, pl_module)
        if self.technique is not None and is_compiled_whole(pl_module):
            what, name = f"`{self.name}={self.value}`", type(pl_module).__name__
            why = f"`{name}` is compiled as a whole, and the compiler needs ordinary logits"
            fix = f"Compile its blocks one by one, or set `{self.name}=None`."
            problems.append(Problem(what, why, fix))
        return problems

    def start(self, trainer: Any, pl_module: Any) -> None:
        """Say where products need more memory, as this torch cannot do them."""
        super().start(trainer, pl_module)
        device, precision = trainer.strategy.root_device, str(trainer.precision)
        narrow = torch.bfloat16 if "bf16" in precision else torch.float16
        if self._handle is not None and device.type == "cuda" and "16" in precision:
            missing = describe_missing_product(device, narrow)
            self.rows = [
                dataclasses.replace(row, details=(*row.details, *filter(None, [missing])))
                for row in self.rows
            ]

    def before_backward(self, pl_module: Any) -> None:
        """Materialize logits that are still referenced, with the weights from before the step."""
        # With manual optimization the step is not over, and may still use its logits.
        if self._handle is not None and pl_module.automatic_optimization:
            materialize_referenced_logits(pl_module)

    def savings(self, pl_module: Any) -> str:
        """Say how large the logits are."""
        heads, _ = find_heads(pl_module, None)
        widths = [len(head.module.weight) for head in heads]  # type: ignore[arg-type]
        size = format_bytes(16 * max(widths, default=0))
        return f"it would save up to {size} for each token of a batch" if widths else ""


class AttentionSetting(ModuleSetting):
    """Attention kernels, which a model may have already."""

    technique: AttentionKernel | None

    def _is_served(self, pl_module: nn.Module) -> bool:
        assert self.technique is not None, "it was applied"
        return self.technique.is_served(pl_module)


class BlockMicroBatchSetting(ModuleSetting):
    """Samples that pass a block at once, which a compiled model has fixed."""

    is_for_evaluation = True
    technique: BlockMicroBatching | None

    @classmethod
    def read(cls, arguments: Arguments) -> "BlockMicroBatchSetting":
        """Make the setting that the arguments describe."""
        name = BlockMicroBatching.argument
        technique = BlockMicroBatching.from_value(arguments[name])
        if technique is None:
            return cls(name, None, "None", is_asked=False)
        why_beyond(arguments, name, technique.exactness)
        if technique.blocks is None:
            technique = dataclasses.replace(technique, blocks=arguments["blocks"])
        return cls(name, technique, repr(arguments[name]), is_asked=True)

    def check(self, trainer: Any, pl_module: Any) -> list[Problem]:
        """Find conflicts with the Trainer and the module."""
        problems = super().check(trainer, pl_module)
        if self.technique is not None and is_compiled_whole(pl_module):
            problems = [compiled_problem(type(pl_module).__name__)]
        return problems


# Techniques that need to know more of a Trainer than their conflicts.
_KINDS: Mapping[type[Technique[Any]], type[ModuleSetting]] = {
    AttentionKernel: AttentionSetting,
    ChunkedCrossEntropy: ChunkedCrossEntropySetting,
}


def read_module_setting(entry: Entry, arguments: Arguments) -> ModuleSetting:
    """Make the setting of a registered technique."""
    assert entry.technique is not None, "settings of the Trainer read their own arguments"
    name, own = entry.argument, is_asked(arguments, entry.argument)
    technique, kind = (
        entry.technique.from_value(arguments[name]),
        _KINDS.get(entry.technique, ModuleSetting),
    )
    if technique is not None and (why := why_beyond(arguments, name, technique.exactness)):
        return kind(name, None, "None", own, why)
    return kind(name, technique, short(arguments[name]), own)
