"""Updates of parameters during the backward pass, as a setting."""

import contextlib
import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch.nn.parameter import is_lazy

from lightning_memsave.callbacks.settings import optimizer as optimizers
from lightning_memsave.callbacks.settings.accumulate_grad_batches import has_scheduler
from lightning_memsave.callbacks.settings.setting import Setting, off_rows, saves
from lightning_memsave.callbacks.settings.values import Arguments, is_asked, short, why_beyond
from lightning_memsave.core.technique import Handle, Row
from lightning_memsave.core.trainer_facts import SHARDED
from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.techniques.micro_batching.technique import size_of_batches
from lightning_memsave.techniques.offloading.technique import Offloading
from lightning_memsave.techniques.optimizer_in_backward.technique import (
    OptimizerInBackward,
    describe_updates,
    norm_problem,
)
from lightning_memsave.techniques.optimizer_in_backward.updates import open_to_keep
from lightning_memsave.techniques.optimizer_step import ACTIVE_UPDATES
from lightning_memsave.trainer.hooks import has_foreign, owners_of
from lightning_memsave.trainer.precision import gradient_scaler
from lightning_memsave.trainer.trainer import facts_of, is_compiled_whole, is_strategy
from lightning_memsave.trainer.training_loop import (
    around_backward,
    around_step,
    may_split_batches,
)

_OFF = "set `optimizer_in_backward=None`"


def find_conflicts(
    trainer: Any, pl_module: Any, technique: OptimizerInBackward, what: str
) -> list[Problem]:
    """Find every reason why the module cannot be updated in backward."""
    problems = []
    if not pl_module.automatic_optimization:
        problems.append(
            Problem(
                what,
                f"`{type(pl_module).__name__}.automatic_optimization=False`: only the module "
                "knows which of its backward passes completes the gradients",
                "Set `optimizer_in_backward=None` and use `OptimizerInBackward` in "
                "`training_step`.",
            )
        )
    problems += _of_clipping(trainer, technique, what)
    if not is_strategy(trainer, *SHARDED):  # refused below, whatever its precision
        problems += find_scaler(trainer, what)
    problems += _of_compilation(pl_module, what)
    problems += _of_module(pl_module, what)
    problems += _of_hooks(trainer, pl_module, what)
    return problems + technique.conflicts(facts_of(trainer), what)


def find_risks(pl_module: Any, what: str) -> list[Problem]:
    """Find what may end the run in a later step, where the setting comes from a preset."""
    owner = type(pl_module).__name__
    whys = {
        "optimizer_step": "may leave out a step, whose backward pass has updated parameters",
        "backward": "may run several backward passes in a step, and only the last one may update",
    }
    return [
        Problem(what, f"`{owner}.{hook}` {why}", "Set `optimizer_in_backward=True` by name.")
        for hook, why in whys.items()
        if has_foreign(pl_module, hook)
    ]


def clipping_of(trainer: Any) -> dict[str, Any]:
    """Find out what the Trainer clips."""
    bound = trainer.gradient_clip_val
    if bound is None or bound <= 0:  # for Lightning, both mean no bound
        return {}
    algorithm = getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm)
    # Without an algorithm, Lightning clips the norm.
    return {"clip_value" if algorithm == "value" else "clip_norm": bound}


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


def _of_clipping(trainer: Any, technique: OptimizerInBackward, what: str) -> list[Problem]:
    return [
        Problem(
            what,
            f"the Trainer was given `gradient_clip_val={bound}`, another bound than "
            f"`{setting}={own}`",
            f"Remove one of the two, or pass `{setting}={bound}` here too.",
        )
        for setting, bound in clipping_of(trainer).items()
        if (own := getattr(technique, setting)) not in (None, bound)
    ]


def find_scaler(trainer: Any, what: str) -> list[Problem]:
    """Find a GradScaler, which may leave out a step after its backward pass."""
    if gradient_scaler(trainer) is None:
        return []
    why = (
        f"`precision={trainer.precision!r}` scales losses, and whether a step is left out is known "
        "only after backward, when parameters are updated already"
    )
    return [Problem(what, why, f'Use `precision="bf16-mixed"`, or {_OFF}.')]


def _of_compilation(pl_module: Any, what: str) -> list[Problem]:
    total = _trained_bytes(pl_module)
    if is_compiled_whole(pl_module):
        compiled = [(type(pl_module).__name__, pl_module)]
    else:
        compiled = [
            (name or type(pl_module).__name__, module)
            for name, module in pl_module.named_modules()
            if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        ]
    return [
        Problem(
            what,
            f"`{name}` is compiled as a whole: its graph gives all gradients at once, so nothing "
            "would be saved",
            f"Compile its blocks one by one, or {_OFF}.",
        )
        for name, module in compiled[:1]
        if 2 * _trained_bytes(module) > total
    ]


def _trained_bytes(module: Any) -> int:
    return sum(p.nbytes for p in module.parameters() if p.requires_grad and not is_lazy(p))


def _of_module(pl_module: Any, what: str) -> list[Problem]:
    owner = type(pl_module).__name__
    whys = {
        "configure_gradient_clipping": "would find no gradients",
        # Momentum and weight decay move a parameter whose gradient is zero, not one without.
        "optimizer_zero_grad": "may keep zeros as gradients, where a parameter that a step does "
        "not use has none after its update in backward, and is left alone; Lightning's own method "
        "sets gradients to `None`",
    }
    return [
        Problem(what, f"`{owner}.{hook}` {why}", f"Remove that method, or {_OFF}.")
        for hook, why in whys.items()
        if has_foreign(pl_module, hook)
    ]


