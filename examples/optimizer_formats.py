"""Convert 8-bit optimizer state to 32 bits and back: on loading a checkpoint, and in the file.

With `MemSaveCallback` in the Trainer, a checkpoint of either format is converted on loading.
Without it, `memsave convert` writes a new file. Both give the same training, bit for bit.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from _sorting import Sorter, make_loader
from lightning.pytorch import Callback, Trainer

from lightning_memsave import MemSaveCallback
from lightning_memsave.cli.main import main as memsave  # the command of that name


def train(
    callbacks: list[Callback], num_batches: int, end: Path, begin: Path | None = None
) -> dict[str, Any]:
    """Train one more epoch, from ``begin`` if given; save and return the checkpoint."""
    torch.manual_seed(0)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=_num_epochs(begin) + 1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        default_root_dir=end.parent,
    )
    trainer.fit(Sorter(), make_loader(num_batches), ckpt_path=begin)
    trainer.save_checkpoint(end)
    return _load(end)


def _num_epochs(checkpoint: Path | None) -> int:
    return 0 if checkpoint is None else int(_load(checkpoint)["epoch"])


def _load(path: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    return checkpoint


def is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Compare the weights of two checkpoints bit for bit."""
    names = one["state_dict"]
    return all(torch.equal(names[name], other["state_dict"][name]) for name in names)


def main() -> int:
    """Convert in both directions in both ways; returns 1 if the results differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a few steps only")
    num_batches = 3 if parser.parse_args().small else 100

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        quiet: dict[str, Any] = {"report": False, "predict": False}
        first = folder / "first.ckpt"
        train([MemSaveCallback(optimizer="8bit", **quiet)], num_batches, first)

        print("\n8-bit to 32-bit")
        on_load = train(
            [MemSaveCallback(optimizer=None, **quiet)], num_batches, folder / "a.ckpt", first
        )
        memsave(["convert", str(first), "--to", "32bit"])
        plain = folder / "plain.ckpt"
        in_file = train([], num_batches, plain, folder / "first-32bit.ckpt")
        to_32bit = is_same(on_load, in_file)
        print(f"converted on load, or in the file for a Trainer without memsave: same {to_32bit}")

        print("\n32-bit to 8-bit")
        on_load = train(
            [MemSaveCallback(optimizer="8bit", **quiet)], num_batches, folder / "b.ckpt", plain
        )
        memsave(["convert", str(plain), "--to", "8bit"])
        converted = folder / "plain-8bit.ckpt"
        in_file = train(
            [MemSaveCallback(optimizer="8bit", **quiet)], num_batches, folder / "c.ckpt", converted
        )
        to_8bit = is_same(on_load, in_file)
        print(f"converted on load, or in the file: same {to_8bit}")
    return 0 if to_32bit and to_8bit else 1


if __name__ == "__main__":
    sys.exit(main())
