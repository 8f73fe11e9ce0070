"""Count what a training step would ask of a GPU: operators, waits, copies and FLOP."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self
from unittest import mock

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_memsave import predict_memory
from lightning_memsave.core.memory import (
    HOST,
    category_in_context,
    is_fake,
    is_host,
    repeats_in_context,
)
from lightning_memsave.measure.live_tensors import in_backward
from lightning_memsave.prediction.result import MemoryPrediction
from lightning_memsave.prediction.work import NO_KERNEL, flop_formula
from lightning_memsave.techniques.offloading.copies import FakeEvent

# What gives a number to Python, or a tensor whose size depends on values.
WAITING = ("_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "masked_select")
# Those do it too, and without an operator where the tensor is on the CPU.
_METHODS = (Tensor.tolist, Tensor.cpu, Tensor.numpy)


@dataclass
class Counts:
    """What was counted in a step.

    Args:
        operators: Kernels by name of the operator; a ``foreach`` over many tensors counts once.
            What the host computes is not among them.
        waits: Of the training thread, by name of the operator or method.
        waits_beside: For events, where the host works beside the computation.
        recomputed: Operators of forward passes that ran again in backward.
        to_host_bytes: Copied from the device to memory that a technique keeps on the host.
        from_host_bytes: Copied back.
        flop: Floating-point operations of products, convolutions and attention.
    """

    operators: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    waits_beside: int = 0
    recomputed: int = 0
    to_host_bytes: int = 0
    from_host_bytes: int = 0
    flop: int = 0

    @property
    def num_operators(self) -> int:
        """All operators."""
        return self.operators.total()

    @property
    def num_waits(self) -> int:
        """All waits."""
        return self.waits.total()


class StepCounter(TorchDispatchMode):
    """Counts what runs inside as if its tensors were on a GPU.

    Args:
        optimizers: Their counts of steps, which torch keeps on the CPU and reads without a wait.
    """

    def __init__(self, optimizers: Iterable[Optimizer] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counts()
        self._optimizers = list(optimizers)
        self._methods = _MethodCounter(self.counts.waits)
        self._events = contextlib.ExitStack()

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name, repeats = func._schema.name.rpartition("::")[2], repeats_in_context()
        if (name in WAITING or _has_mask(name, args)) and not self._is_there(args[0]):
            self.counts.waits[name] += 1
        if name not in NO_KERNEL and not func.is_view and not _is_of_host(args):
            self.counts.operators[name] += repeats
            self.counts.recomputed += repeats * (in_backward() and torch.is_grad_enabled())
        if name == "copy_":
            self._count_copy(*args[:2])
        if (formula := flop_formula(func)) is not None:
            self.counts.flop += repeats * int(formula(*args, **(kwargs or {}), out_val=result))
        return result

    def __enter__(self) -> Self:
        for kind in (torch.cuda.Event, FakeEvent):
            wait = self._counting(kind.synchronize, is_fake=kind is FakeEvent)
            self._events.enter_context(mock.patch.object(kind, "synchronize", wait))
        self._methods.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._methods.__exit__(*error)  # type: ignore[no-untyped-call]
        self._events.close()

    # Waits of a GPU's training thread are not only those of Python.
    def _counting(self, wait: Callable[[Any], None], *, is_fake: bool) -> Callable[[Any], None]:
        def count_and_wait(event: Any) -> None:
            if category_in_context() == HOST:
                self.counts.waits_beside += 1
            elif is_fake:
                self.counts.waits["synchronize"] += 1
            wait(event)

        return count_and_wait

    # Host memory was copied while the device went on.
    def _is_there(self, tensor: Any) -> bool:
        is_copy = isinstance(tensor, Tensor) and is_host(tensor.untyped_storage())
        return is_copy or any(
            state.get("step") is tensor for o in self._optimizers for state in o.state.values()
        )

    def _count_copy(self, to: Tensor, source: Any) -> None:
        if not isinstance(source, Tensor):
            return
        ends = is_host(to.untyped_storage()), is_host(source.untyped_storage())
        if ends == (True, False):
            self.counts.to_host_bytes += to.nbytes
        elif ends == (False, True):
            self.counts.from_host_bytes += to.nbytes


class _MethodCounter(TorchFunctionMode):
    def __init__(self, waits: Counter[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METHODS:
            self.waits[func.__name__] += 1
        return func(*args, **(kwargs or {}))


# What is computed while host copies are made, but for the copies.
def _is_of_host(args: tuple[Any, ...]) -> bool:
    if category_in_context() != HOST:
        return False
    tensors = [each for each in args[:2] if isinstance(each, Tensor)]
    is_here = all(each.is_cpu and not is_fake(each) for each in tensors)
    return is_here or len({is_host(each.untyped_storage()) for each in tensors}) < 2


def _has_mask(name: str, args: tuple[Any, ...]) -> bool:
    return name == "index" and any(i is not None and i.dtype is torch.bool for i in args[1])


@dataclass
class Setup:
    """A step to count.

    Args:
        build: Makes the model, which gives its own loss.
        batch: Keywords of the model.
        settings: Arguments of `MemSaveCallback`; those that are not named are off.
        clip: Bound on the total norm of all gradients; ``None`` for no clipping.
        trainer: Further arguments of the Trainer.
    """

    build: Callable[[], nn.Module]
    batch: dict[str, Tensor]
    settings: dict[str, Any] = field(default_factory=dict)
    clip: float | None = None
    trainer: dict[str, Any] = field(default_factory=dict)


class _Counted(LightningModule):
    """Counts each optimizer step of a simulated fit; the last is like all later ones."""

    found: ClassVar[list[Counts]] = []

    def __init__(self, model: nn.Module, accumulated: int) -> None:
        super().__init__()
        self.model = model
        self._accumulated = accumulated
        self._counter: StepCounter | None = None

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % self._accumulated == 0:
            self._counter = StepCounter(self.trainer.optimizers)
            self._counter.__enter__()

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._counter is not None and (batch_idx + 1) % self._accumulated == 0:
            self._counter.__exit__(None, None, None)
            self.found.append(self._counter.counts)
            self._counter = None


def count(setup: Setup) -> tuple[Counts, MemoryPrediction]:
    """Count a step on the CUDA path, on fake tensors.

    Args:
        setup: The step.

    Returns:
        What was counted, and the prediction.
    """
    accumulated = setup.settings.get("accumulate_grad_batches") or 1
    clip = {} if setup.clip is None else {"gradient_clip_val": setup.clip}
    _Counted.found.clear()
    prediction = predict_memory(
        lambda: _Counted(setup.build(), accumulated),
        setup.batch,
        settings={"micro_batch_size": None, **setup.settings},
        trainer_arguments={**clip, **setup.trainer},
        time_limit_s=None,
    )
    return _Counted.found[-1], prediction
