"""Two processes (FSDP2, gloo) on the CPU: each holds half of weights, gradients and 8-bit state.

The module does not shard itself: the strategy finds its blocks. The Trainer starts the second
process itself. On GPUs: `Trainer(accelerator="gpu", devices=2, strategy="memsave_fsdp2")`.
"""

import argparse

import torch
from _sorting import Sorter, make_loader
from lightning.pytorch import Trainer, seed_everything

from lightning_memsave import LowBitOptimizer, MemSaveCallback


def main() -> None:
    """Train, save, and load the checkpoint without the strategy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a few steps only")
    num_batches = 8 if parser.parse_args().small else 400

    seed_everything(0)
    module = Sorter()
    callback = MemSaveCallback(optimizer=LowBitOptimizer("8bit"))
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="memsave_fsdp2",
        max_epochs=1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, make_loader(num_batches))  # Lightning gives each process half of it
    trainer.save_checkpoint("sorter.ckpt")  # one file, gathered from both
    if trainer.is_global_zero:
        print(f"{trainer.global_step} steps in {trainer.world_size} processes")
        checkpoint = torch.load("sorter.ckpt", weights_only=True)
        Sorter().load_state_dict(checkpoint["state_dict"])
        moments = checkpoint["optimizer_states"][0]["state"][0]
        print(f"the checkpoint loads in one process, with {', '.join(sorted(moments))}")


if __name__ == "__main__":
    main()
