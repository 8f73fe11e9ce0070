"""Micro-batches and the other settings under DDP and FSDP2, on two processes.

`ranks` runs every scenario on both; pytest compares what the two saw.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_memsave import GPUMemoryMonitor, MemSaveCallback, MicroBatching
from lightning_memsave.errors import IncompatibleError, MemoryExhaustedError, MemsaveWarning
from tests.callbacks.lit import (
    SmallerFrom,
    Trace,
    Vectors,
    loader_of,
    make_lit,
    make_trainer,
    no_step,
    only,
    quiet,
    rows_of,
    without_dropout,
)
from tests.callbacks.ranks import RANKS, Notes, rank_of_this_process
from tests.cases import WIDTH, BatchNormModel, Model
from tests.out_of_memory import MESSAGE, OutOfMemoryAt

pytestmark = pytest.mark.usefixtures("no_prediction", "any_saving_counts")

SIZES = ((4, 4, 4, 4, 3), (4, 4, 4, 4, 1))  # of the batches of each rank
EQUAL_SIZES = (4, 4, 4, 3)
EVEN_SIZES = ((4, 4, 4, 4, 4), (4, 4, 4, 4, 2))  # batch normalisation needs two samples in a part


# --- what runs on each rank ---


class OnOneRank(Model):
    """A layer that the second rank never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if rank_of_this_process() == 0:
            x = x + self.sometimes(x)
        return super().forward(x)


class SparseModel(Model):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH, sparse=True)

    def uses(self, x: Tensor) -> Tensor:
        """Say which samples look up a row."""
        return torch.ones(len(x), dtype=torch.bool)

    def forward(self, x: Tensor) -> Tensor:
        if (uses := self.uses(x)).any():
            x = x + self.embedding(x.argmax(-1)) * uses.unsqueeze(-1)
        return super().forward(x)


class SparseOnOneRank(SparseModel):
    """Some batches of the second rank have no gradient of the embedding."""

    def uses(self, x: Tensor) -> Tensor:
        return super().uses(x) if rank_of_this_process() == 0 else x.mean(-1) < -0.1


def batches(sizes: tuple[int, ...], rank: int | None = None) -> list[Tensor]:
    shares = Vectors(RANKS * sum(sizes)).data
    start = (rank_of_this_process() if rank is None else rank) * sum(sizes)
    return list(shares[start : start + sum(sizes)].split(sizes))


