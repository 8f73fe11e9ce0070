"""`CheckpointedTransformer` for Trainers of ``pytorch_lightning``."""

from pytorch_lightning import LightningModule

from lightning_memsave.modules.checkpointed_transformer import CheckpointedTransformerMixin


class CheckpointedTransformer(CheckpointedTransformerMixin, LightningModule):
    __doc__ = CheckpointedTransformerMixin.__doc__


__all__ = ["CheckpointedTransformer"]
