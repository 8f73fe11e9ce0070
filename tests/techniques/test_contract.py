"""What every technique promises, on every awkward model."""

import copy
import functools
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from torch import Tensor, nn

from lightning_memsave.core.technique import Exactness, Technique
from lightning_memsave.errors import IncompatibleError, NoEffectWarning
from lightning_memsave.techniques.activation_checkpointing.technique import (
    ActivationCheckpointing,
)
from lightning_memsave.techniques.low_bit_optimizer.technique import LowBitOptimizer
from lightning_memsave.techniques.low_precision_weights.technique import LowPrecisionWeights
from lightning_memsave.techniques.micro_batching.technique import MicroBatching
from lightning_memsave.techniques.registry import techniques
from tests.cases import (
    CASES,
    DEVICE,
    INDEPENDENT_OF_THE_BATCH,
    MODELS,
    ON_CUDA_TOO,
    REFUSED_IN_PARTS,
    fused,
    make_batch,
    make_model,
    sgd,
)
from tests.helpers import (
    OF_OPTIMIZER,
    InAutocast,
    Run,
    adamw,
    assert_bitwise_equal,
    autocast_step_of,
    for_model,
    in_parts,
    snapshot,
    step_of,
    switch_on,
    train,
)

# With every linear layer as a head, most logits are needed.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.chunked_cross_entropy. saves nothing"),
    *ON_CUDA_TOO,
]

more = pytest.mark.exhaustive

ALL = [
    pytest.param(variant, name, id=f"{variant!r}-{name}")
    for case in CASES.values()
    for variant in case.variants
    for name in case.only_on
    if not (case.needs_blocks and name == "unrepeated")
]


def in_some_precisions(is_meant: Callable[[Any], bool], *often: str) -> list[Any]:
    """Cases of some techniques: on a few models in `make test`, on all in `make test-all`."""
    return [
        pytest.param(*p.values, id=p.id, marks=() if p.values[1] in often else more)
        for p in ALL
        if is_meant(p.values[0])
    ]


WHOLE = MicroBatching("auto")  # whole batches, until memory runs out
BITWISE = in_some_precisions(lambda t: t.exactness is Exactness.BITWISE, "new_tensors")
ROUNDING = in_some_precisions(
    lambda t: t.exactness is Exactness.ROUNDING and not isinstance(t, MicroBatching),
    "classifier",
    "eager_bert",
)
APPROXIMATE = in_some_precisions(lambda t: t.exactness is Exactness.APPROXIMATE, "unrepeated")
IN_PARTS = in_some_precisions(lambda t: isinstance(t, MicroBatching), "mutating")


def in_turns(is_long: Callable[[Technique[Any]], bool]) -> list[Any]:
    """All of them; in `make test` a model has one variant of each technique, where it is long."""
    return [
        pytest.param(
            *(variant, name),
            id=f"{variant!r}-{name}",
            marks=more if is_long(variant) and turn % len(case.variants) != number else (),
        )
        for case in CASES.values()
        for number, variant in enumerate(case.variants)
        for turn, name in enumerate(case.only_on)
        if not (case.needs_blocks and name == "unrepeated")
    ]


TRAINED = [
    param
    for param in in_turns(lambda variant: variant.exactness is Exactness.APPROXIMATE)
    if param.values[0] != MicroBatching(6)
]
VARIANTS = [
    pytest.param(variant, id=repr(variant)) for case in CASES.values() for variant in case.variants
]


def target_of(technique: Technique[Any], model: nn.Module) -> Any:
    return adamw(model) if isinstance(technique, OF_OPTIMIZER) else model


@functools.cache
def plain_run(name: str, **options: Any) -> Run:
    """Training without any technique, to compare many with."""
    return train(make_model(name), make_batch, **options)


@pytest.mark.parametrize("name", CASES[MicroBatching.name].only_on)
def test_micro_batches_are_a_loop_over_parts(name):
    """Dropout on: other parts draw other masks, so this loop is the truth to compare with."""
    model = make_model(name)
    saving = train(model, make_batch, MicroBatching(6))
    by_hand = train(model, make_batch, run_step_of=lambda m: in_parts(m, (6, 6, 4)))
    assert_bitwise_equal(by_hand, saving)


