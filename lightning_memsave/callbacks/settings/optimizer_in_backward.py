"""`optimizer_in_backward` of `MemSaveCallback`."""

import contextlib
import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from lightning_memsave.callbacks.settings.accumulate_grad_batches import has_scheduler
from lightning_memsave.callbacks.settings.setting import (
    Arguments,
    OptimizerTechniqueSetting,
    saves,
    trained_parameters,
)
from lightning_memsave.core.gradient_reads import reads_gradients
from lightning_memsave.core.patching import patch_method, previous_method
from lightning_memsave.core.technique import Handle, Row
from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.techniques.micro_batching.technique import size_of_batches
from lightning_memsave.techniques.offloading.technique import Offloading
from lightning_memsave.techniques.optimizer_in_backward.freed_gradients import (
    FREED,
    READ_BEFORE,
    READING_HOOKS,
    ZEROING_HOOK,
    has_foreign_hook,
    refuse_reads,
)
from lightning_memsave.techniques.optimizer_in_backward.technique import (
    OptimizerInBackward,
    describe_updates,
    norm_problem,
)
from lightning_memsave.techniques.optimizer_in_backward.updates import open_to_keep
from lightning_memsave.techniques.optimizer_step import ACTIVE_UPDATES
from lightning_memsave.trainer.facts import clipping_of
from lightning_memsave.trainer.hooks import find_owners, has_foreign, log_info
from lightning_memsave.trainer.trainer import is_compiled_whole
from lightning_memsave.trainer.training_loop import around_backward, around_step, may_split_batches

_OFF = "set `optimizer_in_backward=None`"
_FIX = f"{READ_BEFORE}, or {_OFF}."


def advice_for(pl_module: Any) -> tuple[str, str]:
    """Say where a second gradient in a step may come from in a Trainer."""
    owner = type(pl_module).__name__
    if has_foreign(pl_module, "optimizer_step"):
        return (
            f"`{owner}.optimizer_step` is overridden, and has probably left out `optimizer.step()` "
            "for an earlier batch, whose backward pass has updated the parameters already",
            f"Call `optimizer.step(closure=optimizer_closure)` there for every batch, or {_OFF}.",
        )
    return (
        f"from a second backward pass in `{owner}.backward`, or from a block that is used twice "
        "under checkpointing with `use_reentrant=True`",
        f"Leave the backward pass to Lightning, checkpoint with `use_reentrant=False`, or {_OFF}.",
    )


