"""FSDP2 for any LightningModule, through Lightning's `ModelParallelStrategy`."""

import contextlib
import functools
import importlib
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_memsave.core.blocks import BlockSelector, as_selectors, find_blocks
from lightning_memsave.core.patching import keep_copies_plain, patch_method, previous_method
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

_ON_DEVICE = OffloadPolicy()
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class FSDP2StrategyMixin:
    """Shard parameters, gradients and optimizer state over all processes, with FSDP2.

    Lightning's ``ModelParallelStrategy``, for modules that do not shard themselves in
    ``configure_model``: each repeated block is sharded as one, and gathered when it runs; what is
    outside of blocks is gathered for a whole step, so that steps may use it in any way, as in
    ``self.model.generate(...)``, until backward needs it no longer: a large embedding or head is
    freed then. Gradients are averaged in the type of the parameters.

    Args:
        blocks: The repeated blocks; ``None`` finds them.
        reshard_after_forward: Free a block's weights after its forward pass, and gather them again
            in backward. False keeps them until then: faster, with more memory.
        save_distributed_checkpoint: Save a folder with a shard for each process. False gathers one
            file with a plain state dict, which loads on one device without this package.
        tensor_parallel_size: Number of processes among which layers are split, by the plan that a
            Hugging Face model has or by the module's own ``configure_model``. They have the same
            batches; weights are sharded over the other processes.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, their gradients and the optimizer state
            in the memory of the host, which updates them.
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
    _process_group_backend: str | None

    def __init__(
        self,
        blocks: BlockSelector | Sequence[BlockSelector] | None = None,
        *,
        reshard_after_forward: bool = True,
        save_distributed_checkpoint: bool = False,
        tensor_parallel_size: int = 1,
        offload_policy: OffloadPolicy | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(  # type: ignore[call-arg]
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            **kwargs,
        )
        self.blocks = None if blocks is None else as_selectors(blocks)
        self.reshard_after_forward = reshard_after_forward
        self.offload_policy = offload_policy or _ON_DEVICE
        self._undo = contextlib.ExitStack()

    def obstacle(self, module: nn.Module) -> str:
        """Return why what a process needs to train a module cannot be predicted, if so."""
        if self._tensor_parallel_size > 1:
            why = "what a process holds of a layer depends on the model's plan"
            return f"not with `tensor_parallel_size={self._tensor_parallel_size}`: {why}"
        is_whole = not any(isinstance(param, DTensor) for param in module.parameters())
        return "" if is_whole else "there is no copy of the module from before it was sharded"

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of its own."""
        names = ("blocks", "reshard_after_forward", "offload_policy")
        return {name: getattr(self, name) for name in names}

    def setup_environment(self) -> None:
        """Use all processes for sharding, and shard once the module has configured its model."""
        if self._data_parallel_size == "auto":
            number = self.num_nodes * self.num_processes
            self._data_parallel_size = number // self._tensor_parallel_size
        if self._process_group_backend is None and self.shard_device != self.root_device:
            self._process_group_backend = "cpu:gloo,cuda:nccl"  # norms and checkpoints of shards
        super().setup_environment()  # type: ignore[misc]
        self._undo.callback(patch_method(self.lightning_module, configure_model))
        self._undo.callback(keep_copies_plain(self.lightning_module))
        if self._tensor_parallel_size > 1:
            self._undo.callback(patch_method(self.precision_plugin, clip_grad_by_norm))

    @property
    def shard_device(self) -> torch.device:
        """Where shards are when no block runs."""
        is_offloaded = isinstance(self.offload_policy, CPUOffloadPolicy)
        return torch.device("cpu") if is_offloaded else self.root_device

    def model_to_device(self) -> None:
        """Move what is not sharded."""
        if self.shard_device == self.root_device:
            super().model_to_device()  # type: ignore[misc]
        else:
            self._move_buffers(self.root_device)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Load with all tensors on one device: torch refuses shards on the host beside buffers."""
        self._move_buffers(self.shard_device)
        try:
            return super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._move_buffers(self.root_device)

    def _move_buffers(self, device: torch.device) -> None:
        for buffer in self.lightning_module.buffers():
            buffer.data = buffer.data.to(device)

    def setup(self, trainer: Any) -> None:
        """Evaluate without inference mode: what is gathered in it first could not be trained."""
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            self._undo.callback(setattr, loop, "inference_mode", loop.inference_mode)
            loop.inference_mode = False
        super().setup(trainer)  # type: ignore[misc]

    def teardown(self) -> None:
        """Give the module its own ``configure_model`` back; it stays sharded."""
        self._undo.close()
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
    mesh, device = strategy.device_mesh["data_parallel"], strategy.root_device
    layers = strategy.device_mesh[TP]
    # Each has drawn its own; DDP starts so too.
    own = [t for t in _all_tensors(self) if not isinstance(t, DTensor)]
    copy_from_first(own, device, torch.distributed.group.WORLD)
    if layers.size() > 1:
        split_by_plan(self, layers)
    if mesh.size() > 1 or layers.size() == 1:
        shard(
            self,
            mesh,
            strategy.blocks,
            reshard_after_forward=strategy.reshard_after_forward,
            offload_policy=strategy.offload_policy,
        )
    materialize(self, strategy.shard_device)
    if layers.size() > 1:
        copy_from_first(copies(self), device, layers.get_group())
        draw_alike(device, layers.get_group())
    for name in _STEPS:
        register_fsdp_forward_method(self, name)
    for module in self.modules():
        if hasattr(module, "save_pretrained"):
            patch_method(module, save_pretrained)  # after the fit too, as shards stay


def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Save whole weights that are given; a process has shards only."""
    is_sharded = any(isinstance(param, DTensor) for param in self.parameters())
    if is_sharded and kwargs.get("state_dict") is None:
        what = f"`{type(self).__name__}.save_pretrained` of sharded weights"
        why = "each process has a part of each weight, also after a fit"
        gather = "`state = get_model_state_dict(model, options=StateDictOptions(full_state_dict="
        gather += "True, cpu_offload=True))` of `torch.distributed.checkpoint.state_dict`"
        fix = f"On all processes call {gather}; in the first one"
        fix = f"{fix} `model.save_pretrained(path, state_dict=state)`."
        raise IncompatibleError("FSDP2Strategy", [Problem(what, why, fix)])
    return previous_method(self, "save_pretrained")(*args, **kwargs)


