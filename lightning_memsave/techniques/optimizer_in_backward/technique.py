"""Each parameter updated in backward, as soon as its gradient is complete."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from types import TracebackType
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_memsave.core.technique import Exactness, Handle, Offer, Technique
from lightning_memsave.core.trainer_facts import SHARDED, TrainerFacts
from lightning_memsave.errors import ConfigurationError, Problem
from lightning_memsave.techniques.low_bit_optimizer.optimizer_kinds import (
    is_low_bit,
    wrapper_problems,
)
from lightning_memsave.techniques.low_precision_weights.tiled_steps import ELEMENTWISE
from lightning_memsave.techniques.optimizer_in_backward.held_gradients import HeldGradients
from lightning_memsave.techniques.optimizer_in_backward.updates import (
    ACTIVE_UPDATES,
    GradientUpdates,
    all_in_backward,
)
from lightning_memsave.units import format_bytes

# Of torch's, only LBFGS looks at several parameters at once; Muon and newer ones need not be there.
_KNOWN = ELEMENTWISE | {
    getattr(torch.optim, name)
    for name in ("Adafactor", "Muon", "SparseAdam")
    if hasattr(torch.optim, name)
}


class InBackwardHandle(Handle[Optimizer]):
    """What ``OptimizerInBackward.apply`` gives: says which backward pass updates.

    Args:
        target: The optimizer.
        updates: What the hooks do.
        changes: As for ``Handle``.
        skipped: As for ``Handle``.
        undo: As for ``Handle``.
    """

    def __init__(
        self,
        target: Optimizer,
        updates: GradientUpdates,
        changes: Iterable[str],
        skipped: Iterable[str] = (),
        undo: Iterable[Callable[[], None]] = (),
    ) -> None:
        super().__init__(target, changes, skipped, undo)
        self._updates = updates

    @property
    def is_accumulating(self) -> bool:
        """Whether gradients add up in ``param.grad`` for now; may be set."""
        return self._updates.is_accumulating

    @is_accumulating.setter
    def is_accumulating(self, value: bool) -> None:
        self._updates.is_accumulating = value

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is not None:  # gradients on the host must not come back to a device that is full
            self._updates.forget()
        super().__exit__(exc_type, exc, traceback)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Let gradients add up; for every backward pass of a step but the last."""
        before, self.is_accumulating = self.is_accumulating, True
        try:
            yield
        finally:
            self.is_accumulating = before


