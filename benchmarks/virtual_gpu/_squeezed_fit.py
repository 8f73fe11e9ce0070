"""A fit on the virtual GPU for which memory really runs out, and what was true when it did."""

import contextlib
import ctypes
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.faults._fits import digest
from lightning_memsave import MemSaveCallback, OOMObserver, find_blocks
from lightning_memsave.units import MIB
from tests.virtual_gpu import counters

SEGMENT = 2 * MIB  # the driver gives memory away in these
# Blocks of 1 to 10 MiB come from segments of 20 MiB.
POOL, PIECE = 20 * MIB, MIB + MIB // 8
NUM_BATCHES = 4
LATE = 3  # the batch before which memory is taken "after 3 steps"


@dataclass(frozen=True)
class Squeeze:
    """How little memory is left, where, and who has the rest."""

    place: str
    """``start``, ``late`` (after three steps), ``validation``, ``optimizer`` (before its first
    step), ``block`` (before a block, as it is fetched) or ``copy`` (as a copy on a stream beside
    the computation's begins)."""
    owner: str
    """``card`` (it has no more), ``tensor`` (of this process, such as a dataset), ``outside``
    (memory that is not torch's), ``limit`` (of torch's allocator) or ``pieces`` (free memory lies
    between tensors)."""
    free_bytes: int
    """What is left free at that place."""
    call: int = 0
    """For ``block`` and ``copy``: at which of the calls of blocks, or of the copies."""


@dataclass
class Known:
    """What was true when memory ran out, seen beside the product."""

    phase: str
    requested_bytes: int
    capacity_bytes: int
    free_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    is_side_stream: bool
    held: dict[str, int]
    """Bytes on the device by owner: parameters, gradients, optimizer_state, taken, others."""


