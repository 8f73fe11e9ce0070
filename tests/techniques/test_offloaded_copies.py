"""How many copies and waits of the host a step with offloaded weights has."""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lightning_memsave import ChunkedCrossEntropy, Offloading
from lightning_memsave.techniques import flat_memory
from lightning_memsave.techniques.host_memory import HostMemory
from lightning_memsave.techniques.micro_batching.loss_probe import LossProbe
from lightning_memsave.techniques.micro_batching.module_state import ModuleState
from lightning_memsave.techniques.offloading import copies
from tests.cases import make_batch, make_model
from tests.techniques.offloaded_loops import Offloaded
from tests.techniques.races import Races

NUM_PARTS = 5  # four blocks and the head
NUM_WEIGHTS = 4 * 6 + 2


def run_steps(what: str, device: str, *, in_backward: bool) -> Iterator[int]:
    """Train, and stop before each step."""
    made = Offloaded(what=what, device=device, in_backward=in_backward, optimizer="fused AdamW")
    for number in range(3):
        yield number
        made.step(number)
    made.close()


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("what", ["optimizer", "parameters"])
def test_what_lies_together_is_copied_at_once(what, in_backward, monkeypatch):
    """Weights to the device, and gradients from there."""
    found: Counter[int] = Counter()
    number = 0
    join = flat_memory.joined

    def count(*tensors: Any) -> Any:
        pairs = join(*tensors)
        found[number] += len(pairs)
        return pairs

    with Races().running(piece_bytes=2**24):
        monkeypatch.setattr(copies, "joined", count)
        for number in run_steps(what, "cpu", in_backward=in_backward):  # noqa: B007
            pass
    assert found[1] == 2 * NUM_PARTS < NUM_WEIGHTS


@contextmanager
def counting_waits() -> Iterator[Counter[str]]:
    """Count the host's waits for the GPU, by thread."""
    found: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for kind in (torch.cuda.Event, torch.cuda.Stream):

            def wait(self: Any, synchronize: Any = kind.synchronize) -> None:
                is_main = threading.current_thread() is threading.main_thread()
                found["main" if is_main else "other"] += 1
                synchronize(self)

            patch.setattr(kind, "synchronize", wait)
        yield found


@pytest.mark.gpu
def test_updates_in_backward_wait_once_for_each_part():
    with counting_waits() as found:
        steps = run_steps("optimizer", "cuda", in_backward=True)
        before = [found.copy() for _ in steps]
    assert sum((before[2] - before[1]).values()) <= 2 * NUM_PARTS


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def test_gradients_of_tables_and_of_weights_are_waited_for_at_once(device):
    model = make_model("tied").train().to(device)
    ChunkedCrossEntropy(heads="head").apply(model)
    technique = Offloading("parameters+embeddings", min_table_bytes=1)
    handles: list[Any] = []
    races = Races() if device == "cpu" else None
    with contextlib.nullcontext() if races is None else races.running():
        handles.append(technique.apply(model))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        handles.append(technique.update_in_background(optimizer))
        for number in range(3):
            loss = model(make_batch(number).to(device))
            with counting_waits() as found:
                loss.backward()
                optimizer.step()
            assert found.total() == 1  # in the thread that ends backward: on CUDA, any
            optimizer.zero_grad()
        for each in reversed(handles):
            each.undo()


def test_host_memory_keeps_its_type_inside_of_the_proof_of_a_loss():
    """It outlives the proof, which computes in float32."""
    forms = [torch.ones(3, 5), torch.ones(7)]
    with LossProbe(ModuleState(make_model("dropout"), make_batch(0)), is_sharp=False):
        made = HostMemory().tensors_like(forms, [torch.bfloat16, torch.float32])
    assert [tensor.dtype for tensor in made] == [torch.bfloat16, torch.float32]