# Between backward and step, where gradients and settings of the optimizer are read and changed.
def _of_hooks(trainer: Any, pl_module: Any, what: str) -> list[Problem]:
    return [
        Problem(
            what,
            f"`{owner}` runs when parameters are updated already and gradients are gone: "
            "what it does to gradients, learning rates or weight decay would have no effect",
            f"Remove that method, or {_OFF}.",
        )
        for hook in ("on_after_backward", "on_before_optimizer_step")
        for owner in owners_of(trainer, pl_module, hook)
    ]


class OptimizerInBackwardSetting(Setting):
    """Each parameter is updated as soon as its gradient is complete."""

    name = "optimizer_in_backward"

    def __init__(
        self,
        technique: OptimizerInBackward | None,
        value: str,
        is_asked: bool = True,
        halves_batches: bool = False,
        off_reason: str = "",
        *,
        is_offloaded: bool = False,
    ) -> None:
        super().__init__()
        self.is_offloaded = is_offloaded
        self.is_asked = is_asked
        self.off_reason = off_reason
        self.halves_batches = halves_batches
        self.technique = technique
        self.value = value
        self.effective = technique
        """The settings with what the Trainer clips."""
        self._state: Any = None
        self._clipping = ""

    @classmethod
    def read(cls, arguments: Arguments) -> "OptimizerInBackwardSetting":
        """Make the setting that the arguments describe."""
        name, wanted = "optimizer_in_backward", arguments["optimizer_in_backward"]
        technique = OptimizerInBackward.from_value(wanted)
        if technique is not None:
            why_beyond(arguments, name, technique.exactness)
        offloading = Offloading.from_value(arguments["offload"])
        return cls(
            technique,
            short(wanted),
            is_asked=is_asked(arguments, name),
            halves_batches=size_of_batches(arguments["micro_batch_size"]) == "auto",
            is_offloaded=offloading is not None and offloading.has_weights,
        )

    def check(self, trainer: Any, pl_module: Any) -> list[Problem]:
        """Find conflicts with the Trainer; the optimizer does not exist yet."""
        if self.technique is None:
            return []
        what = f"`{self.name}={self.value}`"
        problems = find_conflicts(trainer, pl_module, self.technique, what)
        clips_norm = self.technique.clip_norm is not None or "clip_norm" in clipping_of(trainer)
        if self.is_offloaded and clips_norm:
            problems.append(norm_problem(f"{what} beside `offload` and clipping"))
        return problems if self.is_asked else problems + find_risks(pl_module, what)

    def savings(self, pl_module: Any) -> str:
        """Say how large the gradients are."""
        sizes = [
            p.numel() * p.element_size()
            for p in pl_module.parameters()
            if p.requires_grad and not is_lazy(p)
        ]
        return saves(sum(sizes) - max(sizes, default=0), "gradients")

    def apply(self, trainer: Any, pl_module: Any) -> None:
        """Wrap ``configure_optimizers`` and the backward passes."""
        if self.technique is None:
            self.rows = off_rows(self)
            return
        # Of the precision that this callback has set; of the Trainer's own, `check` says it.
        if problems := find_scaler(trainer, f"`{self.name}={self.value}`"):
            if self.is_asked:
                raise IncompatibleError("MemSaveCallback", problems)
            self.yield_to(problems, trainer, pl_module)
            return
        clipping, self._clipping = clipping_of(trainer), ""
        self.effective = dataclasses.replace(self.technique, **clipping)
        if clipping:
            # Done where the gradients are; afterwards torch would not find one that it could clip.
            clip_val, trainer.gradient_clip_val = trainer.gradient_clip_val, None
            self._undo.append(lambda: setattr(trainer, "gradient_clip_val", clip_val))
            kind = "all values" if "clip_value" in clipping else "the norm of all gradients"
            self._clipping = f"clips {kind} at {clip_val} before the updates, for the Trainer"
        self._state, undo = optimizers.enable(pl_module, self.effective, not self.is_asked)
        self._undo += [
            undo,
            around_backward(trainer, self._around_backward),
            # A backward pass inside of it is none that updates: Lightning zeroes what it leaves.
            around_step(trainer, self._accumulating),
        ]

    def start(self, trainer: Any, pl_module: Any) -> None:
        """Say what became of each optimizer."""
        if self._state is None:
            return
        if self._state.problems:
            self.yield_to(self._state.problems, trainer, pl_module)
            return
        self.rows = [self._row_of(trainer, handle) for handle in self._state.handles] or [
            Row(self.name, self.value, "off", ("the module configures no optimizer",))
        ]
        for handle in self._state.handles:
            if handle.target in ACTIVE_UPDATES:
                ACTIVE_UPDATES[handle.target].advice = advice_for(pl_module)

    def keep_gradients(self, num_bytes: int) -> None:
        """Let gradients that wait for their total norm stay on the device, up to ``num_bytes``."""
        handles = [] if self._state is None else self._state.handles
        for held in open_to_keep([handle.target for handle in handles]):
            held.keep(num_bytes)

    def undo(self) -> None:
        """Restore everything, and let go of the optimizers; a second call does nothing."""
        handles = [] if self._state is None else self._state.handles
        for handle in handles:  # the step that they wait for will not come
            if handle.target in ACTIVE_UPDATES:
                ACTIVE_UPDATES[handle.target].forget()
        self._state = None
        super().undo()

    def _row_of(self, trainer: Any, handle: Handle[Any]) -> Row:
        if not handle.changes:
            return Row(self.name, self.value, "off", handle.skipped)
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
            for handle in self._state.handles:
                stack.enter_context(handle.accumulating())
            yield
