"""Synchronize gradients, buffers and values over processes, bypassing DDP where needed."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_memsave.core.patching import (
    keep_copies_plain,
    own,
    patch_method,
    previous_method,
    set_own,
)
from lightning_memsave.trainer.trainer import is_strategy

_BUCKET_BYTES = 4 * 2**20  # beside the buckets of DDP itself
_SHARDED = ("FSDPStrategy", "ModelParallelStrategy")
_DENSE, _SPARSE = 1, 2
# Arguments of `DDPStrategy` that change gradient synchronization or forward passes.
_OWN_WAYS = ("ddp_comm_hook", "mixed_precision")


def communicates_in_forward(trainer: Any, module: nn.Module) -> str:
    """Return why forward passes communicate, so that all processes need the same number of them."""
    name = type(trainer.strategy).__name__
    if is_strategy(trainer, *_SHARDED):
        return f"under `{name}` all processes communicate in every forward pass"
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    will_convert = bool(norms) and getattr(trainer.strategy, "_layer_sync", None) is not None
    is_synced = will_convert or any(isinstance(norm, nn.SyncBatchNorm) for norm in norms)
    if trainer.world_size > 1 and is_synced:
        return "`SyncBatchNorm` computes statistics over all processes in every forward pass"
    return ""


def has_custom_gradient_sync(trainer: Any) -> str:
    name = type(trainer.strategy).__name__
    if trainer.world_size == 1:
        return ""
    if not is_strategy(trainer, "DDPStrategy") or is_strategy(trainer, "XLAStrategy"):
        return f"`{name}` synchronizes gradients in its own way"
    kwargs = vars(trainer.strategy).get("_ddp_kwargs", {})
    given = kwargs | {"ddp_comm_hook": getattr(trainer.strategy, "_ddp_comm_hook", None)}
    own = next((way for way in _OWN_WAYS if given.get(way) is not None), None)
    return "" if own is None else f"`{name}({own}=...)` synchronizes gradients in its own way"


class SharedModel(nn.Module):
    """Takes the place of DDP around a module whose gradients something else averages."""

    def __init__(self, module: nn.Module, average: WeakMethod[Any], *, broadcasts: bool) -> None:
        super().__init__()
        self.module, self._average = module, average
        self.averages_now = True
        self._broadcasts = self._is_due = broadcasts
        self.broadcast_buffers()

    def average(self) -> None:
        """Average the gradients of all processes."""
        average = self._average()
        assert average is not None, "the module is in a fit"
        average()

    def broadcast_buffers(self) -> None:
        """Broadcast the buffers of the first process, where DDP would in the next forward pass."""
        for buffer in self.module.buffers() if self._is_due else ():
            dist.broadcast(buffer, 0)
        self._is_due = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.broadcast_buffers()
        output = self.module(*args, **kwargs)
        if torch.is_grad_enabled() and self.averages_now:
            self.expect_buffers()
        return output

    def expect_buffers(self) -> None:
        """Broadcast buffers again in the next forward pass."""
        self._is_due = self._broadcasts


_AVERAGE = "_memsave_average"


def share_model(
    trainer: Any, pl_module: Any, average: Callable[[], None]
) -> list[Callable[[], None]]:
    """Let a method average gradients at the end of backward, in the place of DDP."""
    strategy = trainer.strategy
    return [
        set_own(strategy, _AVERAGE, WeakMethod(average)),
        patch_method(strategy, configure_ddp),
        patch_method(strategy, block_backward_sync),
        patch_method(pl_module, backward),
        keep_copies_plain(pl_module),
    ]


def configure_ddp(self: Any) -> None:
    """Wrap the module as DDP would."""
    settings = vars(self).get("_ddp_kwargs", {})
    names = ("forward_sync_buffers", "broadcast_buffers")
    given = [settings[name] for name in names if settings.get(name) is not None]
    self.model = SharedModel(self.model, own(self, _AVERAGE), broadcasts=all(given[:1]))


def block_backward_sync(self: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context in which gradients are summed, but not averaged."""
    if not isinstance(self.model, SharedModel):
        return previous_method(self, "block_backward_sync")()  # type: ignore[no-any-return]
    return _blocked(self.model)


@contextlib.contextmanager
def _blocked(model: SharedModel) -> Iterator[None]:
    before, model.averages_now = model.averages_now, False
    try:
        yield
    finally:
        model.averages_now = before


