"""Offloading to the memory of the host."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Self

import psutil
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memsave.core.blocks import BlockSelector, as_selectors, find_blocks
from lightning_memsave.core.memory import is_fake
from lightning_memsave.core.technique import Exactness, Handle, Offer, Technique
from lightning_memsave.core.trainer_facts import SHARDED, TrainerFacts
from lightning_memsave.errors import ConfigurationError, IncompatibleError, Problem
from lightning_memsave.techniques.low_bit_optimizer.optimizer_kinds import wrapper_problems
from lightning_memsave.techniques.offloading.host_updates import HostUpdates, host_updates_of
from lightning_memsave.techniques.offloading.host_worker import HostWorker
from lightning_memsave.techniques.offloading.residence import (
    Residence,
    residence_of,
    residence_with,
)
from lightning_memsave.units import format_bytes, parse_bytes

KINDS = ("optimizer", "parameters")
_HOST_SHARE = 0.5
_NUM_STATES = 2  # of AdamW, each as large as the weights


class OffloadingHandle(Handle[nn.Module]):
    """The handle of ``Offloading.apply``.

    Args:
        target: The model.
        residence: What moves its parameters; ``None`` if there are none.
        changes: As for ``Handle``.
        skipped: As for ``Handle``.
        undo: As for ``Handle``.
    """

    def __init__(
        self,
        target: nn.Module,
        residence: Residence | None,
        changes: Iterable[str],
        skipped: Iterable[str] = (),
        undo: Iterable[Callable[[], None]] = (),
    ) -> None:
        super().__init__(target, changes, skipped, undo)
        self.residence = residence

    def wait(self) -> None:
        """Let all weights and gradients be on the host, after all updates."""
        if self.residence is not None:
            self.residence.wait()


@dataclass(frozen=True)
class Offloading(Technique[nn.Module]):
    """Keep what a training step does not need at once in the memory of the host.

    With ``"optimizer"``, the device holds the weights only. The weights that the optimizer updates,
    its state and the gradients are on the host, and the host updates them: each gradient goes there
    as soon as backward has computed it, and before the next forward pass the weights are copied to
    the device. Between two steps ``param.data`` and ``param.grad`` are ordinary tensors on the
    host, so that clipping, checkpoints, averages of weights and any optimizer work as usual.

    Args:
        what: ``"optimizer"``.
        blocks: The repeated blocks, as for `ActivationCheckpointing`; ``None`` finds them.
        host_budget: Bytes of host memory that may be used, or a text such as ``"16GiB"``; ``None``
            for half of what is free.
        num_threads: Threads of each operator in the background updates; ``None`` for torch's
            number, and for all cores but one where that is one beside a GPU.

    Raises:
        ConfigurationError: If arguments are invalid; the message lists all of them.

    Note:
        Exactness is *bitwise*: the same optimizer computes the same on the host. On CUDA, its
        kernels for the host round in another way than those for a GPU; torch's Adam, AdamW, SGD and
        Adagrad use their fused ones unless ``foreach`` or ``fused`` was chosen. Each parameter may
        be used in the forward and backward passes of its module only, and a backward pass must not
        be repeated. Parameters that are frozen, lazy, of another class, with sparse gradients or
        with memory that they share stay on the device. For one process, and not for compiled
        modules.

    Example:
        >>> model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> offloading = Offloading("optimizer", blocks=nn.Linear)
        >>> handle = offloading.apply(model)
        >>> print(*handle.changes)
        8 weights, their gradients and optimizer state on the host: 260.00 KiB
        >>> with offloading.update_in_background(optimizer):
        ...     model(torch.ones(2, 64)).sum().backward()
        ...     norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> handle.undo()

    References:
        Ren et al. (2021), ZeRO-Offload: Democratizing Billion-Scale Model Training,
        arXiv:2101.06840.
    """

    name: ClassVar[str] = "offloading"
    argument: ClassVar[str] = "offload"
    examples: ClassVar[str] = '"optimizer"'
    offers: ClassVar[tuple[Offer, ...]] = (
        Offer("optimizer on the host", "optimizer", "copies of weights and gradients, host memory"),
    )
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    source: ClassVar[str] = "Ren et al. (2021), ZeRO-Offload, arXiv:2101.06840"

    what: str = "optimizer"
    _: KW_ONLY
    blocks: BlockSelector | Sequence[BlockSelector] | None = None
    host_budget: int | str | None = None
    num_threads: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.what not in KINDS:
            choices = ", ".join(f'"{kind}"' for kind in KINDS)
            problems.append(
                Problem(
                    f"`offload={self.what!r}`", "it cannot be offloaded", f"Choose from {choices}."
                )
            )
        threads: object = self.num_threads
        is_number = isinstance(threads, int) and not isinstance(threads, bool) and threads > 0
        if threads is not None and not is_number:
            what, fix = f"`num_threads={threads!r}`", "Use a number such as 4, or `None`."
            problems.append(Problem(what, "it must be a positive number", fix))
        try:
            _ = self._host_bytes
        except ValueError as error:
            fix = 'Use a text such as "16GiB", a number of bytes, or `None`.'
            problems.append(Problem(f"`host_budget={self.host_budget!r}`", str(error), fix))
        if problems:
            raise ConfigurationError.from_problems(type(self).__name__, problems)
        if self.blocks is not None:
            object.__setattr__(self, "blocks", as_selectors(self.blocks))

    @classmethod
    def from_value(cls, value: Any) -> Self | None:
        """Convert the name of what is offloaded."""
        return cls(value) if value in KINDS else super().from_value(value)

    def conflicts(self, facts: TrainerFacts, written: str) -> list[Problem]:
        """Refuse strategies with several processes, or with gradients of their own."""
        if facts.world_size == 1 and not facts.is_strategy(*SHARDED, "DDPStrategy"):
            return []
        fix = f"Train in one process without a strategy, or set `{self.argument}=None`."
        if facts.is_strategy(*SHARDED):
            fix = (
                f"Use the strategy's own offloading, such as `CPUOffloadPolicy` of FSDP2, and set "
                f"`{self.argument}=None`."
            )
        why = f"`{facts.strategy}` moves weights and gradients itself"
        return [Problem(written, why, fix)]

    def check(self, target: nn.Module) -> list[Problem]:
        """Find every reason why ``apply`` would be refused; changes nothing.

        Args:
            target: The model.

        Returns:
            All problems, empty if there are none.
        """
        problems = []
        if residence_of(target) is not None:
            what, why = f"`{type(target).__name__}`", "it is offloaded already"
            problems.append(Problem(what, why, "Call `handle.undo()` of the first one."))
        problems += [
            Problem(
                f"`{name or type(target).__name__}`",
                "it is compiled, and its graph holds on to the memory of its parameters",
                f"Do not compile it, or set `{self.argument}=None`.",
            )
            for name, module in target.named_modules()
            if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        ]
        params, _ = _chosen(target)
        needed = sum((2 + _NUM_STATES) * p.numel() * p.element_size() for p in params)
        if needed > self._host_bytes:
            problems.append(
                Problem(
                    f"{format_bytes(needed)} of host memory",
                    f"`host_budget` is {format_bytes(self._host_bytes)}"
                    + (", half of what is free" if self.host_budget is None else ""),
                    f"Free host memory, or pass `host_budget={needed}` if there is enough.",
                )
            )
        return problems

    def apply(self, target: nn.Module) -> OffloadingHandle:
        """Apply the technique.

        Args:
            target: The model.

        Returns:
            The handle, with ``undo`` and ``wait``.
        """
        handle = super().apply(target)
        assert isinstance(handle, OffloadingHandle), "`_apply` makes it"
        return handle

    def _apply(self, target: nn.Module) -> OffloadingHandle:
        params, left = _chosen(target)
        if not params:
            why = f"there is no parameter to offload: {left or 'none is trained'}"
            return OffloadingHandle(target, None, (), (why,))
        worker = HostWorker(in_background=not is_fake(params[0]), num_threads=self.num_threads)
        blocks = find_blocks(target, self.blocks)
        is_streamed = self.what == "parameters"
        residence = Residence(target, blocks, params, worker, is_streamed=is_streamed)
        num_bytes = (2 + _NUM_STATES) * sum(p.nbytes for p in params)
        change = (
            f"{len(params)} weights, their gradients and optimizer state on the host: "
            f"{format_bytes(num_bytes)}"
        )
        skipped = [f"on the device: {left}"] if left else []
        undo = [residence.release, *residence.start()]
        return OffloadingHandle(target, residence, [change], skipped, undo)

    def update_in_background(self, optimizer: Optimizer) -> Handle[Optimizer]:
        """Let ``optimizer.step()`` return at once, and update while the next step begins.

        Updates run in a thread of the host, in the order in which the next forward pass needs the
        weights; each module waits for its own. Whatever else reads or changes weights or optimizer
        state between two steps, but for ``state_dict`` and ``load_state_dict``, calls the
        ``wait`` of the model's handle first. What an update raises is raised by who waits for it.

        Args:
            optimizer: Of the offloaded model, before or after its first step.

        Returns:
            A handle with the same optimizer and ``undo``.

        Raises:
            IncompatibleError: If it trains no offloaded parameter, updates in the background
                already, or is a wrapper of `fabric.setup`.
        """
        problems = wrapper_problems(optimizer)
        what = f"`{type(optimizer).__name__}`"
        found = [residence_with(p) for group in optimizer.param_groups for p in group["params"]]
        residences = [residence for residence in found if residence is not None]
        if not residences:
            why = "it trains no offloaded parameter"
            fix = "Apply `Offloading` to its model first."
            problems.append(Problem(what, why, fix))
        if host_updates_of(optimizer) is not None:
            fix = "Undo the first handle."
            problems.append(Problem(what, "it updates in the background already", fix))
        if problems:
            raise IncompatibleError(self.name, problems)
        undo = HostUpdates(optimizer, residences[0]).start()
        return Handle(optimizer, (f"{type(optimizer).__name__}: updates on the host",), undo=undo)

    @property
    def _host_bytes(self) -> int:
        if self.host_budget is None:
            return int(_HOST_SHARE * psutil.virtual_memory().available)
        if isinstance(self.host_budget, str):
            return parse_bytes(self.host_budget)
        if isinstance(self.host_budget, bool) or not self.host_budget > 0:
            raise ValueError("it must be a positive number of bytes")
        return int(self.host_budget)


def _chosen(model: nn.Module) -> tuple[list[nn.Parameter], str]:
    """Return the parameters to offload, and a text about the others."""
    sparse = {
        param
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        for param in module.parameters(recurse=False)
    }
    plain = [p for p in model.parameters() if _is_plain(p)]
    sharing = Counter(param.untyped_storage()._cdata for param in plain)

    def reason(param: nn.Parameter) -> str:
        if not param.requires_grad:
            return "frozen"
        if not _is_plain(param):
            return "of a special class"
        if param in sparse:
            return "with sparse gradients"
        return "with shared memory" if sharing[param.untyped_storage()._cdata] > 1 else ""

    reasons = {param: reason(param) for param in model.parameters()}
    counts = sorted(Counter(why for why in reasons.values() if why).items())
    left = ", ".join(f"{number} {why}" for why, number in counts)
    return [param for param, why in reasons.items() if not why], left


# Not a lazy one, a quantized one or a DTensor.
def _is_plain(param: nn.Parameter) -> bool:
    is_own = type(param) is nn.Parameter or is_fake(param)
    return is_own and param.layout == torch.strided
