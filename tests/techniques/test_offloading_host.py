"""The host's side of offloading: its memory, its thread, and waits that somebody interrupts."""

import contextlib
import functools
import gc
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_memsave import ChunkedCrossEntropy, Offloading
from lightning_memsave.targets.target import parse_batch
from lightning_memsave.techniques.host_memory import HostMemory
from lightning_memsave.techniques.offloading import host_worker
from lightning_memsave.techniques.offloading.copies import StreamCopies
from lightning_memsave.techniques.offloading.host_worker import HostWorker
from lightning_memsave.techniques.residences import residence_of
from tests.helpers import adamw, assert_same, clones, seed_torch
from tests.techniques.in_backward import apply
from tests.techniques.offloaded_chain import Chain, batch_of
from tests.techniques.offloaded_loops import Offloaded
from tests.techniques.test_host_table import OPTIMIZERS, TiedModel, batch, on_host, pair

PAGE = os.sysconf("SC_PAGESIZE")
MANY = 2**24  # bytes


class Runtime:
    """Stands in for CUDA's, which locks whole pages, none twice, as long as there is room."""

    def __init__(self, room: float = float("inf")) -> None:
        self.pages = Counter[int]()
        self.sizes = dict[int, int]()
        self.room, self.num_calls = room, 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self.num_calls += 1
        own = pages_of(address, num_bytes)
        if any(self.pages[page] for page in own):
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        if sum(self.sizes.values()) + num_bytes > self.room:
            return 2  # cudaErrorMemoryAllocation
        self.pages.update(own)
        self.sizes[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.pages.subtract(pages_of(address, self.sizes.pop(address)))
        return 0


def pages_of(address: int, num_bytes: int) -> range:
    return range(address // PAGE, (address + num_bytes - 1) // PAGE + 1)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    found = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    return found


def bytes_like(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="meta")


def taken(num_bytes: int, *, locks: bool) -> tuple[HostMemory, Tensor]:
    memory = HostMemory()
    if locks:
        memory.lock()
    (tensor,) = memory.tensors_like([bytes_like(num_bytes)])
    return memory, tensor.fill_(3)


def in_child(function: Callable[[], int]) -> int:
    """Run a function in a forked process, which ends at once; give what it has returned."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, Python 3.12
        child = os.fork()
    if not child:
        status = 99
        try:
            status = function()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class TestForks:
    def test_a_worker_keeps_its_own_memory(self, runtime):
        """It may lie where the locked one does not exist, and objects there still stand for it."""
        held = [taken(MANY, locks=True)]

        def work() -> int:
            own = [np.full(MANY, 1, np.uint8) for _ in range(4)]  # OpenMP does not survive forks
            held.clear()
            gc.collect()
            return int(sum(int(each[::PAGE].sum()) for each in own) != 4 * MANY // PAGE)

        assert in_child(work) == 0
        assert len(runtime.sizes) == 1, "the child has unlocked nothing"

    def test_nothing_is_mapped_for_tensors_without_elements(self, runtime):
        memory = HostMemory()
        memory.lock()
        (tensor,) = memory.tensors_like([bytes_like(0)])
        assert tensor.shape == (0,)
        assert runtime.sizes == {}

    def test_too_much_is_out_of_memory(self):
        with pytest.raises(MemoryError, match="of host memory cannot be allocated"):
            HostMemory().tensors_like([bytes_like(2**60)])


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of threads that start."""
    names: list[str] = []
    start = threading.Thread.start

    def note(thread: threading.Thread) -> None:
        names.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", note)
    return names


def workers_alive() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("memsave-host")]


class TestThread:
    @pytest.mark.parametrize("in_backward", [False, True])
    def test_one_thread_serves_all_steps(self, in_backward, started):
        others = {*workers_alive()}  # of other tests, which end when they have been idle
        model = Chain()
        optimizer = adamw(model)
        technique = Offloading("parameters")
        undo = [technique.apply(model).undo]
        if in_backward:
            undo.append(apply(optimizer).undo)
        undo.append(technique.update_in_background(optimizer).undo)
        for _ in range(5):
            model(batch_of(4)).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.state_dict()  # waits: the thread has nothing to do then
        assert started.count("memsave-host_0") == 1
        for function in reversed(undo):
            function()
        assert {*workers_alive()} <= others

    def test_it_ends_with_what_it_works_for(self):
        worker, seen = HostWorker(in_background=True), list[Any]()
        worker.submit(lambda: seen.append(threading.current_thread())).result()
        del worker
        gc.collect()
        seen[0].join(60)
        assert not seen[0].is_alive()

    def test_what_was_given_is_done_before_it_ends(self):
        worker, seen, gate = HostWorker(in_background=True), list[int](), threading.Event()
        worker.submit(functools.partial(gate.wait, 60))  # type: ignore[arg-type]
        for number in range(3):
            worker.submit(functools.partial(seen.append, number))
        threading.Timer(0.01, gate.set).start()
        worker.close()
        assert seen == [0, 1, 2]
        worker.close()
        assert worker.submit(lambda: seen.append(3)).result() is None
        worker.close()
        assert seen[-1] == 3

    def test_results_do_not_live_until_the_next_work(self):
        worker, tensor = HostWorker(in_background=True), torch.ones(3)
        weak = StorageWeakRef(tensor.untyped_storage())
        worker.submit(functools.partial(tensor.add_, 1)).result()  # type: ignore[arg-type]
        worker.submit(lambda: None).result()
        del tensor
        assert weak.expired()
        worker.close()

    def test_a_forked_process_has_a_thread_of_its_own(self):
        worker = HostWorker(in_background=True)
        worker.submit(lambda: None).result()

        def work() -> int:
            seen: list[int] = []
            worker.submit(lambda: seen.append(1)).result(timeout=60)
            worker.close()
            return len(seen)

        assert in_child(work) == 1
        worker.close()

    def test_updates_end_before_the_process_does(self, tmp_path):
        """Python ends daemons wherever they are; memory is unlocked after that."""
        code = """
        import pathlib, sys, threading, time, weakref
        from lightning_memsave.techniques.offloading.host_worker import HostWorker

        class Memory: pass
        memory, path = Memory(), pathlib.Path(sys.argv[1])
        weakref.finalize(memory, lambda: path.write_text(path.read_text() + "unlocked "))
        worker = HostWorker(in_background=True)
        worker.submit(lambda: path.write_text(""))
        def work():
            time.sleep(0.2)
            path.write_text(path.read_text() + "updated ")
        worker.submit(work)
        """
        path = tmp_path / "done"
        command = [sys.executable, "-c", textwrap.dedent(code), str(path)]
        subprocess.run(command, check=True, timeout=120, cwd=Path(__file__).parents[2])
        assert path.read_text() == "updated unlocked "


class WaitedFor(torch.cuda.Event):
    """Notes of each event for which the host waits whether it lets the core do something else."""

    is_blocking: bool
    are_blocking: ClassVar[list[bool]] = []

    def __new__(cls, **settings: Any) -> "WaitedFor":
        made: WaitedFor = super().__new__(cls, **settings)
        made.is_blocking = settings.get("blocking", False)
        return made

    def synchronize(self) -> None:
        self.are_blocking.append(self.is_blocking)
        super().synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_host_that_waits_for_a_gpu_does_not_spin(dtype, monkeypatch):
    """The updates need the core."""
    streams: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Event", WaitedFor)
    monkeypatch.setattr(torch.cuda.streams, "Event", WaitedFor)
    monkeypatch.setattr(torch.cuda.Stream, "synchronize", streams.append)
    monkeypatch.setattr(WaitedFor, "are_blocking", [])
    model = Chain().to("cuda", dtype)
    technique, optimizer = Offloading(True, min_bytes=1), adamw(model)
    handle = technique.apply(model)
    updates = technique.update_in_background(optimizer)
    for size in (4, 8):  # in the second step, activations need larger buffers
        model(batch_of(size).to("cuda", dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.load_state_dict(model.state_dict())
    updates.undo()
    handle.undo()
    assert all(WaitedFor.are_blocking)
    assert len(WaitedFor.are_blocking) >= 9
    assert streams == []


class Interrupted:
    """Lets the user press Ctrl-C in the first wait for a worker, which goes on in the second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate, self._num_waits = threading.Event(), 0
        wait = Future.result

        def result(done: Any, timeout: float | None = None) -> Any:
            self._num_waits += 1
            if self._num_waits == 1:
                raise KeyboardInterrupt
            self.gate.set()
            return wait(done, timeout)

        monkeypatch.setattr(Future, "result", result)

    def work(self) -> None:
        assert self.gate.wait(60)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupted]:
    made = Interrupted(monkeypatch)
    yield made
    made.gate.set()


class TestInterrupts:
    """A wait that Ctrl-C ends is not over: the thread goes on, and who comes next waits for it."""

    def test_weights(self, interrupted):
        """Of the last update: waits for later ones would hide it."""
        model = nn.Linear(4, 4)
        technique, optimizer = Offloading("optimizer"), adamw(model)
        handle = technique.apply(model)
        updates = technique.update_in_background(optimizer)
        assert handle.residence is not None
        handle.residence.worker.submit(interrupted.work)
        before = model.weight.detach().clone()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(1, 4))
        handle.wait()
        assert not torch.equal(before, model.weight), "the update has come meanwhile"
        updates.undo()
        handle.undo()

    def test_tables(self, interrupted):
        _, (ours, optimizer) = pair(OPTIMIZERS["adamw"])
        residence = residence_of(ours)
        assert residence is not None
        residence.worker.submit(interrupted.work)
        before = ours.table.weight.detach().clone()
        ours(batch(0)).backward()
        optimizer.step()
        with pytest.raises(KeyboardInterrupt):
            ours(batch(0))
        ours.state_dict()
        assert not torch.equal(before, ours.table.weight), "the update has come meanwhile"
        residence.worker.close()

    def test_gradients_that_land(self, interrupted):
        worker = HostWorker(in_background=True)
        copies, landed = StreamCopies(worker, HostMemory(), None), torch.zeros(3)
        worker.submit(interrupted.work)
        copies._landings.append(worker.submit(functools.partial(landed.fill_, 1)))  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            copies.finish()
        copies.finish()
        assert torch.equal(landed, torch.ones(3))
        worker.close()

    def test_what_has_failed_is_said_once(self):
        worker = HostWorker(in_background=False)
        work = [worker.submit(each) for each in (lambda: None, fail(KeyError), fail(SystemExit))]
        with pytest.raises(KeyError):
            host_worker.wait_for(work)
        assert work == []


def fail(error: type[BaseException]) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


@contextmanager
def elsewhere() -> Iterator[None]:
    """New tensors are on another device unless told otherwise, as some users have it for CUDA."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def trained_weights(what: str, kind: Any, default: AbstractContextManager[None]) -> Any:
    seed_torch(0)
    model, batches = Chain(), [batch_of(4), batch_of(3)]
    technique = Offloading(what, min_bytes=1)
    with default:
        handle = technique.apply(model)
        optimizer = kind(model.parameters())
        updates = technique.update_in_background(optimizer)
        for batch in batches:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = clones(model.state_dict())
        updates.undo()
        handle.undo()
    return state, optimizer.state_dict()["state"]


class TestDefaultDevice:
    @pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
    @pytest.mark.parametrize("what", ["optimizer", "parameters+activations"])
    def test_weights_and_state(self, what, kind):
        """torch counts steps of some optimizers on the default device."""
        expected, _ = trained_weights(what, kind, contextlib.nullcontext())
        found, state = trained_weights(what, kind, elsewhere())
        assert_same(found, expected)
        assert {str(value.device) for each in state.values() for value in each.values()} == {"cpu"}

    def test_tables_tied_to_a_head(self):
        batches = [batch(number) for number in range(4)]

        def run(default: Callable[[], AbstractContextManager[None]]) -> dict[str, Tensor]:
            seed_torch(0)
            model = TiedModel()
            ChunkedCrossEntropy(heads="head").apply(model)
            optimizer = OPTIMIZERS["adamw"](model.parameters())
            undo = on_host(model, optimizer)
            del undo
            for each in batches:
                loss = model(each)
                with default():
                    loss.backward()
                    optimizer.step()
                optimizer.zero_grad()
            return clones(model.state_dict())

        assert_same(run(elsewhere), run(contextlib.nullcontext))

    def test_batches_of_predictions(self):
        spec = parse_batch("x=float32[2,3],y=int64[2]<10,mask=int64[2]<1")
        expected = spec.build()
        with elsewhere():
            found = spec.build()
        assert_same(found, expected)

    @pytest.mark.gpu
    def test_a_conversion_without_a_device_leaves_the_device(self):
        """It asked the conversion about a tensor of the default device."""
        made = Offloaded()
        made.model.cuda()
        made.model.float()
        assert made.residence.device.type == "cuda"
        made.model.cpu()
        assert made.residence.device.type == "cpu"
        made.close()