def _all_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def shard(
    module: nn.Module,
    mesh: Any,
    blocks: BlockSelector | Sequence[BlockSelector] | None = None,
    *,
    reshard_after_forward: bool = True,
    offload_policy: OffloadPolicy = _ON_DEVICE,
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
        fully_shard(
            block.module,
            mesh=mesh,
            mp_policy=_policy_of(block.module),
            reshard_after_forward=reshard_after_forward,
            offload_policy=offload_policy,
        )
    root: Any = fully_shard(
        module, mesh=mesh, mp_policy=_policy_of(module), offload_policy=offload_policy
    )
    sizes = [sum(p.numel() for p in block.module.parameters()) for block in found]
    if sizes and (group := root._get_fsdp_state()._fsdp_param_group) is not None:
        group.wait_for_unshard = functools.partial(_wait_and_free, group)
        for sharded in group.fsdp_params:
            param = sharded.sharded_param
            # Of the whole one, and so the same for all numbers of processes.
            if 2 * param.numel() >= max(sizes) and param.is_floating_point():
                _Table(group, sharded)


# The garbage collector does not traverse hooks on parameters.
def _call_on_gradient(leaf: nn.Parameter, method: Callable[[torch.Tensor], None]) -> None:
    weak: Any = weakref.WeakMethod(method)
    register: Any = leaf.register_post_accumulate_grad_hook  # untyped in torch

    def call(param: torch.Tensor) -> None:
        weak()(param)

    register(call)


# In forward passes FSDP2 keeps what it has received until the next parameters have come, too.
def _wait_and_free(group: Any) -> None:
    with group.use_training_state(TrainingState.IDLE):
        type(group).wait_for_unshard(group)


class _Table:
    """A large parameter outside of blocks, of which backward frees what it no longer needs.

    FSDP2 frees the gathered parameters of its root, and reduces their gradients, when backward has
    ended. Here a large one is freed and reduced once its gradient is complete. If several modules
    share it, each has a leaf of its own for it in a step, so that it is freed as soon as nothing in
    the graph holds it (as the graph of an embedding does not), and gradients are summed in place.
    """

    def __init__(self, group: Any, sharded: Any) -> None:
        self._group, self._sharded = group, sharded
        self._put_into_modules = sharded._setattr_on_modules
        self._leaves: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._num_holders = 0
        sharded._setattr_on_modules = self._put

    def _put(self, param: nn.Parameter) -> None:
        self._put_into_modules(param)
        if param is not getattr(self._sharded, "_unsharded_param", None):
            return
        if not self._num_holders:
            self._make_leaves(param)
            self._num_holders = self._count_holders()  # without any graph
        for module, name, leaf in self._leaves:
            leaf.requires_grad_(param.requires_grad)
            setattr(module, name, leaf)

    def _make_leaves(self, param: nn.Parameter) -> None:
        is_trained = param.requires_grad
        param.requires_grad_()  # hooks need it, and a frozen one may be trained later
        _call_on_gradient(param, self._on_gradient)
        param.requires_grad_(is_trained)
        places = self._sharded._module_info
        for module, name in zip(places.shared_modules, places.shared_param_names, strict=True):
            if module is not places.module:
                leaf = nn.Parameter(param.detach())
                _call_on_gradient(leaf, self._on_gradient_of_leaf)
                self._leaves.append((module, name, leaf))

    def _count_holders(self) -> int:
        storage = self._sharded.all_gather_outputs[0].untyped_storage()
        return int(torch._C._storage_Use_Count(storage._cdata))

    @property
    def _is_held(self) -> bool:
        return self._count_holders() > self._num_holders

    @torch.no_grad()
    def _on_gradient_of_leaf(self, leaf: torch.Tensor) -> None:
        param, grad, leaf.grad = self._sharded.unsharded_param, leaf.grad, None
        if param.grad is None:
            param.grad = grad
        else:
            param.grad += grad
        if not self._is_held:
            self._sharded.to_sharded()

    def _on_gradient(self, param: torch.Tensor) -> None:
        if self._leaves or self._is_held:
            return  # the group reduces it at the end of backward
        group = self._group
        before = group.fsdp_params, group._training_state, group._sharded_state
        group.fsdp_params = [self._sharded]
        try:
            group.post_backward()
        finally:
            group.fsdp_params, group._training_state, group._sharded_state = before


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
