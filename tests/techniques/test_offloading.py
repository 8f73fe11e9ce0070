"""Weights, gradients and optimizer state on the host, and updates beside the next step."""

import copy
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_memsave import ActivationCheckpointing, ChunkedCrossEntropy, LowPrecisionWeights
from lightning_memsave.core.memory import emulating_cuda, is_host
from lightning_memsave.errors import ConfigurationError, IncompatibleError, NoEffectWarning
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.measure.storages import storages_of, tensors_in
from lightning_memsave.prediction.fake.tensors import fake_tensors
from lightning_memsave.techniques.host_memory import HostMemory
from lightning_memsave.techniques.micro_batching.loss_probe import LossProbe
from lightning_memsave.techniques.micro_batching.module_state import ModuleState
from lightning_memsave.techniques.offloading.copies import Copies
from lightning_memsave.techniques.offloading.part import Part
from lightning_memsave.techniques.offloading.technique import Offloading
from lightning_memsave.techniques.residences import leave_device
from tests.cases import make_batch, make_model
from tests.helpers import (
    InAutocast,
    adamw,
    assert_same,
    clones,
    gradients_of,
    in_pairs,
    seed_torch,
)
from tests.techniques.offloaded_loops import (
    LOOPS,
    OPTIMIZERS,
    HostOperators,
    Offloaded,
    optimizer_of,
    trained,
    trained_without,
)


@pytest.fixture
def offloaded() -> Iterator[Offloaded]:
    made = Offloaded()
    yield made
    made.close()


def is_on_host(tensor: Tensor) -> bool:
    return all(is_host(storage) for storage in storages_of(tensor))


class TestPlaces:
    def test_between_steps_everything_is_on_the_host(self, offloaded):
        model = offloaded.model
        model(make_batch(0)).backward()
        assert all(is_on_host(p) and is_on_host(p.grad) for p in model.parameters())
        offloaded.optimizer.step()
        offloaded.handle.wait()
        states = [*tensors_in(offloaded.optimizer.state)]
        assert len(states) == 3 * len([*model.parameters()])
        assert all(map(is_on_host, states))

    def test_device_bytes_are_the_weights_and_what_a_step_computes(self):
        """The peak is that of plain training without its gradients, but for those on their way."""
        made = Offloaded()
        weights = sum(p.nbytes for p in made.model.parameters())
        made.step(0)
        made.step(1)
        with LiveTensors(made.model, [made.optimizer]) as counter:
            made.step(2)
            made.handle.wait()
            assert counter.breakdown.total_bytes == weights
        assert counter.peak.parameter_bytes == weights
        assert counter.peak.gradient_bytes == counter.peak.optimizer_state_bytes == 0
        # Weights, gradients, two moments, and a number of steps for each.
        num_params = len([*made.model.parameters()])
        assert counter.peak.host_bytes == 4 * weights + 4 * num_params
        made.close()

    def test_each_weight_has_memory_of_its_own(self, offloaded):
        """Checkpoints and safetensors store whole storages."""
        storages = [p.untyped_storage() for p in offloaded.model.parameters()]
        assert len({storage.data_ptr() for storage in storages}) == len(storages)
        assert [s.nbytes() for s in storages] == [p.nbytes for p in offloaded.model.parameters()]

    @pytest.mark.parametrize("what", ["optimizer", "parameters", "parameters+activations"])
    @pytest.mark.parametrize("name", ["dropout", "tied", "eager_bert", "used_twice"])
    def test_no_device_computation_reads_host_memory(self, name, what):
        made = Offloaded(name, what, in_background=False)
        ActivationCheckpointing().apply(made.model)
        made.step(0)
        with HostOperators() as operators:
            made.model(make_batch(1)).backward()
        assert operators.mixed == []
        with HostOperators() as operators:
            made.model.head.bias.detach() * 2 + torch.ones(1)
        assert operators.mixed == ["aten.mul.Tensor"], "it finds such a computation"
        made.close()


