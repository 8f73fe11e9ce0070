"""What blocks save for backward waits on the host: same numbers, fewer bytes on the device."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from lightning_memsave import ActivationCheckpointing, find_blocks
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.techniques.host_memory import HostMemory
from lightning_memsave.techniques.offloading.host_worker import HostWorker
from lightning_memsave.techniques.offloading.residence import Residence
from tests.helpers import InAutocast, gradients_of, seed_torch
from tests.techniques.offloaded_chain import (
    INPUT,
    KINDS,
    NUM_BLOCKS,
    WIDTH,
    Block,
    Chain,
    batch_of,
    offloading,
    watch,
)
from tests.techniques.races import Races


def test_the_last_input_alone_is_on_the_device_after_the_blocks():
    model, batch = Chain(), batch_of()
    with offloading(model) as offloaded:
        watched, live = watch(model, batch)
        # The last block's input and output.
        assert watched.at_head == 2
        forward, backward = watched.in_blocks[:NUM_BLOCKS], watched.in_blocks[NUM_BLOCKS:]
        # A block's own input, and the one before that is on its way.
        assert forward == [1] + [2] * (NUM_BLOCKS - 1)
        assert backward == [2] * (NUM_BLOCKS - 1) + [1]
        assert offloaded.host_bytes == (NUM_BLOCKS - 1) * INPUT
        assert live.peak.host_bytes == (NUM_BLOCKS - 1) * INPUT
    with_all_inputs, _ = watch(model_checkpointed(), batch)
    assert with_all_inputs.at_head == NUM_BLOCKS + 1


def model_checkpointed() -> Chain:
    model = Chain()
    ActivationCheckpointing().apply(model)
    return model


@pytest.mark.parametrize(
    ("which", "num_saved"),
    # "selective" keeps the outputs of both layers, too; without checkpointing the result of tanh,
    # from which the second layer's weight gets its gradient, too.
    [("all", 1), ("nested", 1), ("selective", 3), (None, 2)],
)
def test_each_kind_moves_what_it_saves_and_no_weights(which, num_saved):
    model, batch = Chain(), batch_of()
    with offloading(model, which) as offloaded:
        with LiveTensors(model) as live:
            for _ in range(3):
                loss = model(batch)
                kept_bytes = live.breakdown.activation_bytes
                loss.backward()
                del loss
                assert offloaded.host_bytes == num_saved * (NUM_BLOCKS - 1) * INPUT
        # One row for each sample is what the head leaves.
        assert kept_bytes - (num_saved + 1) * INPUT < INPUT / WIDTH * 2
        assert live.peak.host_bytes == offloaded.host_bytes


def test_host_memory_does_not_grow_with_steps_nor_with_lengths():
    model = Chain()
    sizes = [256, 1024, 64, 1000, 1024, 512, 1023]
    with offloading(model, min_bytes=1) as offloaded:
        found = []
        for size in sizes:
            model(batch_of(size)).backward()
            found.append(offloaded.host_bytes)
        assert found == [(NUM_BLOCKS - 1) * INPUT // 4] + [(NUM_BLOCKS - 1) * INPUT] * 6


def test_what_is_not_an_activation_stays():
    class Reading(Block):
        def __init__(self, outer: nn.Parameter) -> None:
            super().__init__()
            self.outer = [outer]
            self.register_buffer("table", torch.ones(2048, WIDTH))

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            torch.ones(2048, WIDTH, device="meta", requires_grad=True).tanh().exp()
            own = self.table[: len(x)] * self.up.weight.sum()
            return x + own + (x @ self.outer[0].t()) @ self.outer[0]

    model = Chain()
    wide = nn.Parameter(torch.ones(2048, WIDTH))
    model.blocks = nn.ModuleList([Reading(wide) for _ in range(NUM_BLOCKS)])
    with offloading(model, None, min_bytes=2048 * WIDTH * 4) as offloaded:
        model(batch_of()).backward()
        # The product with the wide matrix alone.
        assert offloaded.host_bytes == (NUM_BLOCKS - 1) * 1024 * 2048 * 4
        assert len(offloaded._copies) == 1


def test_copies_of_weights_in_autocast_stay():
    model = Chain()
    with offloading(model, None, min_bytes=WIDTH * WIDTH * 2) as offloaded:
        InAutocast(model)(batch_of()).backward()
        # In bfloat16: a block's input, and the result of tanh.
        assert offloaded.host_bytes == (NUM_BLOCKS - 1) * INPUT


def test_small_tensors_stay():
    model = Chain()
    with offloading(model, min_bytes=INPUT + 1) as offloaded:
        model(batch_of()).backward()
        assert offloaded.host_bytes == 0
    with offloading(model, min_bytes=INPUT) as offloaded:
        model(batch_of()).backward()
        assert offloaded.host_bytes > 0


def test_a_tensor_that_all_blocks_save_goes_once():
    model = Chain(is_masked=True)
    with offloading(model) as offloaded:
        watched, _ = watch(model, batch_of())
        assert offloaded.host_bytes == NUM_BLOCKS * INPUT
        # It never leaves, and never comes twice: the last block keeps it.
        assert watched.at_head == 3
        assert max(watched.in_blocks) == 3


def test_what_others_hold_on_to_does_not_come_back():
    class Holding(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            self.held = [x]
            for block in self.blocks:
                x = block(x)
                self.held.append(x)
            return self.head(x).mean()

    model = Holding()
    with offloading(model):
        watched, _ = watch(model, batch_of())
        assert watched.in_blocks[NUM_BLOCKS:] == [NUM_BLOCKS + 1] * NUM_BLOCKS


def test_a_tensor_that_was_changed_between_two_passes():
    block, given = Chain(), batch_of().requires_grad_()
    with torch.no_grad():
        mask = torch.full_like(given, 0.5)

    def gradient() -> Tensor:
        (found,) = torch.autograd.grad(run().mean(), given)
        return found

    def run() -> Tensor:
        x = given
        for each in block.blocks:
            x = each(x, mask)
        return x

    with offloading(block):
        unused = run()
        mask.mul_(2.0)
        with_it = gradient()
        del unused
    assert torch.equal(gradient(), with_it)


class Views(Chain):
    """Blocks get views: transposed, with an offset, parts of one tensor, and labels."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        labels = torch.arange(len(x) * WIDTH).view(len(x), WIDTH)
        for block in self.blocks:
            wide = torch.cat([x, x.tanh()], dim=1).t().contiguous().t()
            x = block(wide[:, :WIDTH], wide[:, WIDTH:]) + block(wide[:, WIDTH:], labels % 3)
            labels += 1  # not the one that was saved
        return self.head(x).mean()


