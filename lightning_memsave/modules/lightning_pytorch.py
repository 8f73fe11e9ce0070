"""`CheckpointedTransformer` for Trainers of ``lightning.pytorch``."""

from lightning.pytorch import LightningModule

from lightning_memsave.modules.checkpointed_transformer import CheckpointedTransformerMixin


class CheckpointedTransformer(CheckpointedTransformerMixin, LightningModule):
    __doc__ = CheckpointedTransformerMixin.__doc__


__all__ = ["CheckpointedTransformer"]