class TestUpdates:
    def test_run_after_the_step_has_returned_and_before_the_next_forward_pass(self, offloaded):
        offloaded.step(0)
        offloaded.handle.wait()
        before = [p.detach().clone() for p in offloaded.model.parameters()]
        gate = threading.Event()
        offloaded.residence.worker.submit(lambda: assert_set(gate))
        offloaded.step(1)  # returns, though nothing can be updated yet
        assert all(map(torch.equal, before, offloaded.model.parameters()))
        seen = []
        offloaded.model.blocks[0].register_forward_hook(lambda *_: seen.append(gate.is_set()))
        threading.Timer(0.05, gate.set).start()
        offloaded.step(2)
        assert seen == [True]

    def test_are_complete_before_a_copy_is_made(self, offloaded):
        gate = hold(offloaded)
        offloaded.step(0)
        threading.Timer(0.05, gate.set).start()
        copied = copy.deepcopy(offloaded.model)
        assert gate.is_set()
        assert all(map(torch.equal, copied.parameters(), offloaded.model.parameters()))

    def test_come_in_the_order_of_the_forward_pass(self, monkeypatch):
        model = make_model("dropout").train()
        names = {id(p): name for name, p in model.named_parameters()}
        # The optimizer has them the other way round.
        optimizer = torch.optim.AdamW([*model.parameters()][::-1], lr=1e-3)
        technique = Offloading()
        handle = technique.apply(model)
        residence = handle.residence
        technique.update_in_background(optimizer)
        model(make_batch(0)).backward()
        submitted = []
        submit = residence.worker.submit

        def note(work: Any) -> Any:
            submitted.append(work)
            return submit(work)

        monkeypatch.setattr(residence.worker, "submit", note)
        optimizer.step()
        handle.wait()
        order = [names[id(part.params[0])] for part in residence.parts]
        assert order == ["head.weight", *(f"blocks.{i}.norm.weight" for i in range(4))]
        assert len(submitted) == len(order)
        handle.undo()

    def test_in_a_prediction_for_cuda_they_run_until_somebody_waits(self):
        """There the host launches the block before in less time than an update takes."""
        done: Future[None] = Future()
        done.set_result(None)
        with fake_tensors() as fakes:
            model = fakes.copy_module(make_model("dropout"))
            part = Part([*model.parameters()], HostMemory())
            part.begin_update(done)
            seen = [part.is_updating]  # as on a CPU
            with emulating_cuda():
                seen.append(part.is_updating)
                part.wait()
                seen.append(part.is_updating)
        assert seen == [False, True, False]

    def test_keep_their_order_in_evaluation_of_single_blocks(self):
        model = make_model("dropout")
        handle = Offloading("parameters").apply(model)
        before = list(handle.residence.parts)
        with torch.no_grad():
            for block in (model.blocks[3], model.blocks[1]):
                block(torch.zeros(2, block.norm.weight.numel()))
                handle.residence.end_pass()
        assert handle.residence.parts == before
        handle.undo()

    @pytest.mark.parametrize(
        "look",
        ["state_dict", "of a submodule", "of the optimizer", "load", "load into the optimizer"],
    )
    def test_end_before_somebody_looks(self, offloaded, look):
        offloaded.step(0)
        saved = copy.deepcopy(offloaded.optimizer.state_dict())
        gate = hold(offloaded)
        offloaded.step(1)
        assert any(part.is_updating for part in offloaded.residence.parts)
        threading.Timer(0.05, gate.set).start()
        if look == "state_dict":
            offloaded.model.state_dict()
        elif look == "of a submodule":
            offloaded.model.blocks[3].up.state_dict()
        elif look == "of the optimizer":
            offloaded.optimizer.state_dict()
        elif look == "load into the optimizer":
            offloaded.optimizer.load_state_dict(saved)
        else:
            offloaded.model.load_state_dict(make_model("dropout").state_dict())
        assert not any(part.is_updating for part in offloaded.residence.parts)

    @pytest.mark.parametrize("waits", ["forward", "state_dict", "step", "undo", "move"])
    def test_failures_come_to_who_waits_next(self, waits):
        """And name what failed, though the step that they are of has returned."""
        others = set(threading.enumerate())  # of other tests, with up to ten idle seconds left
        made = Offloaded()
        made.step(0)
        made.handle.wait()
        for name in ("blocks.2.up.weight", "blocks.3.up.bias"):
            state = made.optimizer.state[made.model.get_parameter(name)]
            state["exp_avg"] = torch.zeros(3, 3)
        made.step(1)
        made.model.get_parameter("blocks.0.up.bias").grad = torch.zeros(128)
        use = {
            "forward": lambda: made.model(make_batch(2)),
            "state_dict": made.model.state_dict,
            "step": made.optimizer.step,
            "undo": made.close,
            "move": lambda: made.model.to("cpu"),
        }
        with pytest.raises(RuntimeError, match="size") as caught:
            use[waits]()
        assert "`blocks.2.up.weight`" in caught.value.__notes__[0]
        assert "blocks.3" not in caught.value.__notes__[0]
        if waits == "forward":  # the next blocks have not been needed yet
            with pytest.raises(RuntimeError, match="size"):
                made.handle.wait()
        made.handle.wait()  # said once
        made.close()
        assert not any(map(is_on_host, made.model.parameters()))
        for thread in {*threading.enumerate()} - others:
            if thread.name.startswith("memsave-host"):
                thread.join(5)
                assert not thread.is_alive()

    def test_gradients_are_reset_after_they_were_read(self, offloaded):
        twin = Offloaded(in_background=False)
        for made in (offloaded, twin):
            for number in range(3):
                torch.manual_seed(number)
                made.model(make_batch(number)).backward()
                gate = hold(made)
                made.optimizer.step()
                threading.Timer(0.02, gate.set).start()
                made.optimizer.zero_grad(set_to_none=False)
            made.handle.wait()
        assert_same(offloaded.model.state_dict(), twin.model.state_dict())
        twin.close()


