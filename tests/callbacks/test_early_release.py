"""What is alive at the peaks of a step in a fit: old gradients, outputs, copies of weights."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader
from transformers import RobertaConfig, RobertaForMaskedLM

from lightning_memsave import MemSaveCallback
from lightning_memsave.core.memory import MemoryBreakdown
from lightning_memsave.measure.live_tensors import LiveTensors

VOCAB_SIZE, BATCH_SIZE, NUM_TOKENS = 3000, 8, 16
LOGITS_BYTES = BATCH_SIZE * NUM_TOKENS * VOCAB_SIZE * 4


class Module(LightningModule):
    def __init__(self, returned: str = "loss") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.returned = returned
        config = RobertaConfig(
            hidden_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=256,
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=40,
        )
        self.model = RobertaForMaskedLM(config).train()

    def training_step(self, batch, batch_idx):
        outputs = self.model(input_ids=batch, labels=batch)
        if self.returned == "loss":
            return outputs.loss
        if self.returned == "outputs":
            return outputs
        return {"loss": outputs.loss, "logits": outputs.logits.detach()}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Peaks(Callback):
    """The peak of each phase of the last batch."""

    def on_train_start(self, trainer, pl_module):
        self.live = LiveTensors(pl_module, trainer.optimizers)
        self.live.__enter__()
        self.found: dict[str, MemoryBreakdown] = {}

    def note(self, phase):
        self.found[phase] = self.live.peak
        self.live.reset_peak()

    def on_train_batch_start(self, *_):
        self.live.reset_peak()

    def on_before_zero_grad(self, *_):
        self.note("forward")

    def on_before_backward(self, *_):
        self.live.reset_peak()

    def on_after_backward(self, *_):
        self.note("backward")

    def on_train_batch_end(self, *_):
        self.note("step")

    def on_train_end(self, *_):
        self.live.__exit__(None, None, None)


def peaks_of_a_step(module, **settings):
    peaks = Peaks()
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet: dict[str, Any] = dict.fromkeys(off, False)
    trainer = Trainer(max_steps=3, accelerator="cpu", callbacks=[peaks], **quiet, **settings)
    words: Any = torch.randint(2, VOCAB_SIZE, (3 * BATCH_SIZE, NUM_TOKENS))
    trainer.fit(module, DataLoader(words, batch_size=BATCH_SIZE))
    return peaks.found


def gradient_bytes(module):
    return sum(4 * p.numel() for p in module.parameters())


pytestmark = [
    pytest.mark.usefixtures("no_prediction"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]


def test_lightning_keeps_old_gradients_in_forward():
    """It zeroes them after the forward pass; `host.pass_batches` before."""
    module = Module()
    found = peaks_of_a_step(module)
    assert found["forward"].gradient_bytes == gradient_bytes(module)


def test_logits_are_gone_in_backward_where_only_the_loss_is_returned():
    """Log-probabilities are kept by the graph, logits by nobody."""
    found = peaks_of_a_step(Module("loss"))
    assert found["step"].activation_bytes < LOGITS_BYTES


@pytest.mark.parametrize("returned", ["outputs", "detached"])
def test_outputs_are_alive_until_the_end_of_the_step(returned):
    loss_only, found = (peaks_of_a_step(Module(what)) for what in ("loss", returned))
    for phase in ("backward", "step"):
        more = found[phase].total_bytes - loss_only[phase].total_bytes
        assert more == pytest.approx(LOGITS_BYTES, abs=64)
    assert found["forward"].total_bytes == pytest.approx(loss_only["forward"].total_bytes, abs=64)


class BackwardPeak(Callback):
    """The peak of the last backward pass; it does not look at outputs."""

    def on_train_start(self, trainer, pl_module):
        self.live = LiveTensors(pl_module, trainer.optimizers)
        self.live.__enter__()

    def on_before_backward(self, *_):
        self.forward_bytes = self.live.peak.gradient_bytes
        self.live.reset_peak()

    def on_after_backward(self, *_):
        self.backward_bytes = self.live.peak.total_bytes
        self.live.reset_peak()

    def on_train_end(self, *_):
        self.live.__exit__(None, None, None)


def fit_with(module, *others, is_on=True):
    peak = BackwardPeak()
    precision = "32-true" if is_on else None  # what Lightning does by itself
    callback = MemSaveCallback(preset="off", precision=precision, predict=False, report=False)
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet: dict[str, Any] = dict.fromkeys(off, False)
    torch.manual_seed(1)
    trainer = Trainer(max_steps=3, accelerator="cpu", callbacks=[callback, peak, *others], **quiet)
    words: Any = torch.randint(2, VOCAB_SIZE, (3 * BATCH_SIZE, NUM_TOKENS))
    trainer.fit(module, DataLoader(words, batch_size=BATCH_SIZE))
    return peak, next((row for row in callback.rows if row.name == "early_release"), None)


@pytest.mark.parametrize("returned", ["outputs", "detached"])
def test_callback_frees_old_gradients_and_outputs(returned):
    module, plain = Module(returned), Module(returned)
    found, row = fit_with(module)
    before, no_row = fit_with(plain, is_on=False)
    assert row.status == "on"
    assert no_row is None
    assert before.forward_bytes == gradient_bytes(module)
    assert found.forward_bytes == 0
    assert before.backward_bytes - found.backward_bytes == pytest.approx(LOGITS_BYTES, abs=64)
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_outputs_are_kept_for_who_may_look_at_them():
    seen = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append(sorted(outputs))

    _, row = fit_with(Module("detached"), Looks())
    assert seen[0] == ["logits", "loss"]
    assert "outputs are kept, as `Looks.on_train_batch_end` may read them" in row.details


def test_a_loop_with_nothing_to_free_is_not_replaced():
    loops = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            loops.append(type(trainer.fit_loop.epoch_loop.automatic_optimization))

    class Zeroes(Module):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            optimizer.zero_grad()

    _, row = fit_with(Zeroes(), Looks())
    assert row.status == "off"
    assert {loop.__module__.split(".")[0] for loop in loops} == {"lightning"}


def test_manual_optimization_is_left_alone():
    class Manual(Module):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    _, row = fit_with(Manual())
    assert row.status == "off"
    assert "runs its own steps" in row.details[0]
