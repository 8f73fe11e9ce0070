"""Optimizers of other people's code: presets yield, a value is refused before the first step."""

import functools
from typing import Any

import pytest

from lightning_memsave.errors import IncompatibleError
from tests.callbacks.lit import assert_same, fit, make_lit, quiet, rows_of
from tests.own_optimizers import Interpolates, TwiceAround

WEIGHTS, UPDATES = "low_precision_weights", "optimizer_in_backward"


def evaluates(self: Any, is_training: bool) -> None:
    optimizer: Any = self.trainer.optimizers[0]
    optimizer.train() if is_training else optimizer.eval()
    self.train(is_training)


def lit_with(cls: Any) -> Any:
    methods: dict[str, Any] = {"configure_optimizers": lambda self: cls(self.parameters())}
    if cls is Interpolates:
        methods["on_validation_model_eval"] = lambda self: evaluates(self, False)
        methods["on_validation_model_train"] = lambda self: evaluates(self, True)
    return make_lit(**methods)


OPTIMIZERS = {
    TwiceAround: "`TwiceAround`: it steps through the `SGD` that it holds",
    Interpolates: "`Interpolates`: its `train` and `eval` mix weights with state",
}


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_a_preset_yields(cls):
    run = functools.partial(fit, lit_with(cls), max_epochs=2)
    single_gpu = quiet(preset="single_gpu")
    # Its weights begin as rounded to bfloat16, which they were until optimizers were known.
    assert run(single_gpu)[0] == pytest.approx(run(precision="bf16-mixed")[0], rel=2e-2)
    rows = rows_of(single_gpu)
    assert (rows[WEIGHTS].status, rows[UPDATES].status) == ("off", "off")
    assert OPTIMIZERS[cls] in rows[WEIGHTS].details[0]


@pytest.mark.parametrize("cls", OPTIMIZERS)
@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_a_value_is_refused_before_the_first_step(cls, rounding):
    steps: list[int] = []
    lit = lit_with(cls)
    type(lit).on_train_batch_start = lambda self, *_: steps.append(0)
    with pytest.raises(IncompatibleError, match=OPTIMIZERS[cls]):
        fit(lit, quiet(preset="off", low_precision_weights=rounding), precision="bf16-mixed")
    assert steps == []


@pytest.mark.parametrize("cls", OPTIMIZERS)
@pytest.mark.parametrize(
    "settings", [{"preset": "bitwise"}, {"preset": "off", "offload": "parameters"}]
)
def test_exact_settings_stay_exact(cls, settings):
    run = functools.partial(fit, lit_with(cls), max_epochs=2)
    assert_same(run(quiet(**settings))[:2], run()[:2])
