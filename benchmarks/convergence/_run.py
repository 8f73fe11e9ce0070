"""Train one row on real text in this process and print its losses, as JSON in the last line."""

import argparse
import contextlib
import json
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks._training import LanguageModel, fit
from benchmarks.learning_curves._text import load_tokens
from lightning_memsave import MemSaveCallback
from lightning_memsave.techniques.low_precision_weights import rounded_updates

VOCAB_SIZE, NUM_TOKENS, BATCH_SIZE = 2_000, 64, 16
NUM_TRAIN, NUM_VALIDATION = 4_000, 512
NUM_STEPS, NUM_WARMUP, EVERY_N_STEPS = 500, 50, 50
LEARNING_RATE = 1e-3

SINGLE_GPU = {"preset": "single_gpu", "optimizer": "8bit"}
# On a CPU the classic preset would leave the precision as it is.
ROWS: dict[str, dict[str, Any] | None] = {
    "float32": None,
    "bitwise": {"preset": "bitwise"},
    # 8-bit state and weights by name: a preset leaves out what saves little in a small model.
    "classic": {"preset": "classic", "precision": "bf16-mixed", "optimizer": "8bit"},
    "single_gpu": {**SINGLE_GPU, "low_precision_weights": "stochastic"},
    "single_gpu, Kahan": {**SINGLE_GPU, "low_precision_weights": "kahan"},
    # Updates are rounded to the nearest, as without the technique: see `round_to_nearest`.
    "single_gpu, plain bf16": {**SINGLE_GPU, "low_precision_weights": "stochastic"},
}
"""What `MemSaveCallback` is told, by name; ``None`` is training without it."""


def round_to_nearest(param: Tensor, values: Tensor, generator: torch.Generator) -> None:
    """Take the place of stochastic rounding; updates of less than half a distance are lost.

    Args:
        param: Where the numbers go, in bfloat16.
        values: In float32.
        generator: Not used.
    """
    param.copy_(values)


class Scheduled(LanguageModel):
    """The language model with a learning rate that rises, and falls to nothing."""

    def configure_optimizers(self) -> Any:
        """Give AdamW and its schedule."""
        optimizer = super().configure_optimizers()
        num_steps = self.trainer.max_steps

        def factor(step: int) -> float:
            return min((step + 1) / NUM_WARMUP, (num_steps - step) / num_steps)

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Validation(Callback):
    """Validates now and then, in float32 whatever the row.

    Args:
        tokens: Sequences that are not trained on, (sequences, tokens).
        every_n_steps: Steps from one validation to the next.
    """

    def __init__(self, tokens: Tensor, every_n_steps: int) -> None:
        self.tokens = tokens
        self.every_n_steps = every_n_steps
        self.losses: dict[int, float] = {}

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Validate, if it is time."""
        if trainer.global_step % self.every_n_steps == 0:
            self.losses[trainer.global_step] = self._validate(pl_module)

    @torch.no_grad()
    def _validate(self, module: Any) -> float:
        # A model of its own: weights in bfloat16 are meant to be computed with as they are.
        model = GPT2LMHeadModel(module.model.config).eval()
        model.load_state_dict(module.model.state_dict())
        losses = [
            model(input_ids=tokens, labels=tokens).loss.item() for tokens in self.tokens.split(64)
        ]
        return float(sum(losses) / len(losses))


def train(name: str, seed: int, *, is_dry: bool) -> dict[int, float]:
    """Train one row.

    Args:
        name: Of the row.
        seed: Of weights, dropout and the order of the sequences.
        is_dry: Only a few steps.

    Returns:
        Validation losses by step.
    """
    num_steps, num_train, num_validation = NUM_STEPS, NUM_TRAIN, NUM_VALIDATION
    if is_dry:
        num_steps, num_train, num_validation = 4, 64, 64
    tokens, held_out = load_tokens(num_train, num_validation, NUM_TOKENS, VOCAB_SIZE)
    generator = torch.Generator().manual_seed(seed)
    num_epochs = -(-num_steps * BATCH_SIZE // len(tokens))
    order = torch.cat([torch.randperm(len(tokens), generator=generator) for _ in range(num_epochs)])
    batches = [
        {"input_ids": tokens[some], "labels": tokens[some]}
        for some in order.split(BATCH_SIZE)[:num_steps]
    ]
    validation = Validation(held_out, 2 if is_dry else EVERY_N_STEPS)
    callbacks: list[Callback] = [validation]
    arguments = ROWS[name]
    if arguments is not None:
        callbacks.append(MemSaveCallback(**arguments, predict=False, report=False))
    torch.manual_seed(seed)
    config: Any = GPT2Config(
        vocab_size=VOCAB_SIZE, n_positions=NUM_TOKENS, n_embd=128, n_layer=4, n_head=4
    )
    module = Scheduled(GPT2LMHeadModel(config).train(), lr=LEARNING_RATE)
    plain = mock.patch.object(rounded_updates, "round_stochastically", round_to_nearest)
    with plain if "plain" in name else contextlib.nullcontext():
        fit(module, batches, callbacks, gradient_clip_val=1.0, max_steps=num_steps)
    return validation.losses


def main() -> None:
    """Train the row named on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence._run", description=__doc__
    )
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)  # two runs share two cores
    print(json.dumps(train(options.row, options.seed, is_dry=options.dry)))


if __name__ == "__main__":
    main()
