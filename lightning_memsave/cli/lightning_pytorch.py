"""`MemSaveCLI` for projects that use ``lightning.pytorch``."""

from lightning.pytorch.cli import LightningCLI

from lightning_memsave.cli.lightning_cli import MemSaveCLIMixin


class MemSaveCLI(MemSaveCLIMixin, LightningCLI):
    """LightningCLI with a flag ``--memsave.*`` for each argument of `MemSaveCallback`.

    It takes what ``LightningCLI`` takes. The one of ``pytorch_lightning`` is
    ``lightning_memsave.cli.pytorch_lightning.MemSaveCLI``; for an own subclass of LightningCLI
    there is `MemSaveCLIMixin`, where the flags are described.

    Args:
        args: Arguments of LightningCLI by position.
        kwargs: Arguments of LightningCLI by name.

    Example:
        In a script that is run as ``python train.py fit --memsave.optimizer=lion_8bit``:

        >>> MemSaveCLI(MyLightningModule, MyDataModule)  # doctest: +SKIP
    """
