"""Add MemSaveCallback to the Trainer of an existing project: one line.

`Sorter` in `_sorting.py` is the project. Use your own module and data instead.
"""

import argparse

from _sorting import Sorter, make_loader
from lightning.pytorch import Trainer, seed_everything

from lightning_memsave import MemSaveCallback


def main() -> None:
    """Train and print the loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a few steps only")
    num_batches = 4 if parser.parse_args().small else 400

    seed_everything(0)
    callback = MemSaveCallback()  # the one line, and its place in the list below
    trainer = Trainer(max_epochs=1, callbacks=[callback], logger=False)
    trainer.fit(Sorter(), make_loader(num_batches))
    print(f"loss after {trainer.global_step} steps: {trainer.callback_metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