@pytest.mark.parametrize("name", REFUSED_IN_PARTS)
def test_losses_that_cannot_be_split_are_refused(name):
    with pytest.raises(IncompatibleError, match="its loss cannot be split"):
        train(make_model(name), make_batch, MicroBatching(6))


@pytest.mark.parametrize("name", INDEPENDENT_OF_THE_BATCH)
def test_micro_batches_have_the_gradients_of_the_batch(name):
    model = make_model(name).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0

    def batch(step: int) -> Any:
        return make_batch(step).double()

    plain = train(model, batch, make_optimizer=standing_still)
    saving = train(model, batch, MicroBatching(6), make_optimizer=standing_still)
    for theirs, ours in zip(plain.gradients, saving.gradients, strict=True):
        for key, truth in theirs.items():
            assert (ours[key] - truth).norm() <= 1e-12 * truth.norm()


def standing_still(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)


@pytest.mark.parametrize(("technique", "name"), TRAINED)
@pytest.mark.daily(2)
def test_trains_as_exactly_as_it_declares(technique, name):
    model = make_model(name)
    if technique.exactness is Exactness.BITWISE or technique == WHOLE:
        make = fused(adamw, technique)
        assert_bitwise_equal(
            plain_run(name, make_optimizer=make),
            train(model, make_batch, technique, make_optimizer=make),
        )
        return
    if technique.exactness is Exactness.ROUNDING:
        assert_same_in_float64(technique, model.double())
        return
    # Below dropout's noise, so that the masks, which are the same, do not hide a difference.
    has_kernels = DEVICE == "cuda" and isinstance(technique, LowPrecisionWeights)
    plain = plain_run(name, steps=30, run_step_of=autocast_step_of if has_kernels else None)
    saving = train(model, make_batch, technique, steps=30)
    assert saving.losses[-1] <= plain.losses[-1] * CASES[technique.name].loss_factor
    moved = [torch.equal(saving.state[k], plain.state[k]) for k in saving.state]
    assert not all(moved), "the technique did nothing: its exactness would be bitwise"


# What Lightning makes of `Trainer(precision=...)`; "16-mixed" on a CPU it replaces by "bf16-mixed".
PRECISIONS: dict[str, Precision] = {
    "64-true": DoublePrecision(),
    "bf16-true": HalfPrecision("bf16-true"),
    "16-true": HalfPrecision("16-true"),
    "bf16-mixed": MixedPrecision("bf16-mixed", DEVICE),
    "16-mixed": MixedPrecision("16-mixed", DEVICE),
}


def in_precision(model: nn.Module, precision: str) -> nn.Module:
    """Let a model run as Lightning runs it: the forward pass has a context, backward has none."""
    cls, plugin = type(model), PRECISIONS[precision]

    def forward(self: nn.Module, batch: Any) -> Any:
        with plugin.forward_context():
            return cls.forward(self, plugin.convert_input(batch))

    model.__class__ = type(cls.__name__, (cls,), {"forward": forward})
    return plugin.convert_module(model)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("technique", "name"), BITWISE)
def test_bitwise_techniques_are_so_in_every_precision(technique, name, precision):
    model, make = in_precision(make_model(name), precision), fused(sgd, technique)
    plain = train(model, make_batch, make_optimizer=make)
    assert all(loss.isfinite() for loss in plain.losses)
    assert_bitwise_equal(plain, train(model, make_batch, technique, make_optimizer=make))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("technique", "name"), IN_PARTS)
def test_micro_batches_are_a_loop_over_parts_in_every_precision(technique, name, precision):
    model = in_precision(make_model(name), precision)
    if precision in ("bf16-true", "16-true"):
        with pytest.raises(IncompatibleError, match='precision="bf16-mixed"'):
            train(model, make_batch, technique, make_optimizer=sgd)
        return
    sizes = (16,) if technique == WHOLE else (6, 6, 4)
    by_hand = train(model, make_batch, run_step_of=lambda m: in_parts(m, sizes), make_optimizer=sgd)
    assert all(loss.isfinite() for loss in by_hand.losses)
    saving = train(model, make_batch, technique, make_optimizer=sgd)
    assert_bitwise_equal(by_hand, saving)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("technique", "name"), ROUNDING)
