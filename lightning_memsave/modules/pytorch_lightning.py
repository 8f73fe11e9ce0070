"""`CheckpointedTransformer` for Trainers of ``pytorch_lightning``."""

from pytorch_lightning import LightningModule

from lightning_memsave.modules.checkpointed_transformer import CheckpointedTransformerMixin


class CheckpointedTransformer(CheckpointedTransformerMixin, LightningModule):  # noqa: D101 - below
    __doc__ = CheckpointedTransformerMixin.__doc__


__all__ = ["CheckpointedTransformer"]
