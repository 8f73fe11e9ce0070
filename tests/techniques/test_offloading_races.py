"""Short trainings on simulated streams: for each wait that is missing one of these fails.

`python -m benchmarks.mutations` removes them one by one.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memsave import ChunkedCrossEntropy, LowPrecisionWeights, Offloading
from lightning_memsave.core.memory import is_host
from lightning_memsave.techniques.host_memory import HostMemory
from lightning_memsave.techniques.offloading.copies import StreamCopies
from lightning_memsave.techniques.offloading.hooks_of_users import Settled
from lightning_memsave.techniques.offloading.host_worker import HostWorker
from lightning_memsave.techniques.optimizer_in_backward.held_gradients import HeldGradients
from lightning_memsave.techniques.optimizer_in_backward.technique import OptimizerInBackward
from lightning_memsave.techniques.optimizer_step import ACTIVE_UPDATES
from tests.cases import make_batch, make_model
from tests.helpers import InAutocast, assert_same, clones
from tests.techniques.offloaded_chain import Chain, batch_of, offloading
from tests.techniques.offloaded_loops import Offloaded
from tests.techniques.races import Races
from tests.techniques.test_host_table import Model, TiedModel, batch, on_host

ON_HOST: dict[str, Any] = {
    "weights": {},
    "in bfloat16": {"rounding": "master"},
    "halves, in backward": {"rounding": "split", "in_backward": True},
    "blocks": {"what": "parameters"},
    "blocks, early": {"what": "parameters", "early_updates": "100%"},
    "blocks in bfloat16, early": {
        "what": "parameters",
        "rounding": "master",
        "early_updates": "100%",
    },
    "blocks, in backward": {"what": "parameters", "in_backward": True},
    "blocks in bfloat16": {"what": "parameters", "rounding": "master"},
    "everything": {"what": "parameters+activations"},
    "all activations": {"what": "activations", "recomputes": False},
    "table": {"what": "parameters+embeddings", "name": "tied"},
    "rows": {"what": "embeddings", "name": "classifier"},
}


def train(**how: Any) -> dict[str, Tensor]:
    """Two steps, each with gradients of two batches if they are not used at once."""
    is_table = "embeddings" in how.get("what", "")
    settings: dict[str, Any] = {"recomputes": True, "min_bytes": 1, "min_table_bytes": 1}
    made = Offloaded(**settings | {"chunks": is_table} | how)
    for number in range(2):
        made.step(number, num_parts=1 if how.get("in_backward") else 2)
    made.close()
    return clones(made.model.state_dict())


@functools.cache
def trained_at_once(kind: str) -> dict[str, Tensor]:
    """The same with copies that are done when they begin, which other tests compare."""
    return train(**ON_HOST[kind])


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("kind", ON_HOST)
def test_training(kind, is_late):
    with Races(is_late=is_late).running() as races:
        found = train(**ON_HOST[kind])
    assert_same(found, trained_at_once(kind))
    assert races.copied_bytes > 0
    assert races.num_spins == 0  # the core is for the updates


def make_copies(forms: list[Tensor]) -> tuple[StreamCopies, list[Tensor]]:
    memory = HostMemory()
    copies = StreamCopies(HostWorker(in_background=True), memory, torch.device("cpu"))
    return copies, memory.tensors_like(forms)


@pytest.mark.parametrize("num_bytes", [64, 8192])
def test_gradients_on_their_way_to_the_host_do_not_fill_the_device(num_bytes):
    piece_bytes, held_bytes = 2048, 10_000
    with Races().running(piece_bytes, held_bytes) as races:
        num_sources = 20 * held_bytes // num_bytes
        copies, targets = make_copies([torch.empty(num_bytes // 4)] * num_sources)
        before, seen = races.device_bytes, []
        for target in targets:
            copies.to_host(target, torch.ones(num_bytes // 4), adds=False)
            seen.append(races.device_bytes - before)
        assert 0 < max(seen) <= held_bytes + 2 * piece_bytes + num_bytes
        copies.finish()
        assert races.device_bytes == before


def test_no_gradient_is_on_the_device_after_a_pass_with_updates():
    with Races(is_late=True).running() as races:
        made = Offloaded(what="parameters")
        OptimizerInBackward().apply(made.optimizer)
        with torch.no_grad():
            made.model(make_batch(0))
        before = races.device_bytes
        for number in range(2):
            made.model(make_batch(number)).backward()
            assert races.device_bytes == before
            made.optimizer.step()
        made.close()


class TestWeights:
    def test_blocks_that_came_in_vain_leave(self):
        """As in LayerDrop."""
        with Races().running():
            made = Offloaded(what="parameters")
            made.step(0)
            blocks = made.model.blocks
            made.model.blocks = nn.ModuleList([*blocks.children()][::3])
            made.step(1)
            made.model.blocks = blocks
            made.close()

    @pytest.mark.parametrize("loads", [False, True])
    def test_change_while_they_may_still_be_copied(self, loads):
        """For a loss that nobody has read yet."""
        with Races().running():
            made = Offloaded()
            made.residence.is_watched = not loads
            made.step(0)
            with torch.no_grad():
                made.model(make_batch(1))
            if loads:
                made.model.load_state_dict(make_model("tuple_output").state_dict())
            else:
                halve(made.model)
            made.step(2)
            made.close()

    def test_change_while_they_may_still_be_updated(self):
        with Races(is_late=True).running():
            made = Offloaded()
            made.residence.is_watched = True
            for number in range(2):
                made.step(number)
                halve(made.model)
            made.close()

    @pytest.mark.parametrize("is_late", [False, True])
    @pytest.mark.parametrize("kind", sorted(ON_HOST.keys() - {"all activations"}))
    def test_change_in_a_hook(self, kind, is_late):
        """Which nobody has announced, while they may still be updated or copied."""

        def train_and_halve(look: Callable[[Any], contextlib.AbstractContextManager[Any]]) -> Any:
            how = ON_HOST[kind]
            is_table = "embeddings" in how.get("what", "")
            small: dict[str, Any] = {"recomputes": True, "min_bytes": 1, "min_table_bytes": 1}
            made = Offloaded(**small | {"chunks": is_table} | how)
            for number in range(3):
                made.optimizer.zero_grad()
                made.whole(make_batch(number)).backward()
                made.optimizer.step()
                with look(made.residence):
                    halve(made.model)
                with torch.no_grad():
                    made.whole(make_batch(number))
                with look(made.residence):
                    halve(made.model)
            made.close()
            return clones(made.model.state_dict())

        expected = train_and_halve(watching)
        with Races(is_late=is_late).running():
            found = train_and_halve(Settled)
        assert_same(found, expected)

    def test_gradients_of_a_failed_pass_are_not_added_to_those_of_the_next(self):
        """Which lands first decides, as sums are made by the host."""
        with Races(is_late=True).running():
            made = Offloaded()
            made.step(0)
            made.model(make_batch(1)).backward()
            hook = made.model.get_parameter("blocks.0.up.weight").register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                made.model(make_batch(2)).backward()
            hook.remove()
            made.optimizer.zero_grad()
            made.step(3)
            made.close()

    def test_an_optimizer_that_couples_them_has_whole_ones(self):
        found = []
        for optimizer in ("AdamW", "unknown"):
            with Races(is_late=True).running():
                made = Offloaded(rounding="split", optimizer=optimizer)
                for number in range(3):
                    made.step(number)
                made.close()
            found.append(clones(made.model.state_dict()))
        torch.testing.assert_close(*found)

    def test_are_changed_by_an_optimizer_in_ways_that_torch_does_not_see(self):
        """Between two calls of a closure, after an evaluation, or without any."""
        for kind, has_closure in ((_ZerothOrder, True), (_Unseen, False)):
            found = []
            for races in (None, Races(is_late=True)):
                with contextlib.nullcontext() if races is None else races.running():
                    model = make_model("dropout").eval()
                    optimizer, undo = kind(model.parameters(), lr=1e-3), []
                    if races is not None:
                        technique = Offloading()
                        undo.append(technique.apply(model).undo)
                        undo.append(technique.update_in_background(optimizer).undo)
                    closure = functools.partial(evaluate, model)
                    for _ in range(2):
                        closure()
                        model(make_batch(0)).backward()
                        optimizer.step(*[closure] * has_closure)
                        optimizer.zero_grad()
                    for function in reversed(undo):
                        function()
                found.append(clones(model.state_dict()))
            assert_same(*found)

    def test_gradients_that_have_landed_are_forgotten(self):
        """Updates in backward with clipping convert them, and no step waits for them."""
        with Races().running():
            copies, targets = make_copies([torch.empty(4), torch.empty(3)])
            for _ in range(3):
                copies.to_host(targets[0], torch.ones(4, dtype=torch.bfloat16), adds=False)
                copies.let_go()
                assert not copies._landings
            copies.to_host(targets[1], torch.ones(4, dtype=torch.bfloat16), adds=False)
            with pytest.raises(RuntimeError, match="must match"):
                copies.let_go()
            copies.let_go()

    @pytest.mark.parametrize("end", ["wait", "undo", "undo of the updates"])
    def test_are_complete_after(self, end):
        with Races(is_late=True).running():
            made = Offloaded("tied", "parameters+embeddings", chunks=True, min_table_bytes=1)
            made.model(make_batch(0)).backward()
            made.optimizer.step()
            ends = {"wait": made.handle.wait, "undo": made.handle.undo}
            ends.get(end, made.updates.undo)()
            for param in made.model.parameters():
                param.detach().clone()

    def test_of_two_optimizers_in_one_block(self):
        """One converts all weights of the block in the background, the other changes some."""
        with Races(is_late=True).running():
            model = make_model("dropout").train()
            technique = Offloading()
            handle = technique.apply(model)
            LowPrecisionWeights("master").apply(model)
            params = [*model.parameters()]
            matrices = torch.optim.AdamW([p for p in params if p.ndim > 1])
            others = torch.optim.SGD([p for p in params if p.ndim == 1])
            updates = technique.update_in_background(matrices)
            for number in range(2):
                InAutocast(model)(make_batch(number)).backward()
                matrices.step()
                others.step()
                model.zero_grad()
            updates.undo()
            handle.undo()

    def test_that_are_frozen_are_on_the_host_after_backward(self):
        with Races().running():
            made = Offloaded(what="parameters")
            made.model.blocks.requires_grad_(False)
            made.model.head.requires_grad_(False)
            made.model(make_batch(0).requires_grad_()).backward()
            params = made.model.parameters()
            assert all(is_host(param.untyped_storage()) for param in params)
            made.close()

    def test_change_their_type_after_a_failed_pass(self):
        """Which has begun to fetch what it did not use."""
        with Races().running():
            made = Offloaded()
            hook = made.model.blocks[0].register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                made.model(make_batch(0))
            hook.remove()
            LowPrecisionWeights("master").apply(made.model)
            made.close()


def evaluate(model: nn.Module) -> Tensor:
    with torch.no_grad():
        loss: Tensor = model(make_batch(0))
    return loss


class _Unseen(torch.optim.SGD):
    """As kernels of others, which count no version."""

    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            param.data.add_(param.grad, alpha=-1e-2)


class _ZerothOrder(torch.optim.SGD):
    """From losses at two points, as MeZO."""

    def step(self, closure: Any = None) -> Any:
        losses = []
        for factor in (1e-3, -2e-3):
            self._move(factor)
            losses.append(closure().item())
        self._move(1e-3 + losses[1] - losses[0])
        return losses[0]

    def _move(self, factor: float) -> None:
        for param in self.param_groups[0]["params"]:
            param.data.add_(factor)


@contextlib.contextmanager
def watching(residence: Any) -> Iterator[None]:
    """Code that was announced."""
    residence.wait()
    yield
    residence.wait()


def halve(model: nn.Module) -> None:
    """Change weights in a way that torch does not see, as a callback may."""
    for param in model.parameters():
        param.data.mul_(0.5)


class TestActivations:
    def test_host_memory_is_freed_after_copies_to_it(self):
        """Of a graph that nobody needs any more, for a longer batch."""
        model = Chain()
        with Races().running(), offloading(model, None, min_bytes=0):
            for size in (64, 128):
                loss = model(batch_of(size))
                del loss

    def test_device_memory_stays_until_a_copy_is_done(self):
        """The graph of a block dies while the next one runs."""
        model = Chain()
        with Races().running(), offloading(model, None, min_bytes=0):
            graph = [model.blocks[0](model.stem(batch_of()))]
            model.blocks[1].register_forward_pre_hook(lambda *_: graph.clear())
            model.blocks[1](torch.ones(1024, 32))

    def test_what_a_graph_fetched_comes_before_its_memory_goes(self):
        """Of a block that backward leaves out; its graph dies meanwhile."""
        model = Chain()
        with Races().running(), offloading(model, None, min_bytes=0):
            outputs = [block(torch.randn(1024, 32)) for block in model.blocks]
            loss = outputs[0].mean() + outputs[-1].mean()
            model.blocks[-1].up.weight.register_hook(lambda _: outputs.clear())
            loss.backward()

    def test_what_came_in_vain_leaves_after_it_came(self):
        """Backward stops before it is used."""
        model = Chain()
        with Races().running(), offloading(model, None, min_bytes=0):
            loss = model(batch_of())
            torch.autograd.grad(loss, [*model.blocks[2].parameters()])
            del loss
            model(batch_of()).backward()


class TestTables:
    def test_zeros_are_written_after_copies_have_ended(self):
        """Of the tiles of a head that serves as a classifier of some words, too."""
        model = TiedModel([slice(0, 9), slice(5, 50)])
        chunks = ChunkedCrossEntropy(heads="head", chunk_size=4)
        with Races().running(piece_bytes=512), chunks.apply(model):
            undo = on_host(model)
            model(batch(0)).backward()
            undo()

    @pytest.mark.parametrize("beside", ["nothing", "weights", "frozen weights"])
    def test_gradients_become_zero_after_they_were_read(self, beside):
        what = "embeddings" if beside == "nothing" else "parameters+embeddings"
        with Races(is_late=True).running():
            made = Offloaded("tied", what, chunks=True, min_table_bytes=1)
            if beside == "frozen weights":  # no update of theirs follows that of the table
                made.model.requires_grad_(False)
                made.model.get_parameter("embedding.weight").requires_grad_()
            for number in range(2):
                made.model(make_batch(number)).backward()
                made.optimizer.step()
                made.optimizer.zero_grad(set_to_none=False)
            made.close()

    def test_are_complete_when_they_come_back(self):
        with Races(is_late=True).running():
            made = Offloaded("classifier", "embeddings", min_table_bytes=1)
            made.step()
            made.handle.undo()
            clones(made.model.state_dict())

    @pytest.mark.parametrize("is_late", [True, False])
    def test_a_failed_update_is_told_by_the_next_step(self, is_late):
        with Races(is_late=is_late).running():
            model = Model()
            optimizer = torch.optim.AdamW(model.parameters())
            on_host(model, optimizer)
            model(batch(0)).backward()
            optimizer.step()
            optimizer.state_dict()  # waits
            optimizer.state[model.table.weight]["exp_avg"] = torch.zeros(3, 3)
            optimizer.step()
            with pytest.raises(RuntimeError, match="size") as caught:
                optimizer.step()
            assert "In the update of `table.weight` on the host" in caught.value.__notes__[0]


class TestHeldGradients:
    def test_are_copied_beside_backward(self):
        found = []
        for races in (None, Races()):
            model = make_model("dropout").train()
            optimizer = torch.optim.AdamW(model.parameters())
            with contextlib.nullcontext() if races is None else races.running():
                handle = OptimizerInBackward(clip_norm=0.1).apply(optimizer)
                for number in range(3):
                    torch.manual_seed(number)
                    model(make_batch(number)).backward()
                    optimizer.step()
                handle.undo()
            found.append(clones(model.state_dict()))
        assert_same(*found)
        num_bytes = sum(param.nbytes for param in model.parameters())
        assert races is not None
        assert races.copied_bytes == 3 * 2 * num_bytes

    def test_that_were_discarded_are_not_on_the_device(self):
        model = make_model("dropout").train()
        optimizer = torch.optim.AdamW(model.parameters())
        with Races().running() as races:
            handle = OptimizerInBackward(clip_norm=0.1).apply(optimizer)
            found = []
            for number in range(2):
                model(make_batch(number)).backward()
                optimizer.step()
                found.append(races.device_bytes)
            model(make_batch(2)).backward()
            ACTIVE_UPDATES[optimizer].forget()
            assert found == 2 * [races.device_bytes]
            handle.undo()

    def test_are_on_the_device_once_when_they_come_back(self):
        parameter, held = nn.Parameter(torch.ones(64, 64)), HeldGradients(1.0)
        with Races().running() as races:
            parameter.grad = torch.ones(64, 64)
            held.take([parameter])
            for _ in held.give_back([[parameter]]):
                assert races.device_bytes == parameter.grad.nbytes + 4  # its norm

    def test_are_discarded_after_they_were_copied(self):
        model = make_model("dropout").train()
        optimizer = torch.optim.AdamW(model.parameters())
        with Races().running():
            handle = OptimizerInBackward(clip_norm=0.1).apply(optimizer)
            hook = model.get_parameter("blocks.1.up.weight").register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(make_batch(0)).backward()
            hook.remove()
            ACTIVE_UPDATES[optimizer].forget()
            model(make_batch(1)).backward()
            optimizer.step()
            handle.undo()


def test_rows_with_a_label_are_counted_before_the_next_call_needs_their_number():
    model = TiedModel()
    with Races().running(), ChunkedCrossEntropy(heads="head").apply(model):
        for number in range(4):
            model(batch(number)).backward()