def assert_set(gate: threading.Event) -> None:
    assert gate.wait(10)


def hold(offloaded: Offloaded) -> threading.Event:
    """Let the host's thread wait until the event is set."""
    gate = threading.Event()
    offloaded.residence.worker.submit(lambda: assert_set(gate))
    return gate


class NoGradient(torch.autograd.Function):
    """Passes none to its second input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        return x * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.scale, self.has_gradient = nn.Parameter(torch.ones(8)), True

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * self.scale if self.has_gradient else NoGradient.apply(x, self.scale)


class TestBitwise:
    @pytest.mark.parametrize(
        ("what", "name", "loop", "kind"),
        in_pairs(["optimizer", "parameters"], ["tied", "eager_bert"], [*LOOPS], [*OPTIMIZERS]),
    )
    def test_whole_loops(self, what, name, loop, kind):
        model = make_model(name).train()
        optimizer, technique = optimizer_of(model, kind), Offloading(what)
        handle = technique.apply(model)
        technique.update_in_background(optimizer)
        assert_same(trained(model, optimizer, loop), trained_without(name, loop, kind))
        handle.undo()

    @pytest.mark.parametrize("loop", ["clipped by value", "accumulated", "scaled"])
    @pytest.mark.parametrize("kind", ["AdamW", "fused AdamW", "Adafactor"])
    def test_whole_loops_of_tables(self, kind, loop):
        made = Offloaded("classifier", "embeddings", optimizer=kind, min_table_bytes=1)
        theirs = trained_without("classifier", loop, kind)
        assert_same(trained(made.model, made.optimizer, loop), theirs)
        made.close()

    @pytest.mark.parametrize("is_frozen", [False, True])
    @pytest.mark.parametrize("what", ["optimizer", "parameters"])
    def test_a_pass_without_a_gradient_leaves_the_one_from_before(self, what, is_frozen):
        """Autograd calls the hooks of a parameter all the same."""
        runs = []
        for is_offloaded in (False, True):
            seed_torch(0)
            model: Any = nn.Sequential(*[Scaled() for _ in range(3)])
            optimizer = adamw(model)
            if is_offloaded:
                technique = Offloading(what)
                handle = technique.apply(model)
                technique.update_in_background(optimizer)
            for number in range(4):
                for block in model:
                    block.has_gradient = is_frozen or number != 1
                loss = model(torch.full((2, 8), 0.1 + number)).square().mean()
                model[1].scale.requires_grad_(number != 1 or not is_frozen)
                loss.backward()
                model[1].scale.requires_grad_(True)
                if number != 0:  # after the pass from before
                    optimizer.step()
                    optimizer.zero_grad()
            runs.append(clones(model.state_dict()))
        assert_same(*runs)
        handle.undo()

    def test_steps_that_run_several_passes(self):
        """LBFGS calls its closure up to twice in a step."""
        runs = []
        for is_offloaded in (False, True):
            model = make_model("dropout").eval()
            optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, lr=0.1)
            if is_offloaded:
                technique = Offloading("parameters")
                handle = technique.apply(model)
                technique.update_in_background(optimizer)

            def closure(model: Any = model, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = model(make_batch(0)).square().mean()
                loss.backward()
                return loss

            losses = [optimizer.step(closure).item() for _ in range(3)]
            runs.append((losses, clones(model.state_dict())))
        assert_same(*runs)
        handle.undo()


class TestMasters:
    """Weights in bfloat16 on the device, in float32 on the host."""

    def test_weights_first_sent_in_a_proof_of_the_loss_keep_their_type(self, monkeypatch):
        """The proof widens half precision, but what it has sent is used in all later steps."""
        sent: list[tuple[Tensor, Tensor]] = []
        send = Copies.to_device

        def note(self: Copies, targets: Any, sources: Any) -> Any:
            sent.extend(zip(targets, sources, strict=True))
            return send(self, targets, sources)

        monkeypatch.setattr(Copies, "to_device", note)
        model, batch = make_model("classifier").train(), make_batch(0)
        handle = Offloading().apply(model)
        LowPrecisionWeights("master").apply(model)
        with torch.no_grad(), LossProbe(ModuleState(model, batch), is_sharp=False):
            InAutocast(model)(batch)
        InAutocast(model)(batch).backward()
        assert {source.dtype for _, source in sent} == {torch.bfloat16, torch.float32}
        assert all(target.dtype is source.dtype for target, source in sent)
        handle.undo()

    def test_needs_offloading_first(self):
        with pytest.raises(IncompatibleError, match="no copy of the weights in float32"):
            LowPrecisionWeights("master").apply(make_model("dropout"))


def run_checkpointed(self: Any, x: Tensor) -> Tensor:
    """Run blocks as many projects do."""
    for block in self.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


class TestStreamedWeights:
    """Of a block, while it computes, and of the next one, which comes meanwhile."""

    @pytest.mark.parametrize("number", [1, 2, 3])
    @pytest.mark.parametrize("mode", [True, False])
    def test_as_many_blocks_as_are_asked_for(self, number, mode, monkeypatch):
        """In forward and in backward, no more and no fewer."""
        made = Offloaded(what="parameters", in_background=False, num_blocks_on_device=number)
        ActivationCheckpointing().apply(made.model)
        size, rest = (bytes_of(made.model.get_submodule(name)) for name in ("blocks.0", "head"))
        made.step(0)
        send, seen = Part.send, []

        def count(part: Part, *args: Any) -> None:
            send(part, *args)
            seen.append(counter.breakdown.parameter_bytes)  # as many as there will be

        monkeypatch.setattr(Part, "send", count)
        with torch.set_grad_enabled(mode), LiveTensors(made.model, [made.optimizer]) as counter:
            loss = made.model(make_batch(1))
            in_forward = len(seen)
            if mode:
                loss.backward()
        assert max(seen[:in_forward]) == rest + number * size
        assert max(seen[in_forward:], default=rest + number * size) == rest + number * size
        made.close()

    def test_order_in_both_passes(self):
        made = Offloaded(what="parameters")
        ActivationCheckpointing().apply(made.model)
        made.step(0)
        seen = []
        for index, block in enumerate(blocks_of(made.model)):
            block.up.register_forward_hook(lambda *_, i=index: seen.append((i, resident(made))))
        made.step(1)
        forward, backward = seen[:4], seen[4:]
        assert forward == [(0, [0]), (1, [1]), (2, [2]), (3, [3])]
        assert backward == forward[::-1]
        made.close()

    def test_the_users_own_checkpoint_brings_each_block_once(self, monkeypatch):
        """In backward it calls blocks as forward does; as many bytes come as with ours."""
        brought = []
        for is_own in (True, False):
            made = Offloaded(what="parameters")
            if is_own:
                ActivationCheckpointing().apply(made.model)
            else:
                monkeypatch.setattr(type(made.model), "run_blocks", run_checkpointed)
            made.step(0)
            num_bytes: list[int] = []
            bring = made.residence.copies.to_device

            def count(targets: Any, sources: Any, bring: Any = bring, into: Any = num_bytes) -> Any:
                into.append(sum(target.nbytes for target in targets))
                return bring(targets, sources)

            made.residence.copies.to_device = count  # type: ignore[method-assign]
            loss = made.model(make_batch(1).requires_grad_())
            num_bytes.clear()
            loss.backward()
            brought.append(sum(num_bytes))
            made.close()
        assert brought[0] == brought[1] > 0

    def test_a_block_that_is_left_out_does_not_stay(self):
        made = Offloaded(what="parameters")
        made.step(0)
        blocks = blocks_of(made.model)
        made.model.blocks = nn.ModuleList([blocks[0], blocks[3]])  # LayerDrop
        with LiveTensors(made.model, [made.optimizer]) as counter:
            made.step(1)
            made.handle.wait()
        size = sum(p.nbytes for p in blocks[0].parameters())
        rest = bytes_of(made.model.get_submodule("head"))
        assert counter.breakdown.parameter_bytes == rest
        assert counter.peak.parameter_bytes <= rest + 3 * size
        made.model.blocks = nn.ModuleList(blocks)
        made.step(2)
        made.close()

    def test_in_evaluation_every_block_leaves(self):
        made = Offloaded(what="parameters")
        made.step(0)
        made.handle.wait()
        plain = copy.deepcopy(made.model).eval()
        made.model.eval()
        with torch.no_grad():
            with LiveTensors(made.model) as counter:
                loss = made.model(make_batch(1))
            assert torch.equal(loss, plain(make_batch(1)))
        assert resident(made) == []
        sizes = [sum(p.nbytes for p in block.parameters()) for block in made.model.blocks]
        rest = bytes_of(made.model.get_submodule("head"))
        assert counter.peak.parameter_bytes == rest + 2 * sizes[0]
        made.close()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [*model.get_submodule("blocks").children()]


def bytes_of(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


def resident(made: Offloaded) -> list[int]:
    """The numbers of the blocks whose parameters are on the device."""
    places = [is_on_host(b.get_parameter("up.weight")) for b in blocks_of(made.model)]
    return [index for index, is_there in enumerate(places) if not is_there]


class TestModule:
    def test_moves_buffers_and_leaves_weights(self, offloaded):
        model = offloaded.model
        model.register_buffer("table", torch.ones(3))
        model.to("meta")
        assert model.table.device.type == "meta"
        assert all(map(is_on_host, model.parameters()))
        assert offloaded.residence.device.type == "meta"
        model.table = torch.ones(3)
        model.to("cpu")
        offloaded.step(0)

    def test_a_conversion_is_refused(self, offloaded):
        with pytest.raises(IncompatibleError, match=r'Use.*"bf16-mixed"|bf16-mixed'):
            offloaded.model.bfloat16()
        assert all(p.dtype is torch.float32 for p in offloaded.model.parameters())
        offloaded.step(0)

    @pytest.mark.parametrize("rounding", [None, "split"])
    def test_new_data_is_taken_over(self, rounding):
        made = Offloaded(rounding=rounding, in_backward=rounding is not None)
        made.step(0)
        for param in made.model.parameters():
            param.data = torch.zeros_like(param)
        assert made.step(1) == 0.0
        assert all(map(is_on_host, made.model.parameters()))
        made.close()

    @pytest.mark.parametrize("checkpoints", [False, True])
    @pytest.mark.parametrize("what", ["optimizer", "parameters"])
    def test_undo_in_the_middle_of_a_step(self, what, checkpoints):
        """The graph is still there, and its backward pass is one without offloading."""
        made, plain = Offloaded(what=what), make_model("dropout").train()
        for model in (made.model, plain):
            if checkpoints:
                ActivationCheckpointing().apply(model)
            torch.manual_seed(0)
            loss = model(make_batch(0))
            made.close()
            loss.backward()
            assert not any(map(is_on_host, model.parameters()))
            assert not any(map(is_on_host, gradients_of(model)))
        assert all(map(torch.equal, gradients_of(made.model), gradients_of(plain)))
        adamw(made.model).step()

    def test_after_a_failed_forward_pass(self, offloaded):
        offloaded.step(0)
        hook = offloaded.model.blocks[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            offloaded.step(1)
        hook.remove()
        offloaded.handle.wait()
        assert all(map(is_on_host, offloaded.model.parameters()))
        twin = Offloaded()
        twin.step(0)
        assert torch.equal(offloaded.step(2), twin.step(2))
        twin.close()


def test_true_is_everything():
    assert Offloading.from_value(True) == Offloading("parameters+activations")
    assert Offloading.from_value("optimizer") == Offloading()
    assert Offloading.from_value(False) is None


class TestLimits:
    def test_what_stays_on_the_device(self):
        model = nn.Module()
        model.table = nn.Embedding(8, 4, sparse=True)
        model.frozen = nn.Linear(4, 4).requires_grad_(False)
        model.head = nn.Linear(4, 4)
        model.lazy = nn.LazyLinear(4)
        handle = Offloading().apply(model)
        assert handle.changes == (
            "2 weights, their gradients and optimizer state on the host: 320 B",
        )
        assert handle.skipped == (
            "weights on the device: 2 frozen, 2 of a special class, 1 with sparse gradients",
        )
        handle.undo()

    def test_nothing_to_do(self):
        model = make_model("dropout").requires_grad_(False)
        with pytest.warns(UserWarning, match="26 frozen|frozen"):
            assert Offloading().apply(model).changes == ()

    def test_twice_is_refused(self, offloaded):
        with pytest.raises(IncompatibleError, match="offloaded already"):
            Offloading().apply(offloaded.model)
        with pytest.raises(IncompatibleError, match="in the background already"):
            Offloading().update_in_background(offloaded.optimizer)
        with pytest.raises(IncompatibleError, match="no offloaded parameter"):
            Offloading().update_in_background(adamw(make_model("dropout")))

    def test_too_little_host_memory_is_refused(self):
        model = make_model("dropout")
        with pytest.raises(IncompatibleError, match=r"`host_budget` is 1\.00 MiB"):
            Offloading(host_budget="1MiB").apply(model)
        Offloading(host_budget=2**22).apply(model).undo()

    def test_compiled_modules_are_refused(self):
        model = make_model("dropout")
        model.blocks[1].compile(backend="eager")
        with pytest.raises(IncompatibleError, match=r"`blocks\.1`: it is compiled"):
            Offloading().apply(model)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"what": "disk"}, r'Choose from "optimizer"'),
            ({"host_budget": "much"}, "host_budget"),
            ({"host_budget": -1}, "it is not a size"),
            ({"num_threads": 0}, "num_threads=0"),
            ({"num_blocks_on_device": 0}, "num_blocks_on_device=0"),
            ({"what": "parameters+disk"}, "it cannot be offloaded"),
            ({"min_bytes": True}, "min_bytes=True"),
        ],
    )
    def test_bad_arguments(self, arguments, message):
        with pytest.raises(ConfigurationError, match=message):
            Offloading(**arguments)


def fail_at_the_end_of_backward(model: nn.Module, number: int) -> None:
    def watch(_: Any, __: Any, output: Tensor) -> None:
        output.register_hook(lambda _: 1 / 0)

    hook = model.get_submodule("blocks.0").register_forward_hook(watch)
    torch.manual_seed(number)
    loss = model(make_batch(number))
    hook.remove()
    loss.backward()


class TestEmbeddings:
    @pytest.mark.parametrize("what", ["embeddings", "parameters+embeddings"])
    def test_a_tied_table_trains_as_tiled_on_the_device(self, what):
        """Tiles are another order of operations, which Adam makes large in float32."""
        runs = []
        for is_saving in (False, True):
            model = make_model("tied").double().train()
            optimizer = adamw(model)
            ChunkedCrossEntropy(heads="head").apply(model)
            if is_saving:
                technique = Offloading(what, min_table_bytes=2**12)
                handle = technique.apply(model)
                updates = technique.update_in_background(optimizer)
                assert is_on_host(model.get_parameter("embedding.weight"))
            losses = []
            for number in range(4):
                torch.manual_seed(number)
                loss = model(make_batch(number).double())
                loss.backward()
                losses.append(loss.detach())
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            runs.append((losses, {k: v.clone() for k, v in model.state_dict().items()}))
        for one, other in zip(runs[0][0], runs[1][0], strict=True):
            assert torch.allclose(one, other, rtol=1e-12)
        for key, value in runs[0][1].items():
            assert torch.allclose(value, runs[1][1][key], rtol=1e-9, atol=1e-12), key
        assert handle.changes[0] == "1 embeddings on the host: 128.00 KiB"
        updates.undo()
        handle.undo()
        assert not any(map(is_on_host, model.parameters()))

    @pytest.mark.parametrize("is_rounded_first", [True, False])
    @pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
    def test_beside_rounded_updates(self, rounding, is_rounded_first):
        runs = []
        for is_saving in (False, True):
            model = make_model("classifier").train()
            optimizer = adamw(model)
            weights = LowPrecisionWeights(rounding, keep_fp32=("embedding.*",))
            technique = Offloading("embeddings", min_table_bytes=2**12)
            applied: list[Any] = [technique.apply(model)] if is_saving else []
            applied.append(weights.apply(model))
            starts: list[Any] = [weights.round_updates]
            if is_saving:
                starts.insert(is_rounded_first, technique.update_in_background)
            started = [start(optimizer) for start in starts]
            for _ in range(4):
                torch.manual_seed(0)
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(make_batch(0))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            assert {str(p.dtype) for p in model.parameters()} == {"torch.float32", "torch.bfloat16"}
            runs.append({k: v.clone() for k, v in model.state_dict().items()})
            for handle in [*started, *reversed(applied)]:
                handle.undo()
            assert not {"step", "zero_grad"} & vars(optimizer).keys()
        assert_same(*runs)

    @pytest.mark.parametrize("name", ["classifier", "tied"])
    def test_a_failed_backward_pass_leaves_nothing(self, name):
        made, twin = (
            Offloaded(name, "parameters+embeddings", chunks=True, min_table_bytes=2**12)
            for _ in range(2)
        )
        for number in range(3):
            with pytest.raises(ZeroDivisionError):
                fail_at_the_end_of_backward(made.model, number)
            leave_device(made.model)
            made.model.zero_grad()
            made.step(number)
            twin.step(number)
        assert_same(made.model, twin.model)
        made.close()
        twin.close()

    def test_small_ones_are_weights_as_all_others(self):
        with pytest.warns(NoEffectWarning, match=r"no embedding has 64\.00 MiB or more"):
            Offloading("embeddings").apply(make_model("tied"))
