"""What is alive at the peaks of a step in a fit: old gradients, outputs, copies of weights."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader
from transformers import RobertaConfig, RobertaForMaskedLM

from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.measure.live_tensors import LiveTensors
from tests.callbacks.lit import (
    LIGHTNING,
    callback_with,
    make_lit,
    make_trainer,
    no_step,
    quiet,
    rows_of,
)

VOCAB_SIZE, BATCH_SIZE, NUM_TOKENS = 3000, 8, 16
LOGITS_BYTES = BATCH_SIZE * NUM_TOKENS * VOCAB_SIZE * 4


def make(returned="loss", **methods):
    def training_step(self, batch, batch_idx):
        outputs = self.model(input_ids=batch, labels=batch)
        if returned == "loss":
            return outputs.loss
        if returned == "outputs":
            return outputs
        return {"loss": outputs.loss, "logits": outputs.logits.detach()}

    sizes: Any = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 256, "max_position_embeddings": 40, "vocab_size": VOCAB_SIZE}
    torch.manual_seed(0)
    model = RobertaForMaskedLM(RobertaConfig(**sizes)).train()
    methods = {"training_step": training_step, "validation_step": no_step} | methods
    return make_lit(model=model, **methods)


class Peaks(Callback):
    """The peak of each phase of the last batch; it does not look at outputs."""

    def on_train_start(self, trainer, pl_module):
        self.live = LiveTensors(pl_module, trainer.optimizers)
        self.live.__enter__()
        self.found: dict[str, MemoryBreakdown] = {}

    def note(self, phase):
        self.found[phase] = self.live.peak
        self.live.reset_peak()

    def on_train_batch_start(self, *_):
        self.live.reset_peak()

    def on_before_backward(self, *_):
        self.note("forward")

    def on_after_backward(self, *_):
        self.note("backward")

    def on_train_end(self, *_):
        self.live.__exit__(None, None, None)


def fit(module, *callbacks):
    torch.manual_seed(1)
    words: Any = torch.randint(2, VOCAB_SIZE, (3 * BATCH_SIZE, NUM_TOKENS))
    trainer = make_trainer(LIGHTNING, *callbacks, max_epochs=None, max_steps=3)
    trainer.fit(module, DataLoader(words, batch_size=BATCH_SIZE))


def gradient_bytes(module):
    return sum(4 * p.numel() for p in module.parameters())


pytestmark = [
    pytest.mark.usefixtures("no_prediction"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]


def fit_with(module, *others, is_on=True):
    peaks = Peaks()
    precision = "32-true" if is_on else None  # what Lightning does by itself
    callback = quiet(preset="off", precision=precision)
    fit(module, callback, peaks, *others)
    return peaks.found, rows_of(callback).get("early_release")


@pytest.mark.parametrize("returned", ["outputs", "detached"])
def test_callback_frees_old_gradients_and_outputs(returned):
    module, plain = make(returned), make(returned)
    found, row = fit_with(module)
    before, no_row = fit_with(plain, is_on=False)
    assert row.status == "on"
    assert no_row is None
    assert before["forward"].gradient_bytes == gradient_bytes(module)
    assert found["forward"].gradient_bytes == 0
    more_bytes = before["backward"].total_bytes - found["backward"].total_bytes
    assert more_bytes == pytest.approx(LOGITS_BYTES, abs=64)
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_outputs_are_kept_for_who_may_look_at_them():
    seen = []
    looks = callback_with(
        name="Looks",
        on_train_batch_end=lambda self, trainer, pl_module, outputs, *_: seen.append(
            sorted(outputs)
        ),
    )
    _, row = fit_with(make("detached"), looks)
    assert seen[0] == ["logits", "loss"]
    assert "outputs are kept, as `Looks.on_train_batch_end` may read them" in row.details


def test_a_loop_with_nothing_to_free_is_not_replaced():
    loops = []
    looks = callback_with(
        on_train_batch_end=lambda self, trainer, *_: loops.append(
            type(trainer.fit_loop.epoch_loop.automatic_optimization)
        )
    )

    zero = lambda self, epoch, batch_idx, optimizer: optimizer.zero_grad()  # noqa: E731
    _, row = fit_with(make(optimizer_zero_grad=zero), looks)
    assert row.status == "off"
    assert {loop.__module__.split(".")[0] for loop in loops} == {"lightning"}