@dataclass(frozen=True)
class OptimizerInBackward(Technique[Optimizer]):
    """Update each parameter in backward when its gradient is complete, and free the gradient.

    Of all gradients one or two exist at a time. The optimizer stays what it is, with its state,
    groups and schedulers, and so does the loop: ``backward``, ``optimizer.step()``, ``zero_grad``.

    Args:
        clip_value: Bound on each element of a gradient, as ``clip_grad_value_`` sets it.
        clip_param_norm: Bound on the norm of the gradient of each parameter by itself.
        clip_norm: Bound on the norm of all gradients of this optimizer together, the same as
            ``clip_grad_norm_``. Gradients wait in host memory until backward has ended: 4 bytes per
            parameter there and twice over the bus, and on the device still one at a time.
        trust_optimizer: Whether to use an optimizer that is not known: you vouch that its step
            updates each parameter from that parameter, its gradient, its state and its group alone.

    Raises:
        ConfigurationError: If an argument is wrong; the message lists all that are.

    Note:
        Exactness is *bitwise*. What looks at gradients after backward finds none:
        ``torch.nn.utils.clip_grad_norm_`` would do nothing and say so to nobody, so use the
        arguments above. Learning rates are read in backward. There is one updating backward pass
        per step; the others, and those whose gradients are to be thrown away, run inside
        ``handle.accumulating()``, and a second one is an error. It cannot be taken back either: a
        loop that leaves out a step after backward trains something else: not with a ``GradScaler``.
        Known are the optimizers of torch but for LBFGS, those of bitsandbytes and of
        `LowBitOptimizer`, and Adafactor of transformers; others are refused, as they may couple
        parameters. Not for several processes.

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
    source: ClassVar[str] = (
        "Lv et al. (2023), Full Parameter Fine-tuning for Large Language Models with Limited "
        "Resources, arXiv:2306.09782"
    )

    _: KW_ONLY
    clip_value: float | None = None
    clip_param_norm: float | None = None
    clip_norm: float | None = None
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
        vouches: object = self.trust_optimizer
        if not isinstance(vouches, bool):
            what, fix = f"`trust_optimizer={vouches!r}`", "Use True or False."
            problems.append(Problem(what, "it must be a truth value", fix))
        if problems:
            raise ConfigurationError.from_problems(type(self).__name__, problems)

    def conflicts(self, facts: TrainerFacts, written: str) -> list[Problem]:
        """Refuse strategies that share gradients after they are complete."""
        # DDP of one process hands its gradients around, too.
        if facts.world_size == 1 and not facts.is_strategy(*SHARDED, "DDPStrategy"):
            return []
        return [
            Problem(
                written,
                f"`{facts.strategy}` shares gradients between processes after they are complete",
                f"Set `{self.argument}=None`, or train in one process without a strategy.",
            )
        ]

    def check(self, target: Optimizer) -> list[Problem]:
        """Find every reason why parameters cannot be updated one by one; changes nothing.

        Args:
            target: The optimizer.

        Returns:
            All problems, empty if there are none.
        """
        if wrapped := wrapper_problems(target):
            return wrapped
        problems = [*_problems_of_others(target), *_problems_of_processes()]
        if not (self.trust_optimizer or _is_known(target)):
            problems.append(
                Problem(
                    f"`{type(target).__name__}`",
                    "it is not known to update each parameter on its own",
                    "Use an optimizer of torch such as AdamW, set `optimizer_in_backward=None`, "
                    "or, if it does so, pass `OptimizerInBackward(trust_optimizer=True)`.",
                )
            )
        if _has_overrides(target):
            problems.append(
                Problem(
                    f"`{type(target).__name__}` with bitsandbytes' overrides",
                    "they are for places in the groups, and one parameter would be in the first",
                    'Use `optimizer="8bit"` with `keep_32bit=...`, or set '
                    "`optimizer_in_backward=None`.",
                )
            )
        if any(group.get("differentiable") for group in target.param_groups):
            problems.append(
                Problem(
                    f"`{type(target).__name__}(differentiable=True)`",
                    "the graph of a step would hold all the gradients",
                    "Set `differentiable=False`.",
                )
            )
        return problems

    def apply(self, target: Optimizer) -> InBackwardHandle:
        """Switch the technique on.

        Args:
            target: The optimizer.

        Returns:
            What was changed, ``undo`` and ``accumulating``.
        """
        handle = super().apply(target)
        assert isinstance(handle, InBackwardHandle), "`_apply` makes it"
        return handle

    def _apply(self, target: Optimizer) -> InBackwardHandle:
        held = None if self.clip_norm is None else HeldGradients(self.clip_norm)
        updates = GradientUpdates(target, self._clip, held)
        if not _trained(target):
            return InBackwardHandle(target, updates, (), ("no parameter is trained",))
        undo = updates.start()
        return InBackwardHandle(target, updates, (describe_updates(target),), undo=undo)

    def _clip(self, param: nn.Parameter) -> None:
        if self.clip_value is not None:
            torch.nn.utils.clip_grad_value_([param], self.clip_value)
        if self.clip_param_norm is not None:
            torch.nn.utils.clip_grad_norm_([param], self.clip_param_norm)


def describe_updates(optimizer: Optimizer, adding_up: str = "") -> str:
    """Say what becomes of the gradients of an optimizer, with the sizes that they have now.

    Args:
        optimizer: One whose parameters are updated in backward.
        adding_up: What is added up before the last backward pass of a step; empty if nothing is.

    Returns:
        One line.
    """
    sizes = [p.numel() * p.element_size() for p in _trained(optimizer)]
    if adding_up:
        how = (
            "the last backward pass of a step, "
            f"all gradients ({format_bytes(sum(sizes))}) are alive while {adding_up} add up"
        )
    else:
        gradients = f"gradients {format_bytes(sum(sizes))} -> {format_bytes(max(sizes, default=0))}"
        how = f"backward, {gradients} at a time"
    where = " (they wait in host memory)" if ACTIVE_UPDATES[optimizer].held is not None else ""
    return f"{type(optimizer).__name__}: {len(sizes)} parameters updated in {how}{where}"


def _trained(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


# Exact types: a subclass may couple parameters.
def _is_known(optimizer: Optimizer) -> bool:
    cls = type(optimizer)
    return (
        cls in _KNOWN
        or is_low_bit(optimizer)
        or cls.__module__.startswith("bitsandbytes.optim.")
        or (cls.__module__, cls.__name__) == ("transformers.optimization", "Adafactor")
    )


# bitsandbytes finds them by the place of a parameter in the groups; those of ours have none.
def _has_overrides(optimizer: Optimizer) -> bool:
    manager = getattr(optimizer, "mng", None)
    if manager is None or is_low_bit(optimizer):
        return False
    return bool(manager.index2config or manager.module_weight_config_triple)


def _problems_of_processes() -> list[Problem]:
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return []
    why = "parameters would be updated before their gradients are averaged"
    fix = "Train on one device, or set `optimizer_in_backward=None`."
    return [Problem(f"{dist.get_world_size()} processes", why, fix)]


def _problems_of_others(target: Optimizer) -> list[Problem]:
    name = type(target).__name__
    if target in ACTIVE_UPDATES:
        return [
            Problem(
                f"`{name}`",
                "its parameters are updated in backward already",
                "Apply it once, or call `handle.undo()` first.",
            )
        ]
    ours = {id(p) for group in target.param_groups for p in group["params"]}
    return [
        Problem(
            f"`{name}`",
            f"it shares parameters with a `{type(other).__name__}` that updates them in backward",
            "Give each parameter to one optimizer.",
        )
        for other, _ in all_in_backward()
        if any(id(p) in ours for group in other.param_groups for p in group["params"])
    ]
