"""Techniques together: every pair, and all of a preset, hold what each of them declares."""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest

from lightning_memsave import ActivationCheckpointing, IncompatibleError, MicroBatching, Offloading
from lightning_memsave.core.technique import Technique
from lightning_memsave.techniques.chunked_cross_entropy.technique import ChunkedCrossEntropy
from lightning_memsave.techniques.low_bit_optimizer.technique import LowBitOptimizer
from lightning_memsave.techniques.low_precision_weights.technique import LowPrecisionWeights
from lightning_memsave.techniques.optimizer_in_backward.technique import OptimizerInBackward
from lightning_memsave.techniques.registry import techniques
from tests.cases import CASES, ON_CUDA_TOO, make_model
from tests.helpers import adamw, switch_all_on
from tests.techniques.contract import assert_as_exact_as_declared, assert_one_fit_keeps_promises

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
PRESETS = {
    "bitwise": BITWISE,
    "classic": CLASSIC,
    "single_gpu": SINGLE_GPU,
    "single_gpu in parts": (*SINGLE_GPU, MicroBatching(6)),
    "offloaded, in backward": (Offloading(), OptimizerInBackward()),
    "offload": OFFLOAD,
}
APART = [*REFUSED, *PRESETS.values()]
PAIRS = [pair for pair in combinations(FIRST.values(), 2) if pair not in APART]


def models_of(techniques: Sequence[Technique[Any]]) -> list[str]:
    """The awkward models on which all of them have something to do."""
    cases = [CASES[technique.name] for technique in techniques]
    names = [name for name in cases[0].only_on if all(name in case.only_on for case in cases)]
    needs_blocks = any(case.needs_blocks for case in cases)
    return [name for name in names if not (needs_blocks and name == "unrepeated")]


def name_of(techniques: Sequence[Technique[Any]]) -> str:
    return "+".join(technique.name for technique in techniques)


def combinations_of() -> list[Any]:
    """All that go together, with the models for them: in `make test` one, each in its turn."""
    result = []
    named = [*((name_of(pair), pair) for pair in PAIRS), *PRESETS.items()]
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


@pytest.mark.parametrize(("techniques", "name"), COMBINATIONS)
def test_train_as_exactly_as_they_declare(techniques, name):
    assert_as_exact_as_declared(techniques, name)


@pytest.mark.parametrize(("techniques", "name"), COMBINATIONS)
def test_one_fit_keeps_every_promise(techniques, name):
    assert_one_fit_keeps_promises(techniques, name)


@pytest.mark.parametrize("techniques", REFUSED, ids=name_of)
def test_what_does_not_go_together_is_refused(techniques):
    model = make_model("dropout")
    with pytest.raises(IncompatibleError, match="offloaded"):
        switch_all_on(techniques, model, adamw(model))
