"""FSDP2 for any LightningModule, through Lightning's `ModelParallelStrategy`."""

import contextlib
import functools
import importlib
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_memsave.core.blocks import BlockSelector, as_selectors, find_blocks
from lightning_memsave.core.patching import patch_method, previous_method
from lightning_memsave.errors import IncompatibleError, MemsaveWarning, Problem
from lightning_memsave.trainer.first_batch import call_before_setup
from lightning_memsave.trainer.tensor_parallel import (
    TP,
    clip_grad_by_norm,
    copies,
    copy_from_first,
    draw_alike,
    split_by_plan,
)

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class FSDP2StrategyMixin:
    """Shard parameters, gradients and optimizer state over all processes, with FSDP2.

    Lightning's ``ModelParallelStrategy``, for modules that do not shard themselves in
    ``configure_model``: each repeated block is sharded as one, and gathered when it runs; what is
    outside of blocks is gathered for a whole step, so that steps may use it in any way, as in
    ``self.model.generate(...)``. Gradients are averaged in the type of the parameters.

    Args:
        blocks: The repeated blocks; ``None`` finds them.
        reshard_after_forward: Free a block's weights after its forward pass, and gather them again
            in backward. False keeps them until then: faster, with more memory.
        save_distributed_checkpoint: Save a folder with a shard for each process. False gathers one
            file with a plain state dict, which loads on one device without this package.
        tensor_parallel_size: Number of processes among which layers are split, by the plan that a
            Hugging Face model has or by the module's own ``configure_model``. They have the same
            batches; weights are sharded over the other processes.
        **kwargs: As of ``ModelParallelStrategy``.

    Raises:
        IncompatibleError: At the start, if a parameter belongs to two blocks, or has no size yet;
            or if layers are to be split, and nothing says how.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_memsave import FSDP2Strategy
        >>> strategy = FSDP2Strategy()
        >>> trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)
        >>> strategy.reshard_after_forward
        True
    """

    lightning_module: Any
    device_mesh: Any
    precision_plugin: Any
    root_device: torch.device
    num_nodes: int
    num_processes: int
    _data_parallel_size: int | str
    _tensor_parallel_size: int

    def __init__(
        self,
        blocks: BlockSelector | Sequence[BlockSelector] | None = None,
        *,
        reshard_after_forward: bool = True,
        save_distributed_checkpoint: bool = False,
        tensor_parallel_size: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(  # type: ignore[call-arg]
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            **kwargs,
        )
        self.blocks = None if blocks is None else as_selectors(blocks)
        self.reshard_after_forward = reshard_after_forward
        self._has_begun = False
        self._undo = contextlib.ExitStack()

    @property
    def is_predictable(self) -> bool:
        """Whether the module is still whole, and will be sharded by FSDP2 alone."""
        return not self._has_begun and self._tensor_parallel_size == 1

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of its own."""
        return {"blocks": self.blocks, "reshard_after_forward": self.reshard_after_forward}

    def setup_environment(self) -> None:
        """Use all processes for sharding, and shard once the module has configured its model."""
        if self._data_parallel_size == "auto":
            number = self.num_nodes * self.num_processes
            self._data_parallel_size = number // self._tensor_parallel_size
        super().setup_environment()  # type: ignore[misc]
        self._undo.callback(patch_method(self.lightning_module, configure_model))
        if self._tensor_parallel_size > 1:
            self._undo.callback(patch_method(self.precision_plugin, clip_grad_by_norm))

    def teardown(self) -> None:
        """Give the module its own ``configure_model`` back; it stays sharded."""
        self._undo.close()
        self._has_begun = False
        super().teardown()  # type: ignore[misc]


@functools.cache
def strategy_class(package: str) -> type[Any]:
    """Make the class for Trainers of a Lightning package."""
    parent = importlib.import_module(f"{package}.strategies").ModelParallelStrategy
    names = {"__doc__": FSDP2StrategyMixin.__doc__, "__module__": __name__}
    return type("FSDP2Strategy", (FSDP2StrategyMixin, parent), names)


def configure_model(self: Any) -> None:
    """Let the module make its layers, and shard them."""
    previous_method(self, "configure_model")()
    strategy = self.trainer.strategy
    if isinstance(self, FSDPModule) or not isinstance(strategy, FSDP2StrategyMixin):
        return
    call_before_setup(strategy)
    strategy._has_begun = True
    mesh, device = strategy.device_mesh["data_parallel"], strategy.root_device
    layers = strategy.device_mesh[TP]
    # Each has drawn its own; DDP starts so too.
    own = [t for t in _all_tensors(self) if not isinstance(t, DTensor)]
    copy_from_first(own, device, torch.distributed.group.WORLD)
    if layers.size() > 1:
        split_by_plan(self, layers)
    if mesh.size() > 1 or layers.size() == 1:
        again = strategy.reshard_after_forward
        shard(self, mesh, strategy.blocks, reshard_after_forward=again)
    materialize(self, device)
    if layers.size() > 1:
        copy_from_first(copies(self), device, layers.get_group())
        draw_alike(device, layers.get_group())
    for name in _STEPS:
        register_fsdp_forward_method(self, name)


def _all_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def shard(
    module: nn.Module,
    mesh: Any,
    blocks: BlockSelector | Sequence[BlockSelector] | None = None,
    *,
    reshard_after_forward: bool = True,
) -> None:
    """Apply `fully_shard` to each block of a module, and to the rest."""
    found = [b for b in find_blocks(module, blocks) if not isinstance(b.module, FSDPModule)]
    if problems := [*_problems_of(module, [block.name for block in found])]:
        raise IncompatibleError("FSDP2Strategy", problems)
    if not found and mesh.get_local_rank() == 0:
        why = "all of its weights are gathered for a whole step. Name blocks, with"
        fix = "`FSDP2Strategy(blocks=...)`."
        name = type(module).__name__
        warnings.warn(f"No block of `{name}` was found: {why} {fix}", MemsaveWarning, stacklevel=2)
    for block in found:
        policy = _policy_of(block.module)
        fully_shard(
            block.module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward
        )
    fully_shard(module, mesh=mesh, mp_policy=_policy_of(module))


# From torch 2.15 on gradients are summed in float32 unless it is said, before in this type.
def _policy_of(module: nn.Module) -> MixedPrecisionPolicy:
    types = {p.dtype for p in module.parameters() if p.is_floating_point()}
    return MixedPrecisionPolicy(reduce_dtype=types.pop() if len(types) == 1 else None)


def _problems_of(module: nn.Module, blocks: Sequence[str]) -> list[Problem]:
    names: defaultdict[Any, list[str]] = defaultdict(list)
    for name, param in module.named_parameters(remove_duplicate=False):
        names[param].append(name)
    why, fix = "it has no size yet, and cannot be sharded", "Run a batch through the module first."
    problems = [Problem(f"`{own[0]}`", why, fix) for p, own in names.items() if is_lazy(p)]
    for own in names.values():
        owners = {next((b for b in blocks if n.startswith(f"{b}.")), "") for n in own}
        # A block with several names is one of them.
        if len({id(module.get_submodule(owner)) for owner in owners}) > 1:
            what = " and ".join(f"`{name}`" for name in own)
            why = "one parameter with two names, in two parts that are sharded apart"
            fix = "Select blocks that hold both or none of them, with `FSDP2Strategy(blocks=...)`."
            problems.append(Problem(what, why, fix))
    return problems


def materialize(module: nn.Module, device: torch.device) -> None:
    """Allocate the shards of what was made on the meta device, and initialize them."""
    empty = [m for m in module.modules() if any(t.is_meta for t in _own_tensors(m))]
    # Hugging Face's models initialize all of their parts, those inside them too.
    whole = [m for m in module.modules() if hasattr(m, "initialize_weights")]
    owners: dict[nn.Module, Any] = {part: m for m in reversed(whole) for part in m.modules()}
    if problems := [*_problems_of_meta(module, empty, owners)]:
        raise IncompatibleError("FSDP2Strategy", problems)
    for part in empty:
        part.to_empty(device=device, recurse=False)
    with contextlib.ExitStack() as stack:
        if device.type == "cpu":  # a process draws its shard; on a GPU DTensors share one sequence
            stack.enter_context(torch.random.fork_rng(devices=()))
            torch.manual_seed(torch.initial_seed() + torch.distributed.get_rank())
        for part in empty:
            if part not in owners:
                _reset_of(part)()  # type: ignore[misc]
        for owner in dict.fromkeys(owners[part] for part in empty if part in owners):
            owner.initialize_weights()


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _reset_of(part: nn.Module) -> Callable[[], None] | None:
    reset = getattr(part, "reset_parameters", None)
    return reset or getattr(part, "_reset_parameters", None)  # torch's attention


def _problems_of_meta(
    module: nn.Module, empty: Sequence[nn.Module], owners: Mapping[nn.Module, Any]
) -> Iterator[Problem]:
    names = {part: name for name, part in module.named_modules()}
    for part in empty:
        what = f"`{names[part]}` of class `{type(part).__name__}`"
        others = owners[part].parameters() if part in owners else ()
        if not all(tensor.is_meta for tensor in (*_own_tensors(part), *others)):
            why = "some tensors of it or its model are on the meta device, and some have values"
            yield Problem(what, why, "Make all of them in one place.")
        elif part not in owners and _reset_of(part) is None:
            why = "it was made on the meta device, and nothing says what its values are"
            yield Problem(what, why, "Give it a method `reset_parameters`.")
