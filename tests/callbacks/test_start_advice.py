"""Errors in the first batch: the settings that change what modules do are named as a suspect."""

import lightning.pytorch
import pytest

from tests.callbacks.lit import make_lit, make_trainer, quiet


def notes_of(step, **settings):
    lit, callback = make_lit(training_step=step), quiet(**settings)
    with pytest.raises(RuntimeError, match=r"cannot be multiplied|normalized_shape") as raised:
        make_trainer(lightning.pytorch, callback, max_steps=2).fit(lit)
    return "".join(getattr(raised.value, "__notes__", []))


def test_settings_are_named_where_a_module_fails():
    def step(self, batch, batch_idx):
        return self.model(batch[:, :3]).sum()

    for name, value in (("activation_checkpointing", "all"), ("offload", "parameters")):
        found = notes_of(step, **{"preset": "off", name: value})
        assert f"by `{name}={value!r}`." in found
    assert '`MemSaveCallback(preset="off")`' in found
    # Code of a project may mix types, as around `index_add`.
    assert "such as `precision=None`" in notes_of(step, preset="off", precision="bf16-mixed")
    assert not notes_of(step, preset="off")


def test_an_error_of_the_step_itself_is_not_theirs():
    """Also not where the step runs in that of an optimizer of ours."""
    assert not notes_of(lambda self, batch, index: batch @ batch, optimizer="8bit")


def test_a_later_batch_has_shown_that_settings_do_no_harm():
    def step(self, batch, batch_idx):
        return self.model(batch if batch_idx == 0 else batch[:, :3]).sum()

    assert not notes_of(step, activation_checkpointing="all")
