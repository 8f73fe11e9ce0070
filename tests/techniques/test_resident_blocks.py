"""Blocks that stay on the device, beside others whose weights wait on the host."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memsave import ActivationCheckpointing, Offloading, predict_memory
from lightning_memsave.core.memory import is_host
from lightning_memsave.core.trainer_facts import TrainerFacts
from lightning_memsave.errors import ConfigurationError, IncompatibleError
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.measure.storages import tensors_in
from lightning_memsave.prediction.cuda.constants import margin_bytes
from lightning_memsave.prediction.cuda.gpus import Gpu
from lightning_memsave.techniques.optimizer_step import allocate_state
from lightning_memsave.units import MIB
from tests.cases import make_batch, make_model
from tests.helpers import adamw, assert_same, in_pairs
from tests.techniques.offloaded_loops import (
    LOOPS,
    OPTIMIZERS,
    Offloaded,
    assert_bitwise,
    optimizer_of,
    trained,
    trained_without,
)

SHARES = [1, 3, "50%", "100%"]


class TestBitwise:
    @pytest.mark.parametrize(
        ("what", "name", "loop", "kind", "resident", "recomputes"),
        in_pairs(
            ["optimizer", "parameters", "parameters+activations"],
            *(["tied", "eager_bert", "used_twice", "frozen"], [*LOOPS], [*OPTIMIZERS]),
            *(SHARES, [False, True]),
        ),
    )
    def test_whole_loops(self, what, name, loop, kind, resident, recomputes):  # noqa: PLR0917
        model = make_model(name).train()
        if recomputes:
            ActivationCheckpointing().apply(model)
        optimizer = optimizer_of(model, kind)
        technique = Offloading(what, min_bytes=1, resident=resident)
        handle = technique.apply(model)
        technique.update_in_background(optimizer)
        assert_same(trained(model, optimizer, loop), trained_without(name, loop, kind))
        handle.undo()

    @pytest.mark.parametrize("resident", SHARES)
    @pytest.mark.parametrize("kind", ["AdamW", "8bit", "momentum"])
    def test_updates_in_backward(self, kind, resident):
        how: dict[str, Any] = {"optimizer": kind, "in_backward": True}
        made = Offloaded("dropout", "parameters", resident=resident, **how)
        assert_bitwise(made, Offloaded("dropout", None, **how))
        made.close()

    @pytest.mark.parametrize("in_backward", [False, True])
    @pytest.mark.parametrize("resident", SHARES)
    def test_masters(self, resident, in_backward):
        """Resident weights are float32, which autocast rounds as the host rounds the others."""
        how: dict[str, Any] = {"rounding": "master", "in_backward": in_backward}
        made = Offloaded("tied", "parameters", resident=resident, recomputes=True, **how)
        assert_bitwise(made, Offloaded("tied", "parameters", recomputes=True, **how))
        made.close()

    def test_weights_that_a_resident_block_shares_wait_on_the_host(self):
        runs = []
        for resident in (None, 1, 2):
            model = make_model("dropout").train()
            model.blocks[3].up.weight = model.blocks[0].up.weight
            optimizer = adamw(model)
            if resident is not None:
                technique = Offloading("parameters", resident=resident)
                handle = technique.apply(model)
                technique.update_in_background(optimizer)
                assert model.blocks[0].up.weight in handle.residence.rest
            found = []
            for number in range(3):
                torch.manual_seed(number)
                loss = model(make_batch(number))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
            if resident is not None:
                handle.undo()
            runs.append((found, [p.detach().clone() for p in model.parameters()]))
        assert_same(runs[1], runs[0])
        assert_same(runs[2], runs[0])


class TestPlaces:
    def test_the_last_blocks_are_ordinary_ones(self):
        made = Offloaded("dropout", "parameters", resident="60%")
        made.model(make_batch(0)).backward()
        made.optimizer.step()
        made.handle.wait()
        for name, param in made.model.named_parameters():
            tensors = [param, param.grad, *tensors_in(made.optimizer.state[param])]
            places = {is_host(tensor.untyped_storage()) for tensor in tensors}
            assert places == {not name.startswith(("blocks.2", "blocks.3"))}, name
        assert "the last 2 of 4 blocks stay on the device" in made.handle.skipped
        made.close()

    @pytest.mark.parametrize("kind", ["AdamW", "momentum"])
    def test_of_state_that_is_allocated_before_the_first_step(self, kind):
        """As micro-batches do; of one group, some is on the host."""
        made = Offloaded("dropout", "parameters", optimizer=kind, resident=2)
        with LiveTensors(made.model, [made.optimizer]) as counter:
            made.model(make_batch(0)).backward()
            allocate_state(made.optimizer)
            before = counter.breakdown
            made.optimizer.step()
            made.handle.wait()
            after = counter.breakdown
        own = [p for index in (2, 3) for p in made.model.blocks[index].parameters()]
        states = [tensor for p in own for tensor in tensors_in(made.optimizer.state[p])]
        num_bytes = sum({t.data_ptr(): t.nbytes for t in states}.values())
        assert after.optimizer_state_bytes == num_bytes > 0
        assert before.activation_bytes == num_bytes, "it is not known yet as state"
        made.close()

    @pytest.mark.parametrize("number", [1, 2, 3, 4])
    def test_each_moves_its_bytes_to_the_device(self, number):
        """Weights, gradients and both moments, beside what streaming needs."""
        peaks = [peak_with(resident) for resident in (0, number)]
        block = 4 * sum(p.numel() for p in make_model("dropout").blocks[0].parameters())
        counts = 4 * len([*make_model("dropout").blocks[0].parameters()])  # of steps
        streamed = min(2, 4 - number) - 2  # those that are on the device at a time
        device = [peak.total_bytes - peak.activation_bytes - peak.temporary_bytes for peak in peaks]
        assert device[1] - device[0] == number * (4 * block + counts) + streamed * block
        assert peaks[0].host_bytes - peaks[1].host_bytes == number * (4 * block + counts)


def peak_with(resident: int) -> Any:
    """The largest place of a step in steady state, in which gradients are complete."""
    made = Offloaded("dropout", "parameters", resident=resident, recomputes=True)
    made.step(0)
    made.step(1)
    made.handle.wait()
    with LiveTensors(made.model, [made.optimizer]) as counter:
        made.step(2)
        made.handle.wait()
    made.close()
    return counter.peak


class TestLimits:
    @pytest.mark.parametrize("resident", [-1, True, 0.5, "60", "101%", "-5%", "all", None])
    def test_what_is_no_number_of_blocks(self, resident):
        with pytest.raises(ConfigurationError, match=r'Use a number such as 4, "60%" or "auto"'):
            Offloading("parameters", resident=resident)

    @pytest.mark.parametrize("what", ["embeddings"])
    def test_where_no_weights_of_blocks_wait(self, what):
        with pytest.raises(ConfigurationError, match=r'Use `Offloading\("parameters", \.\.\.\)`'):
            Offloading(what, resident=1)

    def test_more_than_there_are(self):
        with pytest.raises(IncompatibleError, match="Use a number up to 4"):
            Offloading("parameters", resident=5).apply(make_model("dropout"))

    def test_processes_that_share_weights(self):
        facts = TrainerFacts(("DDPStrategy", "Strategy"), 2, None)
        (problem,) = Offloading("parameters", resident=1).conflicts(facts, "")
        assert problem.what == "`resident=1`"
        assert problem.fix.startswith("Leave it out")
        assert not Offloading("parameters").conflicts(facts, "")

    def test_host_memory_is_that_of_the_others(self):
        model = make_model("dropout")
        block, rest = (
            sum(p.numel() for p in model.get_submodule(name).parameters())
            for name in ("blocks.0", "head")
        )
        found = [Offloading("parameters", resident=n).host_bytes(model)[0] for n in range(5)]
        assert found == [16 * (rest + (4 - n) * block) for n in range(5)]


def test_coupled_updates_of_both():
    """LBFGS joins what waits on the host with what does not."""
    runs = []
    for is_offloaded in (False, True):
        model = make_model("dropout").eval()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, lr=0.1)
        if is_offloaded:
            technique = Offloading("parameters", resident=2)
            handle = technique.apply(model)
            technique.update_in_background(optimizer)

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(make_batch(0)).square().mean()
            loss.backward()
            return loss

        runs.append([optimizer.step(closure).item() for _ in range(3)])
    handle.undo()
    assert runs[0] == runs[1]


@pytest.mark.parametrize(("resident", "number"), [(1, 1), ("50%", 2), (3, 3)])
def test_activations_of_resident_blocks_stay(resident, number):
    """Of a checkpointed block its input, but for the last one of those that wait."""
    runs = []
    for each in (0, resident):
        made = Offloaded("dropout", "activations", resident=each, min_bytes=1, recomputes=True)
        assert_bitwise(made, Offloaded("dropout", None, recomputes=True))
        runs.append(made.handle.memory.peak_bytes)
        made.close()
    assert runs[1] * 3 == runs[0] * (3 - number)
    assert runs[0] > 3 * make_batch(0).nbytes


def test_a_loop_knows_no_budget():
    with pytest.raises(IncompatibleError, match=r"`resident='auto'`: only a prediction .*\"60%\""):
        Offloading("parameters", resident="auto").apply(make_model("dropout"))


def test_a_prediction_fills_a_gpu():
    """With as many blocks as fit, and one more does not; without any GPU it is refused."""
    gpu = Gpu("small", 820 * MIB)
    room = gpu.total_bytes - margin_bytes(gpu.total_bytes)
    layers = [nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(12)]
    model, batch = nn.Sequential(*layers), torch.ones(8, 512)

    def predicted(resident: Any, **more: Any) -> Any:
        offload = None if resident is None else Offloading("parameters", resident=resident)
        settings = {"preset": "off", "offload": offload}
        return predict_memory(
            model, batch, settings=settings, loss=lambda output, _: output.mean(), **more
        )

    assert predicted(None, gpu=gpu).device_bytes > room
    filled = predicted("auto", gpu=gpu)
    assert filled.device_bytes <= room
    text = re.search(r"(\d+) of 12 blocks stay there", filled.assumptions[-1])
    assert text is not None
    number = int(text[1])
    assert predicted(number, gpu=gpu).device_bytes == filled.device_bytes
    assert predicted(number + 1, gpu=gpu).device_bytes > room
    whole = predicted("auto", gpu="T4")
    assert whole.peak_bytes == predicted(None, gpu="T4").peak_bytes
    with pytest.raises(ConfigurationError, match='Use `gpu="RTX 3060"`'):
        predicted("auto")
