"""Techniques together: every pair, and all of a stack, hold what each of them declares."""

import copy
import functools
import io
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memsave.core.technique import Exactness, Technique
from lightning_memsave.errors import IncompatibleError
from lightning_memsave.techniques.activation_checkpointing.technique import (
    ActivationCheckpointing,
)
from lightning_memsave.techniques.chunked_cross_entropy.technique import ChunkedCrossEntropy
from lightning_memsave.techniques.low_bit_optimizer.technique import LowBitOptimizer
from lightning_memsave.techniques.low_precision_weights.technique import LowPrecisionWeights
from lightning_memsave.techniques.micro_batching.technique import MicroBatching
from lightning_memsave.techniques.offloading.technique import Offloading
from lightning_memsave.techniques.optimizer_in_backward.technique import OptimizerInBackward
from lightning_memsave.techniques.registry import techniques
from tests.cases import CASES, DEVICE, ON_CUDA_TOO, fused, make_batch, make_model
from tests.helpers import (
    InAutocast,
    MakeOptimizer,
    Run,
    adamw,
    assert_bitwise_equal,
    autocast_step_of,
    for_model,
    in_parts,
    snapshot,
    switch_all_on,
    train,
)

# With every linear layer as a head, most logits are needed.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.chunked_cross_entropy. saves nothing"),
    *ON_CUDA_TOO,
]

# In the order of the registry, as in a fit.
FIRST = {cls.name: CASES[cls.name].variants[0] for cls in techniques()}
# Two ways to update the same weights.
REFUSED = [(Offloading(), LowPrecisionWeights())]
BITWISE = (ActivationCheckpointing(), OptimizerInBackward())
CLASSIC = (ActivationCheckpointing(), LowBitOptimizer(), MicroBatching(6))
SINGLE_GPU = (
    ChunkedCrossEntropy(heads="head"),
    ActivationCheckpointing("nested"),
    LowBitOptimizer(force_8bit=("*",)),
    LowPrecisionWeights(),
    OptimizerInBackward(),
)
OFFLOAD = (
    ChunkedCrossEntropy(heads="head"),
    ActivationCheckpointing("nested"),
    Offloading("parameters+activations", min_bytes=1),
)
STACKS = {
    "bitwise": BITWISE,
    "classic": CLASSIC,
    "single_gpu": SINGLE_GPU,
    "single_gpu in parts": (*SINGLE_GPU, MicroBatching(6)),
    "offloaded, in backward": (Offloading(), OptimizerInBackward()),
    "offload": OFFLOAD,
}
APART = [*REFUSED, *STACKS.values()]
PAIRS = [pair for pair in combinations(FIRST.values(), 2) if pair not in APART]


def models_of(techniques: Sequence[Technique[Any]]) -> list[str]:
    """The awkward models on which all of them have something to do."""
    cases = [CASES[technique.name] for technique in techniques]
    names = [name for name in cases[0].only_on if all(name in case.only_on for case in cases)]
    needs_blocks = any(case.needs_blocks for case in cases)
    return [name for name in names if not (needs_blocks and name == "unrepeated")]


def name_of(techniques: Sequence[Technique[Any]]) -> str:
    return "+".join(technique.name for technique in techniques)


def is_approximate(techniques: Sequence[Technique[Any]]) -> bool:
    # Micro-batches are compared with a loop over the same parts.
    declared = {t.exactness for t in techniques if not isinstance(t, MicroBatching)}
    return Exactness.APPROXIMATE in declared


def combinations_of() -> list[Any]:
    """All that go together, with the models for them: in `make test` one, each in its turn."""
    result = []
    named = [*((name_of(pair), pair) for pair in PAIRS), *STACKS.items()]
    turns: Counter[str] = Counter()
    for name, combined in named:
        models = models_of(combined)
        # Those that had the fewest turns so far.
        now = sorted(models, key=lambda model: turns[model])[:1]
        turns.update(now)
        result += [
            pytest.param(
                *(combined, model),
                id=f"{name}-{model}",
                marks=() if model in now else pytest.mark.exhaustive,
            )
            for model in models
        ]
    return result


COMBINATIONS = combinations_of()


