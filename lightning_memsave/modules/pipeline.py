"""Pipeline parallelism for any LightningModule, with the schedules of torch."""

import functools
import importlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_memsave.core.blocks import (
    Block,
    BlockSelector,
    as_selectors,
    compiled_in,
    find_blocks,
)
from lightning_memsave.core.patching import patch_method, previous_method, set_own
from lightning_memsave.core.technique import undo_all
from lightning_memsave.errors import ConfigurationError, IncompatibleError, Problem
from lightning_memsave.modules.pipeline_batches import SCHEDULES, Batches
from lightning_memsave.techniques.micro_batching.loss_weights import LossWeight
from lightning_memsave.techniques.micro_batching.technique import MicroBatching
from lightning_memsave.trainer.pipeline_chain import OWNER, Chain, Until
from lightning_memsave.trainer.pipeline_state import OUTSIDE, StageState, clip_grad_by_norm
from lightning_memsave.trainer.tensor_parallel import copy_from_first, draw_alike
from lightning_memsave.trainer.trainer import averages_weights


class PipelineStrategyMixin:
    """Give each process some of the repeated blocks, through which micro-batches pass in turn.

    For GPUs without a fast connection: only what one block gives to the next passes between
    processes, and gradients of what is outside of blocks. Each process runs the module's own
    ``training_step`` for each micro-batch, but computes its own blocks only; the last one comes to
    the loss. Outside of blocks all processes hold everything. All of them read the same batches,
    and ``validation_step``, ``test_step`` and ``predict_step`` have the same values on all.

    Args:
        num_micro_batches: Into how many equal micro-batches a batch is split: as many as its number
            of samples allows.
        schedule: ``"1f1b"`` holds activations of as many micro-batches as there are stages,
            ``"gpipe"`` of all. A batch of fewer micro-batches than stages passes by the latter.
        blocks: The repeated blocks, in the order in which they run; ``None`` finds them.
        loss_weight: What the loss of a micro-batch is a mean over, as of `MicroBatching`.
        **kwargs: ``process_group_backend`` and ``timeout``, as of ``ModelParallelStrategy``.

    Raises:
        ConfigurationError: If an argument is invalid.
        IncompatibleError: At the start, if the blocks cannot be divided; in the first batch, on all
            processes, if more than one tensor of one shape passes from block to block, or if the
            loss cannot be split.

    Note:
        Training equals one process with *rounding*. With dropout, other masks are drawn.
        ``training_step`` runs for each micro-batch, to its end on the last process only: attributes
        that it sets are other ones elsewhere. Of a dictionary that it returns, hooks see the loss.
        Hooks see gradients of their stage; an optimizer must treat each parameter by itself.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_memsave import PipelineStrategy
        >>> strategy = PipelineStrategy(8, schedule="gpipe")
        >>> trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)
        >>> strategy.num_micro_batches
        8
    """

    accelerator: Any
    lightning_module: Any
    model: Any
    optimizers: Any
    precision_plugin: Any
    root_device: torch.device
    num_nodes: int
    num_processes: int

    def __init__(
        self,
        num_micro_batches: int = 4,
        *,
        schedule: str = "1f1b",
        blocks: BlockSelector | Sequence[BlockSelector] | None = None,
        loss_weight: LossWeight = "proven",
        **kwargs: Any,
    ) -> None:
        if type(num_micro_batches) is not int or num_micro_batches < 1:
            raise ConfigurationError(
                f"`num_micro_batches={num_micro_batches!r}` is not a number of micro-batches: it "
                "must be at least 1. Use a multiple of the number of processes, such as 4."
            )
        if schedule not in SCHEDULES:
            known = " or ".join(f"`schedule={name!r}`" for name in SCHEDULES)
            raise ConfigurationError(f"`schedule={schedule!r}` is not known. Use {known}.")
        super().__init__(  # type: ignore[call-arg]
            data_parallel_size=1, save_distributed_checkpoint=False, **kwargs
        )
        self.num_micro_batches, self.schedule = num_micro_batches, schedule
        self.blocks = None if blocks is None else as_selectors(blocks)
        self.loss_weight = loss_weight
        self._chain: Chain | None = None
        self._state: StageState | None = None
        self._batches: Batches | None = None
        self._checked: set[str] = set()
        self._undo: list[Callable[[], None]] = []

    def setup_environment(self) -> None:
        """Give all processes the same batches."""
        self._tensor_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()  # type: ignore[misc]

    def setup(self, trainer: Any) -> None:
        """Keep the blocks of this stage, and free the others."""
        self.accelerator.setup(trainer)
        module, group = self.lightning_module, dist.group.WORLD
        blocks = find_blocks(module, self.blocks)
        if problems := [*_problems_of(trainer, module, blocks, self.num_micro_batches)]:
            raise IncompatibleError(OWNER, problems)
        self.model = self.precision_plugin.convert_module(self.model)
        copy_from_first([*module.parameters(), *module.buffers()], self.root_device, group)
        draw_alike(self.root_device, group)
        random.setstate(self.broadcast(random.getstate()))  # type: ignore[attr-defined]
        chain = self._chain = Chain(module, blocks, self.root_device)
        state = self._state = StageState(module, chain)
        state.free_others()
        self.model_to_device()  # type: ignore[attr-defined]
        self._checked = set()
        # Random numbers are alike: a sampler gives all processes what one process would see.
        connector = trainer._accelerator_connector
        before = connector.use_distributed_sampler
        self._undo.append(lambda: setattr(connector, "use_distributed_sampler", before))
        connector.use_distributed_sampler = False
        self._undo += self._patches(chain, state)
        if trainer.state.fn == "fit":
            self._batches = Batches(self, trainer, chain, state)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()  # type: ignore[attr-defined]

    def _patches(self, chain: Chain, state: StageState) -> Iterator[Callable[[], None]]:
        chain.patch()
        yield chain.unpatch
        yield set_own(self.precision_plugin, OUTSIDE, ({*state.outside}, self.root_device))
        yield patch_method(self.precision_plugin, clip_grad_by_norm)
        yield patch_method(self, load_optimizer_state_dict, is_outer=True)
        for metric in self.lightning_module.modules():
            if hasattr(metric, "distributed_available_fn"):  # all processes update it alike
                before = metric.distributed_available_fn
                metric.distributed_available_fn = _is_alone
                yield functools.partial(setattr, metric, "distributed_available_fn", before)

    def setup_optimizers(self, trainer: Any) -> None:
        """Let optimizers update the parameters of this stage."""
        super().setup_optimizers(trainer)  # type: ignore[misc]
        assert self._state is not None, "`setup` has made it"
        if problems := [p for one in self.optimizers for p in _problems_of_optimizer(one)]:
            raise IncompatibleError(OWNER, problems)
        for optimizer in self.optimizers:
            self._state.keep_own(optimizer)

    def teardown(self) -> None:
        """Give all processes the whole module again, on the host; not after an error."""
        undo_all(self._undo)
        if self._chain is not None and self._state is not None:
            self._state.gather()
            self.lightning_module.cpu()
        self._chain = self._batches = None
        super().teardown()  # type: ignore[misc]

    def on_exception(self, exception: BaseException) -> None:
        """Leave the module as it is: other processes may be gone."""
        self._chain = None
        super().on_exception(exception)  # type: ignore[misc]

    def training_step(self, batch: Any, *args: Any) -> torch.Tensor:
        """Run forward and backward of all micro-batches; the loss brings the gradients."""
        assert self._batches is not None, "`setup` has made them"
        own = super().training_step  # type: ignore[misc]
        return self._batches.train(lambda part: own(part, *args), batch)

    def validation_step(self, *args: Any) -> Any:
        """Run the module's step with the same values on all processes."""
        return self._evaluate(super().validation_step, args)  # type: ignore[misc]

    def test_step(self, *args: Any) -> Any:
        """Run the module's step with the same values on all processes."""
        return self._evaluate(super().test_step, args)  # type: ignore[misc]

    def predict_step(self, *args: Any) -> Any:
        """Run the module's step with the same values on all processes."""
        return self._evaluate(super().predict_step, args)  # type: ignore[misc]

    def _evaluate(self, step: Callable[..., Any], args: Sequence[Any]) -> Any:
        assert self._chain is not None, "`setup` has made it"
        draw_alike(self.root_device, dist.group.WORLD)
        if step.__name__ in self._checked:
            return self._chain.run(lambda: step(*args), Until.END)
        self._checked.add(step.__name__)
        return self._chain.run_checked(lambda: step(*args))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return what all processes have alike."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all processes, or any, have decided so."""
        found = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(found, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(found.item())

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the whole state dict on the first process, and an empty one on the others."""
        assert self._state is not None, "`setup` has made it"
        return self._state.state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of all parameters, as one process would, on the first process."""
        assert self._state is not None, "`setup` has made it"
        optimizer = getattr(optimizer, "optimizer", optimizer)
        return self._state.optimizer_state(optimizer, optimizer.state_dict())


def load_optimizer_state_dict(self: Any, checkpoint: Mapping[str, Any]) -> None:
    """Load what belongs to this stage."""
    pairs = zip(self.optimizers, checkpoint["optimizer_states"], strict=False)
    states = [self._state.local_state(optimizer, state) for optimizer, state in pairs]
    load = previous_method(self, "load_optimizer_state_dict", is_outer=True)
    load({**checkpoint, "optimizer_states": states})


def _is_alone() -> bool:
    return False


_ALONE = "Train in one process."


def _problems_of(
    trainer: Any, module: Any, blocks: Sequence[Block], num_micro_batches: int
) -> Iterator[Problem]:
    """Give every reason why a module cannot be divided."""
    number, name = dist.get_world_size(), f"`{type(module).__name__}`"
    if number < 2:
        yield Problem("one process", "a pipeline has two stages or more", "Use `devices=2`.")
    if len(blocks) < number:
        why = f"{len(blocks)} blocks were found in it, and each of {number} processes needs one"
        yield Problem(name, why, "Name them with `blocks=`, or use fewer `devices`.")
    if not module.automatic_optimization:
        why = "it steps its own optimizers, and runs backward itself"
        yield Problem(f"{name} with `automatic_optimization=False`", why, _ALONE)
    if compiled := compiled_in(module.named_modules()):
        why = "its compiled graph would hold blocks of other processes"
        yield Problem(f"`{compiled}`", why, "Do not compile it.")
    if callback := next((c for c in trainer.callbacks if averages_weights(c)), None):
        why = "it reads the weights of all blocks, and each process has some of them"
        yield Problem(f"`{type(callback).__name__}`", why, "Remove it.")
    yield from _problems_of_parts(module)
    if num_micro_batches > 1 and trainer.state.fn == "fit":
        for problem in MicroBatching(1).check_module(module):
            fix = 'Keep parameters in float32 with `precision="bf16-mixed"`.'
            yield Problem(f"`num_micro_batches={num_micro_batches}`", problem.why, fix)


def _problems_of_parts(module: nn.Module) -> Iterator[Problem]:
    for name, part in module.named_modules():
        if getattr(part, "gradient_checkpointing", False) is True:
            why = "its own checkpointing may run blocks without gradients"
            fix = 'Use `MemSaveCallback(activation_checkpointing="all")`.'
            yield Problem(f"`{name}.gradient_checkpointing`", why, fix)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor) or tensor.is_meta:
            why = "it has no values yet, which all processes begin with"
            yield Problem(f"`{name}`", why, "Make it on the CPU, and run a batch through it.")
        elif tensor.numel() and not tensor.untyped_storage().size():
            why = "an earlier run has ended with an error, and it is on another process"
            yield Problem(f"`{name}`", why, "Make the module anew.")


def _problems_of_optimizer(optimizer: Any) -> Iterator[Problem]:
    """Give every reason why an optimizer cannot update a part of the parameters."""
    if isinstance(getattr(optimizer, "optimizer", optimizer), torch.optim.LBFGS):
        why = "it computes with all parameters at once, of which each process has some"
        yield Problem(f"`{type(optimizer).__name__}`", why, "Use an optimizer such as AdamW.")


# What `ModelParallelStrategy` does with shards; here it is as in one process.
_OF_ONE_PROCESS = (
    *("load_checkpoint", "save_checkpoint", "load_model_state_dict", "load_optimizer_state_dict"),
    *("restore_checkpoint_after_setup", "lightning_restore_optimizer"),
)


@functools.cache
def strategy_class(package: str) -> type[Any]:
    """Make the class for Trainers of a Lightning package."""
    strategies = importlib.import_module(f"{package}.strategies")
    names: dict[str, Any] = {n: vars(strategies.Strategy)[n] for n in _OF_ONE_PROCESS}
    names |= {"__doc__": PipelineStrategyMixin.__doc__, "__module__": __name__}
    parents = (PipelineStrategyMixin, strategies.ModelParallelStrategy)
    return type("PipelineStrategy", parents, names)
