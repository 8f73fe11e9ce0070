"""Weights in bfloat16 in a Trainer: calls outside of steps, other callbacks, table, messages."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memsave import MemSaveCallback
from lightning_memsave.errors import IncompatibleError
from lightning_memsave.trainer.precision import half_precision_on_cpu
from tests.callbacks.lit import (
    LIGHTNING,
    callback_with,
    fit,
    late,
    make_lit,
    make_trainer,
    quiet,
    rows_of,
)

pytestmark = pytest.mark.usefixtures("no_prediction")


def only(**settings: Any) -> MemSaveCallback:
    """Weights in bfloat16 and nothing else."""
    off = dict.fromkeys(("activation_checkpointing", "optimizer", "micro_batch_size"))
    return quiet(**(off | {"low_precision_weights": "kahan"} | settings))


def row_of(callback: MemSaveCallback, name: str = "low_precision_weights") -> Any:
    return rows_of(callback)[name]


class TestOtherCallbacks:
    def averaging(self, package: Any) -> list[Any]:
        names = ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging")
        known = [n for n in names if hasattr(package.callbacks, n)]  # older ones lack two
        settings = {names[0]: {"swa_lrs": 1e-2}}
        return [getattr(package.callbacks, n)(**settings.get(n, {})) for n in known]

    def test_that_average_come_first(self, package):
        lit = make_lit(package)
        for other in self.averaging(package):
            name = type(other).__name__
            trainer = make_trainer(package, only(), other)
            with pytest.raises(IncompatibleError) as caught:
                trainer.fit(lit)
            assert f"Put `{name}` before `MemSaveCallback`" in str(caught.value)
            assert all(p.dtype is torch.float32 for p in lit.parameters())

    def test_that_average_keep_float32_in_each_fit(self, package):
        dtypes: set[torch.dtype] = set()

        def look(self: Any, trainer: Any, pl_module: Any) -> None:
            dtypes.update(p.dtype for p in average._average_model.parameters())

        average = self.averaging(package)[-1]
        trainer = make_trainer(package, average, only(), callback_with(package, on_train_end=look))
        for epochs in (1, 2):
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(make_lit(package))
        assert dtypes == {torch.float32}

    def test_pruning_is_refused(self, package):
        pruning = package.callbacks.ModelPruning("l1_unstructured", parameter_names=["weight"])
        for callbacks in ([pruning, only()], [only(), pruning]):
            with pytest.raises(IncompatibleError, match=r"beside `ModelPruning`.*Remove that"):
                make_trainer(package, *callbacks).fit(make_lit(package))


class TestTable:
    def test_of_a_model_that_is_bfloat16_already(self, recwarn):
        lit = make_lit()
        lit.model.bfloat16()
        for module in lit.model.modules():
            if isinstance(module, nn.LayerNorm):
                module.float()  # the CPU's kernel takes nothing else for inputs in float32
        callback = only(precision=None)
        fit(lit, callback, precision="bf16-mixed")
        row = row_of(callback)
        assert row.status == "on"
        assert row.details == (
            "outputs of 4 norms and activations in bfloat16",
            "there is no tensor to convert: kept float32: 8 norm; unchanged: 18 bfloat16",
            "AdamW: 18 of 26 tensors updated in float32 and rounded with a bfloat16 compensation",
        )
        assert not [w for w in recwarn if "changed nothing" in str(w.message)]

    def test_of_layers_that_are_made_late(self):
        fit(late(make_lit()), callback := only())
        assert "AdamW: 9 of 26 tensors" in row_of(callback).details[1]

    def test_of_what_changes_nothing(self):
        lit = make_lit(
            model=nn.Sequential(nn.LayerNorm(64)),
            training_step=lambda self, batch, index: self.model(batch).square().mean(),
        )
        with pytest.raises(IncompatibleError, match="there is no tensor to convert"):
            fit(lit, only(), limit_val_batches=0)
        callback = MemSaveCallback(preset="single_gpu")
        fit(lit, callback, limit_val_batches=0)
        assert row_of(callback).status == "off"

    def test_of_manual_optimization_whose_sums_are_float32(self):
        dtypes = set()

        def training_step(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
            optimizer = self.optimizers()
            loss = self.model(batch)
            self.manual_backward(loss)
            dtypes.add(self.model.head.weight.grad.dtype)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        lit = make_lit(automatic_optimization=False, training_step=training_step)
        fit(lit, callback := only())
        assert dtypes == {torch.float32}
        assert "gradients summed in float32" in row_of(callback).details[-1]


class TestMessages:
    @pytest.mark.parametrize(
        ("settings", "trainer", "is_bf16"),
        [
            ({}, {"precision": "bf16-true"}, False),
            ({}, {"plugins": [half_precision_on_cpu(LIGHTNING)]}, False),
            ({"precision": None}, {}, False),
            ({}, {}, True),
        ],
        ids=["bf16-true", "plugin", "none", "model in bfloat16"],
    )
    def test_lead_out(self, settings, trainer, is_bf16):
        """Doing what they say is enough."""
        preset: dict[str, Any] = {"preset": "single_gpu", "predict": False}
        lit = make_lit()
        way, precision = "`low_precision_weights=None`", None
        if is_bf16:
            lit.model.bfloat16()
            way, precision = f'set {way} and `precision="bf16-true"`', "bf16-true"
        named: Any = {"low_precision_weights": "stochastic"}
        with pytest.raises(IncompatibleError) as caught:
            fit(lit, MemSaveCallback(**preset, **settings, **named), **trainer)
        assert way in str(caught.value)
        out: dict[str, Any] = {"precision": precision, "low_precision_weights": None}
        fit(lit, MemSaveCallback(**preset, **out), **trainer)
