"""Weights in bfloat16: what is rounded and how, in tiles and as a whole, alone and together."""

import copy
import math
import pickle
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memsave import LowBitOptimizer, LowPrecisionWeights, OptimizerInBackward, PeakMemory
from lightning_memsave.errors import ConfigurationError, IncompatibleError, NoEffectWarning
from lightning_memsave.measure.live_tensors import LiveTensors
from lightning_memsave.techniques import tiled_steps
from lightning_memsave.techniques.low_precision_weights import rounded_updates
from lightning_memsave.techniques.optimizer_step import OWN_STATE, allocate_state, owners_of
from tests.cases import make_batch, make_model
from tests.helpers import assert_same
from tests.own_optimizers import CountsInGroups

BF16 = torch.bfloat16
ROUNDINGS = ("stochastic", "kahan")
ELEMENTWISE: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1, "amsgrad": True}),
    "adamw-foreach": (torch.optim.AdamW, {"foreach": True}),
    "adamw-fused": (torch.optim.AdamW, {"fused": True}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "rprop": (torch.optim.Rprop, {}),
    "asgd": (torch.optim.ASGD, {}),
}
WHOLE: dict[str, Any] = {"adafactor": torch.optim.Adafactor, "muon": torch.optim.Muon}
LOW_BIT = ("adamw_8bit", "adam_8bit", "lion_8bit", "sgd_8bit", "rmsprop")


