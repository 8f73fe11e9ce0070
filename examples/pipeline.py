"""Two processes (gloo) on the CPU: each holds half of the blocks, through which micro-batches pass.

The Trainer starts the second process itself. On two GPUs without a fast connection:
`Trainer(accelerator="gpu", devices=2, strategy=PipelineStrategy(8))`.
"""

import argparse
from typing import Any

import torch
from _sorting import Sorter, make_loader
from lightning.pytorch import Trainer, seed_everything

from lightning_memsave import MemSaveCallback, PipelineStrategy


def main() -> None:
    """Train, save, and load the checkpoint without the strategy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a few steps only")
    num_batches = 4 if parser.parse_args().small else 400

    seed_everything(0)
    module = Sorter()
    strategy: Any = PipelineStrategy(num_micro_batches=4, schedule="1f1b")
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        callbacks=[MemSaveCallback(preset="off", activation_checkpointing="all")],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, make_loader(num_batches))  # both have the same batches
    trainer.save_checkpoint("sorter.ckpt")  # one file, gathered from both
    if trainer.is_global_zero:
        print(f"{trainer.global_step} steps in {trainer.world_size} stages")
        print(f"loss of the last batch: {trainer.callback_metrics['loss'].item():.3f}")
        checkpoint = torch.load("sorter.ckpt", weights_only=True)
        Sorter().load_state_dict(checkpoint["state_dict"])
        print("the checkpoint loads in one process")


if __name__ == "__main__":
    main()
