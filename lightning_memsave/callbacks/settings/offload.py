"""`offload` and `host_budget` of `MemSaveCallback`."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_memsave.callbacks.settings.micro_batch_size import MicroBatchSetting
from lightning_memsave.callbacks.settings.resident_correction import ResidentCorrection
from lightning_memsave.callbacks.settings.setting import ModuleSetting, as_given, exactness_limit
from lightning_memsave.core.memory import is_fake, is_host
from lightning_memsave.core.optimizers import foreign_hooks
from lightning_memsave.core.patching import patch_method, previous_method
from lightning_memsave.core.saved_state import with_attribute
from lightning_memsave.core.technique import Exactness, Handle, Technique, settings_of
from lightning_memsave.errors import ConfigurationError, IncompatibleError
from lightning_memsave.measure.storages import tensors_in
from lightning_memsave.techniques.offloading.early_updates import EarlyUpdates, why_none
from lightning_memsave.techniques.offloading.handle import OffloadingHandle
from lightning_memsave.techniques.offloading.hooks_of_users import (
    HOOKS,
    training_step,
    work_with_hook,
)
from lightning_memsave.techniques.offloading.host_budget import (
    SMALLER_FORM,
    form_on_host,
    host_bytes_per_parameter,
)
from lightning_memsave.techniques.offloading.host_updates import host_updates_of, trains_offloaded
from lightning_memsave.techniques.offloading.late_weights import lightning_module_state_dict
from lightning_memsave.techniques.offloading.technique import STAY, Offloading
from lightning_memsave.techniques.optimizer_step import updates_each_alone
from lightning_memsave.techniques.registry import with_optimizer
from lightning_memsave.trainer.checkpoint_files import streams_checkpoints
from lightning_memsave.trainer.distributed import (
    communicates_in_forward,
    has_custom_gradient_sync,
    share_model,
)
from lightning_memsave.trainer.facts import clipping_of
from lightning_memsave.trainer.hooks import has_foreign, log_info, owners_of
from lightning_memsave.trainer.precision import gradient_scaler
from lightning_memsave.trainer.trainer import (
    averages_weights,
    builds_model_late,
    is_strategy,
    unfreezes_later,
)
from lightning_memsave.trainer.training_loop import around_backward

# They run between a step and the next forward pass, where they may read or change weights.
_BETWEEN_STEPS = (
    "optimizer_step",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "on_train_batch_end",
    "on_train_batch_start",
)
# They run between backward and a step, where they may change what updates were begun with.
_BEFORE_STEPS = (
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
)


class OffloadSetting(ModuleSetting):
    kind = Offloading
    shown = "what"
    technique: Offloading
    _handle: OffloadingHandle | None
    _why_no_tables = ""
    why_form = ""
    """Why what is on the host is in another form than the fastest."""
    note = ""
    """How many blocks were chosen to stay on the device."""
    is_open = False
    """Whether their number was chosen, and may be corrected."""
    micro_batches: MicroBatchSetting
    when_corrected: Callable[[str], None]
    _block_bytes = 0
    _is_corrected = False
    _correction: ResidentCorrection | None = None
    _details: Sequence[str] = ()
    """What the row says besides what is on the host, and what not."""

    def read(self) -> Any:
        arguments, given = self.arguments, self.arguments[self.name]
        technique, budget = super().read(), arguments["host_budget"]
        if budget is not None and getattr(technique, "host_budget", "unused") is not None:
            raise ConfigurationError(
                f"`host_budget={budget!r}` is not used with {as_given(arguments, self.name)}. Use "
                f'`{self.name}="optimizer"`, or pass it to `Offloading`.'
            )
        if technique is None:
            return None
        arguments = with_optimizer(arguments)
        known = {
            "host_budget": budget,
            "bytes_per_parameter": host_bytes_per_parameter(arguments),
            "form": form_on_host(arguments),
        }
        named = settings_of(technique) if isinstance(given, Offloading) else {}
        return dataclasses.replace(technique, **{n: v for n, v in known.items() if n not in named})

    def explain(self, note: str, block_bytes: int) -> None:
        """Note how many blocks were chosen to stay on the device, or that nothing else waits.

        One block more needs so many bytes there.
        """
        self.note, self.off_reason = note, self.off_reason or note
        self.is_open, self._block_bytes = True, block_bytes

    def reasons(self, trainer: Any, pl_module: Any) -> Iterator[tuple[str, str]]:
        limit = exactness_limit(self.arguments)
        if not limit.allows(self._exactness_on(trainer)):
            why = (
                "a CPU rounds updates in another way than a GPU: it is rounding, which "
                f"`exactness={limit.value!r}` does not allow"
            )
            fix = f'Use `exactness="rounding"`, `{self.name}="activations"` or `None`.'
            yield why, fix
        if self._is_shared(trainer):
            yield from self._problems_of_sharing(trainer, pl_module)

    def _problems_of_sharing(self, trainer: Any, pl_module: Any) -> Iterator[tuple[str, str]]:
        fix = f'Use `{self.name}="activations"`, or train in one process.'
        if trainer.num_nodes > 1:
            yield "processes of several machines have no memory in common", fix
        if why := has_custom_gradient_sync(trainer):
            yield f"{why}, and gradients that wait on the host are averaged there", fix
        if why := communicates_in_forward(trainer, pl_module):
            yield f"{why}, which nobody has tried with weights that processes share", fix
        if any(map(averages_weights, trainer.callbacks)):
            why = "a callback that averages weights writes them in each process, and they are one"
            yield why, fix
        if unfreezes_later(trainer):
            yield "processes share out what is trained at the start, and more is later", fix
        if builds_model_late(pl_module):
            fix = "Make its layers in `__init__`."
            yield "`configure_model` makes layers when the processes share them already", fix

    def apply(self, trainer: Any, pl_module: Any) -> None:
        """Change the module; under DDP weights and state are those of all processes."""
        # Predictions are of one process.
        is_here = not any(map(is_fake, pl_module.parameters()))
        if not (is_here and self._is_shared(trainer)):
            super().apply(trainer, pl_module)
            return
        from lightning_memsave.techniques.offloading.processes import Processes

        processes = Processes()
        self._undo.append(processes.close)
        self.use(dataclasses.replace(self.technique, processes=processes), pl_module)
        if self._handle is not None and self._handle.residence is not None:
            average = self._handle.residence.average_gradients
            self._undo += share_model(trainer, pl_module, average)

    def _is_shared(self, trainer: Any) -> bool:
        return self.technique.has_weights and is_strategy(trainer, "DDPStrategy")

    def use(self, technique: Technique[nn.Module], pl_module: nn.Module) -> Handle[nn.Module]:
        """Apply it, without embeddings where they stand in the way and were not asked for."""
        assert isinstance(technique, Offloading), "`read` has made it"
        self._why_no_tables = ""
        kinds = [kind for kind in str(technique.what).split("+") if kind != "embeddings"]
        try:
            return super().use(technique, pl_module)
        except IncompatibleError as error:
            if self.is_asked or not kinds or "+".join(kinds) == technique.what:
                raise
            problem = error.problems[0]
            self._why_no_tables = f"{problem.what}: {problem.why}"
        return super().use(dataclasses.replace(technique, what="+".join(kinds)), pl_module)

    def start(self, trainer: Any, pl_module: Any) -> None:
        """Let the optimizers update on the host, beside the next step where nobody looks."""
        super().start(trainer, pl_module)
        residence = None if self._handle is None else self._handle.residence
        if self._handle is None or residence is None:
            self.add_details(self.note)
            return
        # `work_with_hook` sees what other hooks use, but not what they do to other processes.
        unseen = ("optimizer_step",) if residence.processes is None else _BETWEEN_STEPS
        watchers = [o for hook in unseen for o in owners_of(trainer, pl_module, hook)]
        watchers += [type(c).__name__ for c in trainer.callbacks if averages_weights(c)]
        hooked = filter(foreign_hooks, trainer.optimizers)
        watchers += [f"{type(optimizer).__name__}.step" for optimizer in hooked]
        if not pl_module.automatic_optimization:
            watchers.append(f"{type(pl_module).__name__}.training_step")
        residence.is_watched = bool(watchers)
        self._undo += [
            work_with_hook(one, hook)
            for hook in HOOKS
            for one in (pl_module, *trainer.callbacks)
            if has_foreign(one, hook)
        ]
        if residence.processes is None:
            self._undo.append(patch_method(trainer.strategy, training_step))
        if streams_checkpoints(trainer.strategy):
            self._undo.append(patch_method(trainer.strategy, lightning_module_state_dict))
        details = []
        if self.why_form:
            details.append(f"{SMALLER_FORM}{self.why_form}")
        if self._why_no_tables:
            details.append(f"embeddings are weights as all others: {self._why_no_tables}")
        # With tables alone on the host, others may train what is on the device.
        trained = [o for o in trainer.optimizers if trains_offloaded(o)]
        updates, passes_whole = [], False
        why = self._why_not_early(trainer, pl_module, trained)
        technique = dataclasses.replace(self.technique, early_updates=0) if why else self.technique
        for optimizer in trained or trainer.optimizers:
            handle = technique.update_in_background(optimizer)
            self._undo.append(handle.undo)
            updates.append(handle.updates.early)
            passes_whole |= handle.updates.passes_whole
        names = ", ".join(f"`{name}`" for name in watchers)
        details.append(
            f"updates end before {names}: it may read weights"
            if watchers
            else "updates end with the step: whole parameters pass the device"
            if passes_whole
            else "updates run beside the next step"
        )
        details += self._allow_early(trainer, updates, why)
        if updates and residence.processes is None and not _own_clipping(trainer):
            self._undo.append(patch_method(trainer.strategy.precision_plugin, clip_grad_by_norm))
        if self.is_open:
            details.append(self._allow_correction(trainer, pl_module, self._handle))
        self._details = details
        self._show(trainer, self._handle)

    def _show(self, trainer: Any, handle: OffloadingHandle) -> None:
        details = [*handle.changes, *handle.skipped, *self._details, self.note]
        self.show("on", *details, exactness=self._exactness_on(trainer).value)

    def _allow_correction(self, trainer: Any, pl_module: Any, handle: OffloadingHandle) -> str:
        """Let the number of blocks be corrected; return what stands against it."""
        alone = all(
            updates_each_alone(o) and not getattr(o, "is_paged", False) for o in trainer.optimizers
        )
        whys = {
            "the module steps by itself": not pl_module.automatic_optimization,
            "the state of the optimizer is not known to be that of each parameter alone": not alone,
        }
        why = next((why for why, holds in whys.items() if holds), "")
        if why:
            return f"{STAY}, as many as chosen, whatever steps measure: {why}"
        whys = {
            "batches are not repeated when memory runs out": not (
                self.micro_batches.is_passing and self.micro_batches.is_auto
            ),
            "`optimizer_in_backward` updates before a batch can be repeated": bool(
                self.arguments["optimizer_in_backward"]
            ),
        }
        why = next((why for why, holds in whys.items() if holds), "")
        is_planned = self.arguments["budget"] is not None
        self._correction = ResidentCorrection(
            handle,
            self._correct,
            0 if why or is_planned else self._block_bytes,
            is_watched=not is_planned,
        )
        self.micro_batches.relief = self._correction
        self._undo.append(self.micro_batches.forget_relief)
        return "" if is_planned or not why else f"never more {STAY} than chosen: {why}"

    def watch(self, trainer: Any, *, is_start: bool) -> None:
        """Correct how many blocks stay on the device by what CUDA's allocator has measured."""
        if self._correction is not None:
            self._correction.watch(trainer, is_start=is_start)

    def leave(self, trainer: Any, why: str) -> bool:
        """Let some blocks leave the device that were chosen to stay there, if there are any."""
        return self._correction is not None and self._correction.leave(trainer, why)

    def _correct(self, trainer: Any, number: int, why: str) -> bool:
        handle = self._handle
        assert handle is not None, "it is on"
        before = handle.num_resident
        if number == before or not self._fits_host(handle.target, number):
            return False
        handle.keep_on_device(number, trainer.optimizers)
        number = handle.num_resident
        if number == before:
            return False
        if number > before:
            self.micro_batches.expect_more()
        self.technique = dataclasses.replace(self.technique, resident=number)
        self._is_corrected = True
        how = f"{number} of {handle.num_blocks} {STAY}, no longer {before}: {why}"
        self.note = f"corrected: {how}"
        self._show(trainer, handle)
        self.when_corrected(f"what was predicted is for {before} resident blocks")
        log_info(trainer, f"{self.name}: {how}.")
        return True

    # Without a budget, half of what is free by now is enough for what is to come.
    def _fits_host(self, pl_module: Any, number: int) -> bool:
        held, limit = self.technique.host_bytes(pl_module)
        needed, _ = dataclasses.replace(self.technique, resident=number).host_bytes(pl_module)
        return needed - (held if self.technique.host_budget is None else 0) <= limit

    @property
    def corrected(self) -> dict[str, Any]:
        """The argument with the number of blocks that is in force, where it was corrected."""
        given = Offloading.from_value(self.arguments[self.name]) if self._is_corrected else None
        if given is None:
            return {}
        return {self.name: dataclasses.replace(given, resident=self.technique.resident)}

    def _allow_early(self, trainer: Any, updates: Sequence[EarlyUpdates], why: str) -> list[str]:
        """Let updates begin in backward if nothing stands against it; say what of it is on."""
        if why:
            return [f"no update begins in backward: {why}"]
        if not (self.technique.early_updates and updates):
            return []
        for each in updates:
            each.is_alone = True
        around = functools.partial(_around_backward, updates)
        self._undo.append(around_backward(trainer, around))
        return [f"updates of {updates[0].number} blocks may begin in backward"]

    def _why_not_early(self, trainer: Any, pl_module: Any, optimizers: Sequence[Any]) -> str:
        if not self.technique.early_updates:
            return ""
        owners = [o for hook in _BEFORE_STEPS for o in owners_of(trainer, pl_module, hook)]
        owners += _own_clipping(trainer)
        whys = {
            "processes share the updates": self.technique.processes is not None,
            "`optimizer_in_backward` updates there": self.arguments["optimizer_in_backward"],
            "the module steps by itself": not pl_module.automatic_optimization,
            "a step may be left out for its scale": gradient_scaler(trainer) is not None,
            "values are clipped, and no norm": "clip_value" in clipping_of(trainer),
            f"`{owners[0]}` may change its gradients" if owners else "": bool(owners),
            **{why: True for o in optimizers if (why := why_none(o))},
        }
        return next((why for why, holds in whys.items() if holds), "")

    def _exactness_on(self, trainer: Any) -> Exactness:
        is_moved = trainer.strategy.root_device.type == "cuda"
        return (
            Exactness.ROUNDING if is_moved and self.technique.has_weights else Offloading.exactness
        )

    def held_bytes(self, trainer: Any) -> int:
        """Count bytes in host memory, optimizer state with it; 0 without offloading."""
        handle = self._handle
        if handle is None:
            return 0
        if not self.technique.has_weights:
            return handle.memory.peak_bytes
        states = tensors_in([optimizer.state for optimizer in trainer.optimizers])
        found = [tensor.untyped_storage() for tensor in states]
        storages = {storage.data_ptr(): storage for storage in found}
        of_states = sum(storage.nbytes() for storage in storages.values() if is_host(storage))
        residence = handle.residence
        of_gradients = 0 if residence is None else residence.gradient_bytes
        return of_states + of_gradients + handle.memory.peak_bytes

    def wait(self) -> None:
        if self._handle is not None:
            self._handle.wait()

    def undo(self) -> None:
        """Restore the module on the host, where Lightning moves it; a second call does nothing."""
        handle, self._correction = self._handle, None
        if handle is not None and handle.residence is not None:
            handle.residence.stay_on_host()
        super().undo()


def _own_clipping(trainer: Any) -> list[str]:
    plugin = trainer.strategy.precision_plugin
    names = ("main_params", "clip_gradients", "clip_grad_by_norm", "clip_grad_by_value")
    # Replacements of this package, such as that of pipelines, clip for other processes, too.
    own = [name for name in names if name in vars(plugin) or has_foreign(plugin, name)]
    return [f"{type(plugin).__name__}.{name}" for name in own]


def clip_grad_by_norm(self: Any, optimizer: Optimizer, clip_val: float) -> None:
    """Leave gradients alone whose norm is small; replaces the method of a precision plugin."""
    updates = host_updates_of(optimizer)
    if updates is None:
        previous_method(self, "clip_grad_by_norm")(optimizer, clip_val)
    else:
        updates.clip_grad_norm_(clip_val)


def _around_backward(
    updates: Sequence[EarlyUpdates], is_last: bool
) -> AbstractContextManager[None]:
    return with_attribute(updates, "is_paused", not is_last)
