"""What blocks save for backward waits on the host: same numbers, fewer bytes on the device."""

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_memsave.core.blocks import find_blocks
from lightning_memsave.core.memory import emulating_cuda
from lightning_memsave.core.technique import Handle
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.techniques.activation_checkpointing.technique import (
    ActivationCheckpointing,
)
from lightning_memsave.techniques.offloading.activations import OffloadedActivations
from lightning_memsave.techniques.offloading.copies import Copies, copies_for
from lightning_memsave.techniques.offloading.host_memory import HostMemory
from lightning_memsave.techniques.offloading.host_worker import HostWorker
from lightning_memsave.techniques.offloading.residence import Residence
from tests.cases import MODELS, make_batch, make_model
from tests.helpers import InAutocast, assert_bitwise_equal, seed_torch, snapshot, train
from tests.techniques.simulated_copies import SimulatedCopies

KINDS = (None, "all", "nested", "selective")
WIDTH, NUM_BLOCKS = 32, 5


@dataclass(eq=False)
class Offloads:
    """As a technique, with copies that take their time."""

    seed: int | None = None
    num_kept: int = 1
    make_copies: Callable[..., Copies] = SimulatedCopies

    def apply(self, model: nn.Module) -> Handle[nn.Module]:
        worker = HostWorker(in_background=False)
        self.copies: Any = self.make_copies(worker, self.seed)
        self.offloaded = OffloadedActivations(
            find_blocks(model),
            lambda _: self.copies,
            HostMemory(),
            min_bytes=0,
            num_kept=self.num_kept,
        )
        return Handle(model, ["blocks"], undo=self.offloaded.start())


def simulate(name: str, which: str | None, offloads: Any, wrap: Any = lambda model: model) -> None:
    """Compare training with and without; also what simulated copies found."""
    model = make_model(name)
    own = [] if which is None else [ActivationCheckpointing(which)]
    if not find_blocks(model):
        own = []
    plain = train(wrap(model), make_batch)
    assert_bitwise_equal(train(wrap(model), make_batch, [*own, offloads]), plain)
    offloads.copies.synchronize()
    assert offloads.copies.problems == []


