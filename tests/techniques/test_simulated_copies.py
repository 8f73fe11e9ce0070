"""Do the simulated copies notice what would go wrong on a GPU?"""

import pytest
import torch

from lightning_memsave.techniques.offloading.copies import StreamCopies
from lightning_memsave.techniques.offloading.host_memory import HostMemory
from lightning_memsave.techniques.offloading.host_worker import HostWorker
from tests.techniques.simulated_copies import SimulatedCopies, SimulatedWorker
from tests.techniques.simulated_streams import Streams


def copies(seed: int | None = None) -> SimulatedCopies:
    return SimulatedCopies(HostWorker(in_background=False), seed)


def test_what_nobody_waited_for_is_not_there():
    simulated, target = copies(), torch.zeros(3)
    simulated.to_device([target], [torch.ones(3)])
    assert target.isnan().all()
    simulated.finish()  # of copies to the host
    assert target.isnan().all()


@pytest.mark.parametrize("direction", ["to_device", "send_to_host"])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_copy_is_there_after_waiting(direction, seed):
    simulated = copies(seed)
    sources = [torch.full((3,), float(i)) for i in range(4)]
    targets = [torch.zeros(3) for _ in sources]
    start = getattr(simulated, direction)
    waits = [start([t], [s]) for t, s in zip(targets, sources, strict=True)]
    waits[2]()
    waits[1]()
    assert all(torch.equal(t, s) for t, s in zip(targets[:3], sources, strict=False))
    assert seed is not None or targets[3].isnan().all()
    simulated.synchronize()
    assert torch.equal(targets[3], sources[3])
    assert simulated.problems == []


def test_a_copy_up_does_not_wait_for_a_copy_down():
    simulated = copies()
    device, host, back = torch.ones(3), torch.zeros(3), torch.zeros(3)
    came_down = simulated.send_to_host([host], [device])
    simulated.to_device([back], [host])()
    assert back.isnan().all()
    came_down()
    simulated.to_device([back], [host])()
    assert torch.equal(back, device)


@pytest.mark.parametrize(("direction", "given_back"), [("to_device", 0), ("send_to_host", 1)])
def test_device_memory_that_is_given_back_too_early_is_noticed(direction, given_back):
    simulated, tensors = copies(), [torch.ones(3), torch.zeros(3)]
    wait = getattr(simulated, direction)([tensors[0]], [tensors[1]])
    del tensors[given_back]
    wait()
    assert len(simulated.problems) == 1


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_sums_on_the_host_are_there_after_finishing(seed):
    simulated, target = copies(seed), torch.ones(3, dtype=torch.float64)
    simulated.to_host(target, torch.full((3,), 2.0), adds=True)
    simulated.to_host(target, torch.full((3,), 4.0), adds=True)
    assert seed is not None or target.isnan().all()
    simulated.finish()
    assert target.tolist() == [7.0] * 3
    simulated.to_host(target, torch.full((3,), 5.0), adds=False)
    simulated.finish()
    assert target.tolist() == [5.0] * 3


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0, 3), (40, 70)])
def test_gradients_land_in_any_layout_and_type(shape, dtype, adds):
    streams = Streams()
    with streams.running():
        copies = StreamCopies(SimulatedWorker(), HostMemory(), torch.device("cpu"))
        pairs = []
        for number in range(3):
            source = torch.randn(shape).to(dtype)
            if number and source.ndim:
                source = source.t().contiguous().t()
            pairs.append((torch.ones(shape), source))
            copies.to_host(*pairs[-1], adds=adds)
        copies.finish()
    for target, source in pairs:
        assert torch.equal(target, source.float() + adds)
    assert streams.problems == []
