"""`MemSaveCLI` for projects that use ``lightning.pytorch``."""

from lightning.pytorch.cli import LightningCLI

from lightning_memsave.cli.lightning_cli import MemSaveCLIMixin


class MemSaveCLI(MemSaveCLIMixin, LightningCLI):
    """LightningCLI with a flag ``--memsave.*`` for each argument of `MemSaveCallback`.

    It has the arguments of ``LightningCLI``. For ``pytorch_lightning`` import it from
    ``lightning_memsave.cli.pytorch_lightning``; for your own subclass of LightningCLI use
    `MemSaveCLIMixin`, which describes the flags.

    Args:
        args: Arguments of LightningCLI by position.
        kwargs: Arguments of LightningCLI by name.

    Example:
        In a script that is run as ``python train.py fit --memsave.optimizer=lion_8bit``:

        >>> MemSaveCLI(MyLightningModule, MyDataModule)  # doctest: +SKIP
    """
