"""``"muon_8bit"``: torch's Muon with quantized momentum, and AdamW as ``"adamw_8bit"`` has it."""

import copy
import io
import pickle
from typing import Any

import bitsandbytes.functional as F  # noqa: N812
import pytest
import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from lightning_memsave import (
    ConfigurationError,
    IncompatibleError,
    LowBitOptimizer,
    LowPrecisionWeights,
    NamedOptimizer,
    Offloading,
    OptimizerInBackward,
)
from lightning_memsave.measure.storages import tensors_in
from lightning_memsave.techniques.low_bit_optimizer.state import convert_state_dict
from lightning_memsave.units import format_bytes
from tests.cases import make_model
from tests.helpers import assert_same
from tests.techniques.contract import assert_one_fit_keeps_promises
from tests.techniques.test_named_optimizer import (
    ACCUMULATED,
    BETAS,
    DECAY,
    configured,
    groups_of,
    run,
)

SIZE = 2048  # the matrices of a block have as many elements, or twice as many
TABLE = F.create_dynamic_map(signed=True)


class MuonByHand(Muon):
    """Muon whose momentum is quantized after each step, in blocks of 256."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for param, state in self.state.items():
            if param.numel() >= SIZE:
                momentum = state["momentum_buffer"]
                values, scales = F.quantize_blockwise(momentum, TABLE, blocksize=256)
                momentum.copy_(F.dequantize_blockwise(values, scales))


class TwoOptimizers:
    """Muon for matrices of blocks and 8-bit AdamW for the rest, as one writes it by hand."""

    def __init__(self, model: nn.Module) -> None:
        first, second = groups_of(model)
        in_blocks = {p for block in model.blocks for p in block.parameters()}
        own = [p for p in first["params"] if p in in_blocks]
        head = [p for p in first["params"] if p not in in_blocks]
        settings: Any = {"lr": 1e-3, "weight_decay": DECAY, "adjust_lr_fn": "match_rms_adamw"}
        rest = AdamW([{**first, "params": head}, second], lr=1e-3, betas=BETAS)
        low_bit = LowBitOptimizer("adamw_8bit", module=model, min_8bit_size=SIZE)
        self.both = [MuonByHand(own, **settings), low_bit.apply(rest).target]

    def step(self) -> None:
        for optimizer in self.both:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.both:
            optimizer.zero_grad()


def muon_8bit(model: nn.Module, optimizer: Optimizer | None = None, **settings: Any) -> Any:
    settings = {"min_8bit_size": SIZE, "module": model, **settings}
    technique = LowBitOptimizer("muon_8bit", **settings)
    optimizer = configured(model) if optimizer is None else optimizer
    assert technique.check(optimizer) == []
    return technique.apply(optimizer).target


@pytest.fixture
def model() -> nn.Module:
    return make_model("dropout").train()


HOW: dict[str, dict[str, Any]] = {"plain": {}, "accumulated": ACCUMULATED}


class TestTrainsAsByHand:
    @pytest.mark.parametrize("how", HOW)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_in_a_loop(self, model, how, dtype):
        for layer in filter(lambda each: isinstance(each, nn.Linear), model.modules()):
            layer.to(dtype)
        other = copy.deepcopy(model)
        how = {**HOW[how], "in_autocast": dtype is torch.bfloat16}
        ours = run(model, muon_8bit(model), range(4), **how)
        assert_same(ours, run(other, TwoOptimizers(other), range(4), **how))
        assert_same(model, other)

    def test_in_backward(self, model):
        other = copy.deepcopy(model)
        optimizer = muon_8bit(model)
        with OptimizerInBackward().apply(optimizer):
            ours = run(model, optimizer)
        assert_same(ours, run(other, TwoOptimizers(other)))
        assert_same(model, other)

    @pytest.mark.parametrize("in_backward", [False, True])
    @pytest.mark.parametrize("what", ["optimizer", "parameters"])
    def test_offloaded(self, model, what, in_backward):
        other = copy.deepcopy(model)
        offloading = Offloading(what)
        handle = offloading.apply(model)
        optimizer = muon_8bit(model)
        if in_backward:
            OptimizerInBackward().apply(optimizer)
        with offloading.update_in_background(optimizer):
            assert_same(run(model, optimizer), run(other, TwoOptimizers(other)))
        handle.undo()
        assert_same(model, other)

    @pytest.mark.parametrize("min_8bit_size", [1, 2**20])
    def test_with_all_or_no_matrix_in_8_bits(self, model, min_8bit_size, monkeypatch):
        other = copy.deepcopy(model)
        monkeypatch.setattr(f"{__name__}.SIZE", min_8bit_size)
        assert_same(run(model, muon_8bit(model)), run(other, TwoOptimizers(other)))
        assert_same(model, other)


def test_state_is_as_large_as_it_says(model):
    low_bit = LowBitOptimizer("muon_8bit", module=model, min_8bit_size=SIZE)
    (change,) = low_bit.apply(configured(model)).changes
    optimizer = muon_8bit(model)
    run(model, optimizer, range(1))
    num_bytes = sum({id(t): t.nbytes for t in tensors_in(optimizer.state)}.values())
    matrices = sum(p.numel() for block in model.blocks for p in block.parameters() if p.ndim == 2)
    head = model.head.weight.numel()
    vectors = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    scales = 4 * (matrices + 2 * head) // 256
    assert num_bytes == matrices + 2 * head + scales + 8 * vectors + 2 * 1024
    assert change == (
        "AdamW -> Muon8bit for 8 matrices of blocks, AdamW8bit for the rest: 9 of 26 tensors, "
        f"optimizer state 554.60 KiB -> {format_bytes(num_bytes)} (kept 32-bit: 9 bias, 8 norm)"
    )


def test_groups_keep_what_they_have_and_get_the_settings(model):
    kwargs = {"ns_steps": 3, "momentum": 0.5, "ns_coefficients": [3.0, -4.0, 2.0]}
    optimizer = configured(model)
    before = copy.deepcopy(optimizer.state_dict())
    technique = LowBitOptimizer("muon_8bit", module=model, optimizer_kwargs=kwargs)
    handle = technique.apply(optimizer)
    first, second = handle.target.param_groups
    assert first is optimizer.param_groups[0]
    assert [first["weight_decay"], second["lr"], first["mine"]] == [DECAY, 3e-4, "kept"]
    assert [first["betas"], first["ns_steps"], first["momentum"]] == [BETAS, 3, 0.5]
    assert first["ns_coefficients"] == (3.0, -4.0, 2.0)
    handle.undo()
    assert_same(optimizer.state_dict(), before)


@pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
@pytest.mark.parametrize("in_backward", [False, True])
def test_rounds_updates_of_bfloat16_weights(model, rounding, in_backward):
    technique = LowPrecisionWeights(rounding)
    technique.apply(model)
    optimizer = muon_8bit(model)
    technique.round_updates(optimizer)
    if in_backward:
        OptimizerInBackward().apply(optimizer)
    before = {name: param.clone() for name, param in model.named_parameters()}
    run(model, optimizer, in_autocast=True)
    for name, param in model.named_parameters():
        assert ("absmax1" in optimizer.state[param]) is (param.ndim == 2)
        assert not torch.equal(param, before[name])


class TestCheckpoints:
    def test_go_on_bit_for_bit(self, model):
        optimizer = muon_8bit(model)
        run(model, optimizer, range(2))
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        straight = run(model, optimizer, range(2, 4))
        other = make_model("dropout").train()
        resumed = muon_8bit(other)
        file.seek(0)
        weights, state = torch.load(file, weights_only=True)
        other.load_state_dict(weights)
        resumed.load_state_dict(state)
        assert_same(straight, run(other, resumed, range(2, 4)))
        assert_same(optimizer, resumed)

    @pytest.mark.parametrize("form", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
    def test_so_do_copies(self, model, form):
        optimizer = muon_8bit(model)
        run(model, optimizer, range(1))
        other, copied = form((model, optimizer))
        assert_same(run(model, optimizer), run(other, copied))
        assert_same(optimizer, copied)

    def test_of_muon_are_converted_and_back(self, model):
        """In 8 bits the momentum of a by-hand run is kept as it is."""
        by_hand = TwoOptimizers(model)
        run(model, by_hand, range(2))
        plain = NamedOptimizer("muon", module=model).apply(configured(model)).target
        ours = muon_8bit(model)
        for param, state in by_hand.both[0].state.items():
            plain.state[param] = {"momentum_buffer": state["momentum_buffer"].clone()}
        ours.load_state_dict(convert_state_dict(plain.state_dict(), ours))
        back = convert_state_dict(ours.state_dict(), plain)
        assert_same(back["state"], plain.state_dict()["state"])
        plain.load_state_dict(back)

    @pytest.mark.parametrize("name", ["adamw_8bit", "lion_8bit"])
    def test_of_others_are_refused(self, model, name):
        other = LowBitOptimizer(name, module=model).apply(configured(model)).target
        run(model, other, range(1))
        with pytest.raises(IncompatibleError, match="written by another optimizer than Muon"):
            muon_8bit(model).load_state_dict(other.state_dict())
        with pytest.raises(IncompatibleError, match="and this run uses Muon8bit"):
            convert_state_dict(other.state_dict(), muon_8bit(model))

    def test_of_other_blocks_are_refused(self, model):
        optimizer = muon_8bit(model)
        run(model, optimizer, range(1))
        other = muon_8bit(make_model("dropout"), blocks="re:blocks.[01]")
        with pytest.raises(IncompatibleError, match="or with other matrices for it"):
            other.load_state_dict(optimizer.state_dict())


def test_one_fit_keeps_every_promise():
    assert_one_fit_keeps_promises([LowBitOptimizer("muon_8bit", min_8bit_size=SIZE)], "dropout")


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"ns_step": 3}, "Did you mean `ns_steps`"),
        ({"adjust_lr_fn": "mine"}, "Adjust learning rate function mine is not supported"),
        ({"momentum": -1.0}, "momentum should be >= 0"),
        ({"betas": (0.9,)}, "it must be 2 numbers"),
    ],
)
def test_wrong_settings_say_what_to_type(kwargs, text):
    with pytest.raises(ConfigurationError, match=text):
        LowBitOptimizer("muon_8bit", optimizer_kwargs=kwargs)


def test_needs_blocks(model):
    with pytest.raises(IncompatibleError, match="is a matrix of a repeated block"):
        LowBitOptimizer("muon_8bit").apply(configured(model))
