"""Updates that begin in backward, before it is known whether the step clips: the same training."""

import functools
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memsave import ConfigurationError, IncompatibleError, Offloading
from lightning_memsave.core.optimizers import parameters_of
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.techniques.flat_memory import aligned
from lightning_memsave.techniques.offloading.early_updates import EarlyUpdate, EarlyUpdates
from tests.cases import make_batch
from tests.helpers import assert_same, clones
from tests.techniques.offloaded_loops import (
    LOOPS,
    HostOperators,
    Offloaded,
    trained,
    trained_without,
)

NUM_BLOCKS = 4


class Settled:
    """Counts early updates that stood, and those that had begun and were taken back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stood: list[int] = []
        self.num_taken_back = 0
        settle, take_back = EarlyUpdates.settle, EarlyUpdate.take_back

        def counted(updates: Any, *found: Any) -> Any:
            settled = settle(updates, *found)
            if updates.number:
                self.stood.append(sum(settled.values()))
            return settled

        def taken(early: Any) -> None:
            self.num_taken_back += bool(early._versions)
            take_back(early)

        monkeypatch.setattr(EarlyUpdates, "settle", counted)
        monkeypatch.setattr(EarlyUpdate, "take_back", taken)


@pytest.fixture
def settled(monkeypatch):
    return Settled(monkeypatch)


def early(name: str = "dropout", number: int | str = "100%", **how: Any) -> Offloaded:
    """With updates at once instead of in a thread: how many begin does not depend on its speed."""
    made = Offloaded(name, **{"what": "parameters", "early_updates": number} | how)
    made.residence.worker._in_background = False
    return made


def step(made: Offloaded, number: int, factor: float = 1.0) -> list[Tensor]:
    """A step that clips if the factor is large; give the loss and the norm."""
    torch.manual_seed(number)
    loss = factor * made.whole(make_batch(number))
    loss.backward()
    if hasattr(made, "updates"):
        if number % 10 in (3, 4):  # in other steps of a thread, what has begun depends on its speed
            wait([update for part in made.residence.parts for update in part._updates])
        norm = made.updates.clip_grad_norm_(10.0)
    else:
        norm = nn.utils.clip_grad_norm_(parameters_of(made.optimizer), 10.0)
    made.optimizer.step()
    made.optimizer.zero_grad()
    return [loss.detach(), norm]


def assert_same_training(ours: Offloaded, theirs: Offloaded, factors: list[float]) -> None:
    for number, factor in enumerate(factors):
        assert_same(step(ours, number, factor), step(theirs, number, factor), where=f"{number}")
    assert_same(ours.model, theirs.model)
    assert_same(ours.optimizer, theirs.optimizer)


class TestBitwise:
    def test_forty_steps_of_which_four_clip(self, settled):
        made = Offloaded(what="parameters", early_updates="100%")  # in a thread
        factors = [1e3 if number % 10 == 3 else 1.0 for number in range(40)]
        assert_same_training(made, Offloaded(what=None), factors)
        assert [settled.stood[number] for number in (3, 13, 23, 33)] == [0] * 4
        assert all(settled.stood[number] > 0 for number in (4, 14, 24, 34))
        assert settled.num_taken_back >= 4

    @pytest.mark.parametrize("what", ["parameters", "optimizer"])
    @pytest.mark.parametrize("optimizer", ["AdamW", "fused AdamW", "momentum", "two groups"])
    def test_optimizers(self, optimizer, what, settled):
        how: dict[str, Any] = {"optimizer": optimizer}
        theirs = Offloaded(what=None, **how)
        assert_same_training(early(what=what, **how), theirs, [1.0, 1e3, 1.0, 1e3, 1.0])
        assert settled.stood == [NUM_BLOCKS, 0, NUM_BLOCKS, 0, NUM_BLOCKS]
        assert settled.num_taken_back == 2 * NUM_BLOCKS

    @pytest.mark.parametrize("rounding", ["master", "split"])
    def test_weights_in_two_types(self, rounding, settled):
        """Beside the weights, their halves or copies for the device are as before."""
        how: dict[str, Any] = {"rounding": rounding, "what": "parameters"}
        assert_same_training(early(**how), Offloaded(**how), [1e3, 1.0, 1e3, 1.0])
        assert settled.stood == [0, NUM_BLOCKS, 0, NUM_BLOCKS]

    @pytest.mark.parametrize("name", ["tied", "used_twice", "frozen", "eager_bert"])
    def test_models(self, name):
        assert_same_training(early(name), Offloaded(name, None), [1.0, 1e3, 1.0])

    @pytest.mark.parametrize("loop", LOOPS)
    def test_loops_that_clip_and_scale_by_themselves(self, loop):
        made = early()
        found = trained(made.model, made.optimizer, loop)
        assert_same(found, trained_without("dropout", loop, "AdamW"))

    def test_gradients_that_are_not_finite(self, settled):
        ours, theirs = early(), Offloaded(what=None)
        for made in (ours, theirs):
            step(made, 0)
            step(made, 1, float("inf"))
        assert settled.stood == [NUM_BLOCKS, 0]
        both = zip(ours.model.state_dict().items(), theirs.model.state_dict().values(), strict=True)
        for (name, one), other in both:
            assert torch.equal(one.isnan(), other.isnan()), name
            assert torch.equal(one.nan_to_num(), other.nan_to_num()), name

    @pytest.mark.gpu
    @pytest.mark.parametrize("rounding", [None, "master", "split"])
    def test_on_a_gpu(self, rounding):
        """As where all updates begin with the step: a GPU rounds them in another way."""
        how: dict[str, Any] = {"rounding": rounding, "what": "parameters", "device": "cuda"}
        ours, theirs = Offloaded(early_updates="100%", **how), Offloaded(**how)
        ours.updates.updates.early.is_alone = True  # also under a mode that looks for races
        assert_same_training(ours, theirs, [1.0, 1e3, 1.0, 1e3, 1.0])

    def test_an_optimizer_that_nobody_knows_has_none(self, settled):
        how: dict[str, Any] = {"optimizer": "unknown"}
        assert_same_training(early(**how), Offloaded(what=None, **how), [1.0, 1e3])
        assert settled.stood == [0, 0]


def _scale_gradients(made: Offloaded) -> None:
    for param in made.model.parameters():
        assert param.grad is not None
        param.grad.mul_(0.5)


def _scale_rate(made: Offloaded) -> None:
    made.optimizer.param_groups[0]["lr"] *= 0.5


def _scale_rate_in_place(made: Offloaded) -> None:
    group = made.optimizer.param_groups[0]
    if not isinstance(group["lr"], Tensor):
        group["lr"] = torch.tensor(group["lr"])
    else:
        group["lr"].mul_(0.5)


def _drop_gradients(made: Offloaded) -> None:
    for param in made.model.get_submodule("blocks")[2].parameters():
        param.grad = None


def _save_and_load(made: Offloaded) -> None:
    made.optimizer.load_state_dict(made.optimizer.state_dict())
    made.model.load_state_dict(made.model.state_dict())


class TestBetweenBackwardAndStep:
    @pytest.mark.parametrize(
        "change",
        [_scale_gradients, _scale_rate, _scale_rate_in_place, _drop_gradients, _save_and_load],
    )
    def test_what_is_changed_counts(self, change: Callable[[Offloaded], None], settled):
        runs = [early(), Offloaded(what=None)]
        for made in runs:
            for number in range(3):
                torch.manual_seed(number)
                made.model(make_batch(number)).backward()
                if number != 1:
                    change(made)
                made.optimizer.step()
                made.optimizer.zero_grad()
        assert settled.stood[0] < NUM_BLOCKS
        assert settled.stood[1] == NUM_BLOCKS
        assert_same(runs[0].model, runs[1].model)
        assert_same(runs[0].optimizer, runs[1].optimizer)

    def test_what_torch_clips_unseen_counts(self):
        """Operators on several tensors change no version under a mode, such as one that counts."""
        ours, theirs = early(), Offloaded(what=None)
        for made in (ours, theirs):
            for number in range(3):
                torch.manual_seed(number)
                with HostOperators():
                    (1e3 * made.model(make_batch(number))).backward()
                    nn.utils.clip_grad_norm_(parameters_of(made.optimizer), 10.0)
                    made.optimizer.step()
                made.optimizer.zero_grad()
        assert_same(ours.model, theirs.model)

    def test_weights_and_state_are_those_from_before(self):
        made = early()
        step(made, 0)
        before = clones(made.model.state_dict()), clones(_state(made))
        made.model(make_batch(1)).backward()
        assert made.residence.parts[1].is_early
        assert_same((clones(made.model.state_dict()), clones(_state(made))), before)
        assert not made.residence.parts[1].is_early

    def test_a_step_that_is_left_out_changes_nothing(self):
        ours, theirs = early(), Offloaded(what=None)
        step(ours, 0)
        step(theirs, 0)
        ours.model(make_batch(7)).backward()
        ours.optimizer.zero_grad()
        for number in (1, 2):
            assert_same(step(ours, number), step(theirs, number))
        assert_same(ours.model, theirs.model)

    def test_a_backward_pass_that_fails_is_repeated(self):
        """As after an out of memory, when blocks at the end of the model are updated already."""
        ours, theirs = early(), Offloaded(what=None)
        step(ours, 0)
        step(theirs, 0)
        hook = ours.model.get_submodule("blocks")[0].up.weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step(ours, 1)
        hook.remove()
        assert ours.residence.parts[NUM_BLOCKS].is_early
        ours.optimizer.zero_grad()
        for number in (1, 2):
            assert_same(step(ours, number), step(theirs, number))
        assert_same(ours.model, theirs.model)

    def test_an_interrupted_wait_takes_nothing_back_while_the_update_runs(self, monkeypatch):
        made = early()
        step(made, 0)
        before = clones(made.model.state_dict())
        made.model(make_batch(1)).backward()
        part = made.residence.parts[NUM_BLOCKS]
        running = part._updates[0]
        with monkeypatch.context() as patch:
            patch.setattr(running, "result", _interrupt)
            patch.setattr(running, "done", lambda: False)
            with pytest.raises(KeyboardInterrupt):
                part.wait()
        assert part.is_early
        assert_same(clones(made.model.state_dict()), before)


def _interrupt() -> None:
    raise KeyboardInterrupt


def _state(made: Offloaded) -> dict[str, Tensor]:
    state = made.optimizer.state_dict()["state"]
    return {f"{n} {k}": value for n, own in state.items() for k, value in own.items()}


class TestCost:
    @pytest.mark.parametrize("number", [0, 1, "50%", NUM_BLOCKS])
    def test_old_values_of_so_many_blocks_are_kept(self, number):
        """The host has room for what the updates of so many blocks change, and no more."""
        made, plain = (early(number=n, optimizer="fused AdamW") for n in (number, 0))
        block = [*made.model.get_submodule("blocks")[0].parameters()]
        sizes = [aligned(p.nbytes, 64) for p in block]
        room = sum(3 * size + 64 for size in sizes)  # and counts of steps
        num = {"50%": 2}.get(number, number)
        peaks = []
        for each in (made, plain):
            with LiveTensors(each.model, [each.optimizer]) as counter:
                for index in range(3):
                    step(each, index)
            peaks.append(counter.peak.host_bytes)
        norms = 4 * len([*made.model.get_submodule("blocks").parameters()])  # and one of each
        assert peaks[0] - peaks[1] == num * room + bool(num) * norms
        assert made.updates.updates.early.number == num

    def test_the_plan_of_host_memory_counts_them(self):
        model = early().model
        numel = sum(p.numel() for p in model.get_submodule("blocks")[0].parameters())
        without, found = (
            Offloading("parameters", early_updates=number).host_bytes(model)[0]
            for number in (0, "50%")
        )
        assert found - without == 2 * 12 * numel

    def test_norms_are_found_beside_backward(self, monkeypatch):
        made, norms = early(), []
        vector_norm = torch.linalg.vector_norm

        def noted(x: Tensor, *args: Any) -> Tensor:
            norms.append(x.numel())
            return vector_norm(x, *args)

        step(made, 0)
        monkeypatch.setattr(torch.linalg, "vector_norm", noted)
        made.model(make_batch(1)).backward()
        blocks = [p.numel() for p in made.model.get_submodule("blocks").parameters()]
        assert sorted(norms) == sorted(blocks)
        norms.clear()
        made.updates.clip_grad_norm_(10.0)
        params = [*made.model.parameters()]
        assert len(norms) == len(params) - len(blocks) + 1

    def test_updates_run_while_backward_does(self):
        made = Offloaded(what="parameters", early_updates="100%")
        step(made, 0)
        made.handle.wait()
        block = made.model.get_submodule("blocks")[3]
        state = made.optimizer.state[block.up.weight]
        before = state["step"].item()
        seen = []

        def look(_: Tensor) -> None:
            made.residence.parts[NUM_BLOCKS]._updates[0].result()
            seen.append(state["step"].item())

        hook = made.model.get_submodule("blocks")[0].up.weight.register_hook(look)
        made.model(make_batch(1)).backward()
        hook.remove()
        assert seen == [before + 1]


@pytest.mark.parametrize("value", [-1, True, "all", "120%", 1.5])
def test_what_is_no_number_of_blocks_is_refused(value):
    with pytest.raises(ConfigurationError, match=r"`early_updates=.*neither a number of blocks"):
        Offloading("parameters", early_updates=value)


def test_more_host_memory_than_there_is_is_refused():
    model = early().model
    needed = functools.partial(Offloading, "parameters")().host_bytes(early(number=0).model)[0]
    Offloaded("dropout", "parameters", host_budget=needed)
    with pytest.raises(IncompatibleError, match="host_budget"):
        Offloading("parameters", host_budget=needed, early_updates=1).apply(model)


@pytest.mark.parametrize("what", ["activations", "embeddings"])
def test_without_weights_of_blocks_on_the_host_it_is_refused(what):
    with pytest.raises(ConfigurationError, match="no weight of blocks is updated"):
        Offloading(what, early_updates=1)
