"""What `CheckpointedTransformer` does with a batch, and how it optimizes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.optim import AdamW

from lightning_memsave.errors import IncompatibleError, Problem
from lightning_memsave.modules._metrics import (
    LM_TASKS,
    LossPerplexity,
    WeightedMean,
    accuracy,
    num_targets,
)
from lightning_memsave.modules._optimization import make_scheduler, weight_decay_groups


def make_metrics() -> nn.ModuleDict:
    """Make what the steps measure with.

    Returns:
        Metrics by the names under which they are logged.
    """
    metrics = nn.ModuleDict({"train_perplexity": LossPerplexity()})
    for stage in ("val", "test"):
        metrics[f"{stage}_loss"] = WeightedMean()
        metrics[f"{stage}_perplexity"] = LossPerplexity()
        metrics[f"{stage}_accuracy"] = WeightedMean()
    return metrics


class TransformerSteps:
    """Steps, optimizer and schedule, in front of a LightningModule."""

    if TYPE_CHECKING:
        # Of the LightningModule that comes behind.
        __call__: Any
        log: Any
        trainer: Any

    model: Any
    """The network; its output has ``loss`` and ``logits`` for the steps that are here."""
    _step_metrics: Any
    task: str | None
    learning_rate: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    lr_schedule: str
    warmup: int | float
    max_steps: int | None

    def forward(self, **inputs: Any) -> Any:
        """Run the model.

        Args:
            inputs: What the model takes, for example ``input_ids`` and ``attention_mask``.

        Returns:
            Its output.

        Raises:
            IncompatibleError: If there is no model.
        """
        if self.model is None:
            what = f"`{type(self).__name__}` without `model`"
            fix = "Pass `model`, or set `self.model` after `super().__init__()`."
            raise IncompatibleError(type(self).__name__, [Problem(what, "it has no model", fix)])
        return cast(Any, self.model)(**inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Compute the loss of a batch and log it.

        Args:
            batch: A dictionary with ``labels``.
            batch_idx: Not used.

        Returns:
            The loss; nothing else of the output is kept.
        """
        loss: Tensor = self(**self._inputs(batch)).loss
        self.log("train_loss", loss, prog_bar=True)
        if self.task in LM_TASKS:
            perplexity = self._step_metrics["train_perplexity"]
            perplexity.update(loss, num_targets(self.task, batch["labels"]))
            self.log("train_perplexity", perplexity, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Measure loss, perplexity and accuracy.

        Args:
            batch: A dictionary with ``labels``.
            batch_idx: Not used.
        """
        self._evaluate("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Measure loss, perplexity and accuracy.

        Args:
            batch: A dictionary with ``labels``.
            batch_idx: Not used.
        """
        self._evaluate("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Predict.

        Args:
            batch: A dictionary; its ``labels`` are not used.
            batch_idx: Not used.

        Returns:
            Logits: (batch, tokens, vocabulary) or (batch, classes).
        """
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits: Tensor = self(**inputs, **self._without_cache()).logits
        return logits

    def _evaluate(self, stage: str, batch: Any) -> None:
        output, labels = self(**self._inputs(batch)), batch["labels"]
        count = num_targets(self.task, labels)
        values = {"loss": output.loss}
        if self.task in LM_TASKS:
            values["perplexity"] = output.loss
        if self.task is not None:
            values["accuracy"] = accuracy(self.task, output.logits, labels)
        for name, value in values.items():
            metric = self._step_metrics[f"{stage}_{name}"]
            metric.update(value, count)
            self.log(f"{stage}_{name}", metric, prog_bar=name != "perplexity")

    def _inputs(self, batch: Any) -> dict[str, Any]:
        if isinstance(batch, Mapping) and "labels" in batch:
            return {**batch, **self._without_cache()}
        keys = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        problem = Problem(
            f"a batch of {keys}",
            "the loss needs a dictionary with `labels`",
            "Let the DataLoader collate with `DataCollatorForLanguageModeling` of transformers, or "
            "write your own `training_step`.",
        )
        raise IncompatibleError(type(self).__name__, [problem])

    # Keys and values are for generation; they would only take memory here.
    def _without_cache(self) -> dict[str, bool]:
        return {"use_cache": False} if self.task == "causal_lm" else {}

    def configure_optimizers(self) -> Any:
        """Make AdamW with two groups of parameters, and the schedule.

        Returns:
            Both, as Lightning takes them.
        """
        optimizer = AdamW(
            weight_decay_groups(cast(nn.Module, self), self.weight_decay),
            lr=self.learning_rate,
            betas=self.betas,
            eps=self.eps,
        )
        num_steps = self.max_steps or self.trainer.estimated_stepping_batches
        owner = type(self).__name__
        scheduler = make_scheduler(owner, optimizer, self.lr_schedule, self.warmup, num_steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }
