"""What the user wrote is set or refused; what is left to a preset has a row and costs nothing."""

import copy
import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn, optim

from lightning_memsave import MemSaveCallback
from lightning_memsave.callbacks import report as _report
from lightning_memsave.errors import IncompatibleError, MemsaveWarning
from tests.callbacks.lit import callback_with, fit, make_lit, make_trainer, rows_of

pytestmark = pytest.mark.usefixtures("no_prediction")


def with_optimizer(make: Any) -> Any:
    return make_lit(configure_optimizers=lambda self: make(self.parameters()))


def test_what_is_so_already_is_not_refused():
    lit = make_lit(model="eager_bert")
    lit.model.bert.activation_checkpointing_enable()
    lit.model.bert.config._attn_implementation_internal = "sdpa"
    fit(lit, callback := MemSaveCallback("all", attention="sdpa", preset="off"))
    rows = rows_of(callback)
    assert "themselves already" in rows["activation_checkpointing"].details[0]
    assert "is `sdpa` already" in rows["attention"].details[0]


def test_a_bare_callback_warns_of_nothing_that_it_does_not_find(recwarn):
    lit = with_optimizer(lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True))
    callback = MemSaveCallback()
    fit(lit, callback)
    assert "nesterov" in rows_of(callback)["optimizer"].details[0]
    assert not [w for w in recwarn if issubclass(w.category, MemsaveWarning)]


class TestSmallestSaving:
    """The state of AdamW is 8 bytes per parameter, and 2.03 in 8 bits."""

    @pytest.mark.parametrize(("width", "status"), [(1700, "off"), (2000, "on")])
    def test_of_8bit_state(self, width, status):
        model = nn.Sequential(nn.Linear(64, width), nn.Linear(width, width))
        lit = make_lit(
            model=model, training_step=lambda self, batch, i: self.model(batch).square().mean()
        )
        callback = MemSaveCallback(activation_checkpointing=None, predict=False)
        fit(lit, callback, limit_train_batches=1, limit_val_batches=0)
        row = rows_of(callback)["optimizer"]
        assert row.status == status
        if status == "off":
            assert "8 bits would save 17.07 MiB; less than 20.00 MiB" in row.details[0]
        else:
            assert row.details[1] == "its steps are slower on a CPU; `optimizer=None` leaves it out"

    def test_a_value_is_set_all_the_same(self):
        """And in a preset for the least memory, where small ones add up."""
        for callback in (MemSaveCallback(optimizer="8bit"), MemSaveCallback(preset="single_gpu")):
            fit(make_lit(), callback)
            rows = rows_of(callback)
            assert rows["optimizer"].status == "on"
        assert rows["low_precision_weights"].status == "on"

    def test_parameters_that_are_unfrozen_later_count(self):
        class Backbone(pl.callbacks.BaseFinetuning):
            def freeze_before_training(self, pl_module: Any) -> None:
                self.freeze(pl_module.model.blocks)

            def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
                self.unfreeze_and_add_param_group(pl_module.model.blocks, optimizer)

        callback = MemSaveCallback()
        lit = with_optimizer(lambda params: optim.AdamW(p for p in params if p.requires_grad))
        fit(lit, callback, Backbone())
        assert "need not change" not in str(rows_of(callback)["optimizer"].details)


class TestOneTrainerAtATime:
    def test_the_same_object_twice_is_refused(self, package):
        callback, lit = MemSaveCallback(), make_lit(package)
        trainer = make_trainer(package, callback, callback)
        with pytest.raises(IncompatibleError, match=r"the Trainer has it twice.*Make one"):
            trainer.fit(lit)
        assert "configure_optimizers" not in vars(lit)
        make_trainer(package, callback).fit(lit)  # and can be used as it should be

    def test_two_trainers_at_once_are_refused(self, package):
        callback, other = MemSaveCallback(), make_lit(package)
        refusals: list[str] = []

        def fit_again(self: Any, trainer: Any, pl_module: Any) -> None:
            with pytest.raises(IncompatibleError) as caught:
                make_trainer(package, callback).fit(other)
            refusals.append(str(caught.value))

        second = callback_with(package, on_train_start=fit_again)
        make_trainer(package, callback, second).fit(make_lit(package))
        assert ["another Trainer is in a run with it" in text for text in refusals] == [True]
        assert rows_of(callback)["activation_checkpointing"].status == "on"
        make_trainer(package, callback).fit(other)  # one after the other


class TestResume:
    def test_nonsense_in_a_checkpoint_is_ignored(self, package, tmp_path):
        path, lit = tmp_path / "last.ckpt", make_lit(package)
        trainer = make_trainer(package, MemSaveCallback())
        trainer.fit(copy.deepcopy(lit))
        trainer.save_checkpoint(path)
        saved = torch.load(path, weights_only=True)
        for size in ("many", -3, 2.5, [4]):
            saved["callbacks"]["MemSaveCallback"] = {"micro_batch_size": size}
            torch.save(saved, path)
            trainer = make_trainer(package, callback := MemSaveCallback(), max_epochs=2)
            with pytest.warns(MemsaveWarning, match="is not a number of samples"):
                trainer.fit(copy.deepcopy(lit), ckpt_path=path)
            assert callback._micro_batches.size is None


def test_the_report_names_the_device_of_the_run(monkeypatch):
    """Not a GPU that the machine has and the run has not used, nor makes a context on it."""
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", asked.append)
    given: Any = {"measured": None, "predicted": None, "device": torch.device("cpu")}
    _report.write_report(".", {}, [], **given)
    assert asked == []
    assert json.loads(Path("memsave_report.json").read_text())["device"] == "cpu"


def test_the_same_problem_of_many_blocks_is_one_line():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.act = nn.Linear(64, 64), nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> Any:
            return self.act(self.linear(x))

    lit = make_lit(model=nn.Sequential(*[Block() for _ in range(14)]))
    with pytest.raises(IncompatibleError, match="and 13 more") as caught:
        fit(lit, MemSaveCallback("selective"))
    assert len(str(caught.value).splitlines()) == 1
