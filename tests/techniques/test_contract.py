"""What every technique promises, on every awkward model."""

import copy
import functools
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

from lightning_memsave import (
    ActivationCheckpointing,
    Exactness,
    LowBitOptimizer,
    LowPrecisionWeights,
    MicroBatching,
    NamedOptimizer,
    Offloading,
    OptimizerInBackward,
)
from lightning_memsave.core.technique import Technique
from lightning_memsave.errors import IncompatibleError, NoEffectWarning
from lightning_memsave.techniques.registry import techniques
from tests.cases import (
    CASES,
    DEVICE,
    INDEPENDENT_OF_THE_BATCH,
    ON_A_REAL_GPU,
    ON_CUDA_TOO,
    REFUSED_IN_PARTS,
    fused,
    make_batch,
    make_model,
    sgd,
)
from tests.helpers import (
    adamw,
    assert_bitwise_equal,
    for_model,
    in_parts,
    snapshot,
    step_of,
    switch_all_on,
    switch_on,
    train,
)
from tests.techniques.contract import (
    PARTS,
    assert_as_exact_as_declared,
    assert_one_fit_keeps_promises,
    make_double_batch,
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


WHOLE = MicroBatching("halve")  # whole batches, until memory runs out


def in_turns() -> list[Any]:
    """All; in `make test` a model has one variant of each technique, where it is long."""
    return [
        pytest.param(
            *(variant, name),
            id=f"{variant!r}-{name}",
            marks=more if turn % len(case.variants) != number and is_long else (),
        )
        for case in CASES.values()
        for number, variant in enumerate(case.variants)
        for turn, name in enumerate(case.only_on)
        for is_long in [variant.exactness is Exactness.APPROXIMATE]
        if not (case.needs_blocks and name == "unrepeated")
    ]


VARIANTS = [
    pytest.param(variant, id=repr(variant)) for case in CASES.values() for variant in case.variants
]


@pytest.mark.parametrize("name", REFUSED_IN_PARTS)
def test_losses_that_cannot_be_split_are_refused(name):
    with pytest.raises(IncompatibleError, match="its loss cannot be split"):
        train(make_model(name), make_batch, MicroBatching(6))


@pytest.mark.parametrize("name", INDEPENDENT_OF_THE_BATCH)
def test_micro_batches_have_the_gradients_of_the_batch(name):
    model = make_model(name).double()
    leave_out_dropout(model)
    options: Any = {"make_optimizer": standing_still}
    plain = train(model, make_double_batch, **options)
    saving = train(model, make_double_batch, MicroBatching(6), **options)
    for theirs, ours in zip(plain.gradients, saving.gradients, strict=True):
        for key, truth in theirs.items():
            assert (ours[key] - truth).norm() <= 1e-12 * truth.norm()


def leave_out_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def standing_still(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)


@pytest.mark.parametrize(("technique", "name"), in_turns())
def test_trains_as_exactly_as_it_declares(technique, name):
    assert_as_exact_as_declared([technique], name)


@pytest.mark.parametrize(("technique", "name"), ALL)
def test_one_fit_keeps_every_promise(technique, name):
    assert_one_fit_keeps_promises([technique], name)


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


def assert_is_a_loop_over_parts(technique: MicroBatching, name: str, precision: str) -> None:
    model = in_precision(make_model(name), precision)
    if precision in ("bf16-true", "16-true"):
        with pytest.raises(IncompatibleError, match='precision="bf16-mixed"'):
            train(model, make_batch, technique, make_optimizer=sgd)
        return
    sizes = (16,) if technique == WHOLE else PARTS
    by_hand = train(model, make_batch, run_step_of=lambda m: in_parts(m, sizes), make_optimizer=sgd)
    assert all(loss.isfinite() for loss in by_hand.losses), precision
    assert_bitwise_equal(by_hand, train(model, make_batch, technique, make_optimizer=sgd))


def assert_bitwise(technique: Technique[Any], name: str, precision: str) -> None:
    model, make = in_precision(make_model(name), precision), fused(sgd, technique)
    if ON_A_REAL_GPU and isinstance(technique, Offloading):
        make = standing_still  # but for updates on the host all is bitwise there, too
    plain = train(model, make_batch, make_optimizer=make)
    assert all(loss.isfinite() for loss in plain.losses), precision
    assert_bitwise_equal(plain, train(model, make_batch, technique, make_optimizer=make))


def assert_only_rounds(technique: Technique[Any], name: str, precision: str) -> None:
    """Its distance from the truth in float64 is that of unmodified training."""
    model = PRECISIONS[precision].convert_module(make_model(name))
    if ON_A_REAL_GPU:  # whose kernels draw other masks in other types
        leave_out_dropout(model)
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
        assert abs(ours - exact) <= abs(usual - exact) + unit * abs(exact), precision
    steps = zip(truth.gradients, plain.gradients, saving.gradients, strict=True)
    for exact_ones, usual_ones, our_ones in steps:
        whole = torch.stack([gradient.norm() for gradient in exact_ones.values()]).norm()
        for key, exact in exact_ones.items():
            # That of a key's bias is zero but for rounding.
            scale = exact.norm() + 1e-3 * whole
            allowed = (usual_ones[key] - exact).norm()
            assert allowed <= 0.1 * scale, "other dropout masks than in float64: no bound at all"
            assert (our_ones[key] - exact).norm() <= allowed + unit * scale, (key, precision)


def make_coarse_batch(step: int) -> Tensor:
    """Of numbers that every type has, so that tokens made of their order are the same."""
    return make_batch(step).bfloat16().float()


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """What learns in float16, where squares of gradients are zero and AdamW ends in NaN."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


def assert_learns(technique: Technique[Any], name: str, precision: str) -> None:
    if precision == "16-true" and isinstance(technique, NamedOptimizer):
        return  # in the place of `momentum` it is an AdamW
    model = in_precision(make_model(name), precision)
    make_optimizer = momentum if precision == "16-true" else adamw
    options: Any = {"steps": 30, "make_optimizer": make_optimizer, "run_step_of": step_of}
    plain = train(model, make_batch, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NoEffectWarning)
        saving = train(model, make_batch, technique, **options)
    # Training itself brings the loss to less than two thirds in these steps.
    assert plain.losses[-1] <= 2 / 3 * plain.losses[0], precision
    factor = CASES[technique.name].loss_factor
    assert saving.losses[-1] <= plain.losses[-1] * factor, precision
    is_same = all(torch.equal(saving.state[k], plain.state[k]) for k in saving.state)
    is_said = any(issubclass(warning.category, NoEffectWarning) for warning in caught)
    assert is_said if is_same else True, "it did nothing and did not say so"


OF_EXACTNESS: dict[Exactness, tuple[Callable[..., None], tuple[str, ...]]] = {
    Exactness.BITWISE: (assert_bitwise, ("new_tensors",)),
    Exactness.ROUNDING: (assert_only_rounds, ("classifier", "eager_bert")),
    Exactness.APPROXIMATE: (assert_learns, ("unrepeated",)),
}
"""What holds in every precision, and the models on which `make test` sees it."""
OF_MICRO_BATCHES = (assert_is_a_loop_over_parts, ("mutating",))


def in_precisions() -> list[Any]:
    """All, with what holds."""
    found = []
    for param in ALL:
        technique, name = param.values
        is_in_parts = isinstance(technique, MicroBatching)
        holds, often = OF_MICRO_BATCHES if is_in_parts else OF_EXACTNESS[technique.exactness]
        marks = () if name in often else more
        found.append(pytest.param(holds, technique, name, id=param.id, marks=marks))
    return found


@pytest.mark.parametrize(("holds", "technique", "name"), in_precisions())
def test_is_as_exact_in_every_precision(holds, technique, name):
    for precision in PRECISIONS:
        holds(technique, name, precision)


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


OF_STEPS: dict[str, tuple[Technique[Any], ...]] = {
    "8-bit": (LowBitOptimizer(),),
    "8-bit and rounded": (LowBitOptimizer(), LowPrecisionWeights()),
    "rounded": (LowPrecisionWeights("kahan"),),
    "in backward": (OptimizerInBackward(),),
    "offloaded": (Offloading(),),
    "offloaded, in backward": (Offloading(), OptimizerInBackward()),
}


@pytest.mark.parametrize("has_closure", [False, True])
@pytest.mark.parametrize("name", OF_STEPS)
def test_hooks_and_schedulers_see_one_step(name, has_closure):
    model, seen = make_model("dropout").train(), list[str]()
    plain, schedulers = adamw(model), list[Any]()
    schedule = functools.partial(
        torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.5**step
    )
    if "8-bit" not in name:  # which gives another optimizer
        schedulers.append(schedule(plain))
    techniques = [for_model(technique, model) for technique in OF_STEPS[name]]
    run, optimizer, undo = switch_all_on(techniques, model, plain)
    schedulers.append(schedule(optimizer))
    before = [p.detach().clone() for p in model.parameters()]

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        seen.append("closure")
        return run(make_batch(0))

    def is_updated() -> bool:
        if name.startswith("offloaded"):
            model.state_dict()  # waits
        return not any(map(torch.equal, before, model.parameters()))

    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    if has_closure:
        loss: Any = optimizer.step(closure)  # type: ignore[arg-type]
        assert loss.isfinite()
    else:
        closure()
        optimizer.step()
    calls = ["before", "closure"] if has_closure else ["closure", "before"]
    assert seen == [*calls, "after"]
    assert is_updated()
    for scheduler in schedulers:
        scheduler.step()  # warns, which is an error here, if it has not seen the step
    undo()
    optimizer.zero_grad()
    optimizer.step()
    assert seen[3:] == ["before", "after"]


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


def test_every_registered_technique_has_a_case():
    assert [technique.name for technique in techniques()] == list(CASES)
