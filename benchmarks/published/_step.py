"""Build the model of a published run from its configuration, and predict its training loop."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import transformers
from torch import Tensor, nn

from benchmarks.published._sources import SMI, Run, Source
from lightning_memsave import predict_memory
from lightning_memsave.prediction.result import MemoryPrediction

_FIRST_WORD = 10  # tokens below are special in some vocabularies


class _Loop(pl.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.model(**batch).loss


class SumOfLogits(_Loop):
    """The loop of fxmarty's script: no optimizer, and ``outputs`` lives until the next ones."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.automatic_optimization = False
        self.kept: list[Any] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Make one step."""
        self.model.zero_grad()
        outputs = self.model(**batch)
        self.kept[:] = [outputs]
        outputs.logits.sum().backward()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return one that Lightning asks for, and that is never stepped."""
        return torch.optim.SGD(self.parameters())


class HuggingFaceTrainer(_Loop):
    """The loop of Hugging Face's Trainer in 2022: gradients are set to zero, not freed."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW, which was a loop over parameters."""
        return torch.optim.AdamW(self.parameters(), foreach=False)

    def optimizer_zero_grad(
        self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer
    ) -> None:
        """Keep the gradients."""
        optimizer.zero_grad(set_to_none=False)


class FusedAdamW(_Loop):
    """A causal language model with torch's fused AdamW."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return it."""
        return torch.optim.AdamW(self.parameters(), fused=True)


_LOOPS = {cls.__name__: cls for cls in (SumOfLogits, HuggingFaceTrainer, FusedAdamW)}


def predict(source: Source, run: Run) -> MemoryPrediction:
    """Predict one run.

    Args:
        source: Where it was published.
        run: The run.

    Returns:
        The prediction for the GPU of the source.
    """
    cls = getattr(transformers, source.model)

    def build() -> nn.Module:
        config = cls.config_class(**source.config)
        dtype = getattr(torch, source.dtype)
        # `dtype` was called `torch_dtype` before transformers 5.
        model = cls._from_config(config, torch_dtype=dtype, attn_implementation=run.attention)
        return _LOOPS[source.loop](model.train())

    return predict_memory(
        build,
        _batch(source, run, cls.config_class(**source.config)),
        settings={"preset": "off", **run.settings},
        gpu=source.gpu,
        trainer_arguments=run.trainer,
        time_limit_s=None,
    )


def predicted_bytes(source: Source, prediction: MemoryPrediction) -> int:
    """Return the predicted size of what the source published.

    Args:
        source: It says what its figures are.
        prediction: Of one of its runs.

    Returns:
        Bytes allocated, or reserved with the CUDA context.
    """
    if source.figure == SMI:
        known = source.context
        context_bytes = prediction.context_bytes if known is None else int(known * source.unit)
        return (prediction.reserved_bytes or 0) + context_bytes
    return prediction.allocated_bytes or 0


def _batch(source: Source, run: Run, config: Any) -> Mapping[str, Tensor]:
    shape = (run.batch_size, run.num_tokens)
    tokens = torch.randint(_FIRST_WORD, config.vocab_size, shape)
    batch = {"input_ids": tokens}
    if source.has_mask:
        batch["attention_mask"] = torch.ones_like(tokens)
    if source.loop != SumOfLogits.__name__:
        is_classified = source.model.endswith("SequenceClassification")
        batch["labels"] = tokens[:, 0] % 2 if is_classified else tokens.clone()
    return batch
