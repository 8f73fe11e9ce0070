"""Steps, metrics, optimizer and schedule of `CheckpointedTransformer`."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import Metric

from lightning_memsave.errors import IncompatibleError, Problem

LM_TASKS = ("masked_lm", "causal_lm")
_IGNORED = -100  # label that Hugging Face's losses ignore


class WeightedMean(Metric):
    """Mean over batches, weighted by the number of tokens or samples in each.

    Unlike torchmetrics' ``MeanMetric`` it shows NaN, and ignores batches with a count of 0.
    """

    is_differentiable = False
    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, value: Tensor, count: Tensor) -> None:
        # In float32, because half-precision sums stop growing; 0 * NaN would be NaN.
        self.total += torch.where(count > 0, value.detach().float() * count, 0.0)
        self.count += count

    def compute(self) -> Tensor:
        return self.total / self.count


class LossPerplexity(WeightedMean):
    """Perplexity as the exponential of the mean loss per token, without logits."""

    def compute(self) -> Tensor:
        return super().compute().exp()


def targets_of(task: str | None, labels: Tensor) -> Tensor:
    """Return the predicted labels: causal language models do not predict the first token."""
    return labels[..., 1:] if task == "causal_lm" else labels


def num_targets(task: str | None, labels: Tensor) -> Tensor:
    """Count the tokens or samples that the loss is the mean over."""
    return (targets_of(task, labels) != _IGNORED).sum()


def accuracy(task: str | None, logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the share of targets whose largest logit is the right one.

    Example:
        >>> logits = torch.eye(3).unsqueeze(0)
        >>> accuracy("masked_lm", logits, torch.tensor([[0, 2, -100]]))
        tensor(0.5000)
    """
    predictions = logits.argmax(-1)
    if task == "causal_lm":
        predictions = predictions[..., :-1]
    targets = targets_of(task, labels)
    is_asked = targets != _IGNORED
    return ((predictions == targets) & is_asked).sum() / is_asked.sum()


SCHEDULES: dict[str, Callable[[float, float], float]] = {
    "linear": lambda done, total: max(0.0, (total - done) / max(1, total)),
    "cosine": lambda done, total: 0.5 * (1.0 + math.cos(math.pi * (done / max(1, total)))),
    "constant": lambda done, total: 1.0,
}
"""Factors of the learning rate after the warmup, as those of transformers to the bit."""


def weight_decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trained parameters into groups with and without weight decay.

    Norms, biases, embeddings (and heads that share their weight), and other one-dimensional
    parameters are not decayed.
    """
    plain = {
        id(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if _is_plain(module, name, parameter)
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if id(p) not in plain], "weight_decay": weight_decay},
        {"params": [p for p in trained if id(p) in plain], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _is_plain(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) or name.endswith("bias"):
        return True
    if "norm" in type(module).__name__.lower():
        return True
    # FSDP1 flattens every weight to one dimension.
    return parameter.ndim < 2 and not hasattr(parameter, "_fsdp_flattened")


def make_scheduler(
    owner: str, optimizer: Optimizer, schedule: str, warmup: int | float, num_steps: float
) -> Any:
    is_needed = schedule != "constant" or isinstance(warmup, float)
    if is_needed and num_steps == float("inf"):
        what = f"`lr_schedule={schedule!r}` with `warmup={warmup!r}`"
        fix = (
            'Use `max_steps=...` here or in the Trainer, or `lr_schedule="constant"` with a whole '
        )
        why, fix = "the number of optimizer steps is not known", f"{fix}number as `warmup`."
        raise IncompatibleError(owner, [Problem(what, why, fix)])
    num_warmup_steps = round(warmup * num_steps) if isinstance(warmup, float) else warmup
    if schedule != "constant" and num_warmup_steps > num_steps:
        why = f"training ends after {num_steps:.0f} optimizer steps"
        fix = "Use a smaller number, or a share such as `warmup=0.1`."
        raise IncompatibleError(owner, [Problem(f"`warmup={warmup!r}`", why, fix)])
    factor = functools.partial(_factor, schedule, num_warmup_steps, num_steps)
    return LambdaLR(optimizer, factor)


def _factor(schedule: str, num_warmup_steps: int, num_steps: float, step: int) -> float:
    if step < num_warmup_steps:
        return step / num_warmup_steps
    return SCHEDULES[schedule](step - num_warmup_steps, num_steps - num_warmup_steps)


def make_metrics() -> nn.ModuleDict:
    metrics = nn.ModuleDict({"train_perplexity": LossPerplexity()})
    for stage in ("val", "test"):
        metrics[f"{stage}_loss"] = WeightedMean()
        metrics[f"{stage}_perplexity"] = LossPerplexity()
        metrics[f"{stage}_accuracy"] = WeightedMean()
    return metrics


class TransformerSteps:
    """Steps, optimizer and schedule, as a mixin for a LightningModule."""

    if TYPE_CHECKING:
        # Of the LightningModule.
        __call__: Any
        log: Any
        trainer: Any

    model: Any
    """The network; the built-in steps need ``loss`` and ``logits`` in its output."""
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
        """Run the model on its arguments, such as ``input_ids`` and ``attention_mask``."""
        if self.model is None:
            what = f"`{type(self).__name__}` without `model`"
            fix = "Pass `model`, or set `self.model` after `super().__init__()`."
            raise IncompatibleError(type(self).__name__, [Problem(what, "it has no model", fix)])
        return cast(Any, self.model)(**inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Compute the loss of a dictionary with ``labels``, and log it; nothing else is kept."""
        loss: Tensor = self(**self._inputs(batch)).loss
        self.log("train_loss", loss, prog_bar=True)
        if self.task in LM_TASKS:
            perplexity = self._step_metrics["train_perplexity"]
            perplexity.update(loss, num_targets(self.task, batch["labels"]))
            self.log("train_perplexity", perplexity, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Measure loss, perplexity and accuracy of a dictionary with ``labels``."""
        self._evaluate("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Measure loss, perplexity and accuracy of a dictionary with ``labels``."""
        self._evaluate("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Compute logits: (batch, tokens, vocabulary) or (batch, classes)."""
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
            "the loss needs a dictionary with the key `labels`",
            "Pass `DataCollatorForLanguageModeling` of transformers to the DataLoader as "
            "`collate_fn=`, or write your own `training_step`.",
        )
        raise IncompatibleError(type(self).__name__, [problem])

    # The KV cache is for generation and would only use memory here.
    def _without_cache(self) -> dict[str, bool]:
        return {"use_cache": False} if self.task == "causal_lm" else {}

    def configure_optimizers(self) -> Any:
        """Create AdamW with two parameter groups, and the schedule."""
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
