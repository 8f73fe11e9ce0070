"""What is left, said and written when memory runs out for good."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_memsave import MemSaveCallback, OOMObserver
from lightning_memsave.errors import MemoryExhaustedError, MemsaveWarning
from tests.callbacks.lit import callback_with, make_lit, make_trainer
from tests.out_of_memory import MESSAGE

pytestmark = pytest.mark.usefixtures("no_prediction")

REPORT = Path("memsave_report.json")


def fail(*args: Any, **kwargs: Any) -> None:
    raise torch.OutOfMemoryError(MESSAGE)


def raised_in(package: Any, lit: Any, *callbacks: Any, stage: str = "fit", **settings: Any) -> Any:
    trainer = make_trainer(package, *callbacks, **settings)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        getattr(trainer, stage)(lit)
    return raised.value


STAYS = pytest.mark.filterwarnings("always:.*weights stay in bfloat16")


class NoMemory(TorchDispatchMode):
    """No operator gets memory once it is armed; what is there can be read, written and freed."""

    is_armed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.is_armed:
            known = {0} | {storage_of(value) for value in tree_leaves((args, kwargs))}
            if any(storage_of(value) not in known for value in tree_leaves(result)):
                raise torch.OutOfMemoryError(MESSAGE)
        return result


def storage_of(value: Any) -> int:
    has_memory = isinstance(value, torch.Tensor) and value.nbytes
    return value.untyped_storage().data_ptr() if has_memory else 0


def everything(**settings: Any) -> MemSaveCallback:
    defaults = {"micro_batch_size": None}
    return MemSaveCallback(preset="single_gpu", **(defaults | settings))


class TestUndo:
    def fit(self, package: Any, mode: Any, *callbacks: Any, **settings: Any) -> tuple[Any, Any]:
        """Memory runs out at the end of the second backward pass, and nothing is freed then."""
        lit = make_lit(package)

        def before_last_gradient(grad):
            if lit.trainer.global_step == 1:
                mode.is_armed = True
                fail()

        next(lit.parameters()).register_hook(before_last_gradient)
        with mode:
            error = raised_in(package, lit, *callbacks, num_sanity_val_steps=0, **settings)
        return lit, error

    def left_in(self, lit: Any) -> list[str]:
        return [
            f"{name}.{key}"
            for name, module in lit.named_modules()
            for key in vars(module)
            if "memsave" in key or key in {"forward", "_call_impl"}
        ]

    @STAYS
    @pytest.mark.parametrize("clipping", [None, 0.5])
    def test_needs_no_memory(self, package, clipping, caplog, recwarn):
        """Gradients that wait on the host and bfloat16 weights need it to be what they were."""
        lit, error = self.fit(package, NoMemory(), everything(), gradient_clip_val=clipping)
        assert str(error) == MESSAGE
        assert "`model.float()`" in str(recwarn.pop(MemsaveWarning).message)
        assert self.left_in(lit) == []
        assert "configure_optimizers" not in vars(lit)
        assert all(p.grad is None for p in lit.parameters())
        assert "not restored" not in caplog.text
        assert json.loads(REPORT.read_text())["status"].startswith("OutOfMemoryError")

    def test_of_one_part_does_not_depend_on_the_others(self, package: Any, caplog):
        callback = everything(low_precision_weights=None, precision=None)
        broken: Any = callback._settings._settings[2]

        def break_it(*_: Any) -> None:
            broken._undo.insert(0, lambda: 1 / 0)
            broken._undo.append(lambda: 1 / 0)

        breaking = callback_with(package, on_train_start=break_it)
        lit, error = self.fit(package, NoMemory(), callback, breaking)
        assert str(error) == MESSAGE
        assert self.left_in(lit) == []
        assert f"`{broken.name}` is not restored: ZeroDivisionError" in caplog.text

    @STAYS
    def test_comes_after_the_report_of_an_observer(self, package):
        """The observer stands after the callback and still finds what the run had."""
        callback = everything(optimizer_in_backward=None)
        lit, _ = self.fit(package, NoMemory(), callback, OOMObserver(predict=False))
        found = json.loads(Path("memsave_oom.json").read_text())
        assert found["alive"]["by_category"]["gradient"] > 0
        # In float32 all of them would have four bytes each.
        num_parameters = sum(p.numel() for p in lit.parameters())
        assert found["alive"]["by_category"]["parameter"] < 4 * num_parameters


# Of the module, in the order in which a fit comes to them.
FIT_HOOKS = (
    *("setup", "configure_optimizers", "on_fit_start", "on_train_start", "on_train_epoch_start"),
    *("transfer_batch_to_device", "on_train_batch_start", "on_before_optimizer_step"),
    *("on_train_batch_end", "validation_step", "on_validation_epoch_end", "on_train_epoch_end"),
)


class TestAdvice:
    def check(self, error: Any, *words: str) -> None:
        (note,) = error.__notes__
        for word in ("Out of memory on cuda", "What to do:\n  1. ", *words):
            assert word in note
        assert json.loads(REPORT.read_text())["status"] == f"OutOfMemoryError: {MESSAGE}"

    @pytest.mark.parametrize("hook", FIT_HOOKS)
    def test_follows_the_message_of_a_fit(self, package, hook):
        lit = make_lit(package, **{hook: fail})
        callback = MemSaveCallback(micro_batch_size=None)
        error = raised_in(package, lit, callback, num_sanity_val_steps=0)
        is_in_validation = "validation" in hook
        self.check(error, *(["micro_batch_size"] if is_in_validation else []))

    def test_names_settings_that_the_project_can_use(self, package):
        """No model of Hugging Face and no large head: `attention=` would be refused."""
        error = raised_in(package, make_lit(package, on_train_epoch_end=fail), MemSaveCallback())
        (line,) = re.findall("Add to `MemSaveCallback`, one by one, (.*)", error.__notes__[0])
        settings = re.findall(r"`(\w+)=(.*?)`", line)
        assert "offload" in dict(settings)
        for name, value in settings:
            callback = MemSaveCallback(**{name: ast.literal_eval(value)})
            make_trainer(package, callback, max_steps=1).fit(make_lit(package))

    @pytest.mark.parametrize("stage", ["validate", "test", "predict"])
    @pytest.mark.parametrize("hook", ["step", "epoch_end", "transfer_batch_to_device"])
    def test_follows_the_message_of_an_evaluation(self, package, stage, hook):
        kind = {"validate": "validation"}.get(stage, stage)
        names = {"step": f"{kind}_step", "epoch_end": f"on_{kind}_epoch_end"}
        lit = make_lit(package, **{names.get(hook, hook): fail})
        callback = MemSaveCallback(micro_batch_size=None)
        error = raised_in(package, lit, callback, stage=stage)
        self.check(error, 'MemSaveCallback(micro_batch_size="halve")')

    def test_follows_an_error_of_the_user_that_memory_caused(self, package):
        class LayerError(Exception):
            pass

        def training_step(self, batch, batch_idx):
            try:
                fail()
            except torch.OutOfMemoryError as error:
                raise LayerError("layer 3") from error

        lit = make_lit(package, training_step=training_step)
        with pytest.raises(LayerError) as raised:
            make_trainer(package, MemSaveCallback(micro_batch_size=2)).fit(lit)
        assert "What to do:" in raised.value.__notes__[0]

    @pytest.mark.parametrize("callbacks", [[], [MemSaveCallback(micro_batch_size=None)]])
    def test_is_given_once_and_by_an_observer_alone_too(self, package, callbacks):
        lit = make_lit(package, training_step=fail)
        error = raised_in(package, lit, OOMObserver(predict=False), *callbacks)
        (note,) = error.__notes__
        assert ("Add `MemSaveCallback()` to the Trainer" in note) == (not callbacks)

    def test_is_not_given_for_other_errors(self, package):
        """Also not where a fit is tried again after memory has run out."""
        lit = make_lit(package, training_step=lambda self, batch, batch_idx: batch @ batch)
        trainer = make_trainer(package, MemSaveCallback(), OOMObserver())
        try:
            fail()
        except torch.OutOfMemoryError:
            with pytest.raises(RuntimeError, match="cannot be multiplied") as raised:
                trainer.fit(lit)
        assert not hasattr(raised.value, "__notes__")
        assert not Path("memsave_oom.txt").exists()

    def test_of_the_optimizer_is_not_for_what_comes_before_the_batch(self, package):
        """In the second batch, as the first has come to its step."""

        def optimizer_step(self, epoch, batch_idx, optimizer, closure):
            if batch_idx == 1:
                fail()
            optimizer.step(closure)

        lit = make_lit(package, optimizer_step=optimizer_step)
        error = raised_in(package, lit, MemSaveCallback(optimizer=None))
        assert not isinstance(error, MemoryExhaustedError)
