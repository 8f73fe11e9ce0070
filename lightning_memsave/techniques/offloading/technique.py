"""Offloading to the memory of the host."""

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar, Self, cast

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memsave.core.blocks import (
    Block,
    BlockSelector,
    as_selectors,
    compiled_in,
    find_blocks,
    owners_of,
)
from lightning_memsave.core.memory import is_fake
from lightning_memsave.core.optimizers import parameters_of
from lightning_memsave.core.technique import Exactness, Offer, Technique, undone_on_error
from lightning_memsave.core.trainer_facts import SHARDED, TrainerFacts
from lightning_memsave.errors import ConfigurationError, IncompatibleError, Problem
from lightning_memsave.techniques.host_memory import HostMemory
from lightning_memsave.techniques.offloading.activations import OffloadedActivations
from lightning_memsave.techniques.offloading.blocks_on_host import BlocksOnHost
from lightning_memsave.techniques.offloading.copies import copies_for
from lightning_memsave.techniques.offloading.handle import OffloadingHandle
from lightning_memsave.techniques.offloading.host_budget import (
    HostForm,
    budget_problems,
    bytes_of_form,
    host_budget_bytes,
    num_elements,
)
from lightning_memsave.techniques.offloading.host_table import (
    choose_tables,
    look_up_on_host,
    table_problems,
)
from lightning_memsave.techniques.offloading.host_updates import (
    HostUpdates,
    UpdatesHandle,
    couples_devices,
    host_updates_of,
)
from lightning_memsave.techniques.offloading.host_worker import HostWorker
from lightning_memsave.techniques.offloading.module_hooks import move_with, tell_device
from lightning_memsave.techniques.offloading.replacements import replace_while_offloaded
from lightning_memsave.techniques.offloading.residence import Residence
from lightning_memsave.techniques.offloading.weights import (
    AUTO,
    choose_weights,
    first_blocks,
    is_number_of_blocks,
    number_of,
    problems_of_number,
    problems_of_trained,
)
from lightning_memsave.techniques.optimizer_kinds import wrapper_problems
from lightning_memsave.techniques.optimizer_step import allocates_all_state, in_backward_of
from lightning_memsave.techniques.residences import residence_among, residence_of
from lightning_memsave.units import format_bytes

KINDS = ("optimizer", "parameters", "activations", "embeddings")
_OF_WEIGHTS = {"optimizer", "parameters"}
_EVERYTHING = "parameters+activations"
STAY = "blocks stay on the device"
"""Ends what is said of resident blocks."""
_UPDATES = "the host's memory and its updates, beside the next step"
_EARLY_BYTES = 12  # a weight and two moments
_NUMBERS = (
    *("num_threads", "min_bytes", "min_table_bytes", "num_blocks_on_device"),
    "bytes_per_parameter",
)


