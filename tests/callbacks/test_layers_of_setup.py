"""A module that makes or replaces layers in ``setup`` trains as one with ``configure_model``."""

from typing import Any

import pytest

from lightning_memsave.errors import IncompatibleError
from tests.callbacks.lit import assert_same, fit, make_lit, quiet, rows_of
from tests.cases import make_model
from tests.helpers import seed_torch

pytestmark = pytest.mark.filterwarnings("ignore:.*tensor_numpy")


def make(self: Any, stage: str = "fit") -> None:
    seed_torch(3)
    self.model = make_model("dropout")


def assign(self: Any, stage: str) -> None:
    own = make_lit()
    make(own)
    self.load_state_dict({k: v.clone() for k, v in own.state_dict().items()}, assign=True)


def without_layers(**methods: Any) -> Any:
    lit = make_lit(**methods)
    lit.model = None
    return lit


def make_once(self: Any) -> None:
    if self.model is None:
        make(self)


PROJECTS = {
    "made": lambda: without_layers(setup=make),
    "replaced": lambda: make_lit(setup=make),
    "assigned": lambda: make_lit(setup=assign),
}
BF16 = {"precision": "bf16-mixed"}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bitwise": ({"preset": "bitwise"}, {}),
    "single_gpu": ({"preset": "single_gpu"}, {}),
    "offload": ({"preset": "offload"}, {}),
    "checkpointing": ({"preset": "off", "activation_checkpointing": "all"}, {}),
    "parameters": ({"preset": "off", "offload": "parameters"}, {}),
    "weights": ({"preset": "off", "low_precision_weights": "stochastic"}, BF16),
    "master": (
        {"preset": "off", "low_precision_weights": "master", "offload": "optimizer"},
        BF16,
    ),
}


@pytest.mark.parametrize("project", PROJECTS)
@pytest.mark.parametrize("name", SETTINGS)
def test_layers_of_setup_are_found(project, name):
    settings, of_trainer = SETTINGS[name]
    found, shown = [], []
    for lit in PROJECTS[project](), without_layers(configure_model=make_once):
        callback = quiet(**settings)
        found.append(fit(lit, callback, **of_trainer)[:2])
        shown.append(
            {
                name: (row.status, row.details)
                for name, row in rows_of(callback).items()
                if name != "micro_batch_size"  # which says how long a proof took
            }
        )
    assert_same(*found)
    assert shown[0] == shown[1]
    assert "on" in {status for status, _ in shown[0].values()}


def test_a_value_that_does_not_fit_them_is_refused_before_anything_is_changed():
    lit = PROJECTS["made"]()
    with pytest.raises(IncompatibleError, match="Use a number up to 4"):
        fit(lit, quiet(preset="off", activation_checkpointing=9))
    assert "configure_optimizers" not in vars(lit)