def backward(self: Any, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Average gradients after the backward pass, before hooks see them."""
    previous_method(self, "backward")(loss, *args, **kwargs)
    model = self.trainer.strategy.model
    if isinstance(model, SharedModel) and model.averages_now:
        model.average()


def has_static_graph(trainer: Any) -> bool:
    return bool(vars(trainer.strategy).get("_ddp_kwargs", {}).get("static_graph"))


def copies_gradients(trainer: Any) -> bool:
    """Return whether DDP keeps, or will keep, a copy of all gradients in buckets of its own."""
    ddp = trainer.strategy.model
    if isinstance(ddp, SharedModel):
        return False
    if isinstance(ddp, DistributedDataParallel):
        return not ddp.gradient_as_bucket_view
    settings = vars(trainer.strategy).get("_ddp_kwargs")  # only `DDPStrategy` has them
    return settings is not None and not settings.get("gradient_as_bucket_view")


def gradient_bytes(module: nn.Module) -> dict[str, int]:
    """Return the bytes of all gradients by module, of which DDP has a copy in buckets."""
    found: dict[str, int] = {}
    for name, param in module.named_parameters():
        if param.requires_grad:
            owner = name.rpartition(".")[0]
            found[owner] = found.get(owner, 0) + param.nbytes
    return found


@contextlib.contextmanager
def alone(trainer: Any) -> Iterator[None]:
    """Run forward and backward without DDP synchronization.

    Call `broadcast_buffers` and `average_gradients` instead.
    """
    strategy = trainer.strategy
    model, strategy.model = strategy.model, strategy.lightning_module
    try:
        yield
    finally:
        strategy.model = model


def without_sync(trainer: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context without gradient synchronization, if the strategy supports it."""
    block = getattr(trainer.strategy, "block_backward_sync", None)
    return contextlib.nullcontext() if block is None else block()


def has_others() -> bool:
    """Return whether other processes run; a prediction only imitates them."""
    return dist.is_available() and dist.is_initialized() and dist.get_backend() != "fake"


def all_reduce_min(trainer: Any, size: int) -> int:
    """Return the minimum of a number over all processes, which must all call this."""
    if trainer.world_size == 1:
        return size
    found = torch.tensor(size, device=trainer.strategy.root_device)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return int(found.item())


def broadcast_from_rank_zero(trainer: Any, value: Any) -> Any:
    """Return the value of rank zero on all ranks, which must all call this."""
    return trainer.strategy.broadcast(value)


def broadcast_buffers(trainer: Any) -> None:
    """Broadcast the buffers of the first process, if DDP would in the next forward pass."""
    ddp = trainer.strategy.model
    if isinstance(ddp, DistributedDataParallel) and ddp.will_sync_module_buffers():
        ddp._sync_buffers()
        ddp.require_forward_param_sync = False  # until gradients have been averaged
    elif isinstance(ddp, SharedModel):
        ddp.broadcast_buffers()


@torch.no_grad()
def average_gradients(trainer: Any, module: nn.Module) -> None:
    """Average gradients over all processes, in place, as DDP does in backward."""
    ddp = trainer.strategy.model
    if isinstance(ddp, SharedModel):
        ddp.average()
        ddp.expect_buffers()
        return
    trained, device = _shared_parameters(ddp, module), trainer.strategy.root_device
    sum_gradients(trained, device, divisor=trainer.world_size)
    if isinstance(ddp, DistributedDataParallel):
        ddp.require_forward_param_sync = True


@torch.no_grad()
def sum_gradients(
    trained: Sequence[nn.Parameter], device: torch.device, *, divisor: int = 1
) -> None:
    """Sum gradients over all processes, in place, after a division; some may have none."""
    if not trained:
        return
    kinds = torch.tensor([_kind(p.grad) for p in trained], device=device)
    dist.all_reduce(kinds, dist.ReduceOp.MAX)
    gradients = []
    for parameter, kind in zip(trained, kinds.tolist(), strict=True):
        if kind and parameter.grad is None:
            is_sparse = kind == _SPARSE
            parameter.grad = _no_rows(parameter) if is_sparse else torch.zeros_like(parameter)
        if kind == _SPARSE:
            parameter.grad = _sparse_sum(cast(torch.Tensor, parameter.grad) / divisor)
        elif kind:
            gradients.append(cast(torch.Tensor, parameter.grad))
    for bucket in _buckets(gradients):
        _sum_bucket(bucket, divisor)


def _shared_parameters(ddp: Any, module: nn.Module) -> list[nn.Parameter]:
    ignored = getattr(ddp, "parameters_to_ignore", ())
    return [p for name, p in module.named_parameters() if p.requires_grad and name not in ignored]


def _kind(gradient: torch.Tensor | None) -> int:
    if gradient is None:
        return 0
    return _SPARSE if gradient.is_sparse else _DENSE


# Like gradients of embeddings: sparse in the first dimension only.
def _no_rows(parameter: torch.Tensor) -> torch.Tensor:
    indices = torch.empty(1, 0, dtype=torch.long, device=parameter.device)
    values = parameter.new_empty(0, *parameter.shape[1:])
    return torch.sparse_coo_tensor(indices, values, parameter.shape)


def _sparse_sum(gradient: torch.Tensor) -> torch.Tensor:
    found = gradient.coalesce()
    dist.all_reduce(found)
    return found


def _sum_bucket(bucket: list[torch.Tensor], divisor: int) -> None:
    is_one = len(bucket) == 1 and bucket[0].is_contiguous()
    # Large gradients are not copied: memory may have just run out.
    flat = bucket[0].view(-1) if is_one else torch.cat([g.flatten() for g in bucket])
    flat /= divisor  # before the sum, as DDP does
    dist.all_reduce(flat)
    if not is_one:
        parts = flat.split([gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(tensors: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        is_other_type = bool(bucket) and bucket[0].dtype != tensor.dtype
        if bucket and (is_other_type or num_bytes + tensor.nbytes > _BUCKET_BYTES):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(tensor)
        num_bytes += tensor.nbytes
    if bucket:
        yield bucket


_OPERATORS = {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM} if dist.is_available() else {}
_UNKNOWN = -1.0


def reduce_over_ranks(
    trainer: Any, how: Literal["max", "sum"], values: Mapping[str, float | None]
) -> dict[str, float]:
    """Reduce values over the ranks of a Trainer in one collective."""
    if trainer.world_size > 1 and values:
        unknown = _UNKNOWN if how == "max" else float("nan")
        known = [unknown if value is None else float(value) for value in values.values()]
        # float32 is exact up to 2**24 only.
        tensor = torch.tensor(known, dtype=torch.float64, device=trainer.strategy.root_device)
        dist.all_reduce(tensor, _OPERATORS[how])
        values = dict(zip(values, tensor.tolist(), strict=True))
    return {key: value for key, value in values.items() if value is not None and value >= 0}
