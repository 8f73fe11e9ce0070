"""Update each parameter in backward, as soon as its gradient is complete."""

import contextlib
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_memsave.core.gradient_reads import reads_gradients
from lightning_memsave.core.optimizers import foreign_hooks, parameters_of
from lightning_memsave.core.saved_state import with_attribute
from lightning_memsave.core.technique import Exactness, Handle, Offer, Technique
from lightning_memsave.core.trainer_facts import SHARDED, TrainerFacts
from lightning_memsave.errors import ConfigurationError, Problem
from lightning_memsave.techniques.optimizer_in_backward.freed_gradients import (
    FREED,
    READ_BEFORE,
    READING_HOOKS,
)
from lightning_memsave.techniques.optimizer_in_backward.held_gradients import HeldGradients
from lightning_memsave.techniques.optimizer_in_backward.updates import (
    GradientUpdates,
    UpdatesInBackward,
)
from lightning_memsave.techniques.optimizer_kinds import is_low_bit, wrapper_problems
from lightning_memsave.techniques.optimizer_step import (
    ACTIVE_UPDATES,
    in_backward_of,
    may_update_alone,
)
from lightning_memsave.techniques.parameter_names import is_shard_of_rows
from lightning_memsave.techniques.residences import residence_among
from lightning_memsave.units import format_bytes

_OF_MODULE = {
    "configure_gradient_clipping": "would find no gradients",
    # Momentum and weight decay move a parameter whose gradient is zero, not one without.
    "optimizer_zero_grad": "may keep zeros as gradients: momentum and weight decay would then move "
    "parameters that the step did not use; Lightning's own method sets gradients to `None`",
}