def make(
    model_class: Callable[[], nn.Module] = Model,
    *,
    mode: OutOfMemoryAt | None = None,
    **methods: Any,
) -> Any:
    """A module whose ranks have batches of other lengths; memory runs out where ``mode`` says."""
    torch.manual_seed(1)
    model, mode = model_class(), mode or OutOfMemoryAt()
    sizes = EVEN_SIZES if model_class is BatchNormModel else SIZES

    def training_step(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
        if torch.is_grad_enabled():  # not in the proof of what the loss is the mean over
            mode.starts.append(mode.num_ops)
            mode.is_armed = True
        loss = self.model(batch.to(self.model.head.weight.dtype))
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    defaults = {
        "training_step": training_step,
        "on_after_backward": lambda self: setattr(mode, "is_armed", False),
        "validation_step": no_step,
        "train_dataloader": lambda self: loader_of(batches(sizes[rank_of_this_process()])),
    }
    return make_lit(model=model, **(defaults | methods))


def exact(lit: Any) -> Any:
    """Without dropout, in float64: sums of parts can be compared with the whole."""
    return without_dropout(lit).double()


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(lit: Any, *callbacks: Any, strategy: Any = "ddp", **settings: Any) -> Notes:
    trace = Trace(pl)
    # A sanity check before training would be the first to share buffers, in DDP's first forward.
    defaults = {"use_distributed_sampler": False, "log_every_n_steps": 1, "num_sanity_val_steps": 0}
    how = defaults | {"devices": RANKS, "strategy": strategy} | settings
    trainer = make_trainer(pl, *callbacks, trace.callback, **how)
    torch.manual_seed(100 + rank_of_this_process())  # other dropout on each rank
    trainer.fit(lit)
    return {
        "losses": trace.losses,
        "logged": {key: value.item() for key, value in trainer.callback_metrics.items()},
        "parameters": {name: full(p).flatten().tolist() for name, p in lit.named_parameters()},
        "buffers": {name: b.double().flatten().tolist() for name, b in lit.named_buffers()},
        "steps": trainer.global_step,
    }


def row(callback: MemSaveCallback, name: str = "micro_batch_size") -> list[Any]:
    found = rows_of(callback)[name]
    return [found.status, " ".join(found.details), found.exactness]


def raised_by(run: Callable[[], Any]) -> list[str]:
    try:
        run()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


DDP_MODELS: dict[str, tuple[type[nn.Module], Callable[[], Any]]] = {
    "plain": (Model, DDPStrategy),
    "batch_norm": (BatchNormModel, DDPStrategy),
    "own_buffers": (BatchNormModel, functools.partial(DDPStrategy, broadcast_buffers=False)),
    "one_rank": (OnOneRank, functools.partial(DDPStrategy, find_unused_parameters=True)),
    "static": (Model, functools.partial(DDPStrategy, static_graph=True)),
    "views": (Model, functools.partial(DDPStrategy, gradient_as_bucket_view=True)),
}


FIXED = ("plain", "one_rank", "views")  # parts change what batch normalisation computes
WHOLE = [(name, window) for name in DDP_MODELS for window in (1, 3)]
WHOLE.remove(("static", 3))  # torch cannot accumulate gradients with `static_graph`


def with_and_without(name: str, size: Any, change: Any = None, **settings: Any) -> Notes:
    model_class, make_strategy = DDP_MODELS[name]
    notes: Notes = {}
    for window in (w for n, w in WHOLE if n == name):
        how = settings | {"accumulate_grad_batches": window}
        for way, callbacks in (("plain", []), ("ours", [only(size)])):
            lit = make(model_class)
            lit = change(lit) if change else lit
            notes[f"{way} {window}"] = train(lit, *callbacks, strategy=make_strategy(), **how)
    return notes


def fixed(name: str) -> Notes:
    """With and without parts, in float64."""
    return with_and_without(name, 2, exact)


def whole(name: str) -> Notes:
    """``"auto"`` while memory is enough."""
    return with_and_without(name, "auto", gradient_clip_val=0.1)


def train_ddp(name: str, window: int, *callbacks: Any, mode: OutOfMemoryAt | None = None) -> Notes:
    model_class, make_strategy = DDP_MODELS[name]
    settings: Notes = {"accumulate_grad_batches": window, "strategy": make_strategy()}
    with mode or contextlib.nullcontext():
        return train(make(model_class, mode=mode), *callbacks, **settings)


@functools.cache
def ops_of_batches(name: str, window: int) -> list[int]:
    """Find the first operator of each whole batch on this rank, and the end of the last."""
    mode = OutOfMemoryAt()
    train_ddp(name, window, only("auto"), mode=mode)
    return [*mode.starts, mode.num_ops]


@functools.cache
def smaller_from(name: str, window: int, batch: int) -> Notes:
    callback = only("auto")
    return train_ddp(name, window, callback, SmallerFrom(callback, batch))


def run_out(name: str, window: int, place: str, batch: int, rank: int) -> Notes:
    """Memory runs out on one rank."""
    ops = ops_of_batches(name, window)
    op = ops[batch] + 5 if place == "forward" else ops[batch + 1] - 5
    callback = only("auto")
    mode = OutOfMemoryAt(*([op] if rank_of_this_process() == rank else []))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", MemsaveWarning)
        ours = train_ddp(name, window, callback, mode=mode)
    return {
        "ours": ours,
        "smaller": smaller_from(name, window, batch),
        "size": callback._micro_batches.size,
        "num_tries": len(mode.starts),
        "said": [str(w.message) for w in said if w.category is MemsaveWarning],
        "row": row(callback),
    }


PLACES = {
    " ".join(map(str, place)): place
    for place in (
        ("plain", 1, "forward", 0, 1),
        ("plain", 3, "backward", 2, 0),
        ("batch_norm", 3, "forward", 0, 1),  # where DDP shares buffers and no gradients
        ("batch_norm", 3, "backward", 3, 0),
        ("one_rank", 3, "backward", 1, 1),
    )
}
"""Model, window, place, batch and rank."""


def num_tries(key: str) -> list[int]:
    """Parts that the two ranks tried; one of each is the whole batch, in vain."""
    name, _, _, batch, _ = PLACES[key]
    sizes = EVEN_SIZES if DDP_MODELS[name][0] is BatchNormModel else SIZES
    return [batch + 1 + sum(-(-n // 2) for n in of_rank[batch:]) for of_rank in sizes]


def run_against_plain() -> Notes:
    """The truth is plain DDP, not ourselves: float64, memory out on one rank in a window."""
    notes: Notes = {}
    for window in (1, 3):
        settings = {"accumulate_grad_batches": window}
        mode = OutOfMemoryAt(*([200] if rank_of_this_process() == 1 else []))
        with mode, warnings.catch_warnings():
            warnings.simplefilter("ignore", MemsaveWarning)
            callback = only("auto")
            notes[f"ours {window}"] = train(exact(make(mode=mode)), callback, **settings)
        assert callback._micro_batches.size == 2
        notes[f"plain {window}"] = train(exact(make()), **settings)
    return notes


def run_exhausted() -> Notes:
    """One rank has not enough memory for a single sample."""
    modules = []

    def training_step(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
        if rank_of_this_process() == 1 and batch_idx == 1:
            raise torch.OutOfMemoryError(MESSAGE)
        return self.model(batch)

    def run(window: int) -> None:
        modules.append(make(training_step=training_step))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MemsaveWarning)
            train(modules[-1], only("auto"), accumulate_grad_batches=window)

    return {
        str(window): {
            "raised": raised_by(functools.partial(run, window)),
            "parameters": {n: p.flatten().tolist() for n, p in modules[-1].named_parameters()},
        }
        for window in (1, 3)
    }


SGD: Notes = {"configure_optimizers": lambda self: torch.optim.SGD(self.parameters(), lr=0.1)}


def run_sparse() -> Notes:
    notes: Notes = {"plain": train(exact(make(SparseModel, **SGD)))}
    for size in ("auto", 2):
        notes[str(size)] = train(exact(make(SparseModel, **SGD)), only(size))
    # Afterwards DDP itself meets a parameter without gradient, and raises its error.
    notes["one rank"] = train(
        exact(make(SparseOnOneRank, **SGD)), only("auto"), limit_train_batches=2
    )
    return notes


def run_evaluation() -> Notes:
    """Validation in parts; memory runs out on the second rank alone."""
    data = Vectors(24).data[rank_of_this_process() :: RANKS]

    def validation_step(self: Any, batch: Tensor, batch_idx: int) -> None:
        if self.is_short and rank_of_this_process() == 1 and len(batch) > 3:
            raise torch.OutOfMemoryError(MESSAGE)
        self.log("val_loss", self.model(batch), sync_dist=True)

    notes: Notes = {}
    for way, callbacks in (
        ("plain", []),
        ("fixed", [only(MicroBatching(4, evaluation=True))]),  # batches of training stay whole
        ("auto", [only(MicroBatching("halve", evaluation=True))]),
    ):
        lit = make(
            BatchNormModel,
            validation_step=validation_step,
            val_dataloader=lambda self: loader_of(list(data.split(6))),
        )
        lit.is_short = way == "auto"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MemsaveWarning)
            notes[way] = train(lit, *callbacks)["logged"]
    return notes


def run_gives_way() -> Notes:
    """What needs all processes in every forward pass, or synchronizes gradients in its own way."""

    class Normed(Model):
        def make_norm(self) -> nn.Module:
            return nn.SyncBatchNorm(WIDTH)

    notes: Notes = {}
    hook = torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook
    for name, lit, settings in (
        ("hook", make(), {"strategy": DDPStrategy(ddp_comm_hook=hook)}),
        ("normed", make(Normed), {}),
        ("converted", make(BatchNormModel), {"sync_batchnorm": True}),
        ("static", make(), {"strategy": DDPStrategy(static_graph=True)}),
    ):
        callback = only(2 if name == "static" else "auto")
        notes[name] = {"raised": raised_by(functools.partial(train, lit, callback, **settings))}
        notes[name]["row"] = row(callback) if callback.rows else None
    return notes


def run_precision(make: Any = make, train: Any = train) -> Notes:
    notes: Notes = {}
    for precision in ("bf16-mixed", "bf16-true"):
        callback = only(None, precision=precision)
        notes[precision] = {
            "plain": train(make(), precision=precision),
            "ours": train(make(), callback),
            "row": row(callback, "precision"),
        }
    return notes | {"32-true": train(make())}


# --- FSDP2 ---


def shard(self: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for part in (*self.model.blocks, self.model):
        fully_shard(part, mesh=self.device_mesh["data_parallel"])


def sharded(model_class: type[nn.Module] = Model, **methods: Any) -> Any:
    equal_batches = lambda self: loader_of(batches(EQUAL_SIZES))  # noqa: E731
    defaults = {"configure_model": shard, "train_dataloader": equal_batches}
    return make(model_class, **(defaults | methods))


def train_sharded(lit: Any, *callbacks: Any, **settings: Any) -> Notes:
    # Without the sizes Lightning takes the other process for tensor parallelism.
    strategy = ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1)
    return train(lit, *callbacks, strategy=strategy, **settings)


def run_fsdp2_checkpointing() -> Notes:
    callback = only(None, activation_checkpointing="all")
    notes: Notes = {"plain": train_sharded(sharded()), "ours": train_sharded(sharded(), callback)}
    return notes | {"row": row(callback, "activation_checkpointing")}


def run_fsdp2_precision() -> Notes:
    notes = run_precision(sharded, train_sharded)
    refused = functools.partial(train_sharded, sharded(), only(None, precision="16-mixed"))
    return notes | {"refused": raised_by(refused)}


def run_fsdp2_fixed() -> Notes:
    notes: Notes = {}
    for window in (1, 3):
        settings = {"accumulate_grad_batches": window}
        notes[f"plain {window}"] = train_sharded(exact(sharded()), **settings)
        notes[f"ours {window}"] = train_sharded(exact(sharded()), only(2), **settings)
    return notes


def accumulated(make: Any, train: Any, window: int, **methods: Any) -> Notes:
    """The gradient before each step: the last window is scaled by its own length."""
    seen: list[list[float]] = []

    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        seen.append(full(self.model.head.weight.grad).flatten().tolist())

    own: Notes = {
        "on_before_optimizer_step": on_before_optimizer_step,
        "configure_optimizers": lambda self: torch.optim.SGD(self.parameters(), lr=0.0),
    }
    callback = only(None, accumulate_grad_batches=window)
    train(exact(make(**own, **methods)), callback)
    return {"gradients": seen, "row": row(callback, "accumulate_grad_batches")}


class Stream(IterableDataset[Tensor]):
    """A loader over it does not know how many batches there are."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(batches(EQUAL_SIZES))


STREAMED: Notes = {"train_dataloader": lambda self: DataLoader(Stream(), batch_size=None)}


def run_fsdp2_monitor() -> Notes:
    monitor = GPUMemoryMonitor(print_summary=False)
    lit = sharded()
    train_sharded(lit, monitor)
    assert monitor.summary is not None
    bare = MemSaveCallback(report=False)
    train_sharded(sharded(), bare)
    return {
        "bare": {name: [row.status, *row.details] for name, row in rows_of(bare).items()},
        "peak_bytes": monitor.summary.peak_bytes,
        "categories": dict(monitor.summary.by_category),
        "local_bytes": sum(p.to_local().nbytes for p in lit.parameters()),
        "all_bytes": sum(p.nbytes for p in lit.parameters()),
    }


def run_fsdp2_refused() -> Notes:
    auto = only("auto")
    notes: Notes = {
        "auto trained": train_sharded(sharded(), auto),
        "plain": train_sharded(sharded()),
    }
    notes["auto"] = row(auto)
    uneven: Notes = {
        "train_dataloader": lambda self: loader_of(
            batches((4, 4)) if rank_of_this_process() else batches((4, 2))
        )
    }
    for name, lit, callback in (
        ("uneven", sharded(**uneven), only(2)),
        ("half", sharded(), only(2, precision="bf16-true")),
        ("evaluation", sharded(), only(MicroBatching(2, evaluation=True))),
    ):
        notes[name] = raised_by(functools.partial(train_sharded, lit, callback))
    return notes


# --- FSDP1 ---


class OnCpu(FSDPStrategy):
    """Without a GPU Lightning refuses `FSDPStrategy` itself; torch does later, in wrapping."""


def run_fsdp1() -> Notes:
    """What is decided before torch wraps the model, which it does on a GPU only."""
    notes: Notes = {"by name": raised_by(lambda: make_trainer(pl, devices=RANKS, strategy="fsdp"))}
    bare = quiet()
    for name, callback, settings in (
        ("bare", bare, {}),
        ("own checkpointing", bare, {"activation_checkpointing_policy": {Model}}),
        ("fixed", only(2), {}),
        ("evaluation", only(MicroBatching(2, evaluation=True)), {}),
        ("optimizer", only(None, optimizer="8bit"), {}),
    ):
        strategy = OnCpu(use_orig_params=True, **settings)  # type: ignore[arg-type] # any
        run = functools.partial(train, make(), callback, strategy=strategy)
        notes[name] = {"raised": raised_by(run)}
        names = {"optimizer", "micro_batch_size", "activation_checkpointing"}
        found = {n: [r.status, *r.details] for n, r in rows_of(callback).items() if n in names}
        notes[name]["rows"] = found
    return notes


SCENARIOS: dict[str, Callable[[], Notes]] = {
    **{f"fixed_{name}": functools.partial(fixed, name) for name in DDP_MODELS if name in FIXED},
    **{f"whole_{name}": functools.partial(whole, name) for name in DDP_MODELS},
    "places": lambda: {key: run_out(*place) for key, place in PLACES.items()},
    "against_plain": run_against_plain,
    "exhausted": run_exhausted,
    "sparse": run_sparse,
    "evaluation": run_evaluation,
    "gives_way": run_gives_way,
    "precision": run_precision,
    "fsdp2_checkpointing": run_fsdp2_checkpointing,
    "fsdp2_precision": run_fsdp2_precision,
    "fsdp2_fixed": run_fsdp2_fixed,
    "accumulation": lambda: {
        "known length 2": accumulated(make, train, 2),
        "unknown length 3": accumulated(make, train, 3, **STREAMED),
        "FSDP2 3": accumulated(sharded, train_sharded, 3),
    },
    "fsdp2_monitor": run_fsdp2_monitor,
    "fsdp2_refused": run_fsdp2_refused,
    "fsdp1": run_fsdp1,
}
# --- what pytest compares ---


slow = pytest.mark.slow


def assert_near(values: list[float], truth: Any) -> None:
    mine, truth = (torch.as_tensor(v, dtype=torch.float64).flatten() for v in (values, truth))
    assert (mine - truth).norm() <= 1e-10 * truth.norm()


def assert_close(ours: Notes, theirs: Notes) -> None:
    """In float64, where 1e-10 leaves room for the order of sums and for nothing else."""
    assert ours["steps"] == theirs["steps"] > 0
    assert ours["parameters"].keys() == theirs["parameters"].keys()
    for name, values in theirs["parameters"].items():
        assert_near(ours["parameters"][name], values)
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-10)
    assert ours["logged"] == pytest.approx(theirs["logged"], rel=1e-6)  # metrics are float32


@slow
class TestDDP:
    @pytest.mark.parametrize("window", [1, 3])
    @pytest.mark.parametrize("scenario", [*(f"fixed_{name}" for name in FIXED), "fsdp2_fixed"])
    def test_fixed_size_trains_as_without(self, report, scenario, window):
        """Last batches of 3 and of 1 sample, so of two parts and one."""
        notes = report(scenario)
        for of_rank in notes:
            assert_close(of_rank[f"ours {window}"], of_rank[f"plain {window}"])
        first, second = (of_rank[f"ours {window}"]["parameters"] for of_rank in notes)
        assert first == second

    @pytest.mark.parametrize(("name", "window"), WHOLE)
    def test_auto_is_ddp_bit_for_bit_while_memory_is_enough(self, report, name, window):
        """The sum of two numbers has no order, so not even DDP's buckets make a difference."""
        for notes in report(f"whole_{name}"):
            assert notes[f"ours {window}"] == notes[f"plain {window}"]

    @pytest.mark.parametrize("key", PLACES)
    def test_out_of_memory_on_one_rank(self, report, key):
        """Both go on as if they had begun this batch with the smaller size, bit for bit."""
        first, second = (notes[key] for notes in report("places"))
        for rank, notes in enumerate((first, second)):
            assert notes["size"] == 2
            assert notes["ours"] == notes["smaller"]
            exactness = "approximate" if key.startswith("batch_norm") else "rounding"
            assert notes["row"][0::2] == ["on", exactness]
            assert bool(notes["said"]) == (rank == 0)
        assert first["ours"]["parameters"] == second["ours"]["parameters"]
        assert [notes["num_tries"] for notes in (first, second)] == num_tries(key)

    @pytest.mark.parametrize("window", [1, 3])
    def test_out_of_memory_changes_rounding_only(self, report, window):
        for notes in report("against_plain"):
            assert_close(notes[f"ours {window}"], notes[f"plain {window}"])

    @pytest.mark.parametrize("window", ["1", "3"])
    def test_no_memory_for_one_sample_ends_both_ranks(self, report, window):
        """In the second batch, so that parameters of the first step or none are there."""
        first, second = (notes[window] for notes in report("exhausted"))
        for notes in (first, second):
            kind, message = notes["raised"]
            assert kind == MemoryExhaustedError.__name__
            assert "2 samples at once, repeated with 1" in message
        assert "another process ran out of memory" in first["raised"][1]
        assert MESSAGE in second["raised"][1]
        assert first["parameters"] == second["parameters"]

    def test_sparse_gradients(self, report):
        for notes in report("sparse"):
            for size in ("auto", "2"):
                assert_close(notes[size], notes["plain"])

    def test_sparse_gradients_of_one_rank(self, report, monkeypatch):
        lit = exact(make(SparseOnOneRank, **SGD))
        optimizer, used = lit.configure_optimizers(), []
        for batch_idx in range(2):
            optimizer.zero_grad()
            for rank in range(RANKS):
                monkeypatch.setenv("RANK", str(rank))
                batch = batches(SIZES[rank], rank)[batch_idx].double()
                used.append(lit.model.uses(batch).any())
                (lit.model(batch) / RANKS).backward()
            optimizer.step()
        assert not all(used)
        for notes in report("sparse"):
            for name, parameter in lit.named_parameters():
                assert_near(notes["one rank"]["parameters"][name], parameter.detach())

    @pytest.mark.parametrize("size", ["fixed", "auto"])
    def test_validation_in_parts(self, report, size):
        """With buffers, which DDP shares in forward passes of validation too."""
        for notes in report("evaluation"):
            assert notes[size].keys() == notes["plain"].keys()
            assert notes[size] == pytest.approx(notes["plain"], rel=1e-6)

    def test_auto_gives_way(self, report):
        sync = "`SyncBatchNorm` computes statistics over all processes"
        hook = "`DDPStrategy(ddp_comm_hook=...)` synchronizes gradients in its own way"
        for notes in report("gives_way"):
            for name, reason in (("hook", hook), ("normed", sync), ("converted", sync)):
                status, details, _ = notes[name]["row"]
                assert status == "off"
                assert reason in details

    def test_a_static_graph_refuses_a_fixed_size(self, report):
        for notes in report("gives_way"):
            kind, message = notes["static"]["raised"]
            assert kind == IncompatibleError.__name__
            assert "static_graph=True" in message

    @pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
    @pytest.mark.parametrize("scenario", ["precision", "fsdp2_precision"])
    def test_precision_is_as_the_trainers(self, report, precision, scenario):
        for notes in report(scenario):
            assert notes[precision]["row"][0] == "on"
            assert notes[precision]["ours"] == notes[precision]["plain"]
            assert notes[precision]["ours"] != notes["32-true"]

    @pytest.mark.parametrize("key", ["known length 2", "unknown length 3", "FSDP2 3"])
    def test_gradient_is_the_mean_over_window_and_ranks(self, report, key):
        lit, window = exact(make()), int(key[-1])
        sizes = [*SIZES] if key == "known length 2" else [EQUAL_SIZES] * RANKS
        shares = [batches(of_rank, rank) for rank, of_rank in enumerate(sizes)]
        for notes in report("accumulation"):
            assert notes[key]["row"][0] == "on"
            starts = range(0, len(shares[0]), window)
            for gradient, start in zip(notes[key]["gradients"], starts, strict=True):
                lit.zero_grad()
                both = [batch for share in shares for batch in share[start : start + window]]
                torch.stack([lit.model(batch.double()) for batch in both]).mean().backward()
                assert_near(gradient, lit.model.head.weight.grad)


@slow
class TestFSDP2:
    def test_checkpointing_is_bitwise(self, report):
        for notes in report("fsdp2_checkpointing"):
            assert notes["row"][0] == "on"
            assert notes["ours"] == notes["plain"]

    def test_precision_with_a_scaler_is_refused(self, report):
        for notes in report("fsdp2_precision"):
            assert "no gradient scaler" in notes["refused"][1]

    def test_the_monitor_counts_the_share_of_a_rank(self, report):
        first, second = report("fsdp2_monitor")
        for notes in (first, second):
            assert notes["categories"]["parameter"] == notes["local_bytes"]
            assert notes["local_bytes"] == notes["all_bytes"] / RANKS
            assert notes["categories"]["optimizer_state"] >= 2 * notes["local_bytes"]
        assert first["peak_bytes"] == second["peak_bytes"]

    def test_what_cannot_be_gives_way(self, report):
        for notes in report("fsdp2_monitor"):
            assert notes["bare"]["activation_checkpointing"][0] == "on"
            assert notes["bare"]["optimizer"][0] == "on"
            assert notes["bare"]["micro_batch_size"][0] == "off"
        for notes in report("fsdp2_refused"):
            status, details, _ = notes["auto"]
            assert status == "off"
            assert "communicate in every forward pass" in details
            assert notes["auto trained"] == notes["plain"]

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("uneven", "some have more parts than others. Use `drop_last=True`"),
            ("half", "summed in half precision"),
            ("evaluation", "`micro_batch_size=2` in evaluation: under `ModelParallelStrategy`"),
        ],
    )
    def test_refused_on_both_ranks(self, report, name, reason):
        for notes in report("fsdp2_refused"):
            kind, message = notes[name]
            assert kind == IncompatibleError.__name__
            assert reason in message


@slow
class TestFSDP1:
    """As far as it goes without a GPU."""

    def test_no_training_here(self, report):
        for notes in report("fsdp1"):
            assert "requires a GPU accelerator" in notes["by name"][1]
            assert "non-CPU accelerator" in notes["fixed"]["raised"][1]

    def test_what_cannot_be_gives_way(self, report):
        for notes in report("fsdp1"):
            rows = notes["bare"]["rows"]
            assert [rows[name][0] for name in ("optimizer", "micro_batch_size")] == ["off", "off"]
            assert rows["activation_checkpointing"][0] == "on"
            own = notes["own checkpointing"]["rows"]["activation_checkpointing"]
            assert own[0] == "off"
            assert "was told to checkpoint activations" in own[1]

    @pytest.mark.parametrize("name", ["evaluation", "optimizer"])
    def test_refused(self, report, name):
        for notes in report("fsdp1"):
            assert notes[name]["raised"][0] == IncompatibleError.__name__


class DeepSpeedStrategy(SingleDeviceStrategy):
    """Stands for the real one, which needs a package and a GPU: same name, same answer."""

    handles_gradient_accumulation = True


class TestDeepSpeed:
    """What is decided by name; nothing of DeepSpeed itself runs here."""

    def trainer(self, callback: MemSaveCallback) -> Any:
        return make_trainer(pl, callback, strategy=DeepSpeedStrategy("cpu"))

    @pytest.mark.parametrize("settings", [{"size": 2}, {"size": MicroBatching(2, evaluation=True)}])
    def test_refused(self, settings):
        with pytest.raises(IncompatibleError, match="DeepSpeedStrategy"):
            self.trainer(only(**settings)).fit(make_lit())

    def test_state_of_joined_parameters_is_refused(self):
        """With 0.19.8 the state of ZeRO's flat partition was in 32 bits all the same."""
        with pytest.raises(IncompatibleError, match="their state would stay in 32 bits"):
            self.trainer(only(None, optimizer="8bit")).fit(make_lit())

    def test_auto_gives_way(self):
        callback = only("auto")
        self.trainer(callback).fit(make_lit())
        assert row(callback)[0] == "off"
        assert "`DeepSpeedStrategy` counts backward passes itself" in row(callback)[1]