def test_rounding_techniques_only_round_in_every_precision(technique, name, precision):
    """Their distance from the truth in float64 is that of unmodified training."""
    model = PRECISIONS[precision].convert_module(make_model(name))
    truth, plain, saving = (
        train(
            in_precision(copy.deepcopy(model), each),
            make_coarse_batch,
            technique if is_saving else None,
            make_optimizer=standing_still,
        )
        for each, is_saving in (("64-true", False), (precision, False), (precision, True))
    )
    # What plain training rounds away, and one more rounding of the result in the type in which it
    # is computed; sums of hundreds of float64 numbers, of which plain is the truth, have several.
    unit = 1e-15 if precision == "64-true" else 2**-7 if "bf16" in precision else 2**-10
    for exact, usual, ours in zip(truth.losses, plain.losses, saving.losses, strict=True):
        assert abs(ours - exact) <= abs(usual - exact) + unit * abs(exact)
    steps = zip(truth.gradients, plain.gradients, saving.gradients, strict=True)
    for exact_ones, usual_ones, our_ones in steps:
        whole = torch.stack([gradient.norm() for gradient in exact_ones.values()]).norm()
        for key, exact in exact_ones.items():
            # That of a key's bias is zero but for rounding.
            scale = exact.norm() + 1e-3 * whole
            allowed = (usual_ones[key] - exact).norm()
            assert allowed <= 0.1 * scale, "other dropout masks than in float64: no bound at all"
            assert (our_ones[key] - exact).norm() <= allowed + unit * scale, key


