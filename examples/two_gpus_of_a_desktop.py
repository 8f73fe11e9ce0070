"""Two GPUs of one computer (DDP), which share the weights and optimizer state in its memory.

The Trainer starts the second process itself: `python two_gpus_of_a_desktop.py`. Without two GPUs
there are two processes on the CPU, whose memory stands for that of GPUs.
"""

import argparse

import torch
from _sorting import Sorter, make_loader
from lightning.pytorch import Trainer, seed_everything

from lightning_memsave import MemSaveCallback


def train(num_batches: int, offload: str | None) -> tuple[Sorter, Trainer]:
    """Train under DDP, with blocks that come to the GPUs when they compute, or all on the GPUs."""
    seed_everything(0)
    module = Sorter()
    callback = MemSaveCallback(preset="off", offload=offload, report=False)
    has_gpus = torch.cuda.device_count() > 1
    trainer = Trainer(
        accelerator="gpu" if has_gpus else "cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        gradient_clip_val=1.0,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, make_loader(num_batches))  # Lightning gives each process half of it
    if trainer.is_global_zero:
        print(*(row.details for row in callback.rows if row.name == "offload" and offload))
    return module, trainer


def main() -> None:
    """Train with and without offloading, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a few steps only")
    num_batches = 8 if parser.parse_args().small else 400

    module, trainer = train(num_batches, "parameters")
    plain, _ = train(num_batches, None)
    trainer.save_checkpoint("sorter.ckpt")
    if trainer.is_global_zero:
        pairs = zip(module.parameters(), plain.cpu().parameters(), strict=True)
        difference = max((a.cpu() - b).abs().max().item() for a, b in pairs)
        print(f"{trainer.global_step} steps in {trainer.world_size} processes")
        print(f"largest difference to DDP without offloading: {difference}")  # 0 on a CPU
        checkpoint = torch.load("sorter.ckpt", weights_only=True)
        Sorter().load_state_dict(checkpoint["state_dict"])
        print(f"the checkpoint has the state of {len(checkpoint['optimizer_states'][0]['state'])}")


if __name__ == "__main__":
    main()