@pytest.mark.parametrize("which", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_training_is_the_same_bit_for_bit(name, which):
    offloads = Offloads()
    simulate(name, which, offloads)
    assert (offloads.copies.num_started > 0) == (name != "unrepeated")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("which", KINDS)
def test_so_it_is_whenever_copies_happen(which, seed):
    simulate("used_twice", which, Offloads(seed))
    simulate("eager_bert", which, Offloads(seed, num_kept=2))


@pytest.mark.parametrize("which", KINDS)
def test_so_it_is_in_autocast(which):
    simulate("transformer", which, Offloads(), InAutocast)


class _NobodyWaitsForDown(SimulatedCopies):
    def send_to_host(self, targets: Any, sources: Any) -> Callable[[], None]:
        super().send_to_host(targets, sources)
        return lambda: None


class _NobodyWaitsForUp(SimulatedCopies):
    def to_device(self, targets: Any, sources: Any) -> Callable[[], None]:
        super().to_device(targets, sources)
        return lambda: None


@pytest.mark.parametrize("broken", [_NobodyWaitsForDown, _NobodyWaitsForUp])
def test_a_missing_wait_would_be_seen(broken):
    with pytest.raises(AssertionError):
        simulate("dropout", "all", Offloads(make_copies=broken))


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("which", ["all", "selective", None])
def test_memory_is_not_given_back_while_copies_of_it_run(which, error, seed):
    model, offloads = Chain(), Offloads(seed)
    checkpointing = None if which is None else ActivationCheckpointing(which).apply(model)
    good = model.blocks[3].down
    with offloads.apply(model):
        for _ in range(2):
            loss = model(batch_of())
            # Backward stops in the middle: what was fetched for its next blocks is not used.
            torch.autograd.grad(loss, [*model.blocks[2].parameters()])
            del loss
            for in_backward in (False, True):
                failing = Failing(error, in_backward=in_backward)
                model.blocks[3].down = nn.Sequential(good, failing)
                with pytest.raises(error):
                    model(batch_of()).backward()
                model.blocks[3].down = good
            offloads.copies.synchronize()
    assert offloads.copies.problems == []
    assert checkpointing is None or checkpointing.undo() is None


class _FullAtFirst(SimulatedCopies):
    """The device has no room for what comes back second."""

    def to_device(self, targets: Any, sources: Any) -> Callable[[], None]:
        self.num_started += 1
        if self.num_started == NUM_BLOCKS + 2:
            raise torch.OutOfMemoryError
        return super().to_device(targets, sources)


@pytest.mark.parametrize("which", ["all", None])
def test_backward_can_be_repeated_after_out_of_memory(which):
    model, offloads = Chain(), Offloads(make_copies=_FullAtFirst)
    model(batch_of()).backward()
    expected = [p.grad for p in model.parameters()]
    checkpointing = None if which is None else ActivationCheckpointing(which).apply(model)
    with offloads.apply(model):
        loss = model(batch_of())
        model.zero_grad()
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
    assert all(map(torch.equal, (p.grad for p in model.parameters()), expected))
    assert checkpointing is None or checkpointing.undo() is None


class Block(nn.Module):
    """Its input has as many bytes as each of its two activations."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.down(self.up(x).tanh())
        return x + (y if mask is None else y * mask)


class Chain(nn.Module):
    """The batch goes through a layer, so that each input of a block is an activation."""

    def __init__(self, *, is_masked: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(NUM_BLOCKS)])
        self.head = nn.Linear(WIDTH, 1)
        self.is_masked = is_masked

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full_like(x, 0.5) if self.is_masked else None
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x).mean()


def batch_of(num_rows: int = 1024) -> Tensor:
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(0))


INPUT = 1024 * WIDTH * 4  # bytes of a block's input


@contextmanager
def offloading(
    model: nn.Module,
    which: str | None = "all",
    *,
    min_bytes: int = WIDTH * WIDTH * 4,  # of a weight
    **settings: Any,
) -> Iterator[OffloadedActivations]:
    memory, worker = HostMemory(), HostWorker(in_background=False)
    blocks = find_blocks(model)
    checkpointing = None if which is None else ActivationCheckpointing(which).apply(model)
    offloaded = OffloadedActivations(
        blocks,
        lambda tensor: copies_for(tensor, worker, memory),
        memory,
        min_bytes=min_bytes,
        **settings,
    )
    undo = offloaded.start()
    try:
        yield offloaded
    finally:
        for function in reversed(undo):
            function()
        if checkpointing is not None:
            checkpointing.undo()


class Watched:
    """Activations while a chain's blocks and head run, forward and again in backward.

    As a number of inputs of blocks; what the loss needs does not count.
    """

    def __init__(self, model: Chain, live: LiveTensors) -> None:
        self.in_blocks: list[int] = []
        self._undo = [block.up.register_forward_pre_hook(self._look) for block in model.blocks]
        self._undo.append(model.head.register_forward_pre_hook(self._look_at_head))
        self._live, self.at_head = live, 0

    def _look(self, *_: object) -> None:
        self.in_blocks.append(self._live.breakdown.activation_bytes // INPUT)

    def _look_at_head(self, *_: object) -> None:
        self.at_head = self._live.breakdown.activation_bytes // INPUT

    def close(self) -> None:
        for hook in self._undo:
            hook.remove()


def watch(model: Chain, batch: Tensor) -> tuple[Watched, LiveTensors]:
    with LiveTensors(model) as live:
        live.track_input(batch)
        watched = Watched(model, live)
        model(batch).backward()
        watched.close()
    return watched, live


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


@pytest.mark.parametrize(("num_kept", "num_prefetched"), [(1, 0), (1, 1), (1, 2), (2, 1), (3, 0)])
def test_numbers_of_kept_and_prefetched_blocks(num_kept, num_prefetched):
    model = Chain()
    with offloading(model, num_kept=num_kept, num_prefetched=num_prefetched) as offloaded:
        watched, _ = watch(model, batch_of())
        assert watched.at_head == num_kept + 1
        assert offloaded.host_bytes == (NUM_BLOCKS - num_kept) * INPUT
    for index, num_inputs in enumerate(watched.in_blocks[NUM_BLOCKS:]):
        num_left = NUM_BLOCKS - index
        kept = max(0, num_kept - index)
        coming = min(num_left - max(1, kept), max(0, num_prefetched - max(0, kept - 1)))
        assert num_inputs == max(1, kept) + coming


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
    model = Views()
    plain = train(model, lambda _: batch_of(64))
    own = [] if which is None else [ActivationCheckpointing(which)]
    offloads = Offloads()
    assert_bitwise_equal(train(model, lambda _: batch_of(64), [*own, offloads]), plain)
    offloads.copies.synchronize()
    assert offloads.copies.problems == []


class Failing(nn.Module):
    """Fails in forward or in backward, as out of memory does."""

    def __init__(self, error: type[BaseException], *, in_backward: bool) -> None:
        super().__init__()
        self.error, self.in_backward = error, in_backward

    def forward(self, x: Tensor) -> Tensor:
        if not self.in_backward:
            raise self.error

        def fail(_: Tensor) -> None:
            raise self.error

        x.register_hook(fail)
        return x


@pytest.mark.usefixtures("only_own_tensors")
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("which", ["all", None])
def test_an_error_leaves_nothing_behind(which, error, in_backward):
    model, batch = Chain(), batch_of()
    with LiveTensors(model) as live, offloading(model, which) as offloaded:
        model(batch).backward()
        before, hosted = live.live_bytes, offloaded.host_bytes
        good = model.blocks[2].down
        model.blocks[2].down = nn.Sequential(good, Failing(error, in_backward=in_backward))
        with pytest.raises(error):
            model(batch).backward()
        model.blocks[2].down = good
        offloaded.drain()
        gc.collect()
        assert live.live_bytes == before
        model(batch).backward()
        assert (live.live_bytes, offloaded.host_bytes) == (before, hosted)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@pytest.mark.usefixtures("only_own_tensors")
@pytest.mark.parametrize(("which", "min_bytes"), [("all", 1), (None, 1), (None, 2**30)])
def test_a_loss_that_nobody_uses_frees_everything(which, min_bytes):
    model, batch = Chain(), batch_of()
    with LiveTensors(model) as live, offloading(model, which, min_bytes=min_bytes) as offloaded:
        before = live.live_bytes
        for _ in range(3):
            loss = model(batch)
        del loss
        assert live.live_bytes == before + batch.nbytes
        after = offloaded.host_bytes
        model(batch).backward()
        assert offloaded.host_bytes == after


@pytest.mark.parametrize("which", ["all", "nested", None])
def test_backward_twice(which):
    model, batch = Chain(), batch_of()
    loss = model(batch)
    loss.backward(retain_graph=True)
    loss.backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    with LiveTensors(model) as live, offloading(model, which, num_prefetched=2):
        loss = model(batch)
        watched = Watched(model, live)
        loss.backward(retain_graph=True)
        after_first = live.breakdown.activation_bytes + live.breakdown.temporary_bytes
        loss.backward()
        watched.close()
        # A block's own input and up to two that come; while the graph stays, also the last block's
        # input and output.
        expected_inputs = [4, 5, 5, 4, 3, 3, 3, 3, 2, 1]
        assert watched.in_blocks == ([] if which is None else expected_inputs)
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
    # What the last block saved, its output, and less than that of the head.
    assert after_first < (4 if which is None else 3) * INPUT


def test_two_graphs_at_a_time_in_any_order():
    model, batches = Chain(), [batch_of(), batch_of() * 2]
    for batch in batches:
        model(batch).backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    with offloading(model):
        losses = [model(batch) for batch in batches]
        for loss in losses:
            loss.backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))


@pytest.mark.parametrize("which", ["all", None])
def test_a_gradient_of_gradients(which):
    def gradients(model: Chain) -> list[Tensor]:
        loss = model(batch_of())
        first = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
        penalty = sum((gradient.square().sum() for gradient in first), loss)
        return [*torch.autograd.grad(penalty, [*model.blocks.parameters()])]

    model = Chain()
    expected = gradients(model)
    with offloading(model, which):
        assert all(map(torch.equal, gradients(model), expected))


def test_a_backward_pass_inside_of_a_block():
    class Penalized(Block):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            y = self.up(x).tanh()
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return x + self.down(y) * slope.square()

    model = Chain()
    model.blocks = nn.ModuleList([Penalized() for _ in range(NUM_BLOCKS)])
    model(batch_of()).backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    with offloading(model, None) as offloaded:
        model(batch_of()).backward()
        assert offloaded.host_bytes >= 3 * (NUM_BLOCKS - 1) * INPUT
    assert all(map(torch.equal, (p.grad for p in model.parameters()), expected))


def test_unpacking_upwards_does_not_fill_the_device():
    model, batch = Chain(), batch_of()
    with LiveTensors(model) as live, offloading(model, None, num_prefetched=2):
        outputs = []
        x = model.stem(batch).detach()
        for block in model.blocks:  # graphs of their own
            outputs.append(block(x).mean())
            x = torch.randn_like(x)
        del x
        num_bytes = []
        for output in outputs:
            output.backward(retain_graph=True)
            num_bytes.append(live.breakdown.activation_bytes + live.breakdown.temporary_bytes)
        assert max(num_bytes) <= num_bytes[0]


@pytest.mark.parametrize("which", KINDS)
def test_each_byte_crosses_once_in_each_direction(which):
    model, offloads = Chain(), Offloads()
    checkpointing = None if which is None else ActivationCheckpointing(which).apply(model)
    with offloads.apply(model):
        model(batch_of()).backward()
        assert offloads.copies.num_started == 2 * (NUM_BLOCKS - 1)
    assert checkpointing is None or checkpointing.undo() is None


def test_what_a_failed_backward_pass_fetched_leaves_with_the_next_block():
    model, batch = Chain(), batch_of()
    with LiveTensors(model) as live, offloading(model, num_prefetched=2) as offloaded:
        good = model.blocks[2].down
        model.blocks[2].down = nn.Sequential(good, Failing(RuntimeError, in_backward=True))
        loss = model(batch)
        with pytest.raises(RuntimeError):
            loss.backward()
        before = live.breakdown.activation_bytes
        model.blocks[2].down = good
        model.blocks[0](batch)
        assert live.breakdown.activation_bytes <= before - 2 * INPUT
        assert offloaded.host_bytes == (NUM_BLOCKS - 1) * INPUT


def test_evaluation_moves_nothing():
    model = Chain()
    with offloading(model) as offloaded, torch.no_grad():
        expected = model(batch_of())
        assert torch.equal(model.eval()(batch_of()), expected)
        with torch.inference_mode():
            model(batch_of())
        assert offloaded.host_bytes == 0


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_model_save_their_own_tensors(make_copy):
    model, batch = Chain(), batch_of()
    with offloading(model) as offloaded:
        double = make_copy(model)
        double(batch).backward()
        assert offloaded.host_bytes == 0
        model(batch).backward()
        assert offloaded.host_bytes == (NUM_BLOCKS - 1) * INPUT
        make_copy(model)
    for one, other in zip(model.parameters(), double.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_undo_restores_the_model_and_frees_the_host():
    model, batch = Chain(), batch_of()
    before = snapshot(model)
    with offloading(model, None) as offloaded:
        model(batch).backward()
        loss = model(batch)
    assert snapshot(model) == before
    model.zero_grad()
    loss.backward()  # graphs that are there keep working
    del loss
    with_it = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(batch).backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), with_it, strict=True))
    assert offloaded.host_bytes == (NUM_BLOCKS - 1) * 2 * INPUT  # of that graph
    offloaded._stop()
    assert offloaded.host_bytes == 0


def test_somebody_elses_hooks_stay_theirs():
    model, batch = Chain(), batch_of()
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    with offloading(model, None) as offloaded:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(batch).backward()
        assert offloaded.host_bytes == 0
        assert len(packed) > 2 * NUM_BLOCKS
        torch.utils.checkpoint.checkpoint(model, batch, use_reentrant=False).backward()
        assert offloaded.host_bytes == 0


class Changing(Chain):
    """What a block has saved is changed after it, which autograd refuses."""

    class Three(Block):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
            product = self.up(x)
            result = product.tanh()
            return self.down(result), product, result

    def __init__(self, which: str | None, index: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Three() for _ in range(NUM_BLOCKS)])
        self.which, self.index = which, index

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x, product, result = block(x)
            if index == self.index:
                changed = product if self.which == "selective" else result
                changed += 1.0
        return x.mean()


@pytest.mark.parametrize("min_bytes", [INPUT, INPUT + 1])
@pytest.mark.parametrize("which", ["selective", None])
@pytest.mark.parametrize("index", [0, NUM_BLOCKS - 1])
def test_changes_in_place_are_refused_as_ever(which, min_bytes, index):
    model = Changing(which, index)
    with offloading(model, which, min_bytes=min_bytes):
        loss = model(batch_of())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Changing(None, index)(batch_of()).backward()


def test_offloaded_weights_are_not_saved_as_activations():
    model, batch = Chain(), batch_of()
    worker = HostWorker(in_background=False)
    residence = Residence(model, find_blocks(model), [*model.parameters()], worker)
    undo = [residence.release, *residence.start()]
    with offloading(model, None) as offloaded:
        model(batch).backward()
        assert offloaded.host_bytes == 2 * (NUM_BLOCKS - 1) * INPUT
    for function in reversed(undo):
        function()


@pytest.mark.parametrize("which", KINDS)
def test_fake_tensors_need_the_same_bytes(which):
    def peaks(make_batch_of: Callable[[], Tensor]) -> list[Any]:
        model = Chain()
        with offloading(model, which) as offloaded:
            batch = make_batch_of()
            watched, live = watch(model, batch)
            watched_again, _ = watch(model, batch)
            return [
                watched.in_blocks,
                watched.at_head,
                watched_again.in_blocks,
                live.peak.total_bytes,
                live.peak.host_bytes,
                offloaded.host_bytes,
            ]

    real = peaks(batch_of)
    assert real[-1] > 0
    with FakeTensorMode():
        assert peaks(lambda: torch.empty(1024, WIDTH)) == real
        with emulating_cuda():
            assert peaks(lambda: torch.empty(1024, WIDTH)) == real


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