def make_coarse_batch(step: int) -> Tensor:
    """Of numbers that every type has, so that tokens made of their order are the same."""
    return make_batch(step).bfloat16().float()


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """What learns in float16, where squares of gradients are zero and AdamW ends in NaN."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("technique", "name"), APPROXIMATE)
def test_approximate_techniques_learn_in_every_precision(technique, name, precision):
    model = in_precision(make_model(name), precision)
    make_optimizer = momentum if precision == "16-true" else adamw
    options: Any = {"steps": 30, "make_optimizer": make_optimizer, "run_step_of": step_of}
    plain = train(model, make_batch, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NoEffectWarning)
        saving = train(model, make_batch, technique, **options)
    # Training itself brings the loss to less than two thirds in these steps.
    assert plain.losses[-1] <= 2 / 3 * plain.losses[0]
    assert saving.losses[-1] <= plain.losses[-1] * CASES[technique.name].loss_factor
    is_same = all(torch.equal(saving.state[k], plain.state[k]) for k in saving.state)
    is_said = any(issubclass(warning.category, NoEffectWarning) for warning in caught)
    assert is_said if is_same else True, "it did nothing and did not say so"


def assert_same_in_float64(technique: Technique[Any], model: nn.Module) -> None:
    """In float64 what is only another order of operations differs by next to nothing."""

    def batch(step: int) -> Any:
        return make_batch(step).double()

    plain = train(model, batch)
    saving = train(model, batch, technique)
    for truth, loss in zip(plain.losses, saving.losses, strict=True):
        assert abs(truth - loss) <= 1e-12 * abs(truth) + 1e-14
    for theirs, ours in zip(plain.gradients, saving.gradients, strict=True):
        for key, gradient in theirs.items():
            assert (ours[key] - gradient).norm() <= 1e-11 * gradient.norm() + 1e-15


@pytest.mark.parametrize(("technique", "name"), ALL)
def test_check_changes_nothing(technique, name):
    model = make_model(name)
    technique = for_model(technique, model)
    before, state = snapshot(model), copy.deepcopy(model.state_dict())
    assert technique.check(target_of(technique, model)) == []
    assert snapshot(model) == before
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize(("technique", "name"), ALL)
def test_undo_restores_the_module(technique, name):
    model = make_model(name).train()
    technique = for_model(technique, model)
    before, keys = snapshot(model), list(model.state_dict())
    step, optimizer, handle = switch_on(technique, model, adamw(model))
    assert list(model.state_dict()) == keys
    step(make_batch(0))
    optimizer.step()
    handle.undo()
    handle.undo()
    assert snapshot(model) == before


# Micro-batching changes nothing that could be changed twice: it gives a new step.
@pytest.mark.parametrize(
    "technique", [p for p in VARIANTS if not isinstance(p.values[0], MicroBatching)]
)
def test_applying_twice_equals_once_or_is_refused(technique):
    model = make_model(CASES[technique.name].only_on[0]).train()
    technique = for_model(technique, model)
    _, optimizer, first = switch_on(technique, model, adamw(model))
    before = snapshot(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _, _, second = switch_on(technique, model, optimizer)
        except IncompatibleError:
            first.undo()
            return
    assert [warning.category for warning in caught] == [NoEffectWarning]
    assert second.changes == ()
    second.undo()
    assert snapshot(model) == before
    first.undo()


@pytest.mark.parametrize(("technique", "name"), in_turns(lambda _: True))
@pytest.mark.daily(2)
def test_state_loads_with_and_without_it(technique, name):
    """Saved with, loaded without, and back; optimizer state goes through a file half-way."""
    model = make_model(name)
    straight, resumed = copy.deepcopy(model), copy.deepcopy(model)
    losses = {}
    for key, net in (("straight", straight), ("resumed", resumed)):
        net.train()
        run_step, optimizer, _ = switch_on(for_model(technique, net), net, adamw(net))
        torch.manual_seed(3)
        for step in range(4):
            if key == "resumed" and step == 2:
                file = io.BytesIO()
                torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
                net = copy.deepcopy(model).train()  # noqa: PLW2901 - a fresh process would have this
                run_step, optimizer, _ = switch_on(for_model(technique, net), net, adamw(net))
                file.seek(0)
                saved = torch.load(file, weights_only=True)
                net.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
            optimizer.zero_grad()
            losses[key] = run_step(make_batch(step))
            optimizer.step()
    assert torch.equal(losses["straight"], losses["resumed"])
    make_model(name).load_state_dict(straight.state_dict())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("technique", VARIANTS)
@pytest.mark.daily(2)
def test_a_copy_is_independent_and_pickles_load(technique, name):
    case = CASES[technique.name]
    if name not in case.only_on or (case.needs_blocks and name == "unrepeated"):
        return
    model = make_model(name).train()
    _, _, handle = switch_on(for_model(technique, model), model, adamw(model))
    twin = copy.deepcopy(model).to(DEVICE)  # what is offloaded is copied in host memory
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    run = InAutocast if isinstance(technique, LowPrecisionWeights) else nn.Sequential
    run(twin)(make_batch(0)).backward()
    assert all(p.grad is None for p in model.parameters())
    assert any(p.grad is not None for p in twin.parameters())
    handle.undo()
    if name != "spectral_norm":  # torch refuses to pickle parametrized modules
        loaded = pickle.loads(pickle.dumps(twin)).to(DEVICE)
        assert list(loaded.state_dict()) == list(twin.state_dict())
        assert torch.isfinite(run(loaded)(make_batch(0)))


@pytest.mark.parametrize("technique", VARIANTS)
def test_repr_makes_an_equal_technique(technique):
    names = {cls.__name__: cls for cls in techniques()}
    again = eval(repr(technique), names)
    assert again == technique
    assert hash(again) == hash(technique)


def test_warns_when_there_is_nothing_to_do():
    model = make_model("unrepeated")
    with pytest.warns(NoEffectWarning, match="recomputing single layers saves nothing"):
        ActivationCheckpointing().apply(model)
    with pytest.warns(NoEffectWarning, match="SGD"):
        LowBitOptimizer(module=model).apply(torch.optim.SGD(model.parameters()))


def test_an_exception_in_the_block_leaves_nothing_behind():
    model = make_model("dropout").train()
    before = snapshot(model)
    with (
        pytest.raises(RuntimeError, match="expected input with shape"),
        ActivationCheckpointing().apply(model),
    ):
        model(torch.randn(3, 7, 5, device=DEVICE))
    assert snapshot(model) == before


def test_every_registered_technique_has_a_case():
    assert [technique.name for technique in techniques()] == list(CASES)
