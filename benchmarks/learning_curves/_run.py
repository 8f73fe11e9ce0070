"""Train one row on real text in this process and print its curves, as JSON in the last line."""

import argparse
import json
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from benchmarks._models import MaskedLM
from benchmarks._training import LanguageModel, fit
from benchmarks.ladder._rows import ROWS, Workload
from benchmarks.learning_curves._text import load_text
from lightning_memsave import MemSaveCallback

WORKLOAD = Workload(MaskedLM(2_000, 128, 4, 4, 512), 16, num_tokens=64, micro_batch_size=4)
NUM_STEPS, NUM_WARMUP, NUM_VALIDATION = 300, 30, 512
EVERY_N_STEPS = 25
LEARNING_RATE = 1e-3


class WarmedUp(LanguageModel):
    """The language model with a learning rate that rises first."""

    def configure_optimizers(self) -> Any:
        """Give AdamW and its schedule."""
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / NUM_WARMUP)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Curves(Callback):
    """Keeps losses.

    Args:
        validation: Sequences that are not trained on; always in float32, whatever the row.
        every_n_steps: Steps from one validation to the next.
    """

    def __init__(self, validation: dict[str, Tensor], every_n_steps: int) -> None:
        self.validation = validation
        self.every_n_steps = every_n_steps
        self.train_losses: list[float] = []
        self.validation_losses: dict[int, float] = {}

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the loss of the batch and, now and then, validate."""
        self.train_losses.append(outputs["loss"].item())
        num_steps = len(self.train_losses)
        if num_steps % self.every_n_steps == 0:
            self.validation_losses[num_steps] = self._validate(pl_module)

    @torch.no_grad()
    def _validate(self, module: Any) -> float:
        module.eval()
        total = num_tokens = 0.0
        for start in range(0, len(self.validation["labels"]), 64):
            batch = {name: rows[start : start + 64] for name, rows in self.validation.items()}
            num_valid = (batch["labels"] != -100).sum().item()
            total += module.model(**batch).loss.item() * num_valid
            num_tokens += num_valid
        module.train()
        return total / num_tokens


def train(name: str, seed: int, *, is_dry: bool) -> dict[str, Any]:
    """Train one row.

    Args:
        name: Of the row.
        seed: Of weights, dropout and the order of the sequences.
        is_dry: Only a few steps.

    Returns:
        Both losses.
    """
    workload, num_steps, every_n_steps = WORKLOAD, NUM_STEPS, EVERY_N_STEPS
    num_validation = NUM_VALIDATION
    if is_dry:
        workload = replace(workload, sizes=MaskedLM(2_000, 64, 2, 2, 128))
        num_steps, every_n_steps, num_validation = 4, 2, 32
    text, validation = load_text(
        num_steps * workload.batch_size,
        num_validation,
        workload.num_tokens,
        workload.sizes.vocab_size,
    )
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(text["labels"]), generator=generator)
    batches = [
        {name: rows[some] for name, rows in text.items()}
        for some in order.split(workload.batch_size)
    ]
    curves = Curves(validation, every_n_steps)
    arguments = ROWS[name].callback_arguments(workload)
    callbacks: list[Callback] = [curves]
    if arguments is not None:
        callbacks.append(MemSaveCallback(**arguments, report=False))
    module = WarmedUp(workload.sizes.build(seed), lr=LEARNING_RATE)
    torch.manual_seed(seed)
    fit(module, batches, callbacks, gradient_clip_val=1.0)
    return {"train_losses": curves.train_losses, "validation_losses": curves.validation_losses}


def main() -> None:
    """Train the row named on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning_curves._run", description=__doc__
    )
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)  # two runs share two cores
    print(json.dumps(train(options.row, options.seed, is_dry=options.dry)))


if __name__ == "__main__":
    main()