@pytest.fixture
def to_the_nearest(monkeypatch):
    """Stochastic rounding rounds to the nearest, as plain bfloat16 does."""
    monkeypatch.setattr(
        rounded_updates, "round_stochastically", lambda param, values, _: param.copy_(values)
    )


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 1,024 numbers."""
    monkeypatch.setattr(tiled_steps, "MIN_TILE_NUMEL", 1024)
    monkeypatch.setattr(tiled_steps, "MAX_TILE_NUMEL", 1024)


def weight(*shape: int, seed: int = 1) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(shape, generator=generator).to(BF16))


def give_gradient(param: nn.Parameter, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def make_optimizer(name: str, params: list[nn.Parameter]) -> Optimizer:
    if name in ELEMENTWISE:
        cls, settings = ELEMENTWISE[name]
        return cls(params, **settings)
    if name in WHOLE:
        return WHOLE[name](params, lr=0.1)
    if name == "rmsprop":
        return LowBitOptimizer("8bit").apply(torch.optim.RMSprop(params)).target
    adamw = torch.optim.AdamW(params)
    return LowBitOptimizer(name, min_8bit_size=256).apply(adamw).target


def updated(optimizer: Optimizer, params: list[nn.Parameter], steps: int = 3) -> list[Tensor]:
    for step in range(steps):
        for param in params:
            give_gradient(param, step)
        optimizer.step()
    return [param.detach().clone() for param in params]


def forward_and_backward(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast("cpu", BF16):
        loss = model(batch)
    loss.backward()
    return loss.detach()


def draws(value: float, count: int = 100_000) -> Tensor:
    result = torch.empty(count, dtype=BF16)
    generator = torch.Generator().manual_seed(5)
    rounded_updates.round_stochastically(result, torch.full((count,), value), generator)
    return result.double()


class TestRounding:
    @pytest.mark.parametrize("share", [0.001, 0.25, 0.5, 0.9])
    @pytest.mark.parametrize("sign", [1, -1])
    def test_stochastic_is_right_on_average(self, share, sign):
        low, high = sign * 1.0, sign * (1.0 + 2**-7)  # neighbours
        value = torch.tensor(low + share * (high - low)).item()
        found = draws(value)
        assert set(found.tolist()) <= {low, high}
        error = found.mean().item() - value
        standard = abs(high - low) * math.sqrt(share * (1 - share) / len(found))
        assert abs(error) < 4 * standard

    @given(st.floats(width=32, allow_nan=False, allow_infinity=False))
    def test_gives_a_neighbour(self, value):
        exact = torch.tensor([value])
        found = torch.empty(1, dtype=BF16)
        rounded_updates.round_stochastically(found, exact.clone(), torch.Generator().manual_seed(0))
        bits = exact.view(torch.int32) & ~0xFFFF
        # The same number for what bfloat16 can hold; past the largest comes infinity.
        up = bits if torch.equal(bits, exact.view(torch.int32)) else bits + 0x10000
        assert found.float().view(torch.int32).item() in (bits.item(), up.item())

    def test_infinities_and_all_kinds_of_nan_stay(self):
        patterns = [0x7F800000, -0x800000, 0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001, -0x400000]
        values = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
        expected = values.clone()
        found = torch.empty(len(patterns), dtype=BF16)
        rounded_updates.round_stochastically(found, values, torch.Generator())
        assert torch.equal(found.isnan(), expected.isnan())
        assert found[:2].tolist() == [math.inf, -math.inf]

    def test_the_rest_is_what_was_lost(self):
        values = torch.randn(1000)
        param, rest = torch.empty(2, 1000, dtype=BF16)
        rounded_updates.round_with_rest(param, values.clone(), rest)
        assert torch.equal(param, values.to(BF16))
        lost = (param.double() + rest.double() - values.double()).abs()
        assert (lost <= values.abs() * 2**-16).all()

    def test_seeds_do_not_come_again_soon(self):
        seeds = [rounded_updates.first_seed(index) for index in range(1000)]
        for _ in range(20):
            seeds += [rounded_updates.next_seed(seed) for seed in seeds[-1000:]]
        assert len(set(seeds)) == len(seeds)
        assert all(0 <= seed < 2**32 for seed in seeds)


class TestUpdates:
    # The last two look at whole weights.
    @pytest.mark.parametrize(
        "name", ["adamw", "momentum", "adamw_8bit", "radam", "adafactor", "muon"]
    )
    def test_are_those_of_float32_rounded(self, name, small_tiles, to_the_nearest):
        param, truth = weight(64, 64), weight(64, 64)
        truth.data = truth.data.float()
        ours, theirs = make_optimizer(name, [param]), make_optimizer(name, [truth])
        LowPrecisionWeights().round_updates(ours)
        for step in range(3):
            give_gradient(param, step)
            truth.grad = param.grad.float()
            truth.data.copy_(param)
            ours.step()
            theirs.step()
            assert torch.equal(param, truth.to(BF16))
        for key, value in theirs.state[truth].items():
            other = ours.state[param][key]
            assert torch.equal(other, value) if isinstance(value, Tensor) else other == value

    @pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
    @pytest.mark.parametrize("name", [*ELEMENTWISE, *LOW_BIT])
    def test_in_tiles_are_those_of_the_whole(
        self, name, rounding, small_tiles, to_the_nearest, monkeypatch
    ):
        results = []
        for limit in (1024, 2**30):
            monkeypatch.setattr(tiled_steps, "MIN_TILE_NUMEL", limit)
            params = [weight(72, 67), weight(5, seed=2)]  # 4,824 numbers: not a multiple
            optimizer = make_optimizer(name, params)
            LowPrecisionWeights(rounding).round_updates(optimizer)
            assert tiled_steps.is_tiled(optimizer, params[0]) is False  # no gradient yet
            give_gradient(params[0], 0)
            assert tiled_steps.is_tiled(optimizer, params[0]) is (limit == 1024)
            results.append((updated(optimizer, params), [optimizer.state[p] for p in params]))
        (tiled, tiled_states), (whole, whole_states) = results
        assert all(torch.equal(a, b) for a, b in zip(tiled, whole, strict=True))
        for a, b in zip(tiled_states, whole_states, strict=True):
            assert a.keys() == b.keys()
            for key, value in b.items():
                if isinstance(value, Tensor):
                    assert a[key].shape == value.shape
                    assert a[key].dtype == value.dtype
                    assert torch.equal(a[key], value), key
                else:
                    assert a[key] == value

    def test_of_tensors_with_other_strides(self, small_tiles):
        plain, turned = weight(64, 64), weight(64, 64)
        turned.data = turned.data.t().contiguous().t()
        results = []
        for param in (plain, turned):
            optimizer = torch.optim.AdamW([param])
            LowPrecisionWeights("kahan").round_updates(optimizer)
            results += updated(optimizer, [param])
        assert torch.equal(*results)

    def test_of_zero_or_of_none_leave_stochastic_weights_alone(self):
        """Rows of an embedding that never come must not walk about."""
        param, other = params = [weight(64, 64), weight(64, 64, seed=2)]
        before = [each.detach().clone() for each in params]
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        LowPrecisionWeights().round_updates(optimizer)
        for _ in range(20):
            param.grad = torch.zeros_like(param)
            optimizer.step()
        assert all(map(torch.equal, params, before))
        assert other not in optimizer.state

    def test_do_not_touch_random_numbers_and_do_not_depend_on_them(self):
        results = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            state = torch.get_rng_state()
            param = weight(64, 64)
            optimizer = torch.optim.AdamW([param])
            LowPrecisionWeights().round_updates(optimizer)
            results += updated(optimizer, [param])
            assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(*results)

    def test_differ_from_step_to_step_and_from_parameter_to_parameter(self):
        params = [nn.Parameter(torch.ones(4096, 1, dtype=BF16)) for _ in range(2)]
        optimizer = torch.optim.SGD(params, lr=2**-8)
        LowPrecisionWeights().round_updates(optimizer)
        found = []
        for _ in range(2):
            for param in params:
                param.data.fill_(1.0)
                param.grad = torch.full_like(param, -1.0)
            optimizer.step()
            found += [param.detach().flatten() == 1 for param in params]
        for i in range(4):
            for j in range(i):
                equal = (found[i] == found[j]).float().mean().item()
                assert 0.45 < equal < 0.55

    def test_state_in_bfloat16_becomes_float32(self):
        param = weight(64, 64)
        optimizer = torch.optim.AdamW([param])
        give_gradient(param, 0)
        optimizer.step()
        assert optimizer.state[param]["exp_avg"].dtype is BF16
        LowPrecisionWeights().round_updates(optimizer)
        updated(optimizer, [param])
        assert optimizer.state[param]["exp_avg"].dtype is torch.float32


class TestOptimizer:
    def test_float32_parameters_are_stepped_as_before(self):
        results = []
        for is_ours in (False, True):
            params = [nn.Parameter(weight(64, 64, seed=s).float().detach()) for s in range(3)]
            groups: Any = [{"params": params[:2]}, {"params": params[2:], "lr": 1}]
            optimizer = torch.optim.AdamW(groups)
            if is_ours:
                optimizer.add_param_group({"params": [weight(64, 64, seed=4)]})
                give_gradient(optimizer.param_groups[-1]["params"][0], 0)
                LowPrecisionWeights().round_updates(optimizer)
            results.append(updated(optimizer, params))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    @pytest.mark.parametrize(
        ("name", "rounding"),
        [("adamw", "kahan"), ("momentum", "stochastic"), ("adamw_8bit", "kahan")],
    )
    def test_copies_and_pickles_step_in_the_same_way(self, name, rounding):
        param = weight(64, 64)
        optimizer = make_optimizer(name, [param])
        LowPrecisionWeights(rounding).round_updates(optimizer)
        updated(optimizer, [param])
        others = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
        expected = updated(optimizer, [param])[0]
        for other in others:
            own = other.param_groups[0]["params"]
            assert not torch.equal(own[0], expected)  # it has a weight of its own
            assert torch.equal(updated(other, own)[0], expected)

    def test_state_loads_with_and_without_it(self):
        param, plain = weight(64, 64), nn.Parameter(weight(64, 64).detach().float())
        ours, theirs = torch.optim.AdamW([param]), torch.optim.AdamW([plain])
        LowPrecisionWeights("kahan").round_updates(ours)
        updated(ours, [param])
        theirs.load_state_dict(ours.state_dict())
        assert torch.equal(theirs.state[plain]["exp_avg"], ours.state[param]["exp_avg"])
        updated(theirs, [plain])
        ours.load_state_dict(theirs.state_dict())
        assert torch.equal(theirs.state[plain]["exp_avg"], ours.state[param]["exp_avg"])
        updated(ours, [param])

    def test_nested_state_loads_in_float32(self):
        param = weight(64, 64)
        optimizer = CountsInGroups([param])
        LowPrecisionWeights("kahan").round_updates(optimizer)
        updated(optimizer, [param])
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(saved)
        assert_same(optimizer.state_dict(), saved)
        updated(optimizer, [param])

    def test_undo_restores_the_optimizer(self):
        optimizer = torch.optim.AdamW([weight(8, 8)])
        before = dict(vars(optimizer))
        handle = LowPrecisionWeights().round_updates(optimizer)
        handle.undo()
        handle.undo()
        assert vars(optimizer) == before
        assert not owners_of(copy.deepcopy(optimizer))

    def test_refuses_what_it_cannot_do(self):
        with pytest.raises(IncompatibleError, match="Use another optimizer"):
            LowPrecisionWeights().round_updates(torch.optim.LBFGS([weight(8, 8)]))
        optimizer = torch.optim.AdamW([weight(8, 8)])
        LowPrecisionWeights().round_updates(optimizer)
        with pytest.raises(IncompatibleError, match="Undo the handle"):
            LowPrecisionWeights().round_updates(optimizer)

    def test_scaled_gradients_arrive_unscaled(self, to_the_nearest):
        param = weight(64, 64)
        optimizer = torch.optim.SGD([param], lr=1.0)
        LowPrecisionWeights().round_updates(optimizer)
        expected = (param.float() - 2.0).to(BF16)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale((param * 2.0).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(param, expected)

    def test_with_a_closure_is_the_step_without_one(self):
        """Also of an optimizer that nobody knows: a Trainer always gives one."""
        results = []
        for has_closure in (False, True):
            param = weight(64, 64)
            optimizer = CountsInGroups([param])
            LowPrecisionWeights("kahan").round_updates(optimizer)
            for step in range(3):
                give_gradient(param, step)
                optimizer.step((lambda: None) if has_closure else None)
            assert "compensation" in optimizer.state[param]
            results.append([param, optimizer.state_dict()])
        assert_same(*results)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("bits", [8, 32])
def test_in_backward_gives_the_same_bits(rounding, bits):
    """Parameters are updated in another order, and rounded by the same random numbers."""
    states = []
    for is_in_backward in (False, True):
        model = make_model("tied").train()
        technique = LowPrecisionWeights(rounding)
        technique.apply(model)
        optimizer: Optimizer = torch.optim.AdamW(model.parameters())
        if bits == 8:
            optimizer = LowBitOptimizer(module=model).apply(optimizer).target
        technique.round_updates(optimizer)
        if is_in_backward:
            OptimizerInBackward().apply(optimizer)
        torch.manual_seed(3)
        for step in range(3):
            forward_and_backward(model, make_batch(step))
            optimizer.step()
            optimizer.zero_grad()
        states.append(model.state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


class TestGradientSums:
    NUM_PARTS = 300

    def parts(self) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        return (torch.rand(self.NUM_PARTS, 32, 32, generator=generator) + 0.5).to(BF16)

    def sum_of_parts(self, model: nn.Linear) -> Tensor:
        for part in self.parts():
            (model.weight * part).sum().backward()
        return model.weight.grad.double()

    def test_is_the_sum_in_float64_but_for_one_rounding(self):
        truth = self.parts().double().sum(0)
        errors = {}
        for key in ("plain", "ours"):
            model = nn.Linear(32, 32, bias=False).requires_grad_(key == "plain")
            technique = LowPrecisionWeights()
            technique.apply(model)
            if key == "ours":
                with technique.sum_gradients_in_fp32(model):
                    assert not model.weight.requires_grad
                    model.requires_grad_()  # a layer may thaw later
                    found = self.sum_of_parts(model)
                    assert model.weight.grad.dtype is torch.float32
                    model.zero_grad()
                    assert torch.equal(self.sum_of_parts(model), found)
                assert model.weight.grad.dtype is BF16
            else:
                found = self.sum_of_parts(model)
            errors[key] = ((found - truth).abs() / truth).max().item()
        assert errors["plain"] > 0.05
        assert errors["ours"] < 1e-6

    def test_keeps_a_gradient_that_is_there(self):
        model = nn.Linear(32, 32, bias=False)
        LowPrecisionWeights().apply(model)
        model.weight.grad = torch.ones_like(model.weight)
        handle = LowPrecisionWeights().sum_gradients_in_fp32(model)
        model.weight.sum().backward()
        handle.undo()
        handle.undo()
        assert torch.equal(model.weight.grad, torch.full((32, 32), 2.0, dtype=BF16))

    def test_updates_in_backward_use_the_sum(self):
        model = nn.Linear(32, 32, bias=False)
        technique = LowPrecisionWeights("kahan")
        technique.apply(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)
        technique.round_updates(optimizer)
        start = model.weight.detach().double()
        in_backward: Any = OptimizerInBackward().apply(optimizer)
        *parts, last = self.parts()
        with technique.sum_gradients_in_fp32(model):
            for part in parts:
                with in_backward.accumulating():
                    (model.weight * part).sum().backward()
            (model.weight * last).sum().backward()
            assert model.weight.grad is None
            optimizer.step()
        truth = start - 2**-6 * self.parts().double().sum(0)
        assert ((model.weight.double() - truth).abs() <= 2**-6 * truth.abs().clamp(min=1)).all()

    def test_undone_after_the_weights(self):
        model: Any = nn.Linear(32, 32, bias=False)
        weights = LowPrecisionWeights().apply(model)
        sums = LowPrecisionWeights().sum_gradients_in_fp32(model)
        model.weight.float().sum().backward()
        weights.undo()
        sums.undo()
        model.weight.sum().backward()
        assert model.weight.grad.dtype is torch.float32
        assert torch.equal(model.weight.grad, torch.full((32, 32), 2.0))

    def test_is_refused_in_a_process_group(self, tmp_path):
        """DDP fails where a gradient is of another type than its parameter."""
        store = torch.distributed.FileStore(  # type: ignore[attr-defined]
            str(tmp_path / "store"), 1
        )
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            model = nn.Linear(32, 32, bias=False)
            technique = LowPrecisionWeights()
            technique.apply(model)
            with pytest.raises(IncompatibleError, match="leave `LowPrecisionWeights` out"):
                technique.sum_gradients_in_fp32(model)
            assert model.weight.grad_dtype is BF16
        finally:
            torch.distributed.destroy_process_group()


def test_state_that_is_made_before_the_step_is_float32():
    """Micro-batches make it early, so that memory does not run out half-way through a step."""
    results = []
    for name in ("adamw", "momentum", "adamw_8bit"):
        for is_early in (False, True):
            param = weight(64, 64)
            optimizer = make_optimizer(name, [param])
            LowPrecisionWeights("kahan" if name == "adamw" else "stochastic").round_updates(
                optimizer
            )
            if is_early and name != "momentum":  # with dampening it is left to the step
                give_gradient(param, 0)
                allocate_state(optimizer)
                assert optimizer.state[param]
            results += updated(optimizer, [param])
    assert all(torch.equal(a, b) for a, b in zip(results[::2], results[1::2], strict=True))


class TestModule:
    def test_keeps_norms_vectors_and_named_parameters(self):
        model = make_model("dropout")
        handle = LowPrecisionWeights(keep_fp32=("head.*",)).apply(model)
        for name, param in model.named_parameters():
            is_kept = "norm" in name or "bias" in name or "head" in name
            assert (param.dtype is torch.float32) == is_kept, name
        assert "kept float32: 8 norm, 2 pattern, 8 vector" in handle.summary

    def test_keeps_what_autocast_does_not_convert(self):
        model = nn.ModuleDict({"lstm": nn.LSTM(8, 8), "both": nn.Bilinear(8, 8, 8)})
        model["linear"] = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        with pytest.warns(NoEffectWarning, match="2 bilinear, 2 parametrized, 4 recurrent"):
            LowPrecisionWeights().apply(model)

    def test_keeps_the_type_that_a_module_says(self):
        """Routers of transformers give their weights this type in forward."""

        class Router(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.dtype, self.classifier = torch.float32, nn.Linear(8, 4, bias=False)

            def forward(self, x: Tensor) -> Tensor:
                self.classifier = self.classifier.to(self.dtype)
                found: Tensor = self.classifier(x.to(self.dtype))
                return found

        model = nn.Sequential(nn.Linear(8, 8), Router())
        handle = LowPrecisionWeights().apply(model)
        assert "kept float32: 1 in the type that their module says, 1 vector" in handle.summary
        with torch.autocast("cpu", BF16):
            model(torch.ones(2, 8)).sum().backward()
        weight: Any = model[1].classifier.weight
        assert weight.dtype is weight.grad.dtype is torch.float32
        assert model[0].weight.dtype is BF16

    def test_keeps_sparse_embeddings_and_their_sparse_steps(self):
        """In bfloat16 each step would make the whole table in float32, and its gradient with it."""
        model = nn.Sequential(nn.Embedding(20_000, 64, sparse=True), nn.Linear(64, 64))
        table = model[0].weight
        before, peaks = table.detach().clone(), []
        for technique in (None, LowPrecisionWeights()):
            handle = None if technique is None else technique.apply(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if technique is not None:
                technique.round_updates(optimizer)
            with torch.autocast("cpu", BF16):
                loss = model(torch.tensor([3, 5])).square().sum()
            with PeakMemory(model, [optimizer]) as peak:
                loss.backward()
                optimizer.step()
            peaks.append(peak.allocated_bytes)
            optimizer.zero_grad()
        assert handle is not None
        assert table.dtype is torch.float32
        assert "kept float32: 1 sparse, 1 vector" in handle.summary
        assert (table != before).any(1).nonzero().flatten().tolist() == [3, 5]
        # The matrix is updated in float32; nothing of the table's size is made.
        assert peaks[1] - peaks[0] < table.nbytes // 100

    def test_keeps_memory_that_parameters_share(self):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        model[1].weight.data = model[0].weight.data
        handle = LowPrecisionWeights().apply(model)
        assert model[1].weight.data_ptr() == model[0].weight.data_ptr()
        assert "2 shared memory" in handle.summary

    @pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
    def test_leaves_layers_whose_weights_autocast_does_not_cast(self):
        model = nn.Sequential(
            nn.EmbeddingBag(4, 8, mode="sum"),
            nn.utils.spectral_norm(nn.Linear(8, 8)),
            nn.utils.weight_norm(nn.Linear(8, 8)),
        )
        before = {n: p.dtype for n, p in model.named_parameters()}
        with pytest.warns(NoEffectWarning, match="kept float32: 1 embedding bag, 5 parametrized"):
            LowPrecisionWeights().apply(model)
        assert {n: p.dtype for n, p in model.named_parameters()} == before
        with torch.autocast("cpu", BF16):
            bags = model[0](torch.arange(4).repeat(2, 1), per_sample_weights=torch.randn(2, 4))
            loss = model[2](model[1](bags)).sum()
        loss.backward()

    def test_matrices_are_no_norms_whatever_their_class_is_called(self):
        class LogNormalHead(nn.Linear):
            pass

        model = nn.Sequential(LogNormalHead(64, 64), nn.LayerNorm((8, 8)))
        LowPrecisionWeights().apply(model)
        assert [p.dtype for p in model.parameters()] == [BF16] + 3 * [torch.float32]
        technique = LowBitOptimizer(min_8bit_size=1, module=model)
        optimizer: Any = technique.apply(torch.optim.AdamW(model.parameters())).target
        assert optimizer.uses_8bit(model[0].weight)
        assert not optimizer.uses_8bit(model[1].weight)

    def test_says_what_is_kept_and_what_had_another_type(self):
        model = nn.Sequential(
            nn.Linear(8, 8).bfloat16(),
            nn.LayerNorm(8).bfloat16(),
            *(nn.Linear(8, 8).double(), nn.Linear(8, 8).half(), nn.LazyLinear(8), nn.Linear(8, 8)),
        )
        handle = LowPrecisionWeights().apply(model)
        assert "1 of 12 tensors" in handle.summary
        expected = "(kept float32: 1 vector; unchanged: 4 bfloat16, 2 float16, 2 float64, 2 lazy)"
        assert handle.summary.endswith(expected)

    def test_gradients_that_are_there_are_converted(self):
        model = nn.Linear(8, 8)
        model.weight.grad = torch.ones(8, 8)
        handle = LowPrecisionWeights().apply(model)
        assert model.weight.grad.dtype is BF16
        handle.undo()
        assert model.weight.grad.dtype is torch.float32

    def test_bad_settings_say_what_to_write(self):
        with pytest.raises(ConfigurationError, match=r'Choose one of "stochastic"'):
            LowPrecisionWeights("random")
        with pytest.raises(ConfigurationError, match=r"keep_fp32=\("):
            LowPrecisionWeights(keep_fp32="head.*")  # type: ignore[arg-type]
        with pytest.raises(IncompatibleError, match=r"such as `head\.weight`"):
            LowPrecisionWeights(keep_fp32=("*head.weigt_x",)).apply(make_model("dropout"))


class _BlockAndHead(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([block]), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.blocks[0](x)))


class TestCallsOutsideOfAutocast:
    def test_they_compute_as_inside_and_so_do_copies_until_it_is_undone(self):
        block = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
        model: Any = _BlockAndHead(block)
        handle = LowPrecisionWeights().apply(model)
        x, off = torch.randn(4, 64), torch.autocast("cpu", enabled=False)
        with torch.autocast("cpu", torch.bfloat16):
            inside = [model(x), model.head(x), model.blocks[0](x)]
            # Who switches it off has asked for float32, which the layer does not have.
            with off, pytest.raises(RuntimeError, match="same dtype"):
                model.head(x)
        with pytest.raises(RuntimeError):
            model(torch.randn(4, 65))
        assert not torch.is_autocast_enabled("cpu")
        for each in (model, copy.deepcopy(model)):
            outside = [each(x), each.head(x), each.blocks[0](x)]
            assert all(map(torch.equal, inside, outside))
        handle.undo()
        assert model.head(x).dtype is torch.float32
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class TestMemory:
    def test_autocast_makes_no_copies_of_weights(self):
        copies = {}
        for is_ours in (False, True):
            model = make_model("dropout")
            if is_ours:
                LowPrecisionWeights().apply(model)
            with LiveTensors(model) as live, torch.autocast("cpu", BF16):
                loss = model(make_batch(0))
                copies[is_ours] = live.breakdown.by_category()["weight_copy"]
            loss.backward()
        matrices = sum(p.numel() for p in make_model("dropout").parameters() if p.ndim > 1)
        biases = sum(
            p.numel()
            for n, p in make_model("dropout").named_parameters()
            if p.ndim == 1 and "norm" not in n
        )
        assert copies == {False: 2 * (matrices + biases), True: 2 * biases}

    @pytest.mark.parametrize("rounding", ROUNDINGS)
    def test_of_a_large_update_is_that_of_tiles(self, rounding):
        param = nn.Parameter(torch.zeros(4 * 2**20, 1, dtype=BF16))
        optimizer = torch.optim.SGD([param], lr=0.1)
        module = nn.Module()
        module.weight = param
        LowPrecisionWeights(rounding).round_updates(optimizer)
        give_gradient(param, 0)
        optimizer.step()
        tile = 4 * 2**20  # 1 Mi numbers in float32
        with LiveTensors(module, [optimizer]) as live:
            held = live.live_bytes
            optimizer.step()
        # The weight and its gradient; later, in place of it, random bits and marks of NaN.
        assert live.peak.total_bytes - held == 2 * tile

    def test_of_state_is_compared_with_that_of_float32(self):
        before = []
        for is_ours in (False, True):
            model = nn.Linear(512, 512)
            if is_ours:
                LowPrecisionWeights().apply(model)
            optimizer = torch.optim.AdamW(model.parameters())
            before.append(LowBitOptimizer().apply(optimizer).summary.split(" -> ")[1])
        assert before[0] == before[1]
        assert "2.00 MiB" in before[0]
        model = nn.Linear(512, 512).bfloat16()  # whose updates nobody rounds
        summary = LowBitOptimizer().apply(torch.optim.AdamW(model.parameters())).summary
        assert "state 1.00 MiB" in summary


class TestConvergence:
    def final_loss(self, rounding: str | None) -> float:
        """Linear regression whose last updates are far below the distance of bfloat16 numbers."""
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(128, 16, generator=generator)
        targets = inputs @ torch.randn(16, 16, generator=generator)
        model = nn.Linear(16, 16, bias=False)
        model.weight.data = torch.ones(16, 16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
        if rounding is not None:
            technique = LowPrecisionWeights(rounding)
            technique.apply(model)
            technique.round_updates(optimizer)
        for _ in range(500):
            optimizer.zero_grad()
            loss = (inputs @ model.weight.float().t() - targets).square().mean()
            loss.backward()
            optimizer.step()
        return loss.item()

    def test_reaches_the_loss_where_rounding_to_the_nearest_stalls(self, request):
        losses = {rounding: self.final_loss(rounding) for rounding in (None, *ROUNDINGS)}
        request.getfixturevalue("to_the_nearest")
        assert self.final_loss("stochastic") > 1.5 * losses[None]
        assert losses["kahan"] < 1.002 * losses[None]
        assert losses["stochastic"] < 1.02 * losses[None]


def test_names_that_checkpoints_have_stay():
    assert OWN_STATE == ("compensation", "rounding_seed")