@pytest.mark.parametrize("which", KINDS)
def test_views_and_labels_are_what_they_were(which):
    seed_torch(1)
    model, batch = Views(), batch_of(64)
    model(batch).backward()
    expected = gradients_of(model)
    with Races().running(), offloading(model, which, min_bytes=0):
        for _ in range(3):
            model.zero_grad()
            model(batch).backward()
    assert all(map(torch.equal, gradients_of(model), expected))


@pytest.mark.parametrize("which", KINDS)
def test_each_byte_crosses_once_in_each_direction(which):
    model, num_saved = Chain(), {"selective": 3, None: 2}.get(which, 1)
    with Races().running() as races, offloading(model, which, min_bytes=0):
        model(batch_of()).backward()
        assert races.copied_bytes == 2 * (NUM_BLOCKS - 1) * num_saved * INPUT


def test_offloaded_weights_are_not_saved_as_activations():
    model, batch = Chain(), batch_of()
    worker = HostWorker(in_background=False)
    params, memory = [*model.parameters()], HostMemory()
    blocks = find_blocks(model)
    residence = Residence(model, blocks, params, worker, memory)
    undo = [residence.release, *residence.start()]
    with offloading(model, None) as offloaded:
        model(batch).backward()
        assert offloaded.host_bytes == 2 * (NUM_BLOCKS - 1) * INPUT
    for function in reversed(undo):
        function()


@pytest.mark.gpu
@pytest.mark.parametrize("which", KINDS)
def test_on_a_gpu(which):
    def run(*, is_offloaded: bool) -> list[Tensor]:
        seed_torch(1)
        model, batch = Chain().cuda(), batch_of(2**16).cuda()
        found = []
        with offloading(model, which) if is_offloaded else nullcontext():
            for _ in range(5):
                torch.cuda._sleep(10**7)  # the CPU runs ahead
                model(batch).backward()
                found.append(torch.cuda.memory_reserved())
        assert found[-1] == found[1]
        return [p.grad.cpu() for p in model.parameters()]

    pairs = zip(run(is_offloaded=True), run(is_offloaded=False), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