def optimizer_step(self: Any, optimizer: Any, closure: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse a step whose closure is not Lightning's own; replaces that of a strategy."""
    if not any(cls.__name__ == "AbstractClosure" for cls in type(closure).__mro__):
        what = f"`{type(self.lightning_module).__name__}.optimizer_step`"
        why = "it runs code between backward and the step, which would find parameters updated"
        fix = f"Call `optimizer.step(closure=optimizer_closure)` with the closure given, or {_OFF}."
        raise IncompatibleError("optimizer_in_backward", [Problem(what, why, fix)])
    return previous_method(self, "optimizer_step")(optimizer, closure, *args, **kwargs)


def _trained_bytes(module: Any) -> int:
    return sum(p.nbytes for p in trained_parameters(module))


class OptimizerInBackwardSetting(OptimizerTechniqueSetting):
    kind = OptimizerInBackward
    technique: OptimizerInBackward

    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments)
        self.effective = self.technique if self.is_on else None
        """The settings with what the Trainer clips."""
        self.halves_batches = size_of_batches(arguments["micro_batch_size"]) == "halve"
        self._clipping = ""
        self._has_watched = False

    def conflicts(self, trainer: Any, pl_module: Any) -> Iterator[Problem]:
        yield from super().conflicts(trainer, pl_module)
        offloading = Offloading.from_value(self.arguments["offload"])
        clips_norm = self.technique.clip_norm is not None or "clip_norm" in clipping_of(trainer)
        if clips_norm and offloading is not None and offloading.has_weights:
            yield norm_problem(f"{self.written} beside `offload` and clipping")

    def reasons(self, trainer: Any, pl_module: Any) -> Iterator[tuple[str, str]]:
        owner = type(pl_module).__name__
        compiled = (
            [(owner, pl_module)]
            if is_compiled_whole(pl_module)
            else [
                (name or owner, module)
                for name, module in pl_module.named_modules()
                if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
            ]
        )
        for name, module in compiled[:1]:
            if 2 * _trained_bytes(module) > _trained_bytes(pl_module):
                why = "its graph gives all gradients at once, so nothing would be saved"
                fix = f"Compile its blocks one by one, or {_OFF}."
                yield f"`{name}` is compiled as a whole: {why}", fix
        # What may end the run in a later step is not for a preset to choose.
        whys = {
            "optimizer_step": "may leave out a step, whose backward pass has updated parameters",
            "backward": "may run several backward passes in a step, or change gradients after one",
        }
        for hook, why in () if self.is_asked else whys.items():
            if has_foreign(pl_module, hook):
                yield f"`{owner}.{hook}` {why}", "Set `optimizer_in_backward=True` by name."

    def savings(self, pl_module: Any) -> str:
        sizes = [p.nbytes for p in trained_parameters(pl_module)]
        return saves(sum(sizes) - max(sizes, default=0), "gradients")

    def apply(self, trainer: Any, pl_module: Any) -> None:
        # Of the precision that this callback has set by now.
        if self.is_asked and (problems := self.check(trainer, pl_module)):
            raise IncompatibleError("MemSaveCallback", problems)
        clipping, self._clipping = clipping_of(trainer), ""
        self.effective = dataclasses.replace(self.technique, **clipping)
        if clipping:
            # Done where the gradients are; afterwards torch would not find one that it could clip.
            clip_val, trainer.gradient_clip_val = trainer.gradient_clip_val, None
            self._undo.append(lambda: setattr(trainer, "gradient_clip_val", clip_val))
            kind = "all values" if "clip_value" in clipping else "the norm of all gradients"
            self._clipping = f"clips {kind} at {clip_val} before the updates, for the Trainer"
        self.enable(pl_module, self.effective)
        self._undo += [
            around_backward(trainer, self._around_backward),
            # A backward pass inside of it is none that updates: Lightning zeroes what it leaves.
            around_step(trainer, self._accumulating),
        ]

    def start(self, trainer: Any, pl_module: Any) -> None:
        super().start(trainer, pl_module)
        if self.handles:
            self.rows = [self._row_of(trainer, handle) for handle in self.handles]
        if not self.handles:
            return
        for handle in self.handles:
            if handle.target in ACTIVE_UPDATES:
                ACTIVE_UPDATES[handle.target].advice = advice_for(pl_module)
        self._undo += [
            refuse_reads(one, hook)
            for hook in READING_HOOKS
            for one in find_owners(trainer, pl_module, hook)
        ]
        self._undo.append(refuse_reads(pl_module, ZEROING_HOOK))
        if has_foreign(pl_module, "optimizer_step"):
            self._undo.append(patch_method(trainer.strategy, optimizer_step))
        self._has_watched = False

    def watch(self, trainer: Any, *, is_start: bool) -> None:
        """Look before the first step at what callbacks have added since."""
        if self._has_watched or not self.handles:
            return
        self._has_watched = True
        problems = [*self._problems_of_wrappers(trainer), *self._problems_of_hooks(trainer)]
        if problems and self.is_asked:
            raise IncompatibleError("MemSaveCallback", problems)
        if problems:
            self.yield_to(problems, trainer, trainer.lightning_module)
            log_info(trainer, f"{self.name}: off, {self.rows[0].details[0]}.")

    def _problems_of_wrappers(self, trainer: Any) -> Iterator[Problem]:
        own = [handle.target for handle in self.handles]
        for optimizer in trainer.optimizers:
            step = type(optimizer).step.__get__(optimizer)
            if optimizer not in own and reads_gradients(step, trainer.lightning_module):
                what = f"`{type(optimizer).__name__}.step`"
                yield Problem(what, f"it reads gradients, {FREED}", _FIX)

    def _problems_of_hooks(self, trainer: Any) -> Iterator[Problem]:
        for name, param in trainer.lightning_module.named_parameters():
            if has_foreign_hook(param, only_late=self.is_asked):
                what = f"a hook of `register_post_accumulate_grad_hook` on `{name}`"
                if self.is_asked:
                    why = "it was registered after `setup`, and runs after the update"
                    yield Problem(what, why, f"Register it in `__init__`, or {_OFF}.")
                else:
                    yield Problem(what, "it may use parameters that are updated already", _FIX)
                return

    def keep_gradients(self, num_bytes: int) -> None:
        """Let gradients that wait for their total norm stay on the device, up to ``num_bytes``."""
        for held in open_to_keep([handle.target for handle in self.handles]):
            held.keep(num_bytes)

    def undo(self) -> None:
        for handle in self.handles:  # the step that they wait for will not come
            if handle.target in ACTIVE_UPDATES:
                ACTIVE_UPDATES[handle.target].forget()
        super().undo()

    def _row_of(self, trainer: Any, handle: Handle[Any]) -> Row:
        if not handle.changes:
            return self.show_handle(handle)
        splits = may_split_batches(trainer)
        adding_up = ""
        if has_scheduler(trainer):
            adding_up = "several batches"
        elif trainer.accumulate_grad_batches > 1:
            adding_up = f"{trainer.accumulate_grad_batches} batches"
        elif splits and not self.halves_batches:
            adding_up = "the micro-batches of a batch"
        # Not what the handle says: weights may have got another type since it was made.
        details = [describe_updates(handle.target, adding_up)]
        if splits and self.halves_batches and not adding_up:
            details.append(
                "all gradients are alive while the micro-batches of a halved batch accumulate"
            )
        if self._clipping:
            details.append(self._clipping)
        exactness = OptimizerInBackward.exactness.value
        return Row(self.name, self.value, "on", tuple(details), exactness)

    def _around_backward(self, is_last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if is_last else self._accumulating()

    @contextlib.contextmanager
    def _accumulating(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for handle in self.handles:
                stack.enter_context(handle.accumulating())  # type: ignore[attr-defined]
            yield
