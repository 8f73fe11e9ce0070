"""Offloaded activations after errors, in unusual backward passes, and beside other things."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memsave.measure.live_tensors import LiveTensors
from tests.helpers import gradients_of, in_pairs, snapshot
from tests.techniques.offloaded_chain import (
    INPUT,
    NUM_BLOCKS,
    WIDTH,
    Block,
    Chain,
    Failing,
    Watched,
    batch_of,
    offloading,
)
from tests.techniques.races import Races


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("which", ["all", "selective", None])
def test_memory_is_not_given_back_while_copies_of_it_run(which, error):
    model = Chain()
    good = model.blocks[3].get_submodule("down")
    with Races().running(), offloading(model, which, min_bytes=0):
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


class _FullAtFirst(TorchDispatchMode):
    """The device has no room for what comes back first."""

    def __init__(self) -> None:
        super().__init__()
        self.has_failed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_fetch = func is torch.ops.aten.empty.memory_format and args == ([INPUT],)
        if is_fetch and torch._C._current_graph_task_id() != -1 and not self.has_failed:
            self.has_failed = True
            raise torch.OutOfMemoryError
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("which", ["all", None])
def test_backward_can_be_repeated_after_out_of_memory(which):
    model = Chain()
    model(batch_of()).backward()
    expected = gradients_of(model)
    with Races().running(), offloading(model, which, min_bytes=0):
        loss = model(batch_of())
        model.zero_grad()
        with pytest.raises(torch.OutOfMemoryError), _FullAtFirst():
            loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
    assert all(map(torch.equal, gradients_of(model), expected))


@pytest.mark.usefixtures("only_own_tensors")
@pytest.mark.parametrize(
    ("in_backward", "error", "which"),
    in_pairs([False, True], [torch.OutOfMemoryError, KeyboardInterrupt], ["all", None]),
)
def test_an_error_leaves_nothing_behind(which, error, in_backward):
    model, batch = Chain(), batch_of()
    with LiveTensors(model) as live, offloading(model, which) as offloaded:
        model(batch).backward()
        before, hosted = live.live_bytes, offloaded.host_bytes
        good = model.blocks[2].get_submodule("down")
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
    expected = gradients_of(model)
    model.zero_grad()
    with LiveTensors(model) as live, offloading(model, which):
        loss = model(batch)
        watched = Watched(model, live)
        loss.backward(retain_graph=True)
        after_first = live.breakdown.activation_bytes + live.breakdown.temporary_bytes
        loss.backward()
        watched.close()
        # A block's own input and the one that comes; while the graph stays, also the last block's
        # input and output.
        expected_inputs = [3, 4, 4, 4, 3, 2, 2, 2, 2, 1]
        assert watched.in_blocks == ([] if which is None else expected_inputs)
    assert all(map(torch.equal, gradients_of(model), expected))
    # What the last block saved, its output, and less than that of the head.
    assert after_first < (4 if which is None else 3) * INPUT


def test_two_graphs_at_a_time_in_any_order():
    model, batches = Chain(), [batch_of(), batch_of() * 2]
    for batch in batches:
        model(batch).backward()
    expected = gradients_of(model)
    model.zero_grad()
    with offloading(model):
        losses = [model(batch) for batch in batches]
        for loss in losses:
            loss.backward()
    assert all(map(torch.equal, gradients_of(model), expected))


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
    expected = gradients_of(model)
    model.zero_grad()
    with offloading(model, None) as offloaded:
        model(batch_of()).backward()
        assert offloaded.host_bytes >= 3 * (NUM_BLOCKS - 1) * INPUT
    assert all(map(torch.equal, gradients_of(model), expected))


def test_unpacking_upwards_does_not_fill_the_device():
    model, batch = Chain(), batch_of()
    with LiveTensors(model) as live, offloading(model, None):
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


def test_what_came_in_vain_leaves_while_backward_runs():
    """Of a block that backward leaves out."""
    model, seen = Chain(), []
    with LiveTensors(model) as live, offloading(model, None):
        outputs = [block(torch.randn(1024, WIDTH)) for block in model.blocks]
        loss = outputs[0].mean() + outputs[-1].mean()

        def look(_: Tensor) -> None:
            seen.append(live.breakdown.activation_bytes // INPUT)

        model.blocks[0].up.weight.register_hook(look)
        loss.backward()
    assert seen == [NUM_BLOCKS]  # the outputs


def test_what_a_failed_backward_pass_fetched_leaves_with_the_next_block():
    model, batch = Chain(), batch_of()
    with LiveTensors(model) as live, offloading(model) as offloaded:
        good = model.blocks[2].get_submodule("down")
        model.blocks[2].down = nn.Sequential(good, Failing(RuntimeError, in_backward=True))
        loss = model(batch)
        with pytest.raises(RuntimeError):
            loss.backward()
        before = live.breakdown.activation_bytes
        model.blocks[2].down = good
        model.blocks[0](batch)
        assert live.breakdown.activation_bytes <= before - INPUT
        assert offloaded.host_bytes == (NUM_BLOCKS - 1) * INPUT


def test_evaluation_moves_nothing():
    model = Chain()
    with offloading(model) as offloaded, torch.no_grad():
        expected = model(batch_of())
        assert torch.equal(model.eval()(batch_of()), expected)
        with torch.inference_mode():
            model(batch_of())
        assert offloaded.host_bytes == 0


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
    with_it = [gradient.clone() for gradient in gradients_of(model)]
    model.zero_grad()
    model(batch).backward()
    assert all(map(torch.equal, gradients_of(model), with_it))
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


@pytest.mark.parametrize(
    ("min_bytes", "which", "index"),
    in_pairs([INPUT, INPUT + 1], ["selective", None], [0, NUM_BLOCKS - 1]),
)
def test_changes_in_place_are_refused_as_ever(which, min_bytes, index):
    model = Changing(which, index)
    with offloading(model, which, min_bytes=min_bytes):
        loss = model(batch_of())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Changing(None, index)(batch_of()).backward()