@dataclass
class SqueezedFit:
    """Runs one fit.

    Args:
        build: Makes the model; it gives its loss for the keywords of a batch.
        batches: Of training.
        validation: Of validation.
        settings: Arguments of `MemSaveCallback`; ``None`` to train without it.
        capacity_bytes: Memory of the GPU.
        squeeze: Where memory gets short; nowhere if ``None``.
        sizes: Micro-batch size of each batch, as a fit was left with after its batch ran out.
        keeps_values: Kernels compute.
    """

    build: Callable[[], nn.Module]
    batches: list[dict[str, Tensor]]
    validation: list[dict[str, Tensor]]
    settings: dict[str, Any] | None
    capacity_bytes: int
    squeeze: Squeeze | None = None
    sizes: tuple[int | None, ...] = ()
    keeps_values: bool = True
    phase: str = "start"
    found: list[Known] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seen_sizes: list[int | None] = field(default_factory=list)
    taken: list[Any] = field(default_factory=list)
    taken_bytes: int = 0
    """In tensors that hold memory for no purpose."""
    num_calls: dict[str, int] = field(default_factory=dict)
    """Of blocks, and of copies on streams beside the computation's."""
    has_taken: bool = False

    def run(self) -> dict[str, Any]:
        """Train; give everything as plain values."""
        counters.set_memory(self.capacity_bytes)
        attach: Any = torch._C  # untyped where torch is built without CUDA
        attach._cuda_attach_out_of_memory_observer(self._observe)
        torch.manual_seed(0)
        self.lit = _Lit(self.build(), self)
        if self.squeeze is not None and self.squeeze.place == "start":
            self.take()
        with tempfile.TemporaryDirectory() as folder:
            observer = OOMObserver(folder, predict=False)
            self.memsave = None
            if self.settings is not None:
                off: Any = dict.fromkeys(("predict", "report"), False)
                self.memsave = MemSaveCallback(**self.settings, **off)
            error = self._fit([*filter(None, [self.memsave]), observer, _Phases(self)])
        report = observer.report
        return {
            "digest": digest(self.lit.cpu()) if error is None and self.keeps_values else None,
            "losses": self.losses,
            "sizes": self.seen_sizes,
            "ooms": [asdict(one) for one in self.found],
            "error": None if error is None else f"{type(error).__name__}: {error}",
            "said": said_by(error),
            "traceback": [] if error is None else traceback.format_tb(error.__traceback__)[-25:],
            "report": None if report is None else report.to_dict(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        }

    def take_at_call(self, place: str) -> None:
        """Count a call at a place, and take memory if it is the one."""
        call = self.num_calls[place] = self.num_calls.get(place, 0) + 1
        squeeze = self.squeeze
        if squeeze is not None and squeeze.place == place and squeeze.call == call:
            self.take()

    def _fit(self, callbacks: list[Any]) -> Exception | None:
        trainer = pl.Trainer(
            accelerator="gpu",
            devices=1,
            max_epochs=1,
            callbacks=callbacks,
            logger=False,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        datasets: Any = (self.batches, self.validation)  # a list is a dataset
        training, validation = (DataLoader(one, batch_size=None) for one in datasets)
        try:
            with _followed_streams(self):
                trainer.fit(self.lit, training, validation)
        except Exception as error:
            return error
        return None

    def take(self) -> None:
        """Leave so much memory free as the squeeze says."""
        squeeze = self.squeeze
        assert squeeze is not None, "there is something to take"
        self.has_taken = True
        torch.cuda.empty_cache()
        free_bytes, capacity_bytes = torch.cuda.mem_get_info()
        most = (free_bytes - squeeze.free_bytes) // SEGMENT * SEGMENT
        if most <= 0:
            return
        if squeeze.owner == "limit":
            reserved = torch.cuda.memory_reserved() + free_bytes - most
            # Of what the allocator takes for the capacity.
            whole = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(reserved / whole)
        elif squeeze.owner == "outside":
            _take_outside(most)
        elif squeeze.owner == "card":
            counters.set_memory(capacity_bytes - most)
        elif squeeze.owner == "pieces":
            pieces = [_bytes(PIECE) for _ in range(most // POOL * (POOL // PIECE))]
            self._hold(pieces[::2], capacity_bytes - most % POOL)
        else:
            self._hold([_bytes(POOL) for _ in range(most // POOL)], capacity_bytes - most % POOL)

    # The allocator asks for no less than a pool: what remains is not there.
    def _hold(self, tensors: list[Tensor], capacity_bytes: int) -> None:
        counters.set_memory(capacity_bytes)
        self.taken = tensors
        self.taken_bytes = sum(tensor.nbytes for tensor in tensors)

    def _observe(self, device: int, requested: int, capacity: int, free: int) -> None:
        stream = torch.cuda.current_stream()
        held = _held_by(self.lit)
        held["taken"] = self.taken_bytes
        allocated = torch.cuda.memory_allocated()
        held["others"] = allocated - sum(held.values())
        free_bytes, capacity_bytes = torch.cuda.mem_get_info()
        self.found.append(
            Known(
                self.phase,
                requested,
                capacity_bytes,
                free_bytes,
                allocated,
                torch.cuda.memory_reserved(),
                stream != torch.cuda.default_stream(),
                held,
            )
        )


def _bytes(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def _take_outside(size: int) -> None:
    place = ctypes.c_void_p()
    function = ctypes.CDLL(None).cudaMalloc
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    assert function(ctypes.byref(place), size) == 0, "it was free"


def _held_by(lit: pl.LightningModule) -> dict[str, int]:
    parameters = list(lit.parameters())
    held = {
        "parameter": _on_device(parameters),
        "gradient": _on_device(p.grad for p in parameters if p.grad is not None),
        "optimizer_state": 0,
    }
    optimizers = lit.optimizers(use_pl_optimizer=False) if lit._trainer is not None else []
    for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
        state = [v for s in optimizer.state.values() for v in s.values()]
        held["optimizer_state"] += _on_device(v for v in state if isinstance(v, Tensor))
    return held


def _on_device(tensors: Iterable[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.is_cuda}
    return sum(storage.nbytes() for storage in storages.values())


def said_by(error: BaseException | None) -> str:
    """Give what Python prints of an exception: its causes and notes too."""
    said = []
    while error is not None:
        said += ["\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])]
        error = error.__cause__ or error.__context__
    return "\n".join(said)


@contextlib.contextmanager
def _followed_streams(fit: SqueezedFit) -> Iterator[None]:
    """Follow what begins on streams beside the computation's."""
    plain = torch.cuda.stream

    @contextlib.contextmanager
    def stream(one: torch.cuda.Stream) -> Iterator[None]:
        fit.take_at_call("copy")
        with plain(one):
            yield

    with mock.patch("torch.cuda.stream", stream):
        yield


# Not in the module: a batch is not split where a step counts something there.
_RUNNING: list[SqueezedFit] = []


class _Lit(pl.LightningModule):
    def __init__(self, model: nn.Module, fit: SqueezedFit) -> None:
        super().__init__()
        self.model = model
        _RUNNING[:] = [fit]
        for block in find_blocks(model):
            block.module.register_forward_pre_hook(self._before_block)

    def _before_block(self, *_: Any) -> None:
        _RUNNING[0].take_at_call("block")

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        _RUNNING[0].phase = "forward"
        loss: Tensor = self.model(**batch).loss
        return loss

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        _RUNNING[0].phase = "validation"
        self.model(**batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class _Phases(pl.Callback):
    """Follows the fit, takes memory, and sets the sizes that a fit is told to use."""

    def __init__(self, fit: SqueezedFit) -> None:
        self.fit = fit

    def _take_at(self, place: str) -> None:
        fit = self.fit
        if fit.squeeze is not None and fit.squeeze.place == place and not fit.has_taken:
            fit.take()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        fit = self.fit
        fit.phase = "before the batch"
        if batch_idx == LATE:
            self._take_at("late")
        if batch_idx < len(fit.sizes) and fit.sizes[batch_idx] is not None:
            # There is no public way, since no user wants it: sizes come from what memory allows.
            batches = fit.memsave._micro_batches  # type: ignore[union-attr] # there are sizes
            batches.size = batches.runner.size = fit.sizes[batch_idx]  # type: ignore[union-attr]

    # Not `on_after_backward`, which updates in backward refuse.
    def on_fit_start(self, trainer: Any, module: Any) -> None:
        backward = trainer.strategy.backward

        def followed(*args: Any, **kwargs: Any) -> Any:
            self.fit.phase = "backward"
            result = backward(*args, **kwargs)
            self.fit.phase = "optimizer"
            self._take_at("optimizer")
            return result

        trainer.strategy.backward = followed

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        fit = self.fit
        fit.phase = "after the batch"
        fit.losses.append(float(outputs["loss"]))
        fit.seen_sizes.append(fit.memsave._micro_batches.size if fit.memsave else None)

    def on_validation_batch_start(self, *_: Any) -> None:
        self.fit.phase = "validation"
        self._take_at("validation")

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.fit.phase = "over"