class InBackwardHandle(Handle[Optimizer]):
    """The handle of ``OptimizerInBackward.apply``: chooses which backward passes update."""

    updates: GradientUpdates
    """What updates the parameters."""

    def __exit__(self, *failure: Any) -> None:
        if failure[1] is not None:  # do not move gradients from the host to a device that is full
            self.updates.forget()
        super().__exit__(*failure)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Accumulate gradients: for every backward pass of a step except the last."""
        with with_attribute([self.updates], "is_accumulating", True):
            yield


@dataclass(frozen=True)
class OptimizerInBackward(Technique[Optimizer]):
    """Update parameters in backward when their gradients are complete, and free the gradients.

    A few gradients exist at a time. The optimizer, its state, groups and schedulers stay the
    same, and so does the loop: ``backward``, ``optimizer.step()``, ``zero_grad``.

    Args:
        clip_value: Bound on each element of a gradient, as in ``clip_grad_value_``.
        clip_param_norm: Bound on the norm of the gradient of each single parameter.
        clip_norm: Bound on the total norm of all gradients of this optimizer, as in
            ``clip_grad_norm_``. Gradients wait until backward has ended, but for ``kept_bytes`` in
            host memory: 4 bytes per parameter there and two transfers.
        group_bytes: Gather gradients up to so many bytes, or those of the largest one if that is
            less, and update their parameters in one call of the optimizer; 0 for one at a time.
            ``None``: 32 MiB, or a sixteenth of all gradients if that is more.
        kept_bytes: With ``clip_norm``, bytes of gradients that stay on the device: the last ones,
            which take the place of activations. ``None``: as many as the prediction at the start of
            fit finds room for below the peak; 0 in a loop without Trainer.
        trust_optimizer: Use an unknown optimizer: you guarantee that its step updates each
            parameter from that parameter, its gradient, its state and its group only.

    Raises:
        ConfigurationError: If arguments are invalid; the message lists all of them.

    Note:
        Exactness is *bitwise*. After backward there are no gradients:
        ``torch.nn.utils.clip_grad_norm_`` would silently do nothing, so use the arguments above.
        There is one updating backward pass per step; all others, and those whose gradients are
        discarded, run inside ``handle.accumulating()``. Weights of `Offloading` are updated on the
        host, in the background, which needs `Offloading.update_in_background`, too; there is no
        ``clip_norm`` for them. More limits are in docs/optimizer_and_precision.md.

    Example:
        >>> model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> handle = OptimizerInBackward().apply(optimizer)
        >>> print(*handle.changes)
        AdamW: 8 parameters updated in backward, gradients 65.00 KiB -> 16.00 KiB at a time
        >>> model(torch.ones(2, 64)).sum().backward()
        >>> any(p.grad is not None for p in model.parameters())
        False
        >>> optimizer.step()

    References:
        Lv et al. (2023), Full Parameter Fine-tuning for Large Language Models with Limited
        Resources, arXiv:2306.09782.
    """

    name: ClassVar[str] = "optimizer_in_backward"
    argument: ClassVar[str] = "optimizer_in_backward"
    offers: ClassVar[tuple[Offer, ...]] = (Offer("optimizer in backward", True),)
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    _: KW_ONLY
    clip_value: float | None = None
    clip_param_norm: float | None = None
    clip_norm: float | None = None
    group_bytes: int | None = None
    kept_bytes: int | None = None
    trust_optimizer: bool = False

    def __post_init__(self) -> None:
        problems = [
            Problem(
                f"`{setting}={value!r}`",
                "it must be a positive number",
                f"Use `{setting}=1.0`, or `None` for no bound.",
            )
            for setting in ("clip_value", "clip_param_norm", "clip_norm")
            if (value := getattr(self, setting)) is not None
            and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0)
        ]
        problems += [
            Problem(f"`{setting}={value!r}`", "it must be a number of bytes", "Use `None`.")
            for setting in ("group_bytes", "kept_bytes")
            if (value := getattr(self, setting)) is not None
            and (isinstance(value, bool) or not isinstance(value, int) or value < 0)
        ]
        trusts: object = self.trust_optimizer
        if not isinstance(trusts, bool):
            what, fix = f"`trust_optimizer={trusts!r}`", "Use True or False."
            problems.append(Problem(what, "it must be a bool", fix))
        if problems:
            raise ConfigurationError.from_problems(type(self).__name__, problems)

    def conflicts(self, facts: TrainerFacts, written: str) -> list[Problem]:
        """Refuse what completes, reads or changes gradients after backward."""
        return [Problem(written, why, fix) for why, fix in self._reasons_against(facts)]

    def _reasons_against(self, facts: TrainerFacts) -> Iterator[tuple[str, str]]:
        off = f"set `{self.argument}=None`"
        if facts.is_manual:
            yield (
                f"`{facts.module}.automatic_optimization=False`: only the module knows which of "
                "its backward passes completes the gradients",
                f"Set `{self.argument}=None` and use `OptimizerInBackward` in `training_step`.",
            )
        for setting, bound in facts.clipping.items():
            if (own := getattr(self, setting)) not in (None, bound):
                yield (
                    f"the Trainer was given `gradient_clip_val={bound}`, another bound than "
                    f"`{setting}={own}`",
                    f"Remove one of the two, or pass `{setting}={bound}` here too.",
                )
        if facts.scales_losses:
            yield (
                f"`precision={facts.precision!r}` scales losses, and whether a step is left out is "
                "known only after backward, when parameters are updated already",
                f'Use `precision="bf16-mixed"`, or {off}.',
            )
        for hook, why in _OF_MODULE.items():
            if (owner := f"{facts.module}.{hook}") in facts.overridden(hook):
                yield f"`{owner}` {why}", f"Remove that method, or {off}."
        yield from self._reasons_against_readers(facts, off)
        yield from self._reasons_against_strategy(facts)

    def _reasons_against_readers(self, facts: TrainerFacts, off: str) -> Iterator[tuple[str, str]]:
        # Between backward and step, where gradients and settings are read and changed.
        for hook in ("on_after_backward", "on_before_optimizer_step"):
            for owner in facts.overridden(hook):
                yield (
                    f"`{owner}` runs when parameters are updated already and gradients are gone: "
                    "what it does to gradients, learning rates or weight decay has no effect",
                    f"Remove that method, or {off}.",
                )
        for hook in ("backward", "optimizer_step", *READING_HOOKS):
            for owner in facts.gradient_readers(hook):
                yield f"`{owner}` reads gradients, {FREED}", f"{READ_BEFORE}, or {off}."

    def _reasons_against_strategy(self, facts: TrainerFacts) -> Iterator[tuple[str, str]]:
        off = f"set `{self.argument}=None`"
        if facts.is_strategy("ModelParallelStrategy"):  # FSDP2 calls hooks of complete shards
            if "clip_norm" in facts.clipping or self.clip_norm is not None:
                yield (
                    "the norm of all gradients is known only after backward, on all processes",
                    f'Use `gradient_clip_algorithm="value"`, or {off}.',
                )
        # DDP of one process has buckets, too; they have the size of all gradients until it ends.
        elif facts.is_strategy("DDPStrategy") and not facts.is_strategy(*SHARDED):
            yield (
                f"`{facts.strategy}` keeps all gradients in its buckets, so that updating early "
                "would free nothing",
                f'Use `Trainer(strategy="memsave_fsdp2")`, or {off}.',
            )
        elif facts.world_size > 1 or facts.is_strategy(*SHARDED):
            yield (
                f"`{facts.strategy}` shares gradients between processes after they are complete",
                f"Set `{self.argument}=None`, or train in one process without a strategy.",
            )

    def check(self, target: Optimizer) -> list[Problem]:
        """Find every reason why parameters cannot be updated one by one; changes nothing."""
        if wrapped := wrapper_problems(target):
            return wrapped
        problems, name = _problems_of_others(target), type(target).__name__
        is_alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
        if not is_alone and not all(map(is_shard_of_rows, parameters_of(target))):
            why = "parameters would be updated before their gradients are averaged"
            fix = "Train on one device, or set `optimizer_in_backward=None`."
            problems.append(Problem(f"{dist.get_world_size()} processes", why, fix))
        if any(map(is_lazy, parameters_of(target))):
            why = "parameters of lazy layers get their size in the first forward pass only"
            fix = "Call the model once before the fit, or set `optimizer_in_backward=None`."
            problems.append(Problem(f"`{name}`", why, fix))
        if self.clip_norm is not None and residence_among(_trained(target)) is not None:
            problems.append(norm_problem(f"`clip_norm={self.clip_norm}`"))
        if not (self.trust_optimizer or may_update_alone(target)):
            why = "it is not known to update each parameter on its own"
            fix = "Use an optimizer of torch such as AdamW, set `optimizer_in_backward=None`, "
            fix += "or, if it does so, pass `OptimizerInBackward(trust_optimizer=True)`."
            problems.append(Problem(f"`{name}`", why, fix))
        if _has_overrides(target):
            why = "they refer to positions in the groups, which change when parameters are updated "
            fix = "Use `optimizer=LowBitOptimizer(keep_32bit=...)`, or set "
            fix += "`optimizer_in_backward=None`."
            what = f"`{name}` with bitsandbytes' overrides"
            problems.append(Problem(what, f"{why}one by one", fix))
        if any(reads_gradients(hook, target) for hook in foreign_hooks(target)):
            what, fix = f"a step hook of `{name}`", f"{READ_BEFORE}, or remove that hook."
            problems.append(Problem(what, f"it reads gradients, {FREED}", fix))
        if any(group.get("differentiable") for group in target.param_groups):
            what, why = f"`{name}(differentiable=True)`", "the graph of a step would keep all"
            problems.append(Problem(what, f"{why} gradients alive", "Set `differentiable=False`."))
        return problems

    def apply(self, target: Optimizer) -> InBackwardHandle:
        """Apply the technique."""
        return cast(InBackwardHandle, super().apply(target))

    def _apply(self, target: Optimizer) -> InBackwardHandle:
        residence, group_bytes = residence_among(_trained(target)), self.group_bytes
        if residence is not None:
            clips = (self.clip_value, self.clip_param_norm) != (None, None)
            updates: GradientUpdates = UpdatesInBackward(
                target, self._clip, residence, clips=clips, group_bytes=group_bytes
            )
        else:
            held = None
            if self.clip_norm is not None:
                held = HeldGradients(self.clip_norm, self.kept_bytes)
            updates = GradientUpdates(target, self._clip, held, group_bytes=group_bytes)
        if _trained(target):
            undo = updates.start()
            handle = InBackwardHandle(target, (describe_updates(target),), undo=undo)
        else:
            handle = InBackwardHandle(target, (), ("no parameter is trained",))
        handle.updates = updates
        return handle

    def _clip(self, params: list[nn.Parameter]) -> None:
        if self.clip_value is not None:
            torch.nn.utils.clip_grad_value_(params, self.clip_value)
        if self.clip_param_norm is not None:
            for param in params:
                torch.nn.utils.clip_grad_norm_([param], self.clip_param_norm)


def describe_updates(optimizer: Optimizer, adding_up: str = "") -> str:
    params, updates = _trained(optimizer), ACTIVE_UPDATES[optimizer]
    total = format_bytes(sum(p.nbytes for p in params))
    is_on_host = residence_among(_trained(optimizer)) is not None
    place = " on the host" if is_on_host else ""
    if adding_up:
        when = "after" if is_on_host else "in"
        how = (
            f"{when} the last backward pass of a step, "
            f"all gradients ({total}) are alive{place} while {adding_up} accumulate"
        )
    else:
        at_a_time = format_bytes(updates.bytes_at_a_time)
        how = f"in backward, gradients {total} -> {at_a_time} at a time{place}"
    where = " (gradients wait until their norm is known)" if updates.held is not None else ""
    return f"{type(optimizer).__name__}: {len(params)} parameters updated {how}{where}"


def norm_problem(what: str) -> Problem:
    return Problem(
        what,
        "the norm of all gradients is known only after backward, when the host has updated most "
        "offloaded weights already",
        "Clip values instead, or set `optimizer_in_backward=None`, with "
        "`Offloading(early_updates=4)` for updates in backward that are taken back if they clip.",
    )


def _trained(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for p in parameters_of(optimizer) if p.requires_grad]


# bitsandbytes looks them up by position in the groups; our own optimizers ignore them.
def _has_overrides(optimizer: Optimizer) -> bool:
    manager = getattr(optimizer, "mng", None)
    if manager is None or is_low_bit(optimizer):
        return False
    return bool(manager.index2config or manager.module_weight_config_triple)


def _problems_of_others(target: Optimizer) -> list[Problem]:
    name = type(target).__name__
    if target in ACTIVE_UPDATES:
        fix = "Apply it once, or call `handle.undo()` first."
        return [Problem(f"`{name}`", "its parameters are updated in backward already", fix)]
    return [
        Problem(
            f"`{name}`",
            f"it shares parameters with a `{type(other).__name__}` that updates them in backward",
            "Give each parameter to one optimizer.",
        )
        for other, _ in in_backward_of(parameters_of(target))
    ]
