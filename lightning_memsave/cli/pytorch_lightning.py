"""`MemSaveCLI` for projects that use ``pytorch_lightning``."""

from pytorch_lightning.cli import LightningCLI

from lightning_memsave.cli.lightning_cli import MemSaveCLIMixin


class MemSaveCLI(MemSaveCLIMixin, LightningCLI):  # type: ignore[misc] # of the other package
    """`lightning_memsave.MemSaveCLI` for Trainers of ``pytorch_lightning``."""
