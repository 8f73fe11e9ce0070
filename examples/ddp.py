"""Two processes (DDP, gloo) on the CPU, with the same one line.

The Trainer starts the second process itself. On GPUs: `Trainer(accelerator="gpu", devices=2,
strategy="ddp")`.
"""

import argparse

import torch
from _sorting import Sorter, make_loader
from lightning.pytorch import Trainer, seed_everything

from lightning_memsave import MemSaveCallback


def main() -> None:
    """Train, and compare the weights of the two processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a few steps only")
    num_batches = 8 if parser.parse_args().small else 400

    seed_everything(0)
    module = Sorter()
    callback = MemSaveCallback(micro_batch_size=16)  # of the 32 samples of each process
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        callbacks=[callback],
        logger=False,
    )
    trainer.fit(module, make_loader(num_batches))  # Lightning gives each process half of it
    with torch.no_grad():
        gathered = [module.all_gather(parameter) for parameter in module.parameters()]
    if trainer.is_global_zero:
        same = all(torch.equal(both[0], both[1]) for both in gathered)
        print(f"{trainer.global_step} steps in {trainer.world_size} processes")
        print(f"the same weights in both: {same}")


if __name__ == "__main__":
    main()
