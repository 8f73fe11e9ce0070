"""What users of other tools report about offloading does not happen here, each by its name.

Those with tests elsewhere: values that are read before they came, and memory that is used again too
early (`test_simulated_offloading`, `test_offloaded_activations`), no clipping, accumulation or
schedulers, checkpoints that nothing else loads (`test_offloading`), labels that are overwritten,
stashes that stay after an error (`test_offloaded_activations_limits`), gradients of a failed pass
in the next step (`test_offloading_races`), only one kind of model (`test_contract`), strategies
(`tests/callbacks/test_offload`).
"""

import gc
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memsave.errors import IncompatibleError, MemsaveWarning
from lightning_memsave.techniques.flat_memory import ALIGNMENT_BYTES
from lightning_memsave.techniques.host_memory import HostMemory
from lightning_memsave.techniques.low_precision_weights.technique import LowPrecisionWeights
from lightning_memsave.techniques.offloading.handle import OffloadingHandle
from lightning_memsave.techniques.offloading.host_worker import HostWorker
from lightning_memsave.techniques.offloading.replacements import Replacement
from lightning_memsave.techniques.offloading.technique import Offloading
from tests.cases import make_batch, make_model
from tests.helpers import adamw, assert_same
from tests.techniques.offloaded_chain import Chain, batch_of
from tests.techniques.races import Races
from tests.techniques.test_offloading_host import Runtime

EVERYTHING = Offloading("parameters+activations", min_bytes=1)


@contextmanager
def trained(
    technique: Offloading, model: nn.Module
) -> Iterator[tuple[OffloadingHandle, torch.optim.Optimizer]]:
    optimizer = adamw(model)
    handle = technique.apply(model)
    updates = technique.update_in_background(optimizer)
    yield handle, optimizer
    updates.undo()
    handle.undo()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    model(batch).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.usefixtures("only_own_tensors")
@pytest.mark.parametrize("technique", [Offloading(), EVERYTHING], ids=["optimizer", "everything"])
def test_nothing_grows_from_step_to_step(technique):
    """Streams, buffers, events and threads of the first steps serve all others."""
    model = Chain()
    of_others = set(threading.enumerate())  # other tests' threads may end meanwhile
    with trained(technique, model) as (handle, optimizer):
        counts, others = [], []
        for number in range(24):
            step(model, optimizer, batch_of(64))
            handle.wait()
            if number % 10 == 3:
                assert handle.residence is not None
                handle.residence.worker.close()
                gc.collect()
                pieces = len(handle.residence.memory._pieces)
                counts.append(len(gc.get_objects()))
                others.append((pieces, len(set(threading.enumerate()) - of_others)))
    assert max(counts) - counts[0] < 5  # less than one in each step
    assert others == [others[0]] * 3


@contextmanager
def locked(runtime: Runtime) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, Races().running():
        patch.setattr(torch.cuda, "cudart", lambda: runtime)
        yield


def test_locked_memory_is_not_rounded_up_to_powers_of_two():
    model, runtime = nn.Sequential(*[nn.Linear(72, 72) for _ in range(4)]), Runtime()
    weights = [param.nbytes for param in model.parameters()]
    assert sum(1 << (size - 1).bit_length() for size in weights) > 1.5 * sum(weights)
    technique = Offloading(blocks=nn.Linear)
    with locked(runtime), trained(technique, model) as (handle, optimizer):
        model(torch.ones(2, 72)).sum().backward()
        # Weights and gradients; optimizer state stays on the host, where the kernel finds it.
        assert sum(runtime.sizes.values()) - 2 * sum(weights) < 2 * ALIGNMENT_BYTES * len(weights)
    del handle, optimizer
    gc.collect()
    assert runtime.sizes == {}


def test_memory_is_locked_in_the_first_step_only():
    """It takes milliseconds each time."""
    model, runtime, found = Chain(), Runtime(), []
    with locked(runtime), trained(EVERYTHING, model) as (_, optimizer):
        for number in range(6):
            step(model, optimizer, batch_of(64 - number))
            found.append(runtime.num_calls)
    assert found == [found[0]] * 6