@functools.cache
def plain_run(
    name: str,
    steps: int,
    make_optimizer: MakeOptimizer,
    *,
    is_in_parts: bool,
    is_double: bool,
    is_in_autocast: bool,
) -> Run:
    """Training without any technique; by hand in parts where batches are to pass in parts."""
    model = make_model(name).double() if is_double else make_model(name)
    by_hand: Any = autocast_step_of if is_in_autocast else None
    if is_in_parts:
        by_hand = lambda m: in_parts(InAutocast(m) if is_in_autocast else m, (6, 6, 4))  # noqa: E731
    make = (lambda step: make_batch(step).double()) if is_double else make_batch
    return train(model, make, steps=steps, make_optimizer=make_optimizer, run_step_of=by_hand)


def reference(
    name: str,
    techniques: Sequence[Technique[Any]],
    make_optimizer: MakeOptimizer = adamw,
    *,
    steps: int = 3,
    is_double: bool = False,
) -> Run:
    is_in_parts = any(isinstance(technique, MicroBatching) for technique in techniques)
    is_in_bf16 = any(isinstance(technique, LowPrecisionWeights) for technique in techniques)
    return plain_run(
        *(name, steps, make_optimizer),
        is_in_parts=is_in_parts,
        is_double=is_double,
        is_in_autocast=is_in_bf16 and DEVICE == "cuda",  # whose kernels draw masks of their own
    )


@pytest.mark.parametrize(("techniques", "name"), COMBINATIONS)
@pytest.mark.daily(2)
def test_train_as_exactly_as_they_declare(techniques, name):
    model = make_model(name)
    if is_approximate(techniques):
        plain = reference(name, techniques, steps=30)
        saving = train(model, make_batch, techniques, steps=30)
        assert saving.losses[-1] <= plain.losses[-1] * 1.05
        return
    optimizer = fused(adamw, *techniques)
    if any(t.exactness is Exactness.ROUNDING for t in techniques if type(t) is not MicroBatching):
        model = model.double()
        truth = reference(name, techniques, optimizer, is_double=True)
        make = lambda step: make_batch(step).double()  # noqa: E731
        saving = train(model, make, techniques, make_optimizer=optimizer)
        for one, other in zip(truth.losses, saving.losses, strict=True):
            assert abs(one - other) <= 1e-12 * abs(one) + 1e-14
        for key, value in truth.state.items():
            assert torch.allclose(saving.state[key], value, rtol=1e-7, atol=1e-9), key
        return
    saving = train(model, make_batch, techniques, make_optimizer=optimizer)
    assert_bitwise_equal(reference(name, techniques, optimizer), saving)


@pytest.mark.parametrize("techniques", REFUSED, ids=name_of)
def test_what_does_not_go_together_is_refused(techniques):
    model = make_model("dropout")
    with pytest.raises(IncompatibleError, match="offloaded"):
        switch_all_on(techniques, model, adamw(model))


@pytest.mark.parametrize(("techniques", "name"), COMBINATIONS)
def test_undone_together_the_module_is_as_it_was(techniques, name):
    model = make_model(name).train()
    chosen = [for_model(technique, model) for technique in techniques]
    before, keys = snapshot(model), list(model.state_dict())
    run_step, optimizer, undo = switch_all_on(chosen, model, adamw(model))
    assert list(model.state_dict()) == keys
    run_step(make_batch(0))
    optimizer.step()
    optimizer.zero_grad()
    undo()
    undo()
    assert snapshot(model) == before
    assert all(p.dtype == torch.float32 for p in model.parameters())
    # What is left trains as any module does.
    plain = adamw(model)
    loss = model(make_batch(1))
    loss.backward()
    plain.step()
    assert torch.isfinite(loss)


@pytest.mark.parametrize(("techniques", "name"), COMBINATIONS)
def test_resume_half_way(techniques, name):
    """From a file, in a model and an optimizer that are made anew."""
    model = make_model(name)
    losses = {}
    for key in ("straight", "resumed"):
        net, run_step, optimizer, undo = _start(model, techniques)
        torch.manual_seed(3)
        for step in range(4):
            if key == "resumed" and step == 2:
                file = io.BytesIO()
                torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
                undo()
                net, run_step, optimizer, undo = _start(model, techniques)
                file.seek(0)
                saved = torch.load(file, weights_only=True)
                net.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
            optimizer.zero_grad()
            losses[key] = run_step(make_batch(step))
            optimizer.step()
        undo()
    assert torch.equal(losses["straight"], losses["resumed"])


def _start(model: nn.Module, techniques: Sequence[Technique[Any]]) -> Any:
    net = copy.deepcopy(model).train()
    chosen = [for_model(technique, net) for technique in techniques]
    return net, *switch_all_on(chosen, net, adamw(net))