@dataclass(frozen=True, repr=False)
class Offloading(Technique[nn.Module]):
    """Keep what a training step does not need at once in the memory of the host.

    With ``"optimizer"``, the device holds the weights only. The weights that the optimizer updates,
    its state and the gradients are on the host, and the host updates them: each gradient goes there
    as soon as backward has computed it, and before the next forward pass the weights are copied to
    the device. With ``"parameters"`` the weights of blocks are on the host, too, but for the block
    that computes and the next one. Between two steps ``param.data`` and ``param.grad`` are ordinary
    tensors on the host, so that clipping, checkpoints, averages of weights and any optimizer work
    as usual. With ``"activations"`` what blocks save for backward is on the host until backward
    comes near: of checkpointed blocks their inputs. With ``"embeddings"`` large tables stay on the
    host, which updates them as other weights: a step gets the rows of its batch. So do the weights
    of heads with `ChunkedCrossEntropy`, tied to a table or not, which work tile by tile.

    Args:
        what: ``"optimizer"``; ``"parameters"``, which includes it; ``"activations"``;
            ``"embeddings"``; several with ``+`` between them; True for
            ``"parameters+activations"``.
        blocks: The repeated blocks, as for `ActivationCheckpointing`; ``None`` finds them.
        host_budget: Bytes of host memory that may be used, or a text such as ``"16GiB"``; ``None``
            for half of what is free; no limit on fake tensors, which may be of another machine.
        min_bytes: Smaller activations stay on the device.
        min_table_bytes: Smaller embeddings and heads are weights as all others.
        num_blocks_on_device: With ``"parameters"``, of how many blocks weights are on the device:
            that of the block that computes, and those that it needs next. 1 lets each block wait
            for its weights.
        resident: How many blocks stay on the device, the last ones of the model, which backward
            needs first: a number, or a share such as ``"60%"``, rounded down. Their weights,
            gradients and state are ordinary ones, updated on the device, and what they save for
            backward stays there. With AdamW in float32, each of their parameters needs 16 bytes
            there and none on the host, and saves an update on the host, two copies of the weight
            per step and one of the gradient. ``"auto"``, in a fit or a prediction: as many as are
            predicted to fit, and no offloading if all do.
        early_updates: Of how many blocks the update may begin in backward, as if the step did not
            clip: a number, or a share such as ``"100%"``. The host keeps what those updates change,
            12 bytes per parameter with AdamW, and puts it back where gradients or settings turn out
            to be others; a change through ``.data`` is not seen. Clip with ``clip_grad_norm_`` of
            the handle of `update_in_background`, as a Trainer does by itself: torch's own changes
            gradients also where their norm is small.
        num_threads: Threads of each operator in the background updates; ``None`` for torch's
            number, and for all cores but one where that is one beside a GPU.
        bytes_per_parameter: What a trained float32 weight is reckoned to need on the host, with
            its gradient and AdamW's state, where ``host_budget`` is checked.
        form: What `MemSaveCallback` knows of its other arguments, where that is checked.
        processes: The processes of this machine that share weights and optimizer state, as
            `MemSaveCallback` has them under DDP; ``None`` for one process.

    Raises:
        ConfigurationError: If arguments are invalid; the message lists all of them.

    Note:
        Exactness is *bitwise*: the same optimizer computes the same on the host. On CUDA, its
        kernels for the host round in another way than those for a GPU; torch's Adam, AdamW, SGD and
        Adagrad use their fused ones unless ``foreach`` or ``fused`` was chosen. But the device
        updates 8-bit state, matrices of Muon and what `NamedOptimizer` makes if it is known to be
        elementwise, bit for bit. Each parameter may be used in the forward and backward passes of
        its module only, and a backward pass must not be repeated. More limits are in
        docs/offloading.md.

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
    examples: ClassVar[str] = 'True, "optimizer", "parameters", "activations", "embeddings"'
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    why_not_compiled: ClassVar[str] = "and its graph holds on to the memory of its parameters"
    offers = (
        Offer("optimizer on the host", "optimizer", _UPDATES, 0.8),
        Offer("weights on the host", "parameters", f"{_UPDATES}; weights come and go", 1.0),
    )

    what: str | bool = "optimizer"
    _: KW_ONLY
    blocks: BlockSelector | Sequence[BlockSelector] | None = None
    host_budget: int | str | None = None
    min_bytes: int = 2**20
    min_table_bytes: int = 2**26
    num_blocks_on_device: int = 2
    resident: int | str = 0
    early_updates: int | str = 0
    num_threads: int | None = None
    bytes_per_parameter: int = 16
    form: Any = field(default=HostForm(), repr=False, compare=False)
    processes: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        problems = []
        if not _is_valid(self.what):
            choices = ", ".join(f'"{kind}"' for kind in KINDS)
            fix = f'Choose from {choices}, with "+" between several, or True.'
            problems.append(Problem(f"`offload={self.what!r}`", "it cannot be offloaded", fix))
        if self.what is True:
            object.__setattr__(self, "what", _EVERYTHING)
        problems += [
            Problem(f"`{name}={value!r}`", "it must be a positive number", f"Use `{name}=4`.")
            for name in _NUMBERS
            if (value := getattr(self, name)) is not None
            and (isinstance(value, bool) or not isinstance(value, int) or value < 1)
        ]
        if self.resident != AUTO and not is_number_of_blocks(self.resident):
            what, fix = f"`resident={self.resident!r}`", 'Use a number such as 4, "60%" or "auto".'
            problems.append(Problem(what, "it is neither a number of blocks nor a share", fix))
        elif self.resident != 0 and self._kinds == {"embeddings"}:
            why = f"with `{self.argument}={self.what!r}` nothing of blocks is on the host"
            fix = 'Use `Offloading("parameters", ...)`, or leave it out.'
            problems.append(Problem(f"`resident={self.resident!r}`", why, fix))
        if not is_number_of_blocks(self.early_updates):
            what, fix = f"`early_updates={self.early_updates!r}`", 'Use 4, or "60%".'
            problems.append(Problem(what, "it is neither a number of blocks nor a share", fix))
        elif self.early_updates != 0 and not self._kinds & _OF_WEIGHTS:
            what, why = f"`early_updates={self.early_updates!r}`", "no weight of blocks is updated"
            problems.append(Problem(what, why, 'Use `Offloading("parameters", ...)`.'))
        try:
            host_budget_bytes(self.host_budget)
        except ValueError:
            what = f"`host_budget={self.host_budget!r}`"
            fix = 'Use a text such as "16GiB", a number of bytes, or `None`.'
            problems.append(Problem(what, "it is not a size", fix))
        if problems:
            raise ConfigurationError.from_problems(type(self).__name__, problems)
        if self.blocks is not None:
            object.__setattr__(self, "blocks", as_selectors(self.blocks))

    @classmethod
    def from_value(cls, value: Any) -> Self | None:
        """Convert True, or the name of what is offloaded."""
        is_name = isinstance(value, bool | str) and _is_valid(value)
        return cls(value) if is_name else super().from_value(value)

    def conflicts(self, facts: TrainerFacts, written: str) -> list[Problem]:
        """Refuse several processes, gradients of a strategy, compilation, and other weights."""
        problems = super().conflicts(facts, written)
        if facts.precision.endswith("-true") and facts.precision != "32-true":
            why = "converts the weights, which wait on the host in their own type"
            fix = 'Use `precision="bf16-mixed"` with `low_precision_weights="master"`, or set '
            fix += f"`{self.argument}=None`."
            problems.append(Problem(written, f"`precision={facts.precision!r}` {why}", fix))
        if facts.world_size == 1 and not facts.is_strategy(*SHARDED, "DDPStrategy"):
            return problems
        # What blocks save for backward is the process's own.
        if not self.has_weights and facts.is_strategy("DDPStrategy", "ModelParallelStrategy"):
            return problems
        if facts.is_strategy("DDPStrategy"):  # processes share the host's memory
            return [*problems, *self._problems_of_sharing(written)]
        fix = f'Use `{self.argument}="activations"`, or train in one process without a strategy.'
        if facts.is_strategy(*SHARDED):
            own = "the strategy's own offloading"
            if facts.is_strategy("ModelParallelStrategy"):
                own = "`FSDP2Strategy(offload_policy=CPUOffloadPolicy())`, with "
                own += "`CPUOffloadPolicy` of `torch.distributed.fsdp`"
            fix = f"Use {own}, and set `{self.argument}=None`."
        why = f"`{facts.strategy}` moves weights and gradients itself"
        return [*problems, Problem(written, why, fix)]

    def _problems_of_sharing(self, written: str) -> list[Problem]:
        problems = []
        if "embeddings" in self._kinds:
            kinds = "+".join(kind for kind in KINDS if kind in self._kinds - {"embeddings"})
            why = "processes of DDP cannot share tables whose rows wait on the host"
            fix = f'Use `{self.argument}="{kinds or "parameters"}"`.'
            problems.append(Problem(written, why, fix))
        if self.resident != 0:
            why = "processes of DDP share all weights or none, and those of resident blocks are "
            why += "on each GPU"
            fix = f"Leave it out, or set `{self.argument}=None`."
            problems.append(Problem(f"`resident={self.resident!r}`", why, fix))
        if not hasattr(os, "memfd_create"):
            why = "processes of DDP share weights in memory that only Linux has"
            fix = f'Use `{self.argument}="activations"`, or train in one process.'
            problems.append(Problem(written, why, fix))
        return problems

    def check(self, target: nn.Module) -> list[Problem]:
        """Find every reason why ``apply`` would be refused; changes nothing."""
        problems = []
        if residence_of(target) is not None:
            what, why = f"`{type(target).__name__}`", "it is offloaded already"
            problems.append(Problem(what, why, "Call `handle.undo()` of the first one."))
        why = "it updates parameters of this model in backward already, on the device"
        fix = "Apply `Offloading` before `OptimizerInBackward`."
        updated = in_backward_of(target.parameters()) if self.has_weights else ()
        problems += [Problem(f"`{type(one).__name__}`", why, fix) for one, _ in updated]
        problems += self.problems_of_compiled(compiled_in(target.named_modules()))
        problems += problems_of_number(find_blocks(target, self.blocks), self.resident)
        problems += budget_problems(*self.host_bytes(target), self.host_budget)
        return problems

    def host_bytes(self, target: nn.Module) -> tuple[int, float]:
        """Reckon the bytes that weights need on the host, and those that may be used."""
        blocks = find_blocks(target, self.blocks)
        tables, _ = self._tables(target)
        chosen = [*tables, *self._chosen(target, blocks, tables)[0]]
        limit = host_budget_bytes(self.host_budget, is_here=not any(map(is_fake, chosen)))
        params = [p for p in chosen[len(tables) :] if p.requires_grad]
        owners = owners_of(params, target, blocks)
        in_blocks = [[p for p in params if owners[p] is block] for block in blocks]
        others = [p for p in params if owners[p] is None]
        needed = self._bytes_of(chosen)
        needed += bytes_of_form(self.form, target, [*in_blocks, *([p] for p in others)], tables)
        num_early = number_of(self.early_updates, len(first_blocks(blocks, self.resident)))
        needed += num_early * _EARLY_BYTES * max(map(num_elements, in_blocks), default=0)
        while_split = sum(p.nbytes for p in chosen) + self.form.split * num_elements(others)
        return max(needed, while_split), limit

    def apply(self, target: nn.Module) -> OffloadingHandle:
        """Apply the technique."""
        return cast(OffloadingHandle, super().apply(target))

    def _apply(self, target: nn.Module) -> OffloadingHandle:
        memory, blocks = HostMemory(), find_blocks(target, self.blocks)
        on_host = first_blocks(blocks, self.resident)
        is_here = not any(map(is_fake, target.parameters()))
        worker = HostWorker(in_background=is_here, num_threads=self.num_threads)
        residence: Residence | None = None
        undo: list[Callable[[], None]] = [worker.close]
        with undone_on_error(undo):
            tables, heads_left = self._tables(target)
            params, _ = self._chosen(target, blocks, tables)
            self._refuse(target, params, tables)
            if params or tables:
                own_blocks = on_host if params else []
                residence = Residence(
                    target,
                    own_blocks,
                    params,
                    worker,
                    memory,
                    tables=tables,
                    num_on_device=self.num_blocks_on_device
                    if "parameters" in self._kinds
                    else None,
                    processes=self.processes,
                )
                undo += [*replace_while_offloaded(), *tell_device(target), residence.release]
                undo += residence.start()
                undo += move_with(target, residence, blocks)
                undo += look_up_on_host(target, residence)
            copies_of = functools.partial(copies_for, worker=worker, memory=memory)
            activations = functools.partial(
                OffloadedActivations, copies_of=copies_of, memory=memory, min_bytes=self.min_bytes
            )
            blocks_on_host = BlocksOnHost(
                blocks,
                len(on_host),
                residence,
                functools.partial(self._weights_of, target, blocks, tables) if params else None,
                activations if "activations" in self._kinds and blocks else None,
            )
            undo.append(blocks_on_host.stop)
            blocks_on_host.start()
        describe = functools.partial(self._describe, target, blocks, tables, heads_left)
        handle = OffloadingHandle(target, *describe(len(blocks) - len(on_host)), undo)
        handle.residence, handle.memory = residence, memory
        handle.blocks, handle.describe = blocks_on_host, describe
        return handle

    def _describe(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        tables: Sequence[nn.Parameter],
        heads_left: Sequence[str],
        num_resident: int,
    ) -> tuple[list[str], list[str]]:
        """Say what is on the host, and what is not."""
        technique, num_on_host = replace(self, resident=num_resident), len(blocks) - num_resident
        params, left = technique._chosen(model, blocks, tables)
        changes, skipped = [], [*heads_left]
        if tables:
            num_bytes = self._bytes_of(tables)
            changes.append(f"{len(tables)} embeddings on the host: {format_bytes(num_bytes)}")
        elif "embeddings" in self._kinds:
            skipped.append(f"no embedding has {format_bytes(self.min_table_bytes)} or more")
        changes += self._changes_of(params, num_on_host)
        if num_resident:
            skipped.append(f"the last {num_resident} of {len(blocks)} {STAY}")
        if self._kinds & _OF_WEIGHTS and (left or not params):
            skipped.append(f"weights on the device: {left or 'none is trained'}")
        if "activations" in self._kinds and num_on_host:
            changes.append(f"what {num_on_host} blocks save for backward on the host")
        elif "activations" in self._kinds and not blocks:
            skipped.append("activations on the device: no repeated block was found")
        return changes, skipped

    def _weights_of(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        tables: Sequence[nn.Parameter],
        block: Block,
    ) -> list[nn.Parameter]:
        """Return the weights of a block that wait on the host when it does."""
        chosen, _ = replace(self, resident=0)._chosen(model, blocks, tables)
        owners = owners_of(chosen, model, blocks)
        return [param for param in chosen if owners[param] is block]

    def _refuse(
        self, model: nn.Module, params: Sequence[nn.Parameter], tables: Sequence[nn.Parameter]
    ) -> None:
        problems = [p for weight in tables for p in table_problems(model, weight)]
        if self.processes is not None:
            problems += problems_of_trained(model, params)
        if problems:
            raise IncompatibleError(self.name, problems)

    def _changes_of(self, params: Sequence[nn.Parameter], num_blocks: int) -> list[str]:
        if not params:
            return []
        frozen = [param for param in params if not param.requires_grad]
        changes = [
            f"{len(params) - len(frozen)} weights, their gradients and optimizer state"
            + (f", and {len(frozen)} frozen weights" if frozen else "")
            + f" on the host: {format_bytes(self._bytes_of(params))}"
        ]
        if "parameters" in self._kinds:
            changes.append(f"weights of {num_blocks} blocks on the device when they compute")
        if self.processes is not None:
            changes.append(f"{self.processes.size} processes share weights and optimizer state")
        return changes

    def _chosen(
        self, model: nn.Module, blocks: Sequence[Block], tables: Sequence[nn.Parameter]
    ) -> tuple[list[nn.Parameter], str]:
        """Return the parameters to offload, and a text about the others."""
        if not self._kinds & _OF_WEIGHTS:
            return [], ""
        on_host, is_streamed = first_blocks(blocks, self.resident), "parameters" in self._kinds
        return choose_weights(model, blocks, on_host, tables, is_streamed=is_streamed)

    def _tables(self, model: nn.Module) -> tuple[list[nn.Parameter], list[str]]:
        """Return the weights of tables, and texts about heads that are weights as all others."""
        if "embeddings" not in self._kinds:
            return [], []
        return choose_tables(model, self.min_table_bytes)

    @property
    def has_weights(self) -> bool:
        """Whether weights are updated on the host."""
        return bool(self._kinds & {*_OF_WEIGHTS, "embeddings"})

    @property
    def _kinds(self) -> set[str]:
        return set(str(self.what).split("+"))

    def update_in_background(self, optimizer: Optimizer) -> UpdatesHandle:
        """Let ``optimizer.step()`` return at once, and update while the next step begins.

        Updates run in a thread of the host, in the order in which the next forward pass needs the
        weights; each module waits for its own. Whatever else reads or changes weights or optimizer
        state between two steps, but for ``state_dict`` and ``load_state_dict``, calls the
        ``wait`` of the model's handle first. What an update raises is raised by who waits for it.

        Args:
            optimizer: Of the offloaded model, before or after its first step.

        Returns:
            A handle with the same optimizer, ``clip_grad_norm_`` and ``undo``.

        Raises:
            IncompatibleError: If it trains no offloaded parameter, updates in the background
                already, or is a wrapper of `fabric.setup`.
        """
        problems = wrapper_problems(optimizer)
        what = f"`{type(optimizer).__name__}`"
        residence = residence_among(parameters_of(optimizer))
        if residence is None:
            why, fix = "it trains no offloaded parameter", "Apply `Offloading` to its model first."
            problems.append(Problem(what, why, fix))
        if host_updates_of(optimizer) is not None:
            fix = "Undo the first handle."
            problems.append(Problem(what, "it updates in the background already", fix))
        if residence is not None and couples_devices(optimizer, residence):
            why = "it couples parameters on the host with others on the device"
            fix = f"Use an optimizer such as AdamW, or set `{self.argument}=None`."
            problems.append(Problem(what, why, fix))
        if getattr(residence, "processes", None) and not allocates_all_state(optimizer):
            why = "processes of DDP can share the work of an optimizer only if it is known to "
            why += "update each parameter alone, in state that is there before the first update"
            fix = "Use an optimizer of torch such as AdamW, or set "
            problems.append(Problem(what, why, f'{fix}`{self.argument}="activations"`.'))
        if problems:
            raise IncompatibleError(self.name, problems)
        assert residence is not None, "otherwise there is a problem"
        num_early = number_of(self.early_updates, len(residence.parts) - 1)
        updates = HostUpdates(optimizer, residence, num_early)
        where = "on the device, parameter by parameter" if updates.passes_whole else "on the host"
        changes = (f"{type(optimizer).__name__}: updates {where}",)
        handle = UpdatesHandle(optimizer, changes, undo=updates.start())
        handle.updates = updates
        return handle

    def _bytes_of(self, params: Sequence[nn.Parameter]) -> int:
        sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in params]
        num_others = 0 if self.processes is None else self.processes.size - 1
        # Each process has gradients of its own.
        share = self.bytes_per_parameter / torch.float32.itemsize + num_others
        return int(sum(size * share if is_trained else size for size, is_trained in sizes))


def _is_valid(what: object) -> bool:
    names = what.split("+") if isinstance(what, str) else []
    return what is True or (bool(names) and all(name in KINDS for name in names))