@pytest.mark.parametrize("room", [0, 2**17])
def test_memory_that_cannot_be_locked_is_not_out_of_memory(room):
    model, runtime = make_model("dropout"), Runtime(room)
    with locked(runtime), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with trained(Offloading(), model) as (_, optimizer):
            step(model, optimizer, make_batch(0))
    (said,) = caught  # once, though it is true of many parts
    assert said.category is MemsaveWarning
    assert "page-locked" in str(said.message)
    assert "`ulimit -l`" in str(said.message)
    plain = make_model("dropout")
    step(plain, adamw(plain), make_batch(0))
    assert_same(model.state_dict(), plain.state_dict())


@pytest.mark.gpu
def test_memory_that_cannot_be_locked_is_no_error_of_the_next_kernel():
    memory, runtime = HostMemory(), torch.cuda.cudart()
    (made,) = memory.tensors_like([torch.empty(2**20, device="cuda")])
    assert int(runtime.cudaHostRegister(made.data_ptr(), made.nbytes, 0)) == 0
    with pytest.warns(MemsaveWarning, match="page-locked"):
        memory.lock()  # pages are locked once only
    assert torch.ones(3, device="cuda").sum().item() == 3
    assert int(runtime.cudaHostUnregister(made.data_ptr())) == 0


@pytest.mark.parametrize("fails", [False, True])
def test_threads_of_the_updates_are_those_that_were_asked_for_and_of_the_rest_as_before(fails):
    before, seen = torch.get_num_threads(), []

    def work() -> None:
        seen.append(torch.get_num_threads())
        if fails:
            raise KeyError

    worker = HostWorker(in_background=True, num_threads=before + 2)
    done = worker.submit(work)
    assert isinstance(done.exception(), KeyError) == fails
    assert seen == [before + 2]
    assert torch.get_num_threads() == before
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen[-1] == before
    worker.close()


@pytest.mark.parametrize(("threads", "expected"), [(1, [7]), (3, [3])])
def test_updates_beside_a_gpu_do_not_run_on_one_core(threads, expected, monkeypatch):
    """Launchers set `OMP_NUM_THREADS=1`."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(threads)
    try:
        worker = HostWorker(in_background=True)
        worker.use_all_cores()
        worker.submit(lambda: seen.append(torch.get_num_threads())).result()
        worker.close()
    finally:
        torch.set_num_threads(before)
    assert seen == expected


class TestGradientsOfWeightsThatWait:
    """A graph knows them on the device, or in another type: it would find none, and say nothing."""

    REFUSED = r"`torch\.autograd\.grad` or `backward\(inputs=\.\.\.\)` of a weight that waits"

    @contextmanager
    def offloaded(self, device: str) -> Iterator[Chain]:
        model = Chain().to(device)
        with trained(Offloading("parameters"), model):
            if device == "cuda":
                yield model
                return
            handle = LowPrecisionWeights("master").apply(model)
            with torch.autocast("cpu", torch.bfloat16):
                yield model
            handle.undo()

    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
    @pytest.mark.parametrize(
        "take",
        [
            lambda loss, weights: torch.autograd.grad(loss, weights, allow_unused=True),
            lambda loss, weights: torch.autograd.grad(loss, weights, materialize_grads=True),
            lambda loss, weights: loss.backward(inputs=weights),
        ],
        ids=["unused", "zeros", "backward"],
    )
    def test_is_refused(self, device, take):
        with self.offloaded(device) as model:
            loss = model(batch_of(8).to(device))
            with pytest.raises(IncompatibleError, match=self.REFUSED):
                take(loss, [model.blocks[0].up.weight])

    def test_what_a_graph_knows_there_is_found(self):
        with self.offloaded("cpu") as model:
            weight: Any = model.blocks[0].up.weight
            unused = torch.ones(3, requires_grad=True)
            penalty = (weight**2).sum()
            found, nothing = torch.autograd.grad(penalty, [weight, unused], allow_unused=True)
            assert torch.equal(found, 2 * weight)
            assert nothing is None

    def test_replacements_stand_until_the_last_one_who_needs_them(self):
        class Owner:
            def run(self) -> str:
                return "own"

        replaced: Replacement = Replacement(run=lambda self: f"not {replaced.own['run'](self)}")
        first, second = replaced.on(Owner), replaced.on(Owner)
        first()
        assert Owner().run() == "not own"
        second()
        assert Owner().run() == "own"
